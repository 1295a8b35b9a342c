//! A lock that a panic poisons: that object refuses every later call, others are not touched.

use crate::error::{Error, Result};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

/// Runs `work` on what the lock guards. A panic becomes [`Error::Poisoned`].
pub fn guarded<T, R>(cell: &Mutex<T>, work: impl FnOnce(&mut T) -> Result<R>) -> Result<R> {
    // The poisoned lock keeps anyone from seeing what the panic left half done.
    let guarded = AssertUnwindSafe(|| match cell.lock() {
        Ok(mut inner) => work(&mut inner),
        Err(_) => Err(Error::Poisoned("a panic, see the first error".into())),
    });
    catch_unwind(guarded).unwrap_or_else(|panic| Err(Error::Poisoned(message(panic.as_ref()))))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without a message".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::Workers;

    #[test]
    fn a_panic_becomes_an_error_and_poisons_only_its_object() {
        let (broken, other) = (Mutex::new(vec![1]), Mutex::new(vec![2]));
        let at = |i: usize| move |list: &mut Vec<i32>| Ok(list[i]);
        assert_eq!(guarded(&broken, at(0)), Ok(1));
        let Err(Error::Poisoned(first)) = guarded(&broken, at(3)) else {
            panic!("an index out of bounds is a panic")
        };
        assert!(first.contains("index is 3"), "{first}");
        let Err(Error::Poisoned(later)) = guarded(&broken, at(0)) else {
            panic!("what a panic left half done is refused")
        };
        assert!(later.contains("see the first error"), "{later}");
        assert_eq!(guarded(&other, at(0)), Ok(2));
    }

    #[test]
    fn a_panic_in_a_helper_thread_reaches_the_caller_and_the_pool_goes_on() {
        let cell = Mutex::new(());
        let run = |bad: usize| {
            guarded(&cell, |()| {
                Workers::steady(4).for_each(100, |i| assert!(i != bad, "item {i} fails"))
            })
        };
        assert_eq!(run(1000), Ok(()));
        let error = run(77).unwrap_err();
        assert!(error.to_string().contains("item 77 fails"), "{error}");
        assert_eq!(Workers::steady(4).for_each(100, |_| ()), Ok(()));
    }

    #[test]
    fn an_error_poisons_nothing() {
        let cell = Mutex::new(5);
        let failed: Result<()> = guarded(&cell, |_| Err(Error::Interrupted));
        assert_eq!(failed, Err(Error::Interrupted));
        assert_eq!(guarded(&cell, |value| Ok(*value)), Ok(5));
    }
}
