//! Errors of the core as Python exceptions; a panic becomes one too.

use crate::error::Error;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        match error {
            Error::Dtype { .. } => PyTypeError::new_err(text),
            Error::Invariant(_) | Error::Poisoned(_) => PyRuntimeError::new_err(text),
            _ => PyValueError::new_err(text),
        }
    }
}

/// Runs `work` on what the lock guards, without holding the interpreter. A panic is caught and
/// poisons the lock: this object refuses every later call, others are not touched.
pub fn locked<T: Send, R: Send>(
    py: Python<'_>,
    cell: &Mutex<T>,
    work: impl FnOnce(&mut T) -> Result<R, Error> + Send,
) -> PyResult<R> {
    let result = py.detach(|| {
        catch_unwind(AssertUnwindSafe(|| match cell.lock() {
            Ok(mut inner) => work(&mut inner),
            Err(_) => Err(Error::Poisoned("a panic, see the first error".into())),
        }))
    });
    match result {
        Ok(result) => result.map_err(PyErr::from),
        Err(panic) => Err(Error::Poisoned(message(panic.as_ref())).into()),
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without a message".into())
}
