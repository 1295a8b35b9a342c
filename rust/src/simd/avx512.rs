//! AVX-512: dot products and weighted sums by hand, the other kernels as compiled from the shared
//! code.

use super::prefetch::prefetch;
use super::scalar::{exp_body, shift_body};
use crate::rows::{Elements, Rows, typed};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Sums of one tile, in registers: of `TILE / G` rows with each of `G` queries, or of `G` outputs.
const TILE: usize = 16;
const LANES: usize = 16;
/// Queries that share one pass over the rows.
const GROUP: usize = 4;
/// Tiles, or rows of a weighted sum, between asking for memory and using it.
const AHEAD: usize = 4;
const ROWS_AHEAD: usize = 16;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn tiles<const G: usize, const R: usize, T: Load>(
    queries: &[f32],
    data: &[T],
    dim: usize,
    count: usize,
    index: Option<&[u32]>,
    out: &mut [f32],
    stride: usize,
) {
    assert!(queries.len() >= G * dim && out.len() >= (G - 1) * stride + count);
    // Plain loops: what `array::from_fn` calls is compiled without the instruction set.
    for first in (0..count).step_by(R) {
        let mut rows = [data.as_ptr(); R];
        for (r, row) in rows.iter_mut().enumerate() {
            // A tile that sticks out repeats its last row and drops the result.
            *row = row_of(data, dim, index, (first + r).min(count - 1)).as_ptr();
            if index.is_some() {
                let later = (first + AHEAD * R + r).min(count - 1);
                prefetch(row_of(data, dim, index, later));
            }
        }
        let mut sums = [_mm512_setzero_ps(); TILE];
        let mut d = 0;
        while d < dim {
            let left = dim - d;
            let mask = if left >= LANES { !0 } else { (1 << left) - 1 };
            let mut x = [_mm512_setzero_ps(); R];
            for r in 0..R {
                // SAFETY: `mask` has a lane for each of the `left` elements from `d` on, no more;
                // every row has `dim` elements.
                x[r] = unsafe { T::load(rows[r].add(d), mask) };
            }
            for g in 0..G {
                // SAFETY: as above; query `g` has `dim` elements, by the assertion.
                let q = unsafe { f32::load(queries.as_ptr().add(g * dim + d), mask) };
                for r in 0..R {
                    sums[g * R + r] = _mm512_fmadd_ps(q, x[r], sums[g * R + r]);
                }
            }
            d += LANES;
        }
        let totals = reduce(sums);
        let left = count - first;
        for g in 0..G {
            let (to, totals) = (&mut out[g * stride + first..], &totals[g * R..][..R]);
            match left < R {
                true => to[..left].copy_from_slice(&totals[..left]),
                // Of a length that is known: no call.
                false => to[..R].copy_from_slice(totals),
            }
        }
    }
}

/// The sums of the lanes of 16 registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn reduce(x: [__m512; TILE]) -> [f32; TILE] {
    // Four sums beside each other in each of four blocks, then the blocks.
    let mut blocks = [_mm512_setzero_ps(); 4];
    for (i, block) in blocks.iter_mut().enumerate() {
        let [a, b, c, d] = [x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]];
        let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        *block = _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
        );
    }
    let [a, b, c, d] = blocks;
    let total = add_blocks(add_blocks(a, b), add_blocks(c, d));
    let mut out = [0.0; TILE];
    // SAFETY: `out` holds 16 floats.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), total) };
    out
}

/// Neighbouring blocks of four lanes added: those of `a`, then those of `b`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn add_blocks(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b),
        _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b),
    )
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub fn weighted_sum(
    weights: &[f32],
    stride: usize,
    rows: Rows<'_>,
    index: Option<&[u32]>,
    out: &mut [f32],
) {
    let dim = rows.dim;
    let count = index.map_or(rows.len, <[u32]>::len);
    if count == 0 || dim == 0 {
        return;
    }
    typed!(Elements, rows.elements, data => {
        for (first, group) in out.chunks_mut(GROUP * dim).enumerate() {
            let weights = &weights[first * GROUP * stride..];
            match group.len() / dim {
                1 => columns::<1, 16, _>(weights, stride, data, dim, count, index, group),
                2 => columns::<2, 8, _>(weights, stride, data, dim, count, index, group),
                3 => columns::<3, 4, _>(weights, stride, data, dim, count, index, group),
                _ => columns::<4, 4, _>(weights, stride, data, dim, count, index, group),
            }
        }
    });
}

/// `G` outputs, `B` blocks of 16 columns at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn columns<const G: usize, const B: usize, T: Load>(
    weights: &[f32],
    stride: usize,
    data: &[T],
    dim: usize,
    count: usize,
    index: Option<&[u32]>,
    out: &mut [f32],
) {
    assert!(weights.len() >= (G - 1) * stride + count && out.len() >= G * dim);
    for d in (0..dim).step_by(B * LANES) {
        let width = (B * LANES).min(dim - d);
        let mut masks = [0; B];
        for (b, mask) in masks.iter_mut().enumerate() {
            *mask = match width.saturating_sub(b * LANES) {
                left if left >= LANES => !0,
                left => (1 << left) - 1,
            };
        }
        let used = width.div_ceil(LANES);
        let mut sums = [[_mm512_setzero_ps(); B]; G];
        for i in 0..count {
            let row = row_of(data, dim, index, i)[d..][..width].as_ptr();
            if index.is_some() {
                let later = (i + ROWS_AHEAD).min(count - 1);
                prefetch(&row_of(data, dim, index, later)[d..][..width]);
            }
            let mut w = [_mm512_setzero_ps(); G];
            for g in 0..G {
                w[g] = _mm512_set1_ps(weights[g * stride + i]);
            }
            for b in 0..B {
                if b < used {
                    // SAFETY: `masks[b]` has a lane for each of the `width` elements of the row
                    // that lie in block `b`.
                    let x = unsafe { T::load(row.add(b * LANES), masks[b]) };
                    for g in 0..G {
                        sums[g][b] = _mm512_fmadd_ps(w[g], x, sums[g][b]);
                    }
                }
            }
        }
        for (g, sums) in sums.iter().enumerate() {
            for (b, &sum) in sums.iter().enumerate().take(used) {
                let to = out[g * dim + d..][..width].as_mut_ptr();
                // SAFETY: as above, in the output's row.
                unsafe {
                    let to = to.add(b * LANES);
                    let old = _mm512_maskz_loadu_ps(masks[b], to);
                    _mm512_mask_storeu_ps(to, masks[b], _mm512_add_ps(old, sum));
                }
            }
        }
    }
}

/// The `i`-th row of those that `index` names.
#[inline(always)]
fn row_of<'a, T>(data: &'a [T], dim: usize, index: Option<&[u32]>, i: usize) -> &'a [T] {
    &data[index.map_or(i, |index| index[i] as usize) * dim..][..dim]
}

/// Elements that load as 16 floats.
trait Load: Sized {
    /// The lanes of `mask` from `from` on, the others zero.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW and VL, and the elements of the mask's lanes are readable.
    unsafe fn load(from: *const Self, mask: u16) -> __m512;
}

impl Load for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load(from: *const Self, mask: u16) -> __m512 {
        // SAFETY: the caller's.
        unsafe { _mm512_maskz_loadu_ps(mask, from) }
    }
}

impl Load for f16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load(from: *const Self, mask: u16) -> __m512 {
        // SAFETY: the caller's.
        _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(mask, from.cast()) })
    }
}

impl Load for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load(from: *const Self, mask: u16) -> __m512 {
        // SAFETY: the caller's.
        let bits = unsafe { _mm256_maskz_loadu_epi16(mask, from.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub fn exp(x: &mut [f32], max: f32) -> f32 {
    exp_body::<true>(x, max)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub fn shift(x: &mut [f32], scale: f32, y: &[f32], offset: f32) -> f32 {
    shift_body::<true>(x, scale, y, offset)
}
