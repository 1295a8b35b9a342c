//! The staging buffer: all that one step of a layer sends to a device, in one piece.
//!
//! | section | type | shape | |
//! |---|---|---|---|
//! | `attended` | u8 | [kv_heads, positions, slots] | 1 where a position attends to a slot |
//! | `tail_max` | f32 | [q_heads, positions] | maximum under which the tail was weighed; -inf: no tail |
//! | `tail_sum` | f32 | [q_heads, positions] | sum of its weights |
//! | `tail_values` | f32 | [q_heads, positions, head_dim] | sum of weight * value |
//! | `rows` | stored type | [misses, 2, head_dim] | key and value of each token to be written |
//! | `targets` | u32 | [misses] | where to: KV head * slots + slot; no two alike |
//!
//! Sections start at multiples of [`ALIGNMENT`] bytes. Misses are in order of position, then KV head,
//! then slot.

use crate::error::Result;
use crate::ids::Place;
use crate::rows::Elements;
use crate::simd::prefetch;
use crate::threads::Workers;
use std::ops::Range;

/// Bytes, of every section's start in the buffer.
pub const ALIGNMENT: usize = 256;
/// Tokens between asking for the rows of one and copying them.
const AHEAD: usize = 16;
/// Tokens of a work item.
const BLOCK: usize = 64;
/// Bytes to copy that are worth a thread.
const LEAST_SHARE: usize = 256 << 10;

/// Where each section starts, in bytes. `rows` is the last one that does not depend on the misses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    pub attended: Range<usize>,
    pub tail_max: Range<usize>,
    pub tail_sum: Range<usize>,
    pub tail_values: Range<usize>,
    pub rows: usize,
    /// Bytes of one key or value.
    row_bytes: usize,
}

impl Layout {
    pub fn new(
        positions: usize,
        (q_heads, kv_heads, head_dim): (usize, usize, usize),
        slots: usize,
        row_bytes: usize,
    ) -> Self {
        let mut end: usize = 0;
        let mut section = |bytes: usize| {
            let start = end.next_multiple_of(ALIGNMENT);
            end = start + bytes;
            start..end
        };
        let queries = q_heads * positions;
        let attended = section(kv_heads * positions * slots);
        let [tail_max, tail_sum] = [(); 2].map(|()| section(queries * size_of::<f32>()));
        let tail_values = section(queries * head_dim * size_of::<f32>());
        Self {
            attended,
            tail_max,
            tail_sum,
            tail_values,
            rows: section(0).start,
            row_bytes,
        }
    }

    /// Bytes of one token: its key and its value.
    pub fn token_bytes(&self) -> usize {
        2 * self.row_bytes
    }

    pub fn targets(&self, misses: usize) -> Range<usize> {
        let start = self.rows + misses * self.token_bytes();
        let start = start.next_multiple_of(ALIGNMENT);
        start..start + misses * size_of::<u32>()
    }

    /// Bytes of all sections.
    pub fn bytes(&self, misses: usize) -> usize {
        self.targets(misses).end
    }

    /// The parts of a buffer that belong to one KV head each, and all from `rows` on.
    pub fn split<'a>(
        &self,
        buffer: &'a mut [u8],
        kv_heads: usize,
    ) -> (Vec<HeadSections<'a>>, &'a mut [u8]) {
        let (fixed, rest) = buffer.split_at_mut(self.rows);
        let sections = [
            &self.attended,
            &self.tail_max,
            &self.tail_sum,
            &self.tail_values,
        ];
        let [mut attended, mut max, mut sum, mut values] = fixed
            .get_disjoint_mut(sections.map(Range::clone))
            .expect("sections in order")
            .map(|section| section.chunks_mut((section.len() / kv_heads).max(1)));
        let mut next = || {
            Some(HeadSections {
                attended: attended.next()?,
                tail_max: max.next()?,
                tail_sum: sum.next()?,
                tail_values: values.next()?,
            })
        };
        (std::iter::from_fn(&mut next).collect(), rest)
    }
}

/// What a layer sends to its device.
#[derive(Debug, Default)]
pub struct Device {
    /// KV head and place of each token that the position at hand has to send.
    pub tokens: Vec<(usize, Place)>,
    /// Where those of all positions go: KV head * slots + slot.
    pub targets: Vec<u32>,
    pub last: Staged,
}

/// What was written to one staging buffer.
#[derive(Debug, Clone, Default)]
pub struct Staged {
    /// `None` before the first call.
    pub layout: Option<Layout>,
    /// Tokens that the device has already, and those that it gets, over all KV heads.
    pub hits: usize,
    pub misses: usize,
    /// Bytes of their keys and values.
    pub row_bytes: usize,
    /// Seconds that packing these took.
    pub pack_time: f32,
}

/// What one KV head writes, [positions, slots] and [group, positions, ...].
#[derive(Debug)]
pub struct HeadSections<'a> {
    pub attended: &'a mut [u8],
    pub tail_max: &'a mut [u8],
    pub tail_sum: &'a mut [u8],
    pub tail_values: &'a mut [u8],
}

/// Writes numbers from element `at` on, in the machine's order of bytes.
pub fn write_f32(section: &mut [u8], at: usize, numbers: &[f32]) {
    let bytes = &mut section[at * size_of::<f32>()..][..size_of_val(numbers)];
    bytes.copy_from_slice(Elements::F32(numbers).as_bytes());
}

pub fn write_u32(section: &mut [u8], numbers: &[u32]) {
    let bytes = section.chunks_exact_mut(size_of::<u32>());
    for (bytes, number) in bytes.zip(numbers) {
        bytes.copy_from_slice(&number.to_ne_bytes());
    }
}

/// Copies the key and the value of every token, `rows(token)`, to `out`, one after another.
pub fn pack<'a, T: Sync>(
    tokens: &[T],
    rows: impl Fn(&T) -> [&'a [u8]; 2] + Sync,
    out: &mut [u8],
    workers: Workers<'_>,
) -> Result<()> {
    let Some(each) = out.len().checked_div(tokens.len()) else {
        return Ok(());
    };
    let workers = workers.at_most(out.len() / LEAST_SHARE);
    let blocks = tokens.chunks(BLOCK).zip(out.chunks_mut(BLOCK * each));
    workers.for_each_mut(&mut blocks.collect::<Vec<_>>(), |_, (tokens, out)| {
        let early = tokens.iter().take(AHEAD);
        early.for_each(|token| rows(token).into_iter().for_each(prefetch));
        for (i, out) in out.chunks_exact_mut(each).enumerate() {
            if let Some(later) = tokens.get(i + AHEAD) {
                rows(later).into_iter().for_each(prefetch);
            }
            let (key, value) = out.split_at_mut(each / 2);
            let [k, v] = rows(&tokens[i]);
            key.copy_from_slice(k);
            value.copy_from_slice(v);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use proptest::prelude::*;

    proptest! {
        /// Sections follow each other, aligned, and each head's parts make up all of them.
        #[test]
        fn sections_are_apart(
            positions in 1usize..5, group in 1usize..5, kv_heads in 1usize..5, dim in 1usize..40,
            slots in 1usize..500, misses in 0usize..300,
        ) {
            let shape = (group * kv_heads, kv_heads, dim);
            let layout = Layout::new(positions, shape, slots, 2 * dim);
            let queries = group * kv_heads * positions;
            let rows = layout.rows..layout.rows + misses * layout.token_bytes();
            let sections = [
                (layout.attended.clone(), kv_heads * positions * slots),
                (layout.tail_max.clone(), 4 * queries),
                (layout.tail_sum.clone(), 4 * queries),
                (layout.tail_values.clone(), 4 * queries * dim),
                (rows, misses * 4 * dim),
                (layout.targets(misses), 4 * misses),
            ];
            let mut end = 0;
            for (section, bytes) in sections {
                prop_assert!(section.start >= end && section.start < end + ALIGNMENT);
                prop_assert_eq!(section.start % ALIGNMENT, 0);
                prop_assert_eq!(section.len(), bytes);
                end = section.end;
            }
            prop_assert_eq!(layout.bytes(misses), end);

            let mut buffer = vec![0u8; layout.bytes(misses)];
            let (mut heads, _) = layout.split(&mut buffer, kv_heads);
            prop_assert_eq!(heads.len(), kv_heads);
            for (h, head) in heads.iter_mut().enumerate() {
                head.attended.fill(h as u8 + 1);
                head.tail_values.fill(h as u8 + 1);
            }
            for section in [layout.attended.clone(), layout.tail_values.clone()] {
                let each = section.len() / kv_heads;
                let head = |(i, &byte): (usize, &u8)| usize::from(byte) == i / each + 1;
                prop_assert!(buffer[section].iter().enumerate().all(head));
            }
        }

        /// Any number of tokens, any width, any number of threads.
        #[test]
        fn packing_is_copying(seed in any::<u64>(), tokens in 0usize..400, width in 1usize..600, threads in 1usize..4) {
            let mut random = Random::new(seed, 0);
            let memory: Vec<u8> = (0..100 * width).map(|_| random.below(256) as u8).collect();
            let row = |i: usize| &memory[i * width..][..width];
            let tokens: Vec<[usize; 2]> =
                (0..tokens).map(|_| [random.below(100), random.below(100)]).collect();
            let mut out = vec![0; tokens.len() * 2 * width];
            pack(&tokens, |token| token.map(row), &mut out, Workers::steady(threads)).unwrap();
            let want: Vec<u8> = tokens.iter().flatten().flat_map(|&i| row(i)).copied().collect();
            prop_assert!(out == want);
        }
    }

    #[test]
    fn numbers_are_written_as_they_lie_in_memory() {
        let mut section = [0xff; 16];
        write_f32(&mut section, 1, &[1.5, -2.0]);
        assert_eq!(section[..4], [0xff; 4]);
        assert_eq!(section[4..8], 1.5f32.to_ne_bytes());
        assert_eq!(section[8..12], (-2.0f32).to_ne_bytes());
        write_u32(&mut section, &[7, 1 << 30]);
        assert_eq!(section[4..8], (1u32 << 30).to_ne_bytes());
        assert_eq!(section[8..12], (-2.0f32).to_ne_bytes());
    }
}
