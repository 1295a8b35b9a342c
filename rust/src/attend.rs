//! Softmax attention over rows, block by block under a running maximum, and the merge of weights
//! that were taken under another maximum.

use crate::rows::Rows;
use crate::simd;

/// Attention of several queries in progress: for each, the largest logit so far, the sum of the
/// weights `exp(logit - max)`, and the weighted sum of the values.
#[derive(Debug, Default)]
pub struct Softmax {
    pub max: Vec<f32>,
    pub sum: Vec<f32>,
    /// [queries, value_dim]
    pub out: Vec<f32>,
}

impl Softmax {
    /// Starts over.
    pub fn reset(&mut self, queries: usize, value_dim: usize) {
        self.max.clear();
        self.max.resize(queries, f32::NEG_INFINITY);
        self.sum.clear();
        self.sum.resize(queries, 0.0);
        self.out.clear();
        self.out.resize(queries * value_dim, 0.0);
    }

    /// Attends to values with these logits, [queries, values]; minus infinity masks one. The logits
    /// are overwritten by the weights.
    pub fn add(&mut self, logits: &mut [f32], values: Rows<'_>) {
        self.weigh(logits, values.len);
        self.add_values(logits, values.len, values, None);
    }

    /// Turns the logits of `count` values, [queries, count], into weights, and adds up these. The
    /// values are the caller's to add.
    pub fn weigh(&mut self, logits: &mut [f32], count: usize) {
        if count == 0 {
            return;
        }
        for (q, row) in logits.chunks_exact_mut(count).enumerate() {
            self.raise(q, simd::max(row));
            if self.max[q] == f32::NEG_INFINITY {
                row.fill(0.0);
            } else {
                self.sum[q] += simd::exp(row, self.max[q]);
            }
        }
    }

    /// Adds values that have been weighed: all rows, or those that `index` names.
    pub fn add_values(
        &mut self,
        weights: &[f32],
        stride: usize,
        values: Rows<'_>,
        index: Option<&[u32]>,
    ) {
        simd::weighted_sum(weights, stride, values, index, &mut self.out);
    }

    /// Attends to values whose weights, [queries, stride], were taken under the maxima `max`.
    pub fn add_weights(
        &mut self,
        weights: &mut [f32],
        stride: usize,
        max: &[f32],
        values: Rows<'_>,
        index: &[u32],
    ) {
        self.merge_weights(weights, stride, index.len(), max);
        self.add_values(weights, stride, values, Some(index));
    }

    /// Brings the first `count` of weights, [queries, stride], that were taken under `max` under the
    /// running maxima, and adds up these. The values are the caller's to add.
    pub fn merge_weights(&mut self, weights: &mut [f32], stride: usize, count: usize, max: &[f32]) {
        for q in 0..self.max.len() {
            let row = &mut weights[q * stride..][..count];
            self.raise(q, max[q]);
            let scale = (max[q] - self.max[q]).exp();
            if scale < 1.0 {
                row.iter_mut().for_each(|weight| *weight *= scale);
            }
            self.sum[q] += simd::sum(row);
        }
    }

    /// Makes `max` the running maximum of query `q` if it is larger.
    pub fn raise(&mut self, q: usize, max: f32) {
        let old = self.max[q];
        if max <= old {
            return;
        }
        self.max[q] = max;
        let scale = (old - max).exp();
        self.sum[q] *= scale;
        let width = self.out.len() / self.max.len();
        self.out[q * width..][..width]
            .iter_mut()
            .for_each(|x| *x *= scale);
    }

    /// The attention output of query `q`, [value_dim].
    pub fn finish(&self, q: usize, out: &mut [f32]) {
        let share = 1.0 / self.sum[q];
        let values = &self.out[q * out.len()..][..out.len()];
        out.iter_mut().zip(values).for_each(|(o, x)| *o = x * share);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::rows::{Dtype, RowStore};
    use proptest::prelude::*;

    proptest! {
        /// Blocks in any cut, some as weights under a maximum of their own, give one softmax.
        #[test]
        fn blocks_and_merges_equal_one_softmax(seed in any::<u64>(), n in 1usize..60, cut in 0usize..60) {
            let mut random = Random::new(seed, 3);
            let cut = cut.min(n);
            let logits: Vec<f32> = (0..2 * n).map(|_| random.below(4000) as f32 / 100.0 - 20.0).collect();
            let mut values = RowStore::new(Dtype::F32, 3);
            let rows: Vec<[f32; 3]> = (0..n).map(|_| [0; 3].map(|_| random.below(100) as f32 / 50.0 - 1.0)).collect();
            rows.iter().for_each(|r| values.push_f32(r));
            let mut softmax = Softmax::default();
            softmax.reset(2, 3);
            let mut first: Vec<f32> = (0..2).flat_map(|q| logits[q * n..][..cut].to_vec()).collect();
            softmax.add(&mut first, values.rows().slice(0..cut));
            let max: Vec<f32> = (0..2).map(|q| logits[q * n..][..n].iter().fold(-99.0f32, |a, &b| a.max(b)) + 1.0).collect();
            let mut rest: Vec<f32> = (0..2).flat_map(|q| logits[q * n + cut..(q + 1) * n].iter().map(|l| (l - max[q]).exp()).collect::<Vec<_>>()).collect();
            let index: Vec<u32> = (cut as u32..n as u32).collect();
            softmax.add_weights(&mut rest, n - cut, &max, values.rows(), &index);
            for q in 0..2 {
                let weights: Vec<f64> = logits[q * n..][..n].iter().map(|&l| f64::from(l).exp()).collect();
                let total: f64 = weights.iter().sum();
                let mut out = [0.0; 3];
                softmax.finish(q, &mut out);
                for d in 0..3 {
                    let want: f64 = weights.iter().zip(&rows).map(|(w, r)| w * f64::from(r[d])).sum::<f64>() / total;
                    prop_assert!((f64::from(out[d]) - want).abs() < 1e-5);
                }
            }
        }
    }
}
