//! The thread pool. The only file that names rayon.
//!
//! One pool per size, made on first use and made anew in a forked child (threads do not survive a
//! fork). The calling thread works too, so a limit of one never starts a pool.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// No call gains from more, and every size of pool that was asked for stays alive.
const MOST_THREADS: usize = 64;

/// Threads that this process may use: `ICECACHE_NUM_THREADS`, else CPU affinity and cgroup quota.
pub fn available() -> usize {
    static AVAILABLE: OnceLock<usize> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        std::env::var("ICECACHE_NUM_THREADS")
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .filter(|&count| count > 0)
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
    })
}

/// Runs `work(i)` for every `i` in `0..items`, on at most `limit` threads (0: all available).
///
/// Items are handed out one by one, so uneven items balance. `work` must give the same result
/// whatever the order: every caller writes only to what belongs to its item.
pub fn for_each(limit: usize, items: usize, work: impl Fn(usize) + Sync) {
    let limit = if limit == 0 { available() } else { limit }.min(MOST_THREADS);
    let helpers = limit.min(items).saturating_sub(1);
    if helpers == 0 {
        return (0..items).for_each(work);
    }
    let next = AtomicUsize::new(0);
    let drain = || {
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                break;
            }
            work(item);
        }
    };
    pool(limit - 1).in_place_scope(|scope| {
        for _ in 0..helpers {
            scope.spawn(|_| drain());
        }
        drain();
    });
}

/// [`for_each`] over the elements of a slice, each visited by one thread.
pub fn for_each_mut<T: Send>(limit: usize, items: &mut [T], work: impl Fn(usize, &mut T) + Sync) {
    let cells: Vec<Mutex<&mut T>> = items.iter_mut().map(Mutex::new).collect();
    for_each(limit, cells.len(), |i| {
        let mut item = cells[i].lock().unwrap_or_else(PoisonError::into_inner);
        work(i, &mut item);
    });
}

type Pools = (u32, HashMap<usize, Arc<rayon::ThreadPool>>);

fn pool(threads: usize) -> Arc<rayon::ThreadPool> {
    static POOLS: OnceLock<Mutex<Pools>> = OnceLock::new();
    let pools = POOLS.get_or_init(|| Mutex::new((std::process::id(), HashMap::new())));
    let mut pools = pools.lock().unwrap_or_else(PoisonError::into_inner);
    if pools.0 != std::process::id() {
        // In a forked child the threads are gone; joining them, as a drop would, hangs.
        std::mem::forget(std::mem::take(&mut pools.1));
        pools.0 = std::process::id();
    }
    pools
        .1
        .entry(threads)
        .or_insert_with(|| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|i| format!("icecache-{i}"))
                .build();
            Arc::new(pool.expect("the operating system starts threads"))
        })
        .clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_once_whatever_the_limit() {
        for limit in [1, 2, 5] {
            let mut seen = vec![0u32; 100];
            for_each_mut(limit, &mut seen, |i, slot| *slot += i as u32 + 1);
            assert!(seen.iter().enumerate().all(|(i, &s)| s == i as u32 + 1));
        }
    }

    #[test]
    fn nested_calls_finish() {
        let total = AtomicUsize::new(0);
        for_each(3, 8, |_| {
            for_each(3, 8, |i| {
                total.fetch_add(i, Ordering::Relaxed);
            });
        });
        assert_eq!(total.into_inner(), 8 * 28);
    }
}
