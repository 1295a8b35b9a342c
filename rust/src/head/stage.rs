//! What a head does for a step of which a device does the exact attention.

use super::{Choice, Head, Scratch};
use crate::config::Options;
use crate::ids::{KeyId, Place, SlotId, TreePlace};
use crate::residency::Residency;
use crate::rows::{Elements, Rows};

impl Scratch {
    /// What a staged step computed: for each query the maximum, the sum of the weights under it, and
    /// the weighted sum of the values, [queries, value_dim].
    pub fn tail(&self) -> (&[f32], &[f32], &[f32]) {
        (&self.softmax.max, &self.softmax.sum, &self.softmax.out)
    }

    /// The slots that a staged step attends to.
    pub fn slots(&self) -> &[SlotId] {
        &self.slots
    }
}

impl Head {
    /// A step of which a device does the exact attention. Afterwards [`Scratch::slots`] are those it
    /// attends to, [`Head::misses`] what has to be there first, and [`Scratch::tail`] all the rest:
    /// everything, where a step is exact.
    pub fn step_staged(
        &mut self,
        queries: &[f32],
        visible: usize,
        like: Option<&Choice>,
        options: &Options,
        scratch: &mut Scratch,
    ) {
        let group = queries.len() / self.key_dim;
        let exact = visible < options.dense_below || like == Some(&None);
        if exact || self.forest.is_empty() {
            self.attend_all(queries, &vec![visible; group], scratch);
            self.count_exact(visible);
            scratch.slots.clear();
            self.misses.clear();
            return;
        }
        self.select(queries, visible, like, options, scratch, false);
        self.admit(visible, scratch);
        // The device adds what is exact: the tail is on its own.
        scratch.softmax.sum.fill(0.0);
        self.add_tail(queries, options, scratch);
        let Scratch {
            softmax, exact_sum, ..
        } = scratch;
        self.step.error_estimate = f32::NAN;
        for (q, exact) in exact_sum.iter().enumerate() {
            let tail = softmax.sum[q];
            self.step.mass_exact += (exact / (exact + tail) - 1.0) / group as f32;
            if tail == 0.0 {
                softmax.max[q] = f32::NEG_INFINITY;
            }
        }
    }

    /// Steps may be staged from now on, with as many slots.
    pub fn open_device(&mut self, slots: usize) {
        self.residency = Some(Residency::new(slots));
    }

    pub fn residency(&self) -> Option<&Residency> {
        self.residency.as_ref()
    }

    /// Until the next turn, no token that a step wants loses its slot.
    pub fn next_turn(&mut self) {
        self.residency.as_mut().expect("an open device").next_turn();
    }

    /// Takes all tokens for gone from the device.
    pub fn forget_device(&mut self) {
        if let Some(residency) = &mut self.residency {
            residency.forget_from(0);
        }
    }

    /// What the last staged step has to send: slots, ascending, and where the tokens are.
    pub fn misses(&self) -> &[(SlotId, Place)] {
        &self.misses
    }

    /// Key and value of a token.
    pub fn rows_at(&self, place: Place) -> [Elements<'_>; 2] {
        match place {
            Place::Sink(i) => self.sink.row(i as usize),
            Place::Window(i) => self.window.row(i as usize),
            Place::Tree(TreePlace { tree, page, row }) => {
                let pages = &self.forest.trees()[tree as usize].pages;
                [pages.keys(page), pages.values(page)].map(|rows| rows.row(row as usize))
            }
        }
    }

    /// Calls `visit(keys, values)` with blocks of tokens, `range` of them in storage order: sink, the
    /// tree leaf by leaf, window.
    pub fn for_each_block(
        &self,
        range: std::ops::Range<usize>,
        mut visit: impl FnMut(Elements<'_>, Elements<'_>),
    ) {
        let mut at = 0;
        let mut block = |keys: Rows<'_>, values: Rows<'_>| {
            let from = range.start.clamp(at, at + keys.len) - at;
            let to = range.end.clamp(at, at + keys.len) - at;
            if from < to {
                let rows = from..to;
                visit(
                    keys.slice(rows.clone()).elements,
                    values.slice(rows).elements,
                );
            }
            at += keys.len;
        };
        block(self.sink.keys.rows(), self.sink.values.rows());
        for tree in self.forest.trees() {
            for &page in &tree.leaves().pages {
                block(tree.pages.keys(page), tree.pages.values(page));
            }
        }
        block(self.window.keys.rows(), self.window.values.rows());
    }

    /// Finds or makes slots for sink, window and what is selected.
    fn admit(&mut self, visible: usize, scratch: &mut Scratch) {
        let Scratch {
            selection,
            wanted,
            slots,
            misses,
            ..
        } = scratch;
        let (sink, window) = (
            self.sink_len(),
            self.window_start as KeyId..visible as KeyId,
        );
        let always = sink + window.len();
        wanted.clear();
        wanted.extend((0..sink as KeyId).chain(window));
        wanted.extend_from_slice(&selection.positions);
        let residency = self.residency.as_mut().expect("an open device");
        residency.admit(wanted, slots, misses);
        let place = |i: usize| match i.checked_sub(always) {
            Some(i) => Place::Tree(selection.tokens[i]),
            None if i < sink => Place::Sink(i as u32),
            None => Place::Window((i - sink) as u32),
        };
        self.misses.clear();
        self.misses
            .extend(misses.iter().map(|&(i, slot)| (slot, place(i))));
    }
}
