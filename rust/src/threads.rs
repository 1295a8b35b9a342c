//! The thread pool. The only file that names rayon.
//!
//! One pool per size, made on first use and made anew in a forked child (threads do not survive a
//! fork). The calling thread works too, so a limit of one never starts a pool, and where the
//! operating system starts no more threads it works alone.

use crate::error::{Error, Result};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// No call gains from more, and every size of pool that was asked for stays alive.
const MOST_THREADS: usize = 64;

/// Threads that this process may use: `ICECACHE_NUM_THREADS`, else CPU affinity and cgroup quota.
pub fn available() -> usize {
    static AVAILABLE: OnceLock<usize> = OnceLock::new();
    let affinity = || std::thread::available_parallelism().map_or(1, |n| n.get());
    *AVAILABLE.get_or_init(|| asked().ok().flatten().unwrap_or_else(affinity))
}

/// Refuses an `ICECACHE_NUM_THREADS` that [`available`] would ignore.
pub fn check_environment() -> Result<()> {
    asked().map(|_| ())
}

fn asked() -> Result<Option<usize>> {
    let Some(text) = std::env::var_os("ICECACHE_NUM_THREADS").filter(|text| !text.is_empty())
    else {
        return Ok(None);
    };
    let text = text.to_string_lossy();
    match text.trim().parse() {
        Ok(count) if count > 0 => Ok(Some(count)),
        _ => Err(Error::Config {
            option: "ICECACHE_NUM_THREADS",
            expected: "an integer of at least 1".into(),
            got: format!("{text:?}"),
        }),
    }
}

/// The threads of one call: how many at most, and a flag by which its caller can give up on it.
#[derive(Debug, Clone, Copy)]
pub struct Workers<'a> {
    limit: usize,
    cancelled: &'a AtomicBool,
}

impl<'a> Workers<'a> {
    /// At most `limit` threads (0: all available), until `cancelled` is set.
    pub fn new(limit: usize, cancelled: &'a AtomicBool) -> Self {
        Self { limit, cancelled }
    }

    /// The same call with fewer threads.
    pub fn at_most(self, threads: usize) -> Self {
        let limit = self.threads().min(threads.max(1));
        Self { limit, ..self }
    }

    /// Threads at most.
    fn threads(self) -> usize {
        match self.limit {
            0 => available().min(MOST_THREADS),
            limit => limit.min(MOST_THREADS),
        }
    }

    /// [`Error::Interrupted`] once the call is cancelled. Long loops look here.
    pub fn check(self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        Ok(())
    }

    /// Runs `work(i)` for every `i` in `0..items`; fewer, and an error, if the call is cancelled.
    ///
    /// Items are handed out one by one, so uneven items balance. `work` must give the same result
    /// whatever the order: every caller writes only to what belongs to its item.
    pub fn for_each(self, items: usize, work: impl Fn(usize) + Sync) -> Result<()> {
        let next = AtomicUsize::new(0);
        let drain = || {
            while self.check().is_ok() {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= items {
                    break;
                }
                work(item);
            }
        };
        let limit = self.threads();
        let helpers = limit.min(items).saturating_sub(1);
        match (helpers > 0).then(|| pool(limit - 1)).flatten() {
            Some(pool) => pool.in_place_scope(|scope| {
                for _ in 0..helpers {
                    scope.spawn(|_| drain());
                }
                drain();
            }),
            None => drain(),
        }
        self.check()
    }

    /// [`Workers::for_each`] over the elements of a slice, each visited by one thread.
    pub fn for_each_mut<T: Send>(
        self,
        items: &mut [T],
        work: impl Fn(usize, &mut T) + Sync,
    ) -> Result<()> {
        let cells: Vec<Mutex<&mut T>> = items.iter_mut().map(Mutex::new).collect();
        self.for_each(cells.len(), |i| {
            let mut item = cells[i].lock().unwrap_or_else(PoisonError::into_inner);
            work(i, &mut item);
        })
    }

    /// [`Workers::for_each_mut`] for work that is itself parallel: `work(i, item, workers)` gets the
    /// threads that are left for it. As many items as there are threads run side by side, with one
    /// thread each; a rest of fewer runs one by one, with all threads. Calls inside of each other
    /// would wait for threads that are busy.
    pub fn for_each_large<T: Send>(
        self,
        items: &mut [T],
        work: impl Fn(usize, &mut T, Workers<'a>) + Sync,
    ) -> Result<()> {
        let rest = items.len() - items.len() % self.threads();
        let (many, few) = items.split_at_mut(rest);
        let alone = Self { limit: 1, ..self };
        self.for_each_mut(many, |i, item| work(i, item, alone))?;
        for (i, item) in few.iter_mut().enumerate() {
            self.check()?;
            work(rest + i, item, self);
        }
        self.check()
    }
}

impl Workers<'static> {
    /// At most `limit` threads (0: all available), to the end.
    pub fn steady(limit: usize) -> Self {
        static NEVER: AtomicBool = AtomicBool::new(false);
        Self::new(limit, &NEVER)
    }
}

type Pools = (u32, HashMap<usize, Arc<rayon::ThreadPool>>);

/// The pool of this size; `None` if the operating system starts no more threads.
fn pool(threads: usize) -> Option<Arc<rayon::ThreadPool>> {
    static POOLS: OnceLock<Mutex<Pools>> = OnceLock::new();
    let pools = POOLS.get_or_init(|| Mutex::new((std::process::id(), HashMap::new())));
    let mut pools = pools.lock().unwrap_or_else(PoisonError::into_inner);
    if pools.0 != std::process::id() {
        // In a forked child the threads are gone; joining them, as a drop would, hangs.
        std::mem::forget(std::mem::take(&mut pools.1));
        pools.0 = std::process::id();
    }
    if let Some(pool) = pools.1.get(&threads) {
        return Some(pool.clone());
    }
    let builder = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("icecache-{i}"));
    let pool = Arc::new(builder.build().ok()?);
    pools.1.insert(threads, pool.clone());
    Some(pool)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_once_whatever_the_limit() {
        for limit in [1, 2, 5] {
            let mut seen = vec![0u32; 100];
            let add = |i: usize, slot: &mut u32| *slot += i as u32 + 1;
            Workers::steady(limit).for_each_mut(&mut seen, add).unwrap();
            assert!(seen.iter().enumerate().all(|(i, &s)| s == i as u32 + 1));
        }
    }

    #[test]
    fn large_items_once_whatever_the_limit() {
        for (limit, items) in [(1, 3), (2, 3), (2, 4), (3, 2), (4, 9)] {
            let mut seen = vec![0u32; items];
            let add = |i: usize, slot: &mut u32, workers: Workers<'_>| {
                let inner = AtomicUsize::new(0);
                let count = |_| {
                    inner.fetch_add(1, Ordering::Relaxed);
                };
                workers.for_each(10, count).unwrap();
                *slot += i as u32 + inner.into_inner() as u32;
            };
            let workers = Workers::steady(limit);
            workers.for_each_large(&mut seen, add).unwrap();
            assert!(seen.iter().enumerate().all(|(i, &s)| s == i as u32 + 10));
        }
    }

    #[test]
    fn nested_calls_finish() {
        let total = AtomicUsize::new(0);
        let workers = Workers::steady(3);
        let inner = |i| {
            total.fetch_add(i, Ordering::Relaxed);
        };
        let outer = |_| workers.for_each(8, inner).unwrap();
        workers.for_each(8, outer).unwrap();
        assert_eq!(total.into_inner(), 8 * 28);
    }

    #[test]
    fn nothing_is_handed_out_once_cancelled() {
        for limit in [1, 4] {
            let (cancelled, started) = (AtomicBool::new(false), AtomicUsize::new(0));
            let workers = Workers::new(limit, &cancelled);
            let result = workers.for_each(1000, |_| {
                if started.fetch_add(1, Ordering::Relaxed) == 9 {
                    cancelled.store(true, Ordering::Relaxed);
                }
            });
            assert_eq!(result, Err(Error::Interrupted));
            assert!((10..10 + limit).contains(&started.into_inner()));
        }
    }
}
