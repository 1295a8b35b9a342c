//! One KV head: sink rows, window rows, and the index of all that lies between them.
//!
//! Every token is in exactly one of the three, by position: sink, then tree, then window. Before
//! the first bulk there is no tree, and the window holds everything after the sink.

use crate::attend::Softmax;
use crate::config::{Options, Selection as Mode, Tail};
use crate::error::{Error, Result};
use crate::forest::Forest;
use crate::ids::{KeyId, Place, SlotId};
use crate::index::FIRST_BULK;
use crate::pages::Part;
use crate::residency::Residency;
use crate::rows::{Dtype, Elements, Rows, Strided, norm};
use crate::select::Selection;
use crate::simd;
use crate::span::Span;
use crate::threads::Workers;
use std::sync::Arc;
use std::time::Instant;

pub mod stage;

/// Tokens that the window holds beyond its option before each new one moves the oldest into the
/// tree, and the fewest it keeps: a crop of this many stays inside the window.
pub const SLACK: usize = 32;
/// Keys scored at a time by exact attention.
const EXACT_ROWS: usize = 256;

/// What the last step of a head did, and what it estimates of its misses (DESIGN section 4).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Step {
    /// Tokens that it could see; 0: there was no step, or its token is gone.
    pub visible: usize,
    /// Tokens attended exactly: sink, window and selected.
    pub tokens_exact: usize,
    /// Keys and mean keys read.
    pub key_rows: usize,
    /// Values and mean values read.
    pub value_rows: usize,
    /// Share of the estimated full softmax that was attended exactly, mean over the query heads.
    pub mass_exact: f32,
    /// First-order estimate of the relative output error, mean over the query heads. NaN where a
    /// device attends: it takes the output.
    pub error_estimate: f32,
    pub times: Times,
}

/// Seconds that the parts of a step took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Times {
    /// The descent.
    pub search: f32,
    /// Scoring candidates, and choosing among them.
    pub select: f32,
    /// Exact attention: sink, window, selected.
    pub attend: f32,
    /// The summary of the rest.
    pub tail: f32,
}

impl Times {
    pub fn total(self) -> f32 {
        self.search + self.select + self.attend + self.tail
    }
}

fn seconds(from: Instant, to: Instant) -> f32 {
    to.duration_since(from).as_secs_f32()
}

/// Working memory of a step; one per thread, whatever the number of heads.
#[derive(Debug, Default)]
pub struct Scratch {
    softmax: Softmax,
    selection: Selection,
    logits: Vec<f32>,
    exact_sum: Vec<f32>,
    errors: Vec<f32>,
    wanted: Vec<KeyId>,
    slots: Vec<SlotId>,
    misses: Vec<(usize, SlotId)>,
}

/// The positions that a step attended to exactly beside sink and window; `None`: all.
pub type Choice = Option<Vec<KeyId>>;

#[derive(Debug)]
pub struct Head {
    key_dim: usize,
    value_dim: usize,
    stream: u64,
    /// Forks share what none of them has changed: see [`Arc::make_mut`].
    sink: Arc<Span>,
    window: Arc<Span>,
    /// Position of the first token of the window.
    window_start: usize,
    forest: Forest,
    /// Of each position of the last call that attended.
    choices: Vec<Choice>,
    step: Step,
    /// Once a device is open.
    residency: Option<Residency>,
    /// What the last staged step has to send, by slot.
    misses: Vec<(SlotId, Place)>,
}

impl Head {
    pub fn new(dtype: Dtype, key_dim: usize, value_dim: usize, stream: u64) -> Self {
        Self {
            key_dim,
            value_dim,
            stream,
            sink: Arc::new(Span::new(dtype, key_dim, value_dim)),
            window: Arc::new(Span::new(dtype, key_dim, value_dim)),
            window_start: 0,
            forest: Forest::default(),
            choices: Vec::new(),
            step: Step::default(),
            residency: None,
            misses: Vec::new(),
        }
    }

    /// An independent head with the same tokens, and with as many slots, all empty, if any.
    pub fn fork(&mut self) -> Self {
        let slots = self.residency.as_ref().map(Residency::slots);
        Self {
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            stream: self.stream,
            sink: self.sink.clone(),
            window: self.window.clone(),
            window_start: self.window_start,
            forest: self.forest.fork(),
            choices: self.choices.clone(),
            step: self.step,
            residency: slots.map(Residency::new),
            misses: Vec::new(),
        }
    }

    pub fn len(&self) -> usize {
        self.window_start + self.window.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn forest(&self) -> &Forest {
        &self.forest
    }

    pub fn sink_len(&self) -> usize {
        self.sink.len()
    }

    pub fn window_len(&self) -> usize {
        self.window.len()
    }

    pub fn step(&self) -> Step {
        self.step
    }

    /// Positions attended exactly by the last step, ascending.
    pub fn selected(&self) -> Vec<KeyId> {
        if self.step.visible == 0 {
            return Vec::new();
        }
        let window = self.window_start as KeyId..self.len() as KeyId;
        let mut positions: Vec<KeyId> = (0..self.sink_len() as KeyId).collect();
        match self.choices.last() {
            Some(Some(chosen)) => positions.extend_from_slice(chosen),
            _ => (self.forest).for_each_token(|position, _, _| positions.push(position)),
        }
        positions.extend(window);
        positions.sort_unstable();
        positions.dedup(); // a deep crop may have put selected ones back into the window
        positions
    }

    /// What each position of the last call that attended chose; nothing if they are gone.
    pub fn choices(&self) -> &[Choice] {
        &self.choices
    }

    /// To be called before the positions of a call that attends.
    pub fn forget_choices(&mut self) {
        self.choices.clear();
    }

    // ---- storing ------------------------------------------------------------------------------

    /// Appends one token. First the oldest of a full window moves into the tree: a step that is
    /// cropped away and done again leaves the state of having done it once.
    pub fn append(
        &mut self,
        keys: Strided<'_>,
        values: Strided<'_>,
        i: usize,
        options: &Options,
    ) -> Result<()> {
        let (most, alone) = (options.window() + SLACK, Workers::steady(1));
        if self.forest.is_empty() {
            self.settle(options, alone)?;
        } else if self.window_len() >= most {
            self.index(self.window_len() + 1 - most, options, alone)?;
        }
        self.store(keys, values, i, options);
        Ok(())
    }

    /// Appends tokens and indexes all but the window at once. Fails only if the workers, those of
    /// the build, are cancelled: see [`Head::settle`].
    pub fn append_bulk(
        &mut self,
        keys: Strided<'_>,
        values: Strided<'_>,
        options: &Options,
        workers: Workers<'_>,
    ) -> Result<()> {
        // At once: growing step by step would leave holes in the heap.
        Arc::make_mut(&mut self.window).reserve(keys.len);
        (0..keys.len).for_each(|i| self.store(keys, values, i, options));
        self.settle(options, workers)
    }

    /// Indexes what is beyond the window, if there is enough of it. Cancelled, it leaves every
    /// token stored, the rest of them in the window: a crop undoes the bulk.
    pub fn settle(&mut self, options: &Options, workers: Workers<'_>) -> Result<()> {
        let least = match self.forest.is_empty() {
            true => FIRST_BULK,
            false => SLACK,
        };
        if self.window_len() < options.window() + least {
            return Ok(());
        }
        self.index(self.window_len() - options.window(), options, workers)
    }

    /// Appends one token to sink or window.
    pub fn store(&mut self, keys: Strided<'_>, values: Strided<'_>, i: usize, options: &Options) {
        let span = if self.window_start < options.sink_tokens && self.window.is_empty() {
            self.window_start += 1;
            &mut self.sink
        } else {
            &mut self.window
        };
        Arc::make_mut(span).push(keys, values, i);
    }

    /// Moves the oldest `count` tokens of the window into the index, or fewer if cancelled.
    fn index(&mut self, count: usize, options: &Options, workers: Workers<'_>) -> Result<()> {
        let first = self.window_start as KeyId;
        let (window, tree) = (&self.window, &options.tree);
        let moved = (self.forest).add(window, count, first, tree, self.stream, workers)?;
        Arc::make_mut(&mut self.window).drop_front(moved);
        self.window_start += moved;
        workers.check()
    }

    /// Keeps the first `n` tokens, and forgets the last step if it was beyond them. Within the
    /// window nothing else changes; deeper, the tokens go from the leaves, and the last ones left
    /// become the window again.
    pub fn crop(&mut self, n: usize, options: &Options) {
        if n < self.step.visible {
            self.choices.clear();
            self.step = Step::default();
        }
        if let Some(residency) = &mut self.residency {
            residency.forget_from(n);
        }
        let window = Arc::make_mut(&mut self.window);
        if n > self.window_start || self.forest.is_empty() && n >= self.window_start {
            window.truncate(n - self.window_start);
            // What is left of a bulk gives its memory back.
            window.drop_front(0);
            return;
        }
        window.truncate(0);
        if n <= self.sink.len() {
            self.forest = Forest::default();
            Arc::make_mut(&mut self.sink).truncate(n);
            self.window_start = n;
            return;
        }
        self.forest.remove_from(n as KeyId);
        let first = n.saturating_sub(options.window()).max(self.sink.len());
        let refilled = self.forest.tokens_from(first as KeyId);
        self.window = Arc::new(refilled.expect("tokens between sink and window are indexed"));
        self.forest.remove_from(first as KeyId);
        self.window_start = first;
    }

    /// Calls `visit(position, key, value)` for every token, in no particular order.
    pub fn for_each_token(
        &self,
        mut visit: impl FnMut(usize, crate::rows::Elements<'_>, crate::rows::Elements<'_>),
    ) {
        for (first, span) in [(0, &self.sink), (self.window_start, &self.window)] {
            for i in 0..span.len() {
                let [key, value] = span.row(i);
                visit(first + i, key, value);
            }
        }
        (self.forest).for_each_token(|position, key, value| visit(position as usize, key, value));
    }

    // ---- attending ----------------------------------------------------------------------------

    /// Exact attention of `queries` [m, key_dim], scaled, over everything stored; query `i` sees
    /// positions below `visible[i]`. `out` is [m, value_dim].
    pub fn attend_exact(
        &self,
        queries: &[f32],
        visible: &[usize],
        scratch: &mut Scratch,
        out: &mut [f32],
    ) {
        self.attend_all(queries, visible, scratch);
        for (q, out) in out.chunks_exact_mut(self.value_dim).enumerate() {
            scratch.softmax.finish(q, out);
        }
    }

    /// The softmax of [`Head::attend_exact`].
    fn attend_all(&self, queries: &[f32], visible: &[usize], scratch: &mut Scratch) {
        let Scratch {
            softmax,
            selection,
            logits,
            ..
        } = scratch;
        softmax.reset(visible.len(), self.value_dim);
        let hide = |logits: &mut [f32], count: usize, position: &dyn Fn(usize) -> usize| {
            for (q, &visible) in visible.iter().enumerate().filter(|v| *v.1 < self.len()) {
                for (i, logit) in logits[q * count..][..count].iter_mut().enumerate() {
                    if position(i) >= visible {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        };
        let sink = (&self.sink, 0, self.sink_len());
        // The part of the window that no query sees is not read.
        let (start, last) = (
            self.window_start,
            visible.iter().copied().max().unwrap_or(0),
        );
        let seen = last.saturating_sub(start).min(self.window_len());
        for (span, before, seen) in [sink, (&self.window, start, seen)] {
            for first in (0..seen).step_by(EXACT_ROWS) {
                let rows = first..(first + EXACT_ROWS).min(seen);
                logits.resize(visible.len() * rows.len(), 0.0);
                let keys = span.keys.rows().slice(rows.clone());
                simd::dots(queries, keys, None, logits, rows.len());
                hide(logits, rows.len(), &|i| before + first + i);
                softmax.add(logits, span.values.rows().slice(rows));
            }
        }
        for tree in self.forest.trees() {
            let (pool, index) = (&tree.pages, &mut selection.index);
            let mut waiting = tree.levels[0].pages.iter().copied().peekable();
            let mut block = Vec::new();
            while waiting.peek().is_some() {
                let mut count = 0;
                block.clear();
                while let Some(page) = waiting.next_if(|_| count < EXACT_ROWS) {
                    count += pool.len(page);
                    block.push((page, 0..pool.len(page)));
                }
                logits.resize(visible.len() * count, 0.0);
                pool.for_each_run(
                    Part::Keys,
                    block.iter().cloned(),
                    index,
                    |rows, index, at| {
                        simd::dots(queries, rows, Some(index), &mut logits[at..], count);
                    },
                );
                // Tree positions lie before the window's: no need to look when all see them.
                if visible.iter().any(|&visible| visible < self.window_start) {
                    let pages = block.iter();
                    let ids: Vec<KeyId> =
                        pages.flat_map(|page| pool.ids(page.0)).copied().collect();
                    hide(logits, count, &|i| ids[i] as usize);
                }
                softmax.weigh(logits, count);
                pool.for_each_run(
                    Part::Values,
                    block.iter().cloned(),
                    index,
                    |rows, index, at| {
                        softmax.add_values(&logits[at..], count, rows, Some(index));
                    },
                );
            }
        }
    }

    /// [`Head::attend_exact`] of one position as a step, with its statistics.
    pub fn step_exact(
        &mut self,
        queries: &[f32],
        visible: usize,
        scratch: &mut Scratch,
        out: &mut [f32],
    ) {
        let group = queries.len() / self.key_dim;
        self.attend_exact(queries, &vec![visible; group], scratch, out);
        self.count_exact(visible);
    }

    /// The statistics of a step that attended to everything.
    fn count_exact(&mut self, visible: usize) {
        self.choices.push(None);
        self.step = Step {
            visible,
            tokens_exact: visible,
            key_rows: visible,
            value_rows: visible,
            mass_exact: 1.0,
            error_estimate: 0.0,
            times: Times::default(),
        };
    }

    /// One decode step of one position (DESIGN section 2): `queries` [group, key_dim], scaled, see
    /// positions below `visible`, which reaches into the window; `like` is what to select instead of
    /// searching. `out` is [group, value_dim].
    pub fn step_sparse(
        &mut self,
        queries: &[f32],
        visible: usize,
        like: Option<&Choice>,
        options: &Options,
        scratch: &mut Scratch,
        out: &mut [f32],
    ) {
        if visible < options.dense_below || like == Some(&None) {
            return self.step_exact(queries, visible, scratch, out);
        }
        self.select(queries, visible, like, options, scratch, true);
        self.add_tail(queries, options, scratch);
        let Scratch {
            softmax,
            exact_sum,
            errors,
            ..
        } = scratch;
        let group = errors.len();
        for (q, out) in out.chunks_exact_mut(self.value_dim).enumerate() {
            softmax.finish(q, out);
            if !self.forest.is_empty() {
                self.step.mass_exact += (exact_sum[q] / softmax.sum[q] - 1.0) / group as f32;
                let norm = out.iter().map(|x| x * x).sum::<f32>().sqrt();
                let error = errors[q] / (softmax.sum[q] * norm.max(f32::MIN_POSITIVE));
                self.step.error_estimate += error / group as f32;
            }
        }
    }

    /// Sink and window, then the selected tokens: their weights, and with `attend` their values.
    fn select(
        &mut self,
        queries: &[f32],
        visible: usize,
        like: Option<&Choice>,
        options: &Options,
        scratch: &mut Scratch,
        attend: bool,
    ) {
        let Scratch {
            softmax,
            selection,
            logits,
            exact_sum,
            ..
        } = scratch;
        let group = queries.len() / self.key_dim;

        // 0. Sink and window, exactly.
        let begun = Instant::now();
        softmax.reset(group, self.value_dim);
        let sink = self.sink_len().min(visible);
        let window = visible.saturating_sub(self.window_start);
        for (span, seen) in [(&self.sink, 0..sink), (&self.window, 0..window)] {
            let count = seen.len();
            logits.resize(group * count, 0.0);
            let keys = span.keys.rows().slice(seen.clone());
            simd::dots(queries, keys, None, logits, count);
            softmax.weigh(logits, count);
            if attend {
                softmax.add_values(logits, count, span.values.rows().slice(seen), None);
            }
        }
        let always = sink + window;
        self.step = Step {
            visible,
            tokens_exact: always,
            key_rows: always,
            value_rows: always,
            mass_exact: 1.0,
            error_estimate: 0.0,
            times: Times::default(),
        };
        let started = Instant::now();
        self.step.times.attend = seconds(begun, started);

        let mut choice = None;
        if !self.forest.is_empty() {
            let trees = self.forest.trees();
            // 1 to 4. Descend, score candidates, select; or take what is given.
            let (max, sum) = (&softmax.max, &softmax.sum);
            match (like, options.selection) {
                (Some(given), _) => {
                    let given = given.as_deref().unwrap_or_default();
                    selection.given_tokens(trees, queries, given, max, sum, options);
                }
                (None, Mode::Tokens) => selection.best_tokens(trees, queries, max, sum, options),
                (None, Mode::Pages) => selection.best_pages(trees, queries, max, sum, options),
            }
            let searched = selection.searched.take().unwrap_or(started);
            self.step.times.search = seconds(started, searched);
            let selected = Instant::now();
            self.step.times.select = seconds(searched, selected);
            choice = Some(selection.positions.clone());
            self.step.tokens_exact += selection.tokens.len();
            self.step.key_rows += selection.key_rows;
            self.step.value_rows += selection.tokens.len();

            // 5. Attend to the selected.
            let (stride, max) = (selection.tokens.len(), selection.max.clone());
            selection.for_each_run(trees, Part::Values, |weights, rows, index| {
                softmax.merge_weights(weights, stride, index.len(), &max);
                if attend {
                    softmax.add_values(weights, stride, rows, Some(index));
                }
            });
            (0..group).for_each(|q| softmax.raise(q, max[q]));
            self.step.times.attend += seconds(selected, Instant::now());
        }
        self.choices.push(choice);
        if !attend {
            self.step.value_rows = 0;
        }
        exact_sum.clear();
        exact_sum.extend_from_slice(&softmax.sum);
    }

    /// 6. Adds the summary of all that was not selected.
    fn add_tail(&mut self, queries: &[f32], options: &Options, scratch: &mut Scratch) {
        let Scratch {
            softmax,
            selection,
            logits,
            exact_sum,
            errors,
            ..
        } = scratch;
        let begun = Instant::now();
        let group = queries.len() / self.key_dim;
        errors.clear();
        errors.resize(group, 0.0);
        let trees = self.forest.trees();
        if trees.is_empty() || options.tail == Tail::Drop {
            return;
        }
        let max = softmax.max.clone();
        selection.thin(trees.len(), &max, exact_sum);
        for (tree, faint) in trees.iter().zip(selection.faint.chunks_exact_mut(group)) {
            softmax.add_weights(faint, 1, &max, tree.whole.values(), &[0]);
            for (error, faint) in errors.iter_mut().zip(faint) {
                *error += *faint * tree.whole.value_spread;
            }
            self.step.value_rows += 1;
        }
        for part in selection.summarised() {
            let level = &trees[part.tree].levels[part.depth];
            let (nodes, count) = (&part.nodes, part.nodes.len());
            let values = level.values.rows();
            softmax.add_weights(&mut part.weights, count, &max, values, nodes);
            self.step.value_rows += count;
            let scalars = nodes.iter().map(|&node| &level.scalars[node as usize]);
            logits.clear();
            logits.extend(scalars.map(|node| {
                let doubt = if part.keys_read { 1.0 } else { node.key_radius };
                doubt * node.value_spread
            }));
            let weights = Rows {
                dim: count,
                len: group,
                elements: Elements::F32(&part.weights),
            };
            let mut doubts = vec![0.0; group];
            simd::dots(logits, weights, None, &mut doubts, group);
            for (q, error) in errors.iter_mut().enumerate() {
                let query = &queries[q * self.key_dim..][..self.key_dim];
                let per_radius = match part.keys_read {
                    true => 1.0,
                    false => norm(query) / (self.key_dim as f32).sqrt(),
                };
                *error += per_radius * doubts[q];
            }
        }
        self.step.value_rows += selection.shift_means(trees, softmax);
        self.step.times.tail = seconds(begun, Instant::now());
    }

    // ---- measuring ----------------------------------------------------------------------------

    /// Bytes of the keys and values alone.
    pub fn row_bytes(&self) -> usize {
        self.len() * (self.key_dim + self.value_dim) * self.sink.keys.dtype().bytes()
    }

    /// Bytes of everything held, and how many of them forks hold too.
    pub fn bytes(&self) -> (usize, usize) {
        let chosen = self.choices.iter().flatten();
        let own = size_of::<Self>()
            + self.choices.capacity() * size_of::<Choice>()
            + chosen.map(Vec::capacity).sum::<usize>() * size_of::<KeyId>()
            + self.misses.capacity() * size_of::<(SlotId, Place)>()
            + self.residency.as_ref().map_or(0, Residency::bytes);
        let (trees, shared) = self.forest.bytes();
        let spans = [&self.sink, &self.window];
        spans
            .iter()
            .fold((own + trees, shared), |(all, shared), span| {
                let twice = if Arc::strong_count(span) > 1 {
                    span.bytes()
                } else {
                    0
                };
                (all + span.bytes(), shared + twice)
            })
    }

    /// Every invariant: those of the tree, and that each position is in exactly one place.
    pub fn check(&self) -> Result<()> {
        let broken = |what: String| Err(Error::Invariant(what));
        let residency = self.residency.as_ref().map(Residency::check);
        residency.transpose().map_err(Error::Invariant)?;
        if [&self.sink, &self.window]
            .iter()
            .any(|span| span.values.len() != span.len())
        {
            return broken("keys and values of different lengths".into());
        }
        let (sink, indexed, window) = (self.sink_len(), self.forest.len(), self.window_start);
        if sink + indexed != window {
            return broken(format!(
                "window starts at {window}, sink ends at {sink}, {indexed} tokens are indexed"
            ));
        }
        self.forest.check(sink as KeyId)
    }
}
