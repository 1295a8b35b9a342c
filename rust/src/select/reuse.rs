//! A step that is told its tokens: those that another layer selected at the same position.
//!
//! Nothing is searched. The tokens are attended exactly, and one level of the tree stands for all the
//! others: its nodes without the selected tokens, so with a smaller count, another mean key and
//! another mean value. These follow from the node's means and the rows of the tokens.

use super::{Selection, Shift, next_part};
use crate::attend::Softmax;
use crate::config::{Options, Tail};
use crate::ids::{KeyId, NodeId, PageId, TreePlace};
use crate::pages::Part;
use crate::rows::norm;
use crate::simd;
use crate::tree::Tree;
use std::sync::Arc;
use std::time::Instant;

/// Nodes that stand for the rest, at most: beyond, those of the level above do.
const MOST_NODES: usize = 2048;

/// A selected token: its node of the level that stands for the rest, page, row and position.
type Given = (NodeId, PageId, u32, KeyId);

impl Selection {
    /// Selects the tokens at the positions `given`, as far as they are in the trees. Else as
    /// [`Selection::best_tokens`].
    pub fn given_tokens(
        &mut self,
        trees: &[Arc<Tree>],
        queries: &[f32],
        given: &[KeyId],
        max: &[f32],
        sum: &[f32],
        options: &Options,
    ) {
        self.start(max, sum);
        let mut found: Vec<Vec<Given>> = Vec::with_capacity(trees.len());
        for (t, tree) in (0..).zip(trees) {
            let depth = depth_of_rest(tree);
            let places = given.iter().filter_map(|&id| {
                let (leaf, page, row) = tree.place_of(id)?;
                Some((tree.ancestor(leaf, depth), page, row, id))
            });
            let mut places: Vec<Given> = places.collect();
            places.sort_unstable();
            for &(_, page, row, id) in &places {
                self.tokens.push(TreePlace { tree: t, page, row });
                self.positions.push(id);
            }
            found.push(places);
        }
        self.searched = Some(Instant::now());

        let (g, m) = (max.len(), self.tokens.len());
        self.weights.clear();
        self.weights.resize(g * m, 0.0);
        self.for_each_run(trees, Part::Keys, |weights, rows, index| {
            simd::dots(queries, rows, Some(index), weights, m);
        });
        self.key_rows += m;
        for q in 0..g {
            self.max[q] = simd::max(&self.weights[q * m..][..m]).max(self.max[q]);
        }
        if options.tail == Tail::Summary {
            self.less.clear();
            self.less.resize(g * m, 0.0);
            let mut before = 0;
            for (t, found) in found.iter().enumerate() {
                self.summarise_rest((t, &trees[t]), queries, found, before);
                before += found.len();
            }
        }
        for q in 0..g {
            simd::exp(&mut self.weights[q * m..][..m], self.max[q]);
        }
    }

    /// Leaves a whole level of a tree to the tail, without the selected tokens in `found`, the first
    /// of which is selected as number `before`.
    fn summarise_rest(
        &mut self,
        (t, tree): (usize, &Tree),
        queries: &[f32],
        found: &[Given],
        before: usize,
    ) {
        let depth = depth_of_rest(tree);
        let level = &tree.levels[depth];
        let (n, m, dim) = (level.len(), self.tokens.len(), level.keys.dim());
        let families = || found.chunk_by(|a, b| a.0 == b.0);
        self.centre(tree, queries);
        self.level_logits.resize(self.max.len() * n, 0.0);
        simd::dots(queries, level.keys.rows(), None, &mut self.level_logits, n);
        self.key_rows += n;
        self.log_counts.clear();
        let counts = level.scalars.iter().map(|scalars| scalars.log_count);
        self.log_counts.extend(counts);
        // Nodes that lose tokens count for those left.
        for family in families() {
            let left = level.scalars[family[0].0 as usize].count - family.len() as u32;
            self.log_counts[family[0].0 as usize] = (left as f32).ln();
        }
        let mut shift = Shift {
            tree: t,
            depth,
            nodes: families().map(|family| family[0].0).collect(),
            more: Vec::new(),
            tokens: before..before + found.len(),
            max: Vec::new(),
        };
        for (q, query) in queries.chunks_exact(dim).enumerate() {
            let row = &mut self.level_logits[q * n..][..n];
            let (offset, length) = (self.offsets[q], norm(query));
            let mut logits = &self.weights[q * m + before..][..found.len()];
            for family in families() {
                let (gone, others) = logits.split_at(family.len());
                logits = others;
                let scalars = &level.scalars[family[0].0 as usize];
                let (all, left) = (scalars.count as f32, scalars.count - family.len() as u32);
                if left == 0 {
                    continue; // The logarithm of its count is minus infinity.
                }
                let (left, logit) = (left as f32, &mut row[family[0].0 as usize]);
                let gone: f32 = gone.iter().map(|logit| logit - offset).sum();
                // The more tokens go, the more the rounding of the stored mean counts for the others:
                // they lie no farther from it than the spread of all allows.
                let most = length * scalars.key_radius * (all / left).sqrt();
                let moved = (all * *logit - gone) / left - *logit;
                *logit += moved.max(-most).min(most);
            }
            let high = simd::shift(row, 1.0, &self.log_counts, offset).max(self.max[q]);
            self.max[q] = high;
            simd::exp(row, high);
            let mut less = &mut self.less[q * m + before..][..found.len()];
            for family in families() {
                let node = family[0].0 as usize;
                let (gone, all) = (family.len() as u32, level.scalars[node].count);
                let each = row[node] / (all - gone).max(1) as f32;
                shift.more.push(each * gone as f32);
                less[..family.len()].fill(-each);
                less = &mut less[family.len()..];
            }
        }
        shift.max.extend_from_slice(&self.max);
        self.shifts.push(shift);
        let part = next_part(&mut self.summarised, &mut self.parts);
        part.tree = t;
        part.depth = depth;
        part.keys_read = false;
        part.nodes.clear();
        part.nodes.extend(0..n as NodeId);
        self.tail_nodes += n;
        std::mem::swap(&mut part.weights, &mut self.level_logits);
        part.weights.truncate(self.max.len() * n);
        part.max.clear();
        part.max.extend_from_slice(&self.max);
    }

    /// Moves the mean values of nodes that lost tokens, as part of the tail in `softmax`: their
    /// weights, which the tail has already, stay. Returns how many values that reads.
    pub fn shift_means(&mut self, trees: &[Arc<Tree>], softmax: &mut Softmax) -> usize {
        let (m, mut read) = (self.tokens.len(), 0);
        for shift in &mut self.shifts {
            let n = shift.nodes.len();
            for (q, max) in shift.max.iter().enumerate() {
                let scale = (max - softmax.max[q]).exp();
                let less = &mut self.less[q * m..][shift.tokens.clone()];
                let more = shift.more[q * n..][..n].iter_mut();
                more.chain(less).for_each(|x| *x *= scale);
            }
            let values = trees[shift.tree].levels[shift.depth].values.rows();
            softmax.add_values(&shift.more, n, values, Some(&shift.nodes));
            read += n + shift.tokens.len();
        }
        if read > 0 {
            std::mem::swap(&mut self.weights, &mut self.less);
            self.for_each_run(trees, Part::Values, |weights, rows, index| {
                softmax.add_values(weights, m, rows, Some(index));
            });
        }
        read
    }
}

/// The lowest level above the leaves, or the one that has few enough nodes, or the top.
fn depth_of_rest(tree: &Tree) -> usize {
    let top = tree.levels.len() - 1;
    let few = |&depth: &usize| tree.levels[depth].len() <= MOST_NODES;
    (1..=top).find(few).unwrap_or(top)
}
