//! AVX-512: dot products by hand, the other kernels as compiled from the shared code.

use super::scalar::{exp_body, weighted_sum_body};
use crate::rows::{Elements, Rows, typed};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Sums of one tile: 4 rows of one query, 2 of two, or one row of up to four queries.
const TILE: usize = 4;
const LANES: usize = 16;

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
        for (first, group) in queries.chunks(TILE * dim).enumerate() {
            let out = &mut out[first * TILE * stride..];
            match group.len() / dim {
                1 => tiles::<1, 4, _>(group, data, dim, count, index, out, stride),
                2 => tiles::<2, 2, _>(group, data, dim, count, index, out, stride),
                3 => tiles::<3, 1, _>(group, data, dim, count, index, out, stride),
                _ => tiles::<4, 1, _>(group, data, dim, count, index, out, stride),
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
    assert!(queries.len() >= G * dim);
    for first in (0..count).step_by(R) {
        // A tile that sticks out repeats its last row and drops the result.
        let row = |r: usize| -> &[T] {
            let i = (first + r).min(count - 1);
            let i = index.map_or(i, |index| index[i] as usize);
            &data[i * dim..][..dim]
        };
        let rows: [&[T]; R] = std::array::from_fn(row);
        let mut sums = [_mm512_setzero_ps(); TILE];
        let mut d = 0;
        while d < dim {
            let left = dim - d;
            let mask = if left >= LANES { !0 } else { (1 << left) - 1 };
            for (r, row) in rows.iter().enumerate() {
                // SAFETY: `mask` has a lane for each of the `left` elements from `d` on, no more.
                let x = unsafe { T::load(row.as_ptr().add(d), mask) };
                for g in 0..G {
                    // SAFETY: as above; query `g` has `dim` elements, by the assertion.
                    let q = unsafe { f32::load(queries.as_ptr().add(g * dim + d), mask) };
                    sums[r * G + g] = _mm512_fmadd_ps(q, x, sums[r * G + g]);
                }
            }
            d += LANES;
        }
        let totals = reduce(sums);
        for r in 0..R.min(count - first) {
            for g in 0..G {
                out[g * stride + first + r] = totals[r * G + g];
            }
        }
    }
}

/// The sums of the lanes of four registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn reduce(sums: [__m512; TILE]) -> [f32; TILE] {
    let [a, b, c, d] =
        sums.map(|x| _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x)));
    let pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    let total = _mm_add_ps(
        _mm256_castps256_ps128(pairs),
        _mm256_extractf128_ps::<1>(pairs),
    );
    let mut out = [0.0; TILE];
    // SAFETY: `out` holds four floats.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), total) };
    out
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
pub fn weighted_sum(
    weights: &[f32],
    stride: usize,
    rows: Rows<'_>,
    index: Option<&[u32]>,
    out: &mut [f32],
) {
    weighted_sum_body::<true>(weights, stride, rows, index, out);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub fn exp(x: &mut [f32], max: f32) -> f32 {
    exp_body::<true>(x, max)
}
