//! The kernels compiled for AVX2 with FMA.

use super::scalar::{dots_body, exp_body, shift_body, weighted_sum_body};
use crate::rows::Rows;

#[target_feature(enable = "avx2,fma,f16c")]
pub fn dots(
    queries: &[f32],
    rows: Rows<'_>,
    index: Option<&[u32]>,
    out: &mut [f32],
    stride: usize,
) {
    dots_body::<true>(queries, rows, index, out, stride);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn weighted_sum(
    weights: &[f32],
    stride: usize,
    rows: Rows<'_>,
    index: Option<&[u32]>,
    out: &mut [f32],
) {
    weighted_sum_body::<true>(weights, stride, rows, index, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn exp(x: &mut [f32], max: f32) -> f32 {
    exp_body::<true>(x, max)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn shift(x: &mut [f32], scale: f32, y: &[f32], offset: f32) -> f32 {
    shift_body::<true>(x, scale, y, offset)
}
