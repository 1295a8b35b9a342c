//! NEON: dot products by hand, the other kernels as compiled from the shared code. Tested under
//! emulation (`make neon`); not yet timed on such a CPU.

use super::scalar::{exp_body, shift_body, weighted_sum_body};
use crate::rows::{Element, Elements, Rows, typed};
use half::{bf16, f16};
use std::arch::aarch64::*;
use std::arch::asm;

/// Sums of one tile, in registers: of `TILE / G` rows with each of `G` queries.
const TILE: usize = 16;
/// Elements of one step: a register of f16 or bf16, two of f32.
const LANES: usize = 8;
/// Queries that share one pass over the rows.
const GROUP: usize = 4;

#[target_feature(enable = "neon")]
pub fn dots(
    queries: &[f32],
    rows: Rows<'_>,
    index: Option<&[u32]>,
    out: &mut [f32],
    stride: usize,
) {
    let dim = rows.dim;
    let count = index.map_or(rows.len, <[u32]>::len);
    if count == 0 || dim == 0 {
        return super::scalar::dots(queries, rows, index, out, stride);
    }
    typed!(Elements, rows.elements, data => {
        for (first, group) in queries.chunks(GROUP * dim).enumerate() {
            let out = &mut out[first * GROUP * stride..];
            match group.len() / dim {
                1 => tiles::<1, 16, _>(group, data, dim, count, index, out, stride),
                2 => tiles::<2, 8, _>(group, data, dim, count, index, out, stride),
                3 => tiles::<3, 4, _>(group, data, dim, count, index, out, stride),
                _ => tiles::<4, 4, _>(group, data, dim, count, index, out, stride),
            }
        }
    });
}

/// All rows against `G` queries, `R` rows at a time.
#[target_feature(enable = "neon")]
fn tiles<const G: usize, const R: usize, T: Load>(
    queries: &[f32],
    data: &[T],
    dim: usize,
    count: usize,
    index: Option<&[u32]>,
    out: &mut [f32],
    stride: usize,
) {
    assert!(queries.len() >= G * dim);
    let whole = dim - dim % LANES;
    for first in (0..count).step_by(R) {
        let mut rows = [&data[..0]; R];
        for (r, row) in rows.iter_mut().enumerate() {
            // A tile that sticks out repeats its last row and drops the result.
            let i = (first + r).min(count - 1);
            *row = &data[index.map_or(i, |index| index[i] as usize) * dim..][..dim];
        }
        let mut sums = [vdupq_n_f32(0.0); TILE];
        for d in (0..whole).step_by(LANES) {
            let mut q = [[vdupq_n_f32(0.0); 2]; G];
            for (g, q) in q.iter_mut().enumerate() {
                // SAFETY: `d + LANES` is at most `dim`, and query `g` has `dim` elements, by the
                // assertion.
                *q = unsafe { f32::load(queries.as_ptr().add(g * dim + d)) };
            }
            for r in 0..R {
                // SAFETY: as above; every row has `dim` elements.
                let x = unsafe { T::load(rows[r].as_ptr().add(d)) };
                for g in 0..G {
                    let sum = vfmaq_f32(sums[g * R + r], q[g][0], x[0]);
                    sums[g * R + r] = vfmaq_f32(sum, q[g][1], x[1]);
                }
            }
        }
        let mut totals = reduce(sums);
        for d in whole..dim {
            for g in 0..G {
                for r in 0..R {
                    let total = &mut totals[g * R + r];
                    *total = queries[g * dim + d].mul_add(rows[r][d].to_f32(), *total);
                }
            }
        }
        let left = R.min(count - first);
        for g in 0..G {
            out[g * stride + first..][..left].copy_from_slice(&totals[g * R..][..left]);
        }
    }
}

/// The sums of the lanes of each register.
#[inline]
#[target_feature(enable = "neon")]
fn reduce(x: [float32x4_t; TILE]) -> [f32; TILE] {
    let mut out = [0.0; TILE];
    for (x, out) in x.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<4>().0) {
        let total = vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3]));
        // SAFETY: `out` holds 4 floats.
        unsafe { vst1q_f32(out.as_mut_ptr(), total) };
    }
    out
}

/// Elements that load as floats.
trait Load: Element {
    /// `LANES` elements from `from` on.
    ///
    /// # Safety
    /// The CPU has NEON, and the elements are readable.
    unsafe fn load(from: *const Self) -> [float32x4_t; 2];
}

impl Load for f32 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(from: *const Self) -> [float32x4_t; 2] {
        // SAFETY: the caller's.
        unsafe { [vld1q_f32(from), vld1q_f32(from.add(4))] }
    }
}

impl Load for f16 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(from: *const Self) -> [float32x4_t; 2] {
        // SAFETY: the caller's.
        let bits = unsafe { vld1q_u16(from.cast()) };
        let (low, high): (float32x4_t, float32x4_t);
        // SAFETY: plain conversions between registers, in every NEON. Rust 1.89 has no stable
        // intrinsics for them.
        unsafe {
            asm!(
                "fcvtl {low:v}.4s, {bits:v}.4h",
                "fcvtl2 {high:v}.4s, {bits:v}.8h",
                bits = in(vreg) bits,
                low = out(vreg) low,
                high = lateout(vreg) high,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        [low, high]
    }
}

impl Load for bf16 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(from: *const Self) -> [float32x4_t; 2] {
        // SAFETY: the caller's.
        let bits = unsafe { vld1q_u16(from.cast()) };
        [
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(bits))),
            vreinterpretq_f32_u32(vshll_high_n_u16::<16>(bits)),
        ]
    }
}

#[target_feature(enable = "neon")]
pub fn weighted_sum(
    weights: &[f32],
    stride: usize,
    rows: Rows<'_>,
    index: Option<&[u32]>,
    out: &mut [f32],
) {
    weighted_sum_body::<true>(weights, stride, rows, index, out);
}

#[target_feature(enable = "neon")]
pub fn exp(x: &mut [f32], max: f32) -> f32 {
    exp_body::<true>(x, max)
}

#[target_feature(enable = "neon")]
pub fn shift(x: &mut [f32], scale: f32, y: &[f32], offset: f32) -> f32 {
    shift_body::<true>(x, scale, y, offset)
}
