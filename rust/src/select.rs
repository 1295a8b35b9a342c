//! Which tokens of the tree one step attends to exactly, and what stands for all the others.
//!
//! DESIGN section 2, steps 1 to 4. Queries come scaled; all weights are `exp(logit - max)` under
//! the maximum of their query at that time, kept beside them.

use crate::config::Options;
use crate::ids::{KeyId, NodeId};
use crate::order::Order;
use crate::simd;
use crate::tree::Tree;
use crate::tree::node::Level;
use crate::tree::search::{Frontier, Priority, View, descend, reach_leaves};

/// Nodes that stand for their tokens, with the weight of each for each query.
#[derive(Debug, Default)]
pub struct Summarised {
    pub depth: usize,
    pub nodes: Vec<NodeId>,
    /// [queries, nodes]
    pub weights: Vec<f32>,
    /// Maximum of each query under which the weights were taken.
    pub max: Vec<f32>,
    /// Whether the keys of these (leaf) nodes were read, so that only values are approximated.
    pub keys_read: bool,
}

/// Tokens of one leaf: its page's rows `rows[first..last]` of the selection.
#[derive(Debug, Clone, Copy)]
pub struct Picked {
    pub leaf: NodeId,
    pub first: usize,
    pub last: usize,
}

/// What a step decides on; reused from one to the next.
#[derive(Debug, Default)]
pub struct Selection {
    /// Leaves with selected tokens.
    pub picked: Vec<Picked>,
    /// Rows inside the page of their leaf.
    pub rows: Vec<u32>,
    /// Positions of the selected tokens.
    pub positions: Vec<KeyId>,
    /// [queries, rows]
    pub weights: Vec<f32>,
    /// Maximum of each query under which these weights were taken.
    pub max: Vec<f32>,
    summarised: Vec<Summarised>,
    parts: usize,
    /// Node and token keys read.
    pub key_rows: usize,

    frontier: Frontier,
    priorities: Vec<f32>,
    level_weights: Vec<f32>,
    level_logs: Vec<f32>,
    raised: Vec<f32>,
    logits: Vec<f32>,
    places: Vec<u32>,
    leaves: Vec<NodeId>,
    starts: Vec<usize>,
    offsets: Vec<f32>,
    base: Vec<f32>,
}

impl Selection {
    /// The nodes that stand for what was not selected.
    pub fn summarised(&mut self) -> &mut [Summarised] {
        &mut self.summarised[..self.parts]
    }

    fn start(&mut self, max: &[f32], base: &[f32]) {
        self.picked.clear();
        self.rows.clear();
        self.positions.clear();
        self.parts = 0;
        self.key_rows = 0;
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
        tree: &Tree,
        queries: &[f32],
        max: &[f32],
        sum: &[f32],
        options: &Options,
    ) {
        self.start(max, sum);
        let g = max.len();

        // 1 to 3. The leaves that are worth reading.
        self.leaves.clear();
        if options.candidates() < tree.len {
            self.best_leaves(tree, queries, options);
        } else {
            self.leaves.extend(0..tree.levels[0].len() as NodeId);
        }

        // 4. Score their keys exactly, keep the best tokens.
        let total = self.score_leaves(tree, queries);
        self.priorities.clear();
        self.priorities.resize(total, 0.0);
        for q in 0..g {
            let row = &mut self.logits[q * total..][..total];
            let high = row.iter().fold(self.max[q], |a, &b| a.max(b));
            self.base[q] *= (self.max[q] - high).exp();
            self.max[q] = high;
            let share = 1.0 / (self.base[q] + simd::exp(row, high));
            self.priorities
                .iter_mut()
                .zip(row)
                .for_each(|(p, w)| *p += *w * share);
        }
        self.frontier.order.rank(&self.priorities);
        let budget = options.token_budget.min(total);
        self.frontier.order.partition(budget, &mut self.places);
        self.pick(tree, total, budget);

        // 5. The candidates left over: their own weights, their pages' mean value.
        self.summarise_candidates(total, g);
    }

    /// Finds the leaves whose tokens are candidates; every other token goes to the tail.
    fn best_leaves(&mut self, tree: &Tree, queries: &[f32], options: &Options) {
        // 1, 2. Score the top; open the best nodes; what stays closed goes to the tail.
        let g = self.max.len();
        let dim = tree.pages.key_dim();
        self.offsets.clear();
        self.offsets.extend(
            queries
                .chunks_exact(dim)
                .map(|q| dot(q, tree.transform.mean())),
        );
        let mut frontier = std::mem::take(&mut self.frontier);
        let mut mass = GroupMass {
            selection: self,
            queries,
            candidates: options.candidates(),
            open_fraction: options.open_fraction,
        };
        descend(&tree.levels, 0, &mut mass, &mut frontier);
        self.key_rows += frontier.scored;

        // 3. The best leaves, until they hold enough candidates.
        let leaves = &tree.levels[0].scalars;
        let count = |place: usize| leaves[frontier.nodes[place] as usize].count as usize;
        frontier.order.rank(&frontier.scores);
        let taken = frontier.order.count_until(options.candidates(), count);
        let mut places = std::mem::take(&mut self.places);
        frontier.order.partition(taken, &mut places);
        self.close(0, &frontier.nodes, &places[taken..], g);
        let best = places[..taken].iter();
        self.leaves
            .extend(best.map(|&p| frontier.nodes[p as usize]));
        self.places = places;
        self.frontier = frontier;
    }

    /// The paper's selection: each query head ranks pages by their best token through an M-DCI
    /// search of its own; the heads take turns; whole pages, the rest dropped.
    pub fn best_pages(
        &mut self,
        tree: &Tree,
        queries: &[f32],
        max: &[f32],
        sum: &[f32],
        options: &Options,
    ) {
        self.start(max, sum);
        let g = max.len();
        let dim = tree.pages.key_dim();
        self.leaves.clear();
        for query in queries.chunks_exact(dim) {
            let found = reach_leaves(
                tree,
                query,
                View(&[options.field_of_view]),
                &mut self.frontier,
            );
            self.leaves.extend(found);
            self.key_rows += self.frontier.scored;
        }
        self.leaves.sort_unstable();
        self.leaves.dedup();
        let total = self.score_leaves(tree, queries);

        let mut rankings = Vec::with_capacity(g);
        for q in 0..g {
            let logits = &self.logits[q * total..][..total];
            self.priorities.clear();
            let pages = self.starts.windows(2);
            self.priorities.extend(pages.map(|p| {
                logits[p[0]..p[1]]
                    .iter()
                    .fold(f32::NEG_INFINITY, |a, &b| a.max(b))
            }));
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
        for q in 0..g {
            let row = &mut self.logits[q * total..][..total];
            self.max[q] = row.iter().fold(self.max[q], |a, &b| a.max(b));
            simd::exp(row, self.max[q]);
        }
        let budget = self.places.len();
        self.pick(tree, total, budget);
    }

    /// Exact logits of all tokens of `leaves`, [queries, total]; `starts` says where each begins.
    fn score_leaves(&mut self, tree: &Tree, queries: &[f32]) -> usize {
        let g = queries.len() / tree.pages.key_dim();
        self.starts.clear();
        let mut total = 0;
        for &leaf in &self.leaves {
            self.starts.push(total);
            total += tree.levels[0].scalars[leaf as usize].count as usize;
        }
        self.starts.push(total);
        self.logits.resize(g * total, 0.0);
        for (&leaf, &start) in self.leaves.iter().zip(&self.starts) {
            let keys = tree.pages.keys(tree.levels[0].pages[leaf as usize]);
            simd::dots(queries, keys, None, &mut self.logits[start..], total);
        }
        self.key_rows += total;
        total
    }

    /// Moves the first `budget` of `places` (ascending) from the candidates to the selected. Their
    /// weights among the candidates become 0.
    fn pick(&mut self, tree: &Tree, total: usize, budget: usize) {
        let g = self.max.len();
        let mut leaf = 0;
        for (i, &place) in self.places[..budget].iter().enumerate() {
            let place = place as usize;
            while self.starts[leaf + 1] <= place {
                leaf += 1;
            }
            let node = self.leaves[leaf];
            let row = (place - self.starts[leaf]) as u32;
            self.rows.push(row);
            let page = tree.levels[0].pages[node as usize];
            self.positions.push(tree.pages.ids(page)[row as usize]);
            match self.picked.last_mut() {
                Some(last) if last.leaf == node => last.last = i + 1,
                _ => self.picked.push(Picked {
                    leaf: node,
                    first: i,
                    last: i + 1,
                }),
            }
        }
        self.weights.clear();
        for q in 0..g {
            let candidates = &mut self.logits[q * total..][..total];
            let taken = self.places[..budget].iter();
            self.weights
                .extend(taken.map(|&p| std::mem::take(&mut candidates[p as usize])));
        }
    }

    /// Leaves with candidates left over; one that was selected whole has nothing to stand for.
    fn summarise_candidates(&mut self, total: usize, g: usize) {
        // Both lists go through the leaves in the same order.
        let mut picked = self.picked.iter().peekable();
        self.places.clear();
        for (i, (&leaf, page)) in self.leaves.iter().zip(self.starts.windows(2)).enumerate() {
            let taken = picked
                .next_if(|p| p.leaf == leaf)
                .map_or(0, |p| p.last - p.first);
            if taken < page[1] - page[0] {
                self.places.push(i as u32);
            }
        }
        if self.places.is_empty() {
            return;
        }
        let part = next_part(&mut self.summarised, &mut self.parts);
        part.depth = 0;
        part.keys_read = true;
        part.nodes.clear();
        let left = self.places.iter();
        part.nodes.extend(left.map(|&i| self.leaves[i as usize]));
        part.max.clear();
        part.max.extend_from_slice(&self.max);
        part.weights.clear();
        for q in 0..g {
            let weights = &self.logits[q * total..][..total];
            part.weights.extend(self.places.iter().map(|&i| {
                let page = self.starts[i as usize]..self.starts[i as usize + 1];
                weights[page].iter().sum::<f32>()
            }));
        }
    }

    /// Leaves nodes of the level just scored to the tail.
    fn close(&mut self, depth: usize, nodes: &[NodeId], places: &[u32], g: usize) {
        if places.is_empty() {
            return;
        }
        let part = next_part(&mut self.summarised, &mut self.parts);
        part.depth = depth;
        part.keys_read = false;
        part.nodes.clear();
        part.nodes.extend(places.iter().map(|&p| nodes[p as usize]));
        part.max.clear();
        part.max.extend_from_slice(&self.max);
        part.weights.clear();
        for q in 0..g {
            let weights = &self.level_weights[q * nodes.len()..][..nodes.len()];
            let from = part.weights.len();
            part.weights
                .extend(places.iter().map(|&p| weights[p as usize]));
            self.base[q] += part.weights[from..].iter().sum::<f32>();
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

/// How many standard deviations above its mean logit a node counts for when nodes are ranked. The
/// deviation takes keys to spread alike in all directions, which they do not: hence more than one.
const SPREAD_WEIGHT: f32 = 2.0;

/// Bound of that raise, as a logit: its exponential stays finite.
const MOST_RAISE: f32 = 40.0;

/// Ranks nodes by the share of the softmax that they may hold, summed over the queries of the
/// group: the weight of their mean, raised by the spread of their keys, since a wide node can hide
/// one key that matters.
struct GroupMass<'a> {
    selection: &'a mut Selection,
    queries: &'a [f32],
    candidates: usize,
    /// Share of the lowest upper level to open; levels above it are opened whole.
    open_fraction: f32,
}

impl Priority for GroupMass<'_> {
    fn score(&mut self, level: &Level, nodes: &[NodeId], out: &mut Vec<f32>) {
        let s = &mut *self.selection;
        let (n, dim) = (nodes.len(), level.keys.dim());
        s.level_weights.resize(s.max.len() * n, 0.0);
        s.level_logs.clear();
        s.level_logs.extend(
            nodes
                .iter()
                .map(|&node| level.scalars[node as usize].log_count),
        );
        simd::dots(
            self.queries,
            level.keys.rows(),
            Some(nodes),
            &mut s.level_weights,
            n,
        );
        out.clear();
        out.resize(n, 0.0);
        for q in 0..s.max.len() {
            let row = &mut s.level_weights[q * n..][..n];
            let mut high = s.max[q];
            for (logit, log_count) in row.iter_mut().zip(&s.level_logs) {
                *logit += log_count + s.offsets[q];
                high = high.max(*logit);
            }
            s.base[q] *= (s.max[q] - high).exp();
            s.max[q] = high;
            // The rank: the same logits, raised, under a maximum of their own.
            let query = &self.queries[q * dim..][..dim];
            let deviation = SPREAD_WEIGHT * (dot(query, query) / dim as f32).sqrt();
            s.raised.clear();
            let radii = nodes
                .iter()
                .map(|&node| level.scalars[node as usize].key_radius);
            s.raised.extend(
                row.iter()
                    .zip(radii)
                    .map(|(logit, r)| logit + deviation * r),
            );
            let top = s.raised.iter().fold(high, |a, &b| a.max(b));
            let sum = s.base[q] + simd::exp(row, high);
            simd::exp(&mut s.raised, top);
            let share = (top - high).min(MOST_RAISE).exp() / sum;
            out.iter_mut()
                .zip(&s.raised)
                .for_each(|(p, w)| *p += *w * share);
        }
    }

    fn open(&mut self, depth: usize, level: &Level, nodes: &[NodeId], order: &mut Order) -> usize {
        if depth > 1 {
            return nodes.len();
        }
        let share = (self.open_fraction * nodes.len() as f32).ceil() as usize;
        let enough = order.count_until(self.candidates, |place| {
            level.scalars[nodes[place] as usize].count as usize
        });
        share.max(enough)
    }

    fn close(&mut self, depth: usize, nodes: &[NodeId], places: &[u32]) {
        let g = self.selection.max.len();
        self.selection.close(depth, nodes, places, g);
    }
}
