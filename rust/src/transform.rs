//! From inner product to nearest neighbour: centring and one more coordinate.
//!
//! Paper section 3.1 (after Neyshabur and Srebro 2015): with `M` at least every key norm,
//! `k -> [k, sqrt(M^2 - |k|^2)]` puts all keys on one sphere, so that the nearest keys to a query
//! `[q, 0]` are those of largest inner product. Keys are first centred (`k - mu`): softmax does not
//! see a constant added to every key, but distances, means and rounding do.

use crate::error::Result;
use crate::rows::{Strided, squared_distance, squares, to_f32};
use crate::threads::Workers;

/// Rows that one work item goes through.
const BLOCK: usize = 1024;

/// Keys are centred and lifted by one of these, fixed from the first bulk of keys on.
#[derive(Debug, Clone)]
pub struct Transform {
    mean: Vec<f32>,
    radius_squared: f32,
}

impl Transform {
    /// The mean, and 1.01 times the largest centred norm, of `keys`. Fails only if the workers are
    /// cancelled.
    pub fn fit(keys: Strided<'_>, workers: Workers<'_>) -> Result<Self> {
        let mut sum = vec![0.0f64; keys.dim];
        let sums = fold_rows(keys, workers, |sum: &mut Vec<f64>, row| {
            sum.resize(row.len(), 0.0);
            let each = sum.iter_mut().zip(row);
            each.for_each(|(s, &x)| *s += f64::from(x));
        })?;
        for block in &sums {
            sum.iter_mut().zip(block).for_each(|(s, x)| *s += x);
        }
        let count = keys.len.max(1) as f64;
        let mut fitted = Self {
            mean: sum.iter().map(|s| (s / count) as f32).collect(),
            radius_squared: 0.0,
        };
        let largest = fold_rows(keys, workers, |largest: &mut f32, row| {
            *largest = largest.max(squared_distance(row, &fitted.mean));
        })?;
        fitted.radius_squared = 1.01 * 1.01 * largest.into_iter().fold(0.0, f32::max);
        Ok(fitted)
    }

    /// The extra coordinate of each key.
    pub fn lifts(&self, keys: Strided<'_>, workers: Workers<'_>) -> Result<Vec<f32>> {
        let lifts = fold_rows(keys, workers, |lifts: &mut Vec<f32>, row| {
            lifts.push(self.lift(squared_distance(row, &self.mean)));
        })?;
        Ok(lifts.concat())
    }

    /// mu, [dim].
    pub fn mean(&self) -> &[f32] {
        &self.mean
    }

    /// M, the radius of the sphere.
    pub fn radius(&self) -> f32 {
        self.radius_squared.sqrt()
    }

    /// Writes `k - mu` and returns its squared norm.
    pub fn centre(&self, key: crate::rows::Elements<'_>, out: &mut [f32]) -> f32 {
        to_f32(key, out);
        out.iter_mut().zip(&self.mean).for_each(|(x, m)| *x -= m);
        squares(out)
    }

    /// The extra coordinate of a centred key; 0 for a key longer than M, whose link may then be a
    /// little worse and nothing else.
    pub fn lift(&self, norm_squared: f32) -> f32 {
        (self.radius_squared - norm_squared).max(0.0).sqrt()
    }

    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.mean.capacity() * size_of::<f32>()
    }
}

/// Folds the rows of each block of [`BLOCK`], as f32, in order: one result per block.
pub fn fold_rows<T: Default + Send>(
    rows: Strided<'_>,
    workers: Workers<'_>,
    add: impl Fn(&mut T, &[f32]) + Sync,
) -> Result<Vec<T>> {
    let mut folded = Vec::new();
    folded.resize_with(rows.len.div_ceil(BLOCK), T::default);
    workers.for_each_mut(&mut folded, |block, folded| {
        let mut row = vec![0.0; rows.dim];
        for i in block * BLOCK..rows.len.min((block + 1) * BLOCK) {
            to_f32(rows.row(i), &mut row);
            add(folded, &row);
        }
    })?;
    Ok(folded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::rows::Elements;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn nearest_after_the_transform_is_largest_inner_product(seed in any::<u64>(), n in 2usize..60) {
            let dim = 5;
            let mut random = Random::new(seed, 0);
            let mut number = || random.below(2001) as f32 / 500.0 - 2.0;
            let keys: Vec<f32> = (0..n * dim).map(|_| number()).collect();
            let query: Vec<f32> = (0..dim).map(|_| number()).collect();
            let rows = Strided { dim, len: n, stride: dim, elements: Elements::F32(&keys) };
            let transform = Transform::fit(rows, Workers::steady(1)).unwrap();
            let mut centred = vec![0.0; dim];
            let mut best = (f32::INFINITY, f32::NEG_INFINITY);
            let mut largest = f32::NEG_INFINITY;
            for i in 0..n {
                let squared = transform.centre(rows.row(i), &mut centred);
                let lift = transform.lift(squared);
                prop_assert!((squared + lift * lift - transform.radius_squared).abs() <= 1e-4 * transform.radius_squared);
                let distance: f32 = centred.iter().zip(&query).map(|(k, q)| (k - q) * (k - q)).sum::<f32>() + lift * lift;
                let product: f32 = keys[i * dim..][..dim].iter().zip(&query).map(|(k, q)| k * q).sum();
                if distance < best.0 { best = (distance, product); }
                largest = largest.max(product);
            }
            prop_assert!(best.1 >= largest - 1e-3 * largest.abs().max(1.0));
        }
    }
}
