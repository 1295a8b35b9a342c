//! Errors of the core as Python exceptions; signals that end a long call.

use crate::error::{Error, Result};
use crate::guard::{guarded, guarded_all};
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// How often a long call looks for signals.
const SIGNAL_PERIOD: Duration = Duration::from_millis(50);

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        let kind = match error {
            Error::InRow { error, .. } => *error,
            error => error,
        };
        match kind {
            Error::Dtype { .. } => PyTypeError::new_err(text),
            Error::Interrupted => PyKeyboardInterrupt::new_err(text),
            Error::Invariant(_) | Error::Poisoned(_) => PyRuntimeError::new_err(text),
            _ => PyValueError::new_err(text),
        }
    }
}

/// Runs `work` on what the lock guards, without holding the interpreter.
pub fn locked<T: Send, R: Send>(
    py: Python<'_>,
    cell: &Mutex<T>,
    work: impl FnOnce(&mut T) -> Result<R> + Send,
) -> PyResult<R> {
    py.detach(|| guarded(cell, work)).map_err(PyErr::from)
}

/// [`locked`] for work that gives up once the flag is set. If the call is `long`, a thread of its
/// own does the work and this one looks for signals: Ctrl-C sets the flag.
pub fn interruptible<T: Send, R: Send>(
    py: Python<'_>,
    cell: &Mutex<T>,
    long: bool,
    work: impl FnOnce(&mut T, &AtomicBool) -> Result<R> + Send,
) -> PyResult<R> {
    all_interruptible(py, &[cell], long, |inner, cancelled| {
        work(inner[0], cancelled)
    })
}

/// [`interruptible`] for work on several at once, none of them twice.
pub fn all_interruptible<T: Send, R: Send>(
    py: Python<'_>,
    cells: &[&Mutex<T>],
    long: bool,
    work: impl FnOnce(&mut [&mut T], &AtomicBool) -> Result<R> + Send,
) -> PyResult<R> {
    let (cancelled, done) = (AtomicBool::new(false), AtomicBool::new(false));
    let work = |inner: &mut [&mut T]| work(inner, &cancelled);
    if !long {
        return py.detach(|| guarded_all(cells, work)).map_err(PyErr::from);
    }
    let caller = thread::current();
    thread::scope(|scope| {
        let worker = thread::Builder::new().spawn_scoped(scope, || {
            let result = guarded_all(cells, work);
            done.store(true, Ordering::Release);
            caller.unpark();
            result
        })?;
        let mut signal = Ok(());
        while signal.is_ok() && !done.load(Ordering::Acquire) {
            py.detach(|| thread::park_timeout(SIGNAL_PERIOD));
            signal = py.check_signals();
        }
        cancelled.store(signal.is_err(), Ordering::Relaxed);
        let result = py.detach(|| worker.join());
        signal?;
        result
            .expect("a panic is caught where the lock is")
            .map_err(PyErr::from)
    })
}
