//! The kernels, written once over arrays of lanes; plain code here, the same code compiled for an
//! instruction set in the files beside this one. This is also the reference they are tested
//! against.

use crate::rows::{Element, Elements, Rows, typed};

/// Lanes of one step: a 512-bit register of f32, or several smaller ones.
const LANES: usize = 16;
/// Queries (or outputs) that share one pass over the rows; more are done in several passes.
const GROUP: usize = 4;

/// See [`super::dots`].
pub fn dots(
    queries: &[f32],
    rows: Rows<'_>,
    index: Option<&[u32]>,
    out: &mut [f32],
    stride: usize,
) {
    dots_body::<false>(queries, rows, index, out, stride);
}

/// See [`super::weighted_sum`].
pub fn weighted_sum(
    weights: &[f32],
    stride: usize,
    rows: Rows<'_>,
    index: Option<&[u32]>,
    out: &mut [f32],
) {
    weighted_sum_body::<false>(weights, stride, rows, index, out);
}

/// See [`super::exp`].
pub fn exp(x: &mut [f32], max: f32) -> f32 {
    exp_body::<false>(x, max)
}

/// See [`super::shift`].
pub fn shift(x: &mut [f32], scale: f32, y: &[f32], offset: f32) -> f32 {
    shift_body::<false>(x, scale, y, offset)
}

#[inline(always)]
fn fused<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
fn at(index: Option<&[u32]>, i: usize) -> usize {
    index.map_or(i, |index| index[i] as usize)
}

#[inline(always)]
pub fn dots_body<const FMA: bool>(
    queries: &[f32],
    rows: Rows<'_>,
    index: Option<&[u32]>,
    out: &mut [f32],
    stride: usize,
) {
    let count = index.map_or(rows.len, <[u32]>::len);
    let dim = rows.dim;
    if count == 0 {
        return;
    }
    if dim == 0 {
        (0..out.len().div_ceil(stride)).for_each(|g| out[g * stride..][..count].fill(0.0));
        return;
    }
    typed!(Elements, rows.elements, data => {
        let mut first = 0;
        for group in queries.chunks(GROUP * dim) {
            let out = &mut out[first * stride..];
            match group.len() / dim {
                1 => dots_group::<1, FMA, _>(group, data, dim, count, index, out, stride),
                2 => dots_group::<2, FMA, _>(group, data, dim, count, index, out, stride),
                3 => dots_group::<3, FMA, _>(group, data, dim, count, index, out, stride),
                _ => dots_group::<4, FMA, _>(group, data, dim, count, index, out, stride),
            }
            first += GROUP;
        }
    });
}

#[inline(always)]
fn dots_group<const G: usize, const FMA: bool, T: Element>(
    queries: &[f32],
    data: &[T],
    dim: usize,
    count: usize,
    index: Option<&[u32]>,
    out: &mut [f32],
    stride: usize,
) {
    let whole = dim - dim % LANES;
    for i in 0..count {
        let row = &data[at(index, i) * dim..][..dim];
        let mut sum = [[0.0f32; LANES]; G];
        let mut d = 0;
        while d < whole {
            let mut x = [0.0f32; LANES];
            let chunk = &row[d..d + LANES];
            for l in 0..LANES {
                x[l] = chunk[l].to_f32();
            }
            for g in 0..G {
                let q = &queries[g * dim + d..][..LANES];
                for l in 0..LANES {
                    sum[g][l] = fused::<FMA>(q[l], x[l], sum[g][l]);
                }
            }
            d += LANES;
        }
        for g in 0..G {
            let mut total = reduce(sum[g]);
            for d in whole..dim {
                total = fused::<FMA>(queries[g * dim + d], row[d].to_f32(), total);
            }
            out[g * stride + i] = total;
        }
    }
}

/// Sum of the lanes in a fixed tree order.
#[inline(always)]
fn reduce(mut x: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            x[l] += x[l + half];
        }
        half /= 2;
    }
    x[0]
}

#[inline(always)]
pub fn weighted_sum_body<const FMA: bool>(
    weights: &[f32],
    stride: usize,
    rows: Rows<'_>,
    index: Option<&[u32]>,
    out: &mut [f32],
) {
    let count = index.map_or(rows.len, <[u32]>::len);
    let dim = rows.dim;
    if count == 0 || dim == 0 {
        return;
    }
    typed!(Elements, rows.elements, data => {
        let mut first = 0;
        for group in out.chunks_mut(GROUP * dim) {
            let weights = &weights[first * stride..];
            match group.len() / dim {
                1 => weighted_group::<1, FMA, _>(weights, stride, data, dim, count, index, group),
                2 => weighted_group::<2, FMA, _>(weights, stride, data, dim, count, index, group),
                3 => weighted_group::<3, FMA, _>(weights, stride, data, dim, count, index, group),
                _ => weighted_group::<4, FMA, _>(weights, stride, data, dim, count, index, group),
            }
            first += GROUP;
        }
    });
}

#[inline(always)]
fn weighted_group<const G: usize, const FMA: bool, T: Element>(
    weights: &[f32],
    stride: usize,
    data: &[T],
    dim: usize,
    count: usize,
    index: Option<&[u32]>,
    out: &mut [f32],
) {
    let mut d = 0;
    while d < dim {
        let width = LANES.min(dim - d);
        let mut sum = [[0.0f32; LANES]; G];
        if width == LANES {
            for i in 0..count {
                let chunk = &data[at(index, i) * dim + d..][..LANES];
                let mut x = [0.0f32; LANES];
                for l in 0..LANES {
                    x[l] = chunk[l].to_f32();
                }
                for g in 0..G {
                    let w = weights[g * stride + i];
                    for l in 0..LANES {
                        sum[g][l] = fused::<FMA>(w, x[l], sum[g][l]);
                    }
                }
            }
        } else {
            for i in 0..count {
                let chunk = &data[at(index, i) * dim + d..][..width];
                for g in 0..G {
                    let w = weights[g * stride + i];
                    for l in 0..width {
                        sum[g][l] = fused::<FMA>(w, chunk[l].to_f32(), sum[g][l]);
                    }
                }
            }
        }
        for g in 0..G {
            for l in 0..width {
                out[g * dim + d + l] += sum[g][l];
            }
        }
        d += LANES;
    }
}

#[inline(always)]
pub fn exp_body<const FMA: bool>(x: &mut [f32], max: f32) -> f32 {
    let mut sum = [0.0f32; LANES];
    let mut chunks = x.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for l in 0..LANES {
            chunk[l] = exp_one::<FMA>(chunk[l] - max);
            sum[l] += chunk[l];
        }
    }
    let mut total = reduce(sum);
    for x in chunks.into_remainder() {
        *x = exp_one::<FMA>(*x - max);
        total += *x;
    }
    total
}

#[inline(always)]
pub fn shift_body<const FMA: bool>(x: &mut [f32], scale: f32, y: &[f32], offset: f32) -> f32 {
    // A comparison vectorises where `f32::max`, which minds NaN, does not.
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let y = &y[..x.len()];
    let mut highest = [f32::NEG_INFINITY; LANES];
    let whole = x.len() - x.len() % LANES;
    for (x, y) in x.chunks_exact_mut(LANES).zip(y.chunks_exact(LANES)) {
        for l in 0..LANES {
            x[l] = fused::<FMA>(scale, y[l], x[l]) + offset;
            highest[l] = larger(x[l], highest[l]);
        }
    }
    let mut high = highest.into_iter().fold(f32::NEG_INFINITY, larger);
    for (x, y) in x[whole..].iter_mut().zip(&y[whole..]) {
        *x = fused::<FMA>(scale, *y, *x) + offset;
        high = larger(*x, high);
    }
    high
}

/// e^x for x <= 0 within 2 ulp, exactly 1 at 0, and 0 below -87: 2^n times a polynomial in the
/// rest, n = round(x / ln 2).
#[inline(always)]
fn exp_one<const FMA: bool>(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let below = x < -87.0;
    let x = if below { -87.0 } else { x };
    let shifted = fused::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fused::<FMA>(-n, LN2_LOW, fused::<FMA>(-n, LN2_HIGH, x));
    let mut p = 1.0 / 5040.0;
    for c in [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        p = fused::<FMA>(p, r, c);
    }
    // The low bits of `shifted` are n; a cast from float would not vectorise.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    let scale = f32::from_bits(n.wrapping_add(127) << 23);
    if below { 0.0 } else { p * scale }
}
