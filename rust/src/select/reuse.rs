//! A step that is told its tokens: those that another layer selected at the same position.
//!
//! Nothing is searched. The tokens are attended exactly, and one level of the tree stands for all the
//! others: its nodes without the selected tokens, so with a smaller count, another mean key and
//! another mean value. These follow from the node's means and the rows of the tokens.

use super::{Selection, Shift, next_part};
use crate::attend::Softmax;
use crate::config::{Options, Tail};
use crate::ids::{KeyId, NodeId, PageId};
use crate::pages::Part;
use crate::rows::norm;
use crate::simd;
use crate::tree::Tree;
use std::time::Instant;

/// Nodes that stand for the rest, at most: beyond, those of the level above do.
const MOST_NODES: usize = 2048;

/// A selected token: its node of the level that stands for the rest, its place, and its position.
type Given = (NodeId, PageId, u32, KeyId);

impl Selection {
    /// Selects the tokens at the positions `given`, as far as they are in the tree, which
    /// [keeps places](Tree::keep_places). Else as [`Selection::best_tokens`].
    pub fn given_tokens(
        &mut self,
        tree: &Tree,
        queries: &[f32],
        given: &[KeyId],
        max: &[f32],
        sum: &[f32],
        options: &Options,
    ) {
        self.start(max, sum);
        let depth = depth_of_rest(tree);
        let mut found: Vec<Given> = Vec::with_capacity(given.len());
        for &id in given {
            if let Some((leaf, page, row)) = tree.place_of(id) {
                found.push((tree.ancestor(leaf, depth), page, row, id));
            }
        }
        found.sort_unstable();
        self.tokens
            .extend(found.iter().map(|&(_, page, row, _)| (page, row)));
        self.positions.extend(found.iter().map(|token| token.3));
        self.searched = Some(Instant::now());

        let (g, m) = (max.len(), found.len());
        self.weights.clear();
        self.weights.resize(g * m, 0.0);
        self.for_each_run(&tree.pages, Part::Keys, |weights, rows, index| {
            simd::dots(queries, rows, Some(index), weights, m);
        });
        self.key_rows += m;
        for q in 0..g {
            self.max[q] = simd::max(&self.weights[q * m..][..m]).max(self.max[q]);
        }
        if options.tail == Tail::Summary {
            self.summarise_rest(tree, queries, depth, &found);
        }
        for q in 0..g {
            simd::exp(&mut self.weights[q * m..][..m], self.max[q]);
        }
    }

    /// Leaves a whole level to the tail, without the tokens in `found`, whose logits are `weights`.
    fn summarise_rest(&mut self, tree: &Tree, queries: &[f32], depth: usize, found: &[Given]) {
        let level = &tree.levels[depth];
        let (n, m, dim) = (level.len(), found.len(), level.keys.dim());
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
        self.shift.depth = depth;
        self.shift
            .nodes
            .extend(families().map(|family| family[0].0));
        for (q, query) in queries.chunks_exact(dim).enumerate() {
            let row = &mut self.level_logits[q * n..][..n];
            let (offset, length) = (self.offsets[q], norm(query));
            let mut logits = &self.weights[q * m..][..m];
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
            for family in families() {
                let node = family[0].0 as usize;
                let (gone, all) = (family.len() as u32, level.scalars[node].count);
                let each = row[node] / (all - gone).max(1) as f32;
                self.shift.more.push(each * gone as f32);
                let less = &mut self.shift.less;
                less.extend(std::iter::repeat_n(-each, family.len()));
            }
        }
        let part = next_part(&mut self.summarised, &mut self.parts);
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
    pub fn shift_means(&mut self, tree: &Tree, softmax: &mut Softmax) -> usize {
        let (n, m) = (self.shift.nodes.len(), self.tokens.len());
        if n == 0 {
            return 0;
        }
        for (q, max) in self.max.iter().enumerate() {
            let scale = (max - softmax.max[q]).exp();
            let (more, less) = (&mut self.shift.more, &mut self.shift.less);
            let weights = more[q * n..][..n].iter_mut();
            weights
                .chain(&mut less[q * m..][..m])
                .for_each(|x| *x *= scale);
        }
        let Shift {
            depth, nodes, more, ..
        } = &self.shift;
        softmax.add_values(more, n, tree.levels[*depth].values.rows(), Some(nodes));
        std::mem::swap(&mut self.weights, &mut self.shift.less);
        self.for_each_run(&tree.pages, Part::Values, |weights, rows, index| {
            softmax.add_values(weights, m, rows, Some(index));
        });
        n + m
    }
}

/// The lowest level above the leaves, or the one that has few enough nodes, or the top.
fn depth_of_rest(tree: &Tree) -> usize {
    let top = tree.levels.len() - 1;
    let few = |&depth: &usize| tree.levels[depth].len() <= MOST_NODES;
    (1..=top).find(few).unwrap_or(top)
}
