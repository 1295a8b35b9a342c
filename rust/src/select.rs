//! Which tokens of the tree one step attends to exactly, and what stands for all the others.
//!
//! DESIGN section 2, steps 1 to 4. Queries come scaled; all weights are `exp(logit - max)` under
//! the maximum of their query at that time, kept beside them.

pub mod reuse;

use crate::config::{Options, Tail};
use crate::ids::{KeyId, NodeId, TreePlace};
use crate::order::Order;
use crate::pages::Part;
use crate::rows::{Rows, norm};
use crate::simd;
use crate::tree::Tree;
use crate::tree::node::Level;
use crate::tree::search::{Frontier, Priority, View, descend, reach_leaves};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Nodes that stand for their tokens, with the weight of each for each query.
#[derive(Debug, Default)]
pub struct Summarised {
    pub tree: usize,
    pub depth: usize,
    pub nodes: Vec<NodeId>,
    /// [queries, nodes]
    pub weights: Vec<f32>,
    /// Maximum of each query under which the weights were taken.
    pub max: Vec<f32>,
    /// Whether the keys of these (leaf) nodes were read, so that only values are approximated.
    pub keys_read: bool,
}

/// What the selected tokens of one tree take from the mean values of their nodes, see [`reuse`].
#[derive(Debug)]
struct Shift {
    tree: usize,
    depth: usize,
    nodes: Vec<NodeId>,
    /// [queries, nodes]: how much of a node's mean value comes on top of its weight.
    more: Vec<f32>,
    /// Which of the selected tokens.
    tokens: Range<usize>,
    /// Maximum of each query under which all that was weighed.
    max: Vec<f32>,
}

/// What a step decides on; reused from one to the next.
#[derive(Debug, Default)]
pub struct Selection {
    /// Selected tokens, tree by tree.
    pub tokens: Vec<TreePlace>,
    /// Positions of the selected tokens.
    pub positions: Vec<KeyId>,
    /// [queries, tokens]
    pub weights: Vec<f32>,
    /// Maximum of each query under which these weights were taken.
    pub max: Vec<f32>,
    /// Weight of all faint nodes of a tree together, [trees, queries], under the maxima given to
    /// [`Selection::thin`].
    pub faint: Vec<f32>,
    /// When the descent was over.
    pub searched: Option<Instant>,
    summarised: Vec<Summarised>,
    parts: usize,
    /// Nodes in all parts that stand for something.
    tail_nodes: usize,
    /// Node and token keys read.
    pub key_rows: usize,
    shifts: Vec<Shift>,
    /// [queries, tokens]: how much of a selected token's value its node's mean loses, negative.
    less: Vec<f32>,

    frontier: Frontier,
    priorities: Vec<f32>,
    level_logits: Vec<f32>,
    log_counts: Vec<f32>,
    radii: Vec<f32>,
    raised: Vec<f32>,
    logits: Vec<f32>,
    places: Vec<u32>,
    /// Tree and node, tree by tree.
    leaves: Vec<(usize, NodeId)>,
    starts: Vec<usize>,
    /// Tokens taken from each of `leaves`.
    taken: Vec<usize>,
    offsets: Vec<f32>,
    base: Vec<f32>,
    /// Rows of a chunk of pages.
    pub index: Vec<u32>,
}

impl Selection {
    /// The nodes that stand for what was not selected.
    pub fn summarised(&mut self) -> &mut [Summarised] {
        &mut self.summarised[..self.parts]
    }

    fn start(&mut self, max: &[f32], base: &[f32]) {
        self.tokens.clear();
        self.positions.clear();
        self.parts = 0;
        self.tail_nodes = 0;
        self.key_rows = 0;
        self.shifts.clear();
        self.max.clear();
        self.max.extend_from_slice(max);
        self.base.clear();
        self.base.extend_from_slice(base);
    }

    /// The best tokens, and the tail of everything else.
    ///
    /// `queries`: [g, key_dim]. `max`, `sum`: of sink and window, so that a query whose mass lies
    /// there gets no vote.
    pub fn best_tokens(
        &mut self,
        trees: &[Arc<Tree>],
        queries: &[f32],
        max: &[f32],
        sum: &[f32],
        options: &Options,
    ) {
        self.start(max, sum);
        let g = max.len();

        // 1 to 3. The leaves that are worth reading.
        self.leaves.clear();
        for (t, tree) in trees.iter().enumerate() {
            if options.candidates(tree.len) < tree.len {
                self.best_leaves(t, tree, queries, options);
            } else {
                let all = 0..tree.levels[0].len() as NodeId;
                self.leaves.extend(all.map(|leaf| (t, leaf)));
            }
        }

        self.searched = Some(Instant::now());

        // 4. Score their keys exactly, keep the best tokens.
        let total = self.score_leaves(trees, queries);
        self.priorities.clear();
        self.priorities.resize(total, 0.0);
        for q in 0..g {
            let row = &mut self.logits[q * total..][..total];
            let high = simd::max(row).max(self.max[q]);
            self.base[q] *= (self.max[q] - high).exp();
            self.max[q] = high;
            let share = 1.0 / (self.base[q] + simd::exp(row, high));
            simd::shift(&mut self.priorities, share, row, 0.0);
        }
        self.frontier.order.rank(&self.priorities);
        let budget = options.token_budget.min(total);
        self.frontier.order.take(budget, &mut self.places);
        self.pick(trees, total);

        // 5. The candidates left over: their own weights, their pages' mean value.
        match options.tail {
            Tail::Summary => self.summarise_candidates(total, g),
            Tail::Drop => self.weigh_selected(trees, queries, max),
        }
    }

    /// Finds the leaves of tree `t` whose tokens are candidates; every other token of it goes to the
    /// tail.
    fn best_leaves(&mut self, t: usize, tree: &Tree, queries: &[f32], options: &Options) {
        // 1, 2. Score the top; open the best nodes; what stays closed goes to the tail.
        self.centre(tree, queries);
        let mut frontier = std::mem::take(&mut self.frontier);
        let mut mass = GroupMass {
            selection: self,
            tree: t,
            queries,
            candidates: options.candidates(tree.len),
            open_share: options.open_share(tree.len),
            scored_share: options.scored_share(tree.len),
        };
        descend(&tree.levels, 0, &mut mass, &mut frontier);
        self.key_rows += frontier.scored;

        // 3. The best leaves, until they hold enough candidates.
        let leaves = &tree.levels[0].scalars;
        let count = |place: usize| leaves[frontier.nodes[place] as usize].count as usize;
        frontier.order.rank(&frontier.scores);
        let wanted = options.candidates(tree.len);
        let taken = frontier.order.count_until(wanted, count);
        let mut places = std::mem::take(&mut self.places);
        frontier.order.take(taken, &mut places);
        self.close(t, 0, &frontier.nodes, &places);
        let best = places.iter();
        self.leaves
            .extend(best.map(|&p| (t, frontier.nodes[p as usize])));
        self.places = places;
        self.frontier = frontier;
    }

    /// What the logits of node means lack, see `transform`.
    fn centre(&mut self, tree: &Tree, queries: &[f32]) {
        let queries = queries.chunks_exact(tree.pages.key_dim());
        self.offsets.clear();
        self.offsets
            .extend(queries.map(|q| dot(q, tree.transform.mean())));
    }

    /// The paper's selection: each query head ranks pages by their best token through an M-DCI
    /// search of its own; the heads take turns; whole pages, the rest dropped.
    pub fn best_pages(
        &mut self,
        trees: &[Arc<Tree>],
        queries: &[f32],
        max: &[f32],
        sum: &[f32],
        options: &Options,
    ) {
        self.start(max, sum);
        let g = max.len();
        self.leaves.clear();
        for (t, tree) in trees.iter().enumerate() {
            for query in queries.chunks_exact(tree.pages.key_dim()) {
                let view = View(&[options.field_of_view]);
                let found = reach_leaves(tree, query, view, &mut self.frontier);
                self.leaves.extend(found.iter().map(|&leaf| (t, leaf)));
                self.key_rows += self.frontier.scored;
            }
        }
        self.leaves.sort_unstable();
        self.leaves.dedup();
        self.searched = Some(Instant::now());
        let total = self.score_leaves(trees, queries);

        let mut rankings = Vec::with_capacity(g);
        for q in 0..g {
            let logits = &self.logits[q * total..][..total];
            self.priorities.clear();
            let pages = self.starts.windows(2);
            self.priorities
                .extend(pages.map(|p| simd::max(&logits[p[0]..p[1]])));
            self.frontier.order.rank(&self.priorities);
            rankings.push(
                self.frontier
                    .order
                    .best(self.leaves.len())
                    .collect::<Vec<_>>(),
            );
        }
        let mut chosen = vec![false; self.leaves.len()];
        let mut held = 0;
        'turns: for turn in 0..self.leaves.len() {
            for ranking in &rankings {
                let page = ranking[turn];
                let tokens = self.starts[page + 1] - self.starts[page];
                if chosen[page] {
                    continue;
                }
                if held > 0 && held + tokens > options.token_budget {
                    break 'turns;
                }
                chosen[page] = true;
                held += tokens;
            }
        }
        self.places.clear();
        for (page, _) in chosen.iter().enumerate().filter(|page| *page.1) {
            self.places
                .extend(self.starts[page] as u32..self.starts[page + 1] as u32);
        }
        self.pick(trees, total);
        self.weigh_selected(trees, queries, max);
    }

    /// Exact logits of all tokens of `leaves`, [queries, total]; `starts` says where each begins.
    fn score_leaves(&mut self, trees: &[Arc<Tree>], queries: &[f32]) -> usize {
        let g = self.max.len();
        self.starts.clear();
        let mut total = 0;
        for &(t, leaf) in &self.leaves {
            self.starts.push(total);
            total += trees[t].levels[0].scalars[leaf as usize].count as usize;
        }
        self.starts.push(total);
        self.logits.resize(g * total, 0.0);
        let (logits, mut before) = (&mut self.logits, 0);
        for leaves in self.leaves.chunk_by(|a, b| a.0 == b.0) {
            let tree = &trees[leaves[0].0];
            let pages = leaves.iter().map(|&(_, leaf)| {
                let page = tree.levels[0].pages[leaf as usize];
                (page, 0..tree.pages.len(page))
            });
            let first = self.starts[before];
            tree.pages
                .for_each_run(Part::Keys, pages, &mut self.index, |rows, index, at| {
                    simd::dots(queries, rows, Some(index), &mut logits[first + at..], total);
                });
            before += leaves.len();
        }
        self.key_rows += total;
        total
    }

    /// Moves `places` (ascending) from the candidates to the selected. Their weights among the
    /// candidates become 0.
    fn pick(&mut self, trees: &[Arc<Tree>], total: usize) {
        let g = self.max.len();
        let mut leaf = 0;
        self.taken.clear();
        self.taken.resize(self.leaves.len(), 0);
        for &place in &self.places {
            let place = place as usize;
            while self.starts[leaf + 1] <= place {
                leaf += 1;
            }
            let row = place - self.starts[leaf];
            let (t, node) = self.leaves[leaf];
            let page = trees[t].levels[0].pages[node as usize];
            self.positions.push(trees[t].pages.ids(page)[row]);
            self.tokens.push(TreePlace {
                tree: t as u32,
                page,
                row: row as u32,
            });
            self.taken[leaf] += 1;
        }
        self.weights.clear();
        for q in 0..g {
            let candidates = &mut self.logits[q * total..][..total];
            let taken = self.places.iter();
            self.weights
                .extend(taken.map(|&p| std::mem::take(&mut candidates[p as usize])));
        }
    }

    /// Visits the K or V rows of the selected tokens, see [`PagePool::for_each_run`].
    pub fn for_each_run(
        &mut self,
        trees: &[Arc<Tree>],
        part: Part,
        mut visit: impl FnMut(&mut [f32], Rows<'_>, &[u32]),
    ) {
        let (weights, mut before) = (&mut self.weights, 0);
        for tokens in self.tokens.chunk_by(|a, b| a.tree == b.tree) {
            let pool = &trees[tokens[0].tree as usize].pages;
            let rows = tokens.iter();
            let rows = rows.map(|token| (token.page, token.row as usize..token.row as usize + 1));
            pool.for_each_run(part, rows, &mut self.index, |rows, index, first| {
                visit(&mut weights[before + first..], rows, index);
            });
            before += tokens.len();
        }
    }

    /// Weighs the selected under a maximum of theirs and of sink and window, `max`, alone. Where the
    /// rest is dropped, a key of the rest that is far above all of them would make them vanish.
    fn weigh_selected(&mut self, trees: &[Arc<Tree>], queries: &[f32], max: &[f32]) {
        let stride = self.tokens.len();
        self.for_each_run(trees, Part::Keys, |weights, rows, index| {
            simd::dots(queries, rows, Some(index), weights, stride);
        });
        for (q, &max) in max.iter().enumerate() {
            let row = &mut self.weights[q * stride..][..stride];
            self.max[q] = simd::max(row).max(max);
            simd::exp(row, self.max[q]);
        }
    }

    /// Leaves with candidates left over; one that was selected whole has nothing to stand for.
    fn summarise_candidates(&mut self, total: usize, g: usize) {
        let left = |&i: &usize| self.taken[i] < self.starts[i + 1] - self.starts[i];
        let mut before = 0;
        for all in self.leaves.chunk_by(|a, b| a.0 == b.0) {
            let leaves = || (before..before + all.len()).filter(left);
            let part = next_part(&mut self.summarised, &mut self.parts);
            part.tree = all[0].0;
            part.depth = 0;
            part.keys_read = true;
            part.nodes.clear();
            part.nodes.extend(leaves().map(|i| self.leaves[i].1));
            self.tail_nodes += part.nodes.len();
            part.max.clear();
            part.max.extend_from_slice(&self.max);
            part.weights.clear();
            for q in 0..g {
                let weights = &self.logits[q * total..][..total];
                let page = |i| {
                    weights[self.starts[i]..self.starts[i + 1]]
                        .iter()
                        .sum::<f32>()
                };
                part.weights.extend(leaves().map(page));
            }
            before += all.len();
        }
    }

    /// Leaves nodes of the level just scored to the tail: all but the `opened` places.
    fn close(&mut self, tree: usize, depth: usize, nodes: &[NodeId], opened: &[u32]) {
        if opened.len() == nodes.len() {
            return;
        }
        let part = next_part(&mut self.summarised, &mut self.parts);
        part.tree = tree;
        part.depth = depth;
        part.keys_read = false;
        part.nodes.clear();
        part.nodes.extend_from_slice(nodes);
        self.tail_nodes += nodes.len() - opened.len();
        // All of the level, in which the opened weigh nothing. Nor do they count for the maximum:
        // the mean of an opened node may lie far above all that is below it, by rounding alone.
        std::mem::swap(&mut part.weights, &mut self.level_logits);
        for (q, row) in part.weights.chunks_exact_mut(nodes.len()).enumerate() {
            for &place in opened {
                row[place as usize] = f32::NEG_INFINITY;
            }
            let high = simd::max(row).max(self.max[q]);
            self.base[q] *= (self.max[q] - high).exp();
            self.max[q] = high;
            self.base[q] += simd::exp(row, high);
        }
        part.max.clear();
        part.max.extend_from_slice(&self.max);
    }

    /// Takes the faint nodes out of the tail: those that hold, over all queries, less than
    /// [`FAINT`] of an even share of the softmax each. What those of each of the `trees` hold together
    /// is in `faint`. `max` and `exact`: final maxima, and the weight under them of all that is attended exactly.
    pub fn thin(&mut self, trees: usize, max: &[f32], exact: &[f32]) {
        let g = max.len();
        let parts = &mut self.summarised[..self.parts];
        self.faint.clear();
        self.faint.resize(trees * g, 0.0);
        let mut sums = exact.to_vec();
        for part in &mut *parts {
            let count = part.nodes.len();
            for (q, &max) in max.iter().enumerate() {
                // From here on `max` of a part is the factor that brings its weights under `max`.
                part.max[q] = (part.max[q] - max).exp();
                sums[q] += part.max[q] * simd::sum(&part.weights[q * count..][..count]);
            }
        }
        let least = FAINT * g as f32 / self.tail_nodes.max(1) as f32;
        for part in parts {
            let count = part.nodes.len();
            self.priorities.clear();
            self.priorities.resize(count, 0.0);
            for (q, sum) in sums.iter().enumerate() {
                let weights = &part.weights[q * count..][..count];
                simd::shift(&mut self.priorities, part.max[q] / sum, weights, 0.0);
            }
            // Without a branch that nothing predicts.
            let mut kept = 0;
            self.places.clear();
            self.places.resize(count, 0);
            for (i, &share) in self.priorities.iter().enumerate() {
                self.places[kept] = i as u32;
                kept += usize::from(share > least);
            }
            self.places.truncate(kept);
            for q in 0..g {
                let weights = &part.weights[q * count..][..count];
                let (factor, all) = (part.max[q], simd::sum(weights));
                for (i, &place) in self.places.iter().enumerate() {
                    part.weights[q * kept + i] = factor * part.weights[q * count + place as usize];
                }
                let rest = factor * all - simd::sum(&part.weights[q * kept..][..kept]);
                self.faint[part.tree * g + q] += rest.max(0.0);
            }
            for (i, &place) in self.places.iter().enumerate() {
                part.nodes[i] = part.nodes[place as usize];
            }
            part.nodes.truncate(kept);
            part.weights.truncate(g * kept);
            part.max.copy_from_slice(max);
        }
    }
}

fn next_part<'a>(parts: &'a mut Vec<Summarised>, used: &mut usize) -> &'a mut Summarised {
    if parts.len() == *used {
        parts.push(Summarised::default());
    }
    *used += 1;
    &mut parts[*used - 1]
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// The values of nodes that together hold at most this share of the softmax are not read.
const FAINT: f32 = 0.1;

/// How many standard deviations above its mean logit a node counts for when nodes are ranked. The
/// deviation takes keys to spread alike in all directions, which they do not: hence more than one.
const SPREAD_WEIGHT: f32 = 2.0;

/// Nodes between asking for the numbers of one and using them.
const NODES_AHEAD: usize = 64;

/// Bound of that raise, as a logit: its exponential stays finite.
const MOST_RAISE: f32 = 40.0;

/// Ranks nodes by the share of the softmax that they may hold, summed over the queries of the
/// group: the weight of their mean, raised by the spread of their keys, since a wide node can hide
/// one key that matters.
struct GroupMass<'a> {
    selection: &'a mut Selection,
    tree: usize,
    queries: &'a [f32],
    candidates: usize,
    /// Share of the lowest upper level to open.
    open_share: f32,
    /// Share of the level above that to open; levels above both are opened whole.
    scored_share: f32,
}

impl Priority for GroupMass<'_> {
    fn score(&mut self, level: &Level, nodes: &[NodeId], out: &mut Vec<f32>) {
        let s = &mut *self.selection;
        let (n, dim) = (nodes.len(), level.keys.dim());
        s.level_logits.resize(s.max.len() * n, 0.0);
        simd::dots(
            self.queries,
            level.keys.rows(),
            Some(nodes),
            &mut s.level_logits,
            n,
        );
        s.log_counts.clear();
        s.radii.clear();
        for (i, &node) in nodes.iter().enumerate() {
            if let Some(&later) = nodes.get(i + NODES_AHEAD) {
                simd::prefetch(&level.scalars[later as usize..][..1]);
            }
            let scalars = &level.scalars[node as usize];
            s.log_counts.push(scalars.log_count);
            s.radii.push(scalars.key_radius);
        }
        out.clear();
        out.resize(n, 0.0);
        for q in 0..s.max.len() {
            let row = &mut s.level_logits[q * n..][..n];
            let high = simd::shift(row, 1.0, &s.log_counts, s.offsets[q]).max(s.max[q]);
            s.raised.clear();
            s.raised.extend_from_slice(row);
            let sum = s.base[q] * (s.max[q] - high).exp() + simd::exp(&mut s.raised, high);
            // The rank: the same logits, raised, under a maximum of their own.
            let query = &self.queries[q * dim..][..dim];
            let deviation = SPREAD_WEIGHT * norm(query) / (dim as f32).sqrt();
            s.raised.clear();
            s.raised.extend_from_slice(row);
            let top = simd::shift(&mut s.raised, deviation, &s.radii, 0.0).max(high);
            simd::exp(&mut s.raised, top);
            let share = (top - high).min(MOST_RAISE).exp() / sum;
            simd::shift(out, share, &s.raised, 0.0);
        }
    }

    fn open(&mut self, depth: usize, level: &Level, nodes: &[NodeId], order: &mut Order) -> usize {
        let all = level.len() as f32;
        match depth {
            1 => (),
            2 => return (self.scored_share * all).ceil() as usize,
            _ => return nodes.len(),
        }
        let share = (self.open_share * all).ceil() as usize;
        let enough = order.count_until(self.candidates, |place| {
            level.scalars[nodes[place] as usize].count as usize
        });
        share.max(enough)
    }

    fn close(&mut self, depth: usize, nodes: &[NodeId], opened: &[u32]) {
        self.selection.close(self.tree, depth, nodes, opened);
    }
}
