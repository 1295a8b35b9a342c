//! A lock that a panic poisons: that object refuses every later call, others are not touched.

use crate::error::{Error, Result};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

/// Runs `work` on what the lock guards. A panic becomes [`Error::Poisoned`].
pub fn guarded<T, R>(cell: &Mutex<T>, work: impl FnOnce(&mut T) -> Result<R>) -> Result<R> {
    guarded_all(&[cell], |inner| work(inner[0]))
}

/// [`guarded`] for several at once, none of them twice. They are locked in the order of their
/// addresses, so that calls that name them in other orders do not wait for each other forever.
pub fn guarded_all<T, R>(
    cells: &[&Mutex<T>],
    work: impl FnOnce(&mut [&mut T]) -> Result<R>,
) -> Result<R> {
    // The poisoned locks keep anyone from seeing what the panic left half done.
    let guarded = AssertUnwindSafe(|| {
        let mut order: Vec<usize> = (0..cells.len()).collect();
        order.sort_by_key(|&i| std::ptr::from_ref(cells[i]).addr());
        if order
            .windows(2)
            .any(|pair| std::ptr::eq(cells[pair[0]], cells[pair[1]]))
        {
            return Err(Error::Twice);
        }
        let mut guards: Vec<_> = cells.iter().map(|_| None).collect();
        for i in order {
            let poisoned = |_| Error::Poisoned("a panic, see the first error".into());
            guards[i] = Some(cells[i].lock().map_err(poisoned)?);
        }
        let mut inner: Vec<&mut T> = guards
            .iter_mut()
            .flatten()
            .map(|guard| &mut **guard)
            .collect();
        work(&mut inner)
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
    fn several_at_once_in_any_order_and_none_twice() {
        let cells: Vec<Mutex<u32>> = (0..4).map(Mutex::new).collect();
        let swap = |a: usize, b: usize| {
            guarded_all(&[&cells[a], &cells[b]], |both| {
                assert!(!std::ptr::eq(both[0], both[1]));
                let (first, second) = (*both[0], *both[1]);
                (*both[0], *both[1]) = (second, first);
                Ok((first, second))
            })
        };
        assert_eq!(swap(3, 1), Ok((3, 1)));
        assert_eq!(swap(3, 1), Ok((1, 3)));
        assert_eq!(swap(2, 2), Err(Error::Twice));
        std::thread::scope(|scope| {
            for (a, b) in [(0, 1), (1, 0), (1, 2), (2, 1)] {
                scope.spawn(move || (0..2000).for_each(|_| assert!(swap(a, b).is_ok())));
            }
        });
        let sum: u32 = cells.iter().map(|cell| *cell.lock().unwrap()).sum();
        assert_eq!(sum, 6);
        let broken: Result<()> = guarded_all(&[&cells[0], &cells[3]], |_| panic!("told to"));
        assert!(matches!(broken, Err(Error::Poisoned(_))));
        assert!(swap(0, 1).is_err() && swap(3, 2).is_err());
        assert!(swap(1, 2).is_ok());
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
