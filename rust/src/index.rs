//! An index of keys alone, for any use: what `DciTree` is in Python.

use crate::config::TreeOptions;
use crate::error::{Error, LARGEST_ELEMENT, Result};
use crate::exact;
use crate::ids::KeyId;
use crate::order::Best;
use crate::rows::{Dtype, RowStore, Strided};
use crate::threads::Workers;
use crate::tree::Tree;
use crate::tree::build::Tokens;
use crate::tree::insert::Inserter;
use crate::tree::search::{self, Frontier, View};
use std::sync::atomic::AtomicBool;

/// Keys of the first tree, which fix centring and transform. Until then every key is scanned.
pub const FIRST_BULK: usize = 256;

/// A DCI-tree over keys numbered in order of insertion.
#[derive(Debug)]
pub struct Index {
    dim: usize,
    options: TreeOptions,
    threads: usize,
    waiting: Option<RowStore>,
    tree: Option<Tree>,
}

/// What one query's search did.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Effort {
    pub nodes_scored: usize,
    pub keys_scored: usize,
}

impl Index {
    pub fn new(dim: usize, options: TreeOptions, threads: usize) -> Result<Self> {
        options.validate()?;
        if dim == 0 {
            return Err(Error::Config {
                option: "dim",
                expected: "at least 1".into(),
                got: "0".into(),
            });
        }
        Ok(Self {
            dim,
            options,
            threads,
            waiting: None,
            tree: None,
        })
    }

    pub fn dim(&self) -> usize {
        self.dim
    }

    pub fn tree(&self) -> Option<&Tree> {
        self.tree.as_ref()
    }

    pub fn len(&self) -> usize {
        self.tree.as_ref().map_or(0, |t| t.len) + self.waiting.as_ref().map_or(0, RowStore::len)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn dtype(&self) -> Option<Dtype> {
        let tree = self.tree.as_ref().map(|t| t.pages.dtype());
        tree.or(self.waiting.as_ref().map(RowStore::dtype))
    }

    /// Bytes of everything held, keys included.
    pub fn bytes(&self) -> usize {
        self.tree.as_ref().map_or(0, Tree::bytes) + self.waiting.as_ref().map_or(0, RowStore::bytes)
    }

    /// Adds keys; their ids continue the count. A bulk as large as the tree rebuilds it. Once
    /// `cancelled` is set it soon fails, and none of the keys are in.
    pub fn insert(&mut self, keys: Strided<'_>, cancelled: &AtomicBool) -> Result<()> {
        self.check_keys("keys", keys)?;
        if let Some(expected) = self.dtype().filter(|&dtype| dtype != keys.dtype()) {
            return Err(Error::Dtype {
                what: "keys",
                expected,
                got: keys.dtype(),
            });
        }
        let first = self.len();
        let total = first + keys.len;
        if total > KeyId::MAX as usize {
            return Err(Error::TooLong {
                most: KeyId::MAX as usize,
                got: total,
            });
        }
        let workers = Workers::new(self.threads, cancelled);
        match &mut self.tree {
            Some(tree) if keys.len < tree.len => {
                let mut inserter = Inserter::new(self.dim, 0);
                for i in 0..keys.len {
                    if let Err(error) = workers.check() {
                        tree.remove_from(first as KeyId);
                        return Err(error);
                    }
                    inserter.insert(
                        tree,
                        keys.row(i),
                        crate::rows::NO_ELEMENTS,
                        (first + i) as KeyId,
                    );
                }
                tree.refresh_crowds();
            }
            tree => {
                let mut all = match (tree, &self.waiting) {
                    (Some(tree), _) => tree.tokens_from(0).1.keys,
                    (None, Some(waiting)) => waiting.clone(),
                    (None, None) => RowStore::new(keys.dtype(), self.dim),
                };
                all.reserve(keys.len);
                for i in 0..keys.len {
                    workers.check()?;
                    all.push(keys.row(i));
                }
                if all.len() < FIRST_BULK {
                    self.waiting = Some(all);
                } else {
                    self.tree = Some(self.build(&all, workers)?);
                    self.waiting = None;
                }
            }
        }
        Ok(())
    }

    fn build(&self, keys: &RowStore, workers: Workers<'_>) -> Result<Tree> {
        let ids: Vec<KeyId> = (0..keys.len() as KeyId).collect();
        let tokens = Tokens {
            keys: keys.strided(),
            values: Strided {
                dim: 0,
                len: keys.len(),
                stride: 0,
                elements: crate::rows::NO_ELEMENTS,
            },
            ids: &ids,
        };
        Tree::build(tokens, None, &self.options, 0, workers)
    }

    /// The `k` keys of largest inner product with each query, by M-DCI search or, with `exact`, by
    /// scanning all. `ids` and `scores` are [queries, k]; unused places become -1 and -inf.
    pub fn search(
        &self,
        queries: Strided<'_>,
        k: usize,
        view: View<'_>,
        exact: bool,
        ids: &mut [i64],
        scores: &mut [f32],
        cancelled: &AtomicBool,
    ) -> Result<Effort> {
        self.check_keys("queries", queries)?;
        struct Item<'a>(&'a mut [i64], &'a mut [f32], Effort);
        let outputs = ids.chunks_mut(k.max(1)).zip(scores.chunks_mut(k.max(1)));
        let mut items: Vec<_> = outputs
            .map(|(i, s)| Item(i, s, Effort::default()))
            .collect();
        let workers = Workers::new(self.threads, cancelled);
        workers.for_each_mut(&mut items, |i, item| {
            let mut query = vec![0.0; self.dim];
            crate::rows::to_f32(queries.row(i), &mut query);
            let (mut best, mut frontier) = (Best::default(), Frontier::default());
            if let Some(tree) = &self.tree {
                let method = if exact { exact::search } else { search::search };
                item.2.nodes_scored = method(tree, &query, view, &mut best, &mut frontier);
            }
            if let Some(waiting) = &self.waiting {
                let ids: Vec<KeyId> = (0..waiting.len() as KeyId).collect();
                best.add(&query, waiting.rows(), &ids);
            }
            item.2.keys_scored = best.scored();
            best.write(item.0, item.1);
        })?;
        Ok(items.iter().fold(Effort::default(), |sum, item| Effort {
            nodes_scored: sum.nodes_scored + item.2.nodes_scored,
            keys_scored: sum.keys_scored + item.2.keys_scored,
        }))
    }

    pub fn check(&self) -> Result<()> {
        self.tree.as_ref().map_or(Ok(()), Tree::check)
    }

    fn check_keys(&self, what: &'static str, keys: Strided<'_>) -> Result<()> {
        if keys.dim != self.dim {
            return Err(Error::Shape {
                what,
                expected: format!("[n, {}]", self.dim),
                got: format!("[{}, {}]", keys.len, keys.dim),
            });
        }
        let limit = if what == "queries" {
            f32::MAX
        } else {
            LARGEST_ELEMENT
        };
        match keys.beyond(limit) {
            None => Ok(()),
            Some((row, value)) => Err(Error::RowOutOfRange { what, row, value }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::rows::Elements;
    use proptest::prelude::*;
    use std::sync::atomic::Ordering;

    static NEVER: AtomicBool = AtomicBool::new(false);

    pub(crate) fn clustered(random: &mut Random, n: usize, dim: usize) -> Vec<f32> {
        let mut number = move || random.below(20001) as f32 / 10000.0 - 1.0;
        let centres: Vec<f32> = (0..n.div_ceil(20) * dim).map(|_| 3.0 * number()).collect();
        (0..n * dim)
            .map(|i| centres[(i / dim % n.div_ceil(20)) * dim + i % dim] + 0.5 * number())
            .collect()
    }

    fn strided(data: &[f32], dim: usize) -> Strided<'_> {
        Strided {
            dim,
            len: data.len() / dim,
            stride: dim,
            elements: Elements::F32(data),
        }
    }

    proptest! {
        /// Whatever the sizes of the batches: every invariant holds, no key is lost, and a field of
        /// view over everything finds what brute force finds.
        #[test]
        fn batches_keep_every_invariant(
            seed in any::<u64>(), dim in 1usize..20, batches in prop::collection::vec(1usize..400, 1..8),
            page_size in 1usize..9, fanout in 2usize..9, passes in 0usize..3, twins in any::<bool>(),
            scan_below in prop::sample::select(vec![1usize, 5, 30, 1 << 14]),
        ) {
            let mut random = Random::new(seed, 0);
            let options = TreeOptions {
                page_size, page_capacity: 2 * page_size, fanout, refine_passes: passes, scan_below, ..TreeOptions::default()
            };
            let mut index = Index::new(dim, options, 2).unwrap();
            let mut all = Vec::new();
            for n in batches {
                let keys = if twins { vec![0.25; n * dim] } else { clustered(&mut random, n, dim) };
                index.insert(strided(&keys, dim), &NEVER).unwrap();
                all.extend(keys);
                prop_assert_eq!(index.check(), Ok(()));
                prop_assert_eq!(index.len(), all.len() / dim);
            }
            let k = 9;
            let query = &all[..dim];
            let (mut ids, mut scores) = (vec![0; k], vec![0.0; k]);
            let (mut want_ids, mut want) = (vec![0; k], vec![0.0; k]);
            index.search(strided(query, dim), k, View(&[usize::MAX]), false, &mut ids, &mut scores, &NEVER).unwrap();
            index.search(strided(query, dim), k, View(&[1]), true, &mut want_ids, &mut want, &NEVER).unwrap();
            prop_assert_eq!(&ids, &want_ids);
            prop_assert_eq!(&scores, &want);
            let brute = all.chunks(dim).map(|key| key.iter().zip(query).map(|(a, b)| a * b).sum::<f32>());
            let top = brute.fold(f32::NEG_INFINITY, f32::max);
            prop_assert!((want[0] - top).abs() <= 1e-4 * top.abs().max(1.0));
        }
    }

    /// Whenever it is cancelled: all keys are in, or none of them and nothing else has changed.
    #[test]
    fn a_cancelled_insertion_leaves_no_trace() {
        let dim = 8;
        let keys = clustered(&mut Random::new(3, 0), 12_000, dim);
        let query = &keys[..dim];
        let (mut done, mut cut) = (0, 0);
        for (start, more) in [(0, 6000), (3000, 6000), (6000, 3000), (100, 100)] {
            for round in 0..12 {
                let mut index = Index::new(dim, TreeOptions::default(), 2).unwrap();
                index
                    .insert(strided(&keys[..start * dim], dim), &NEVER)
                    .unwrap();
                let best = |index: &Index| {
                    let (mut ids, mut scores) = ([0; 5], [0.0; 5]);
                    let (query, view) = (strided(query, dim), View(&[4]));
                    index
                        .search(query, 5, view, true, &mut ids, &mut scores, &NEVER)
                        .unwrap();
                    (ids, scores)
                };
                let before = best(&index);
                let cancelled = AtomicBool::new(false);
                let result = std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(std::time::Duration::from_micros(100 << round));
                        cancelled.store(true, Ordering::Relaxed);
                    });
                    index.insert(strided(&keys[start * dim..][..more * dim], dim), &cancelled)
                });
                assert_eq!(index.check(), Ok(()));
                if result.is_ok() {
                    done += 1;
                    assert_eq!(index.len(), start + more);
                } else {
                    cut += 1;
                    assert_eq!(result, Err(Error::Interrupted));
                    assert_eq!((index.len(), best(&index)), (start, before));
                }
            }
        }
        assert!(done > 0 && cut > 10, "{done} done, {cut} cancelled");
    }

    /// Few distinct keys leave nodes of every level without children while a tree is built.
    #[test]
    fn many_twins_of_few_keys() {
        for (seed, page_size, fanout) in (0..60).flat_map(|s| [(s, 1, 2), (s, 2, 3), (s, 6, 4)]) {
            let mut random = Random::new(seed, 5);
            let topics = clustered(&mut random, 20, 4);
            let picks: Vec<usize> = (0..400).map(|_| random.below(20)).collect();
            let keys: Vec<f32> = picks
                .iter()
                .flat_map(|&t| topics[t * 4..][..4].to_vec())
                .collect();
            let options = TreeOptions {
                page_size,
                page_capacity: 2 * page_size,
                fanout,
                seed,
                ..TreeOptions::default()
            };
            let mut index = Index::new(4, options, 1).unwrap();
            index.insert(strided(&keys, 4), &NEVER).unwrap();
            assert_eq!(
                index.check(),
                Ok(()),
                "seed {seed}, page {page_size}, fanout {fanout}"
            );
        }
    }

    #[test]
    fn recall_on_clustered_keys() {
        let (n, dim, k) = (8192, 64, 16);
        let mut random = Random::new(11, 0);
        let keys = clustered(&mut random, n, dim);
        let queries = clustered(&mut random, 64, dim);
        let mut index = Index::new(dim, TreeOptions::default(), 0).unwrap();
        index.insert(strided(&keys, dim), &NEVER).unwrap();
        let (mut ids, mut want) = (vec![0; 64 * k], vec![0; 64 * k]);
        let mut scores = vec![0.0; 64 * k];
        let effort = index
            .search(
                strided(&queries, dim),
                k,
                View(&[64]),
                false,
                &mut ids,
                &mut scores,
                &NEVER,
            )
            .unwrap();
        index
            .search(
                strided(&queries, dim),
                k,
                View(&[64]),
                true,
                &mut want,
                &mut scores,
                &NEVER,
            )
            .unwrap();
        let found: usize = ids
            .chunks(k)
            .zip(want.chunks(k))
            .map(|(a, b)| a.iter().filter(|i| b.contains(i)).count())
            .sum();
        let recall = found as f64 / want.len() as f64;
        let share = effort.keys_scored as f64 / (64 * n) as f64;
        assert!(
            recall >= 0.9 && share < 0.2,
            "recall {recall}, scored {share}"
        );
    }
}
