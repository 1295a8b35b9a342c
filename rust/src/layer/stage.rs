//! Decode for a device: all of a step but the exact attention, see [`Layer::stage`].
//!
//! A device holds slots, [kv_heads, slots, head_dim] for keys and as many for values. Of every position
//! it attends to the slots that `stage` names; all else comes from the CPU.

use super::{Choices, Heads, Layer, SCRATCH, Shape, config, scaled, worthwhile};
use crate::error::{Error, Result};
use crate::head::{Head, SLACK};
use crate::ids::Place;
use crate::pack::{self, Device, Layout, Staged};
use crate::residency::Counts;
use crate::rows::{Dtype, Elements};
use crate::threads::Workers;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Bytes, of a staging buffer's address: a device copies words as long.
const STAGING_ALIGNMENT: usize = 16;

impl Layer {
    /// Makes [`Layer::stage`] possible: from now on the layer keeps book of what lies in which slot.
    pub fn open_device(&mut self) -> Result<()> {
        let (slots, most) = (self.device_slots(), u32::MAX as usize / self.shape.kv_heads);
        if slots > most {
            let expected = format!("so small that there are at most {most} slots");
            return Err(config(
                "device_tokens",
                expected,
                self.options.device_tokens(),
            ));
        }
        if self.device.is_none() {
            self.device = Some(Device::default());
            self.heads
                .iter_mut()
                .for_each(|head| head.open_device(slots));
        }
        Ok(())
    }

    /// Slots of a KV head on a device: for all that [`Layer::positions_at_once`] want at most.
    pub fn device_slots(&self) -> usize {
        let o = &self.options;
        let parts = [o.sink_tokens, o.window(), SLACK, self.positions_at_once()];
        let always = parts.into_iter().fold(0, usize::saturating_add);
        always.saturating_add(o.device_tokens())
    }

    /// Positions that one call of [`Layer::stage`] takes at most.
    pub fn positions_at_once(&self) -> usize {
        self.options.device_tokens() / self.options.most_selected()
    }

    /// Most bytes that one call of [`Layer::stage`] writes; while nothing is stored, for f32.
    pub fn staging_bytes(&self) -> usize {
        self.most_staging_bytes(self.dtype.unwrap_or(Dtype::F32))
    }

    fn most_staging_bytes(&self, dtype: Dtype) -> usize {
        let slots = self.device_slots();
        // A slot is written once per call at most.
        let misses = self.shape.kv_heads * slots;
        self.layout(self.positions_at_once(), dtype).bytes(misses)
    }

    fn layout(&self, positions: usize, dtype: Dtype) -> Layout {
        let Shape {
            q_heads,
            kv_heads,
            head_dim,
        } = self.shape;
        let row_bytes = head_dim * dtype.bytes();
        let shape = (q_heads, kv_heads, head_dim);
        Layout::new(positions, shape, self.device_slots(), row_bytes)
    }

    /// Decode for a device. Appends the positions and does, for one after another, all of
    /// [`Layer::decode`] but the exact attention. Writes what the device needs for that, see
    /// [`crate::pack`], to `staging`: at least [`Layer::staging_bytes`]. `like` as for decode.
    pub fn stage(
        &mut self,
        q: &Heads<'_>,
        k: &Heads<'_>,
        v: &Heads<'_>,
        like: Option<&Choices>,
        staging: &mut [u8],
        cancelled: &AtomicBool,
    ) -> Result<Staged> {
        let n = self.check_new(k, v)?;
        self.check_queries(q, n)?;
        let dtype = k[0].dtype();
        self.check_staging(n, dtype, staging)?;
        self.check_choices(n, like)?;
        let result = self.grow(dtype, |layer| {
            let workers = layer.workers(cancelled);
            layer.stage_each(q, k, v, like, staging, workers)
        });
        if result.is_err() {
            self.abandon_stage();
        }
        result
    }

    fn stage_each(
        &mut self,
        q: &Heads<'_>,
        k: &Heads<'_>,
        v: &Heads<'_>,
        like: Option<&Choices>,
        staging: &mut [u8],
        workers: Workers<'_>,
    ) -> Result<Staged> {
        let (group, dim, n) = (self.group(), self.shape.head_dim, q[0].len);
        let (first, slots) = (self.seq_len(), self.device_slots());
        let layout = self.layout(n, k[0].dtype());
        let searching = worthwhile(workers, self.busy(n));
        let (options, scale) = (&self.options, self.scale);
        let device = self.device.as_mut().expect("checked before");
        device.targets.clear();
        let counts = |heads: &[Head]| total(heads.iter());
        let (before, mut pack_time) = (counts(&self.heads), 0.0);
        let (mut sections, rows) = layout.split(staging, self.heads.len());
        self.heads.iter_mut().for_each(|head| {
            head.next_turn();
            head.forget_choices();
        });
        for i in 0..n {
            // 1. Heads side by side: append, search, find slots, write all but the rows.
            let mut items: Vec<_> = self.heads.iter_mut().zip(&mut sections).collect();
            searching.for_each_mut(&mut items, |h, (head, out)| {
                SCRATCH.with_borrow_mut(|scratch| {
                    let mut queries = vec![0.0; group * dim];
                    if head.append(k[h], v[h], i, options).is_err() {
                        return; // The workers know of it.
                    }
                    for (g, query) in queries.chunks_exact_mut(dim).enumerate() {
                        scaled(q[h * group + g].row(i), scale, query);
                    }
                    let like = like.map(|choices| &choices.heads[h][i]);
                    head.step_staged(&queries, first + i + 1, like, options, scratch);
                    let attended = &mut out.attended[i * slots..][..slots];
                    attended.fill(0);
                    for slot in scratch.slots() {
                        attended[slot.index()] = 1;
                    }
                    let (max, sum, values) = scratch.tail();
                    for g in 0..group {
                        let at = g * n + i;
                        pack::write_f32(out.tail_max, at, &max[g..=g]);
                        pack::write_f32(out.tail_sum, at, &sum[g..=g]);
                        pack::write_f32(out.tail_values, at * dim, &values[g * dim..][..dim]);
                    }
                });
            })?;
            // 2. The rows, before the next position moves any.
            let begun = Instant::now();
            let from = device.targets.len() * layout.token_bytes();
            device.tokens.clear();
            for (h, head) in self.heads.iter().enumerate() {
                for &(slot, place) in head.misses() {
                    device.targets.push((h * slots + slot.index()) as u32);
                    device.tokens.push((h, place));
                }
            }
            let to = device.targets.len() * layout.token_bytes();
            let heads = &self.heads;
            let rows_of = |&(h, place): &(usize, Place)| {
                let rows: [Elements<'_>; 2] = heads[h].rows_at(place);
                rows.map(Elements::as_bytes)
            };
            pack::pack(&device.tokens, rows_of, &mut rows[from..to], workers)?;
            pack_time += begun.elapsed().as_secs_f32();
        }
        let misses = device.targets.len();
        let targets = layout.targets(misses);
        let targets = targets.start - layout.rows..targets.end - layout.rows;
        pack::write_u32(&mut rows[targets], &device.targets);
        device.last = Staged {
            hits: counts(&self.heads).hits - before.hits,
            misses,
            row_bytes: misses * layout.token_bytes(),
            layout: Some(layout),
            pack_time,
        };
        self.steps += n;
        Ok(device.last.clone())
    }

    /// Takes what the last [`Layer::stage`] sent for lost: all tokens, since slots that they were to
    /// overwrite may have gone too. The next call sends what it needs.
    pub fn abandon_stage(&mut self) {
        self.heads.iter_mut().for_each(Head::forget_device);
    }

    /// What the last call of [`Layer::stage`] wrote, and the counts of all calls since the sequence
    /// began; `None` if no device is open.
    pub fn staged(&self) -> Option<(&Staged, Counts)> {
        let device = self.device.as_ref()?;
        Some((&device.last, total(self.heads.iter())))
    }

    /// Writes the keys and the values of `count` tokens, [kv_heads, count, head_dim] each, in storage
    /// order: sink, the tree leaf by leaf, window. That of the tree differs from head to head.
    pub fn history(
        &self,
        first: usize,
        count: usize,
        keys: &mut [u8],
        values: &mut [u8],
    ) -> Result<()> {
        let (stored, end) = (self.seq_len(), first.saturating_add(count));
        if end > stored {
            return Err(Error::History { stored, first, end });
        }
        let row = self.shape.head_dim * self.dtype.map_or(0, Dtype::bytes);
        let each = count * row;
        for (what, buffer) in [("keys", &*keys), ("values", &*values)] {
            let (expected, got) = (self.heads.len() * each, buffer.len());
            if got < expected {
                let (expected, got) = (format!("{expected} bytes"), format!("{got} bytes"));
                return Err(Error::Shape {
                    what,
                    expected,
                    got,
                });
            }
        }
        if each == 0 {
            return Ok(());
        }
        let buffers = keys
            .chunks_exact_mut(each)
            .zip(values.chunks_exact_mut(each));
        let mut items: Vec<_> = self.heads.iter().zip(buffers).collect();
        let workers = Workers::steady(self.options.num_threads);
        workers.for_each_mut(&mut items, |_, (head, (keys, values))| {
            let mut at = 0;
            head.for_each_block(first..end, |k, v| {
                let (k, v) = (k.as_bytes(), v.as_bytes());
                keys[at..at + k.len()].copy_from_slice(k);
                values[at..at + v.len()].copy_from_slice(v);
                at += k.len();
            });
        })
    }

    fn check_staging(&self, n: usize, dtype: Dtype, staging: &[u8]) -> Result<()> {
        if self.device.is_none() {
            return Err(Error::NoDevice);
        }
        let most = self.positions_at_once();
        if n > most {
            return Err(Error::TooManyPositions { most, got: n });
        }
        let bytes = self.most_staging_bytes(dtype);
        if staging.len() < bytes {
            return Err(Error::Staging {
                expected: format!("at least {bytes} bytes"),
                got: format!("{} bytes", staging.len()),
            });
        }
        let address = staging.as_ptr().addr();
        if !address.is_multiple_of(STAGING_ALIGNMENT) {
            return Err(Error::Staging {
                expected: format!("aligned to {STAGING_ALIGNMENT} bytes"),
                got: format!("address {address:#x}"),
            });
        }
        Ok(())
    }
}

/// What the residencies of all heads counted.
fn total<'a>(heads: impl Iterator<Item = &'a Head>) -> Counts {
    let counts = heads.filter_map(|head| Some(head.residency()?.counts()));
    counts.fold(Counts::default(), |a, b| Counts {
        hits: a.hits + b.hits,
        misses: a.misses + b.misses,
        evictions: a.evictions + b.evictions,
    })
}
