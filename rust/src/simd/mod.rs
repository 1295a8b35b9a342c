//! Dot products, weighted sums and exponentials over rows. One file per instruction set, chosen
//! once at run time; `ICECACHE_SIMD=scalar|avx2|avx512|neon` overrides the choice.
//!
//! Rows are read by `index`, or all in order where it is `None`. Outputs of several queries lie
//! `stride` apart: query `g`, row `i` is at `g * stride + i`.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod prefetch;
mod scalar;

use crate::error::{Error, Result};
use crate::rows::Rows;
use std::sync::OnceLock;

pub use prefetch::prefetch;

type Dots = unsafe fn(&[f32], Rows<'_>, Option<&[u32]>, &mut [f32], usize);
type WeightedSum = unsafe fn(&[f32], usize, Rows<'_>, Option<&[u32]>, &mut [f32]);
type Exp = unsafe fn(&mut [f32], f32) -> f32;
type Shift = unsafe fn(&mut [f32], f32, &[f32], f32) -> f32;

struct Kernels {
    name: &'static str,
    dots: Dots,
    weighted_sum: WeightedSum,
    exp: Exp,
    shift: Shift,
}

const SCALAR: Kernels = Kernels {
    name: "scalar",
    dots: scalar::dots,
    weighted_sum: scalar::weighted_sum,
    exp: scalar::exp,
    shift: scalar::shift,
};

/// What this CPU can run, best first.
fn supported() -> Vec<Kernels> {
    let mut list = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        if avx2 && avx512 {
            list.push(Kernels {
                name: "avx512",
                dots: avx512::dots,
                weighted_sum: avx512::weighted_sum,
                exp: avx512::exp,
                shift: avx512::shift,
            });
        }
        if avx2 {
            list.push(Kernels {
                name: "avx2",
                dots: avx2::dots,
                weighted_sum: avx2::weighted_sum,
                exp: avx2::exp,
                shift: avx2::shift,
            });
        }
    }
    #[cfg(target_arch = "aarch64")]
    if std::arch::is_aarch64_feature_detected!("neon") {
        list.push(Kernels {
            name: "neon",
            dots: neon::dots,
            weighted_sum: neon::weighted_sum,
            exp: neon::exp,
            shift: neon::shift,
        });
    }
    list.push(SCALAR);
    list
}

fn chosen() -> &'static Kernels {
    static CHOSEN: OnceLock<Kernels> = OnceLock::new();
    CHOSEN.get_or_init(|| supported().swap_remove(asked().unwrap_or(0)))
}

/// Refuses an `ICECACHE_SIMD` that would be ignored.
pub fn check_environment() -> Result<()> {
    asked().map(|_| ())
}

/// The place in [`supported`] that `ICECACHE_SIMD` asks for, or the best.
fn asked() -> Result<usize> {
    let Some(name) = std::env::var_os("ICECACHE_SIMD").filter(|name| !name.is_empty()) else {
        return Ok(0);
    };
    let names: Vec<_> = supported().iter().map(|kernels| kernels.name).collect();
    let place = names.iter().position(|known| name == *known);
    place.ok_or_else(|| Error::Config {
        option: "ICECACHE_SIMD",
        expected: format!("one of {}, as this CPU has them", names.join(", ")),
        got: format!("{:?}", name.to_string_lossy()),
    })
}

/// Name of the instruction set in use.
pub fn name() -> &'static str {
    chosen().name
}

/// `out[g, i] = queries[g] . row i`; `queries` is [g, dim], `out` at least [g, stride].
pub fn dots(
    queries: &[f32],
    rows: Rows<'_>,
    index: Option<&[u32]>,
    out: &mut [f32],
    stride: usize,
) {
    // SAFETY: `supported` lists a kernel only where the CPU has its instruction set; the kernel
    // itself is safe code that checks its bounds.
    unsafe { (chosen().dots)(queries, rows, index, out, stride) }
}

/// `out[g] += sum over i of weights[g, i] * row i`; `out` is [g, dim].
pub fn weighted_sum(
    weights: &[f32],
    stride: usize,
    rows: Rows<'_>,
    index: Option<&[u32]>,
    out: &mut [f32],
) {
    // SAFETY: as in `dots`.
    unsafe { (chosen().weighted_sum)(weights, stride, rows, index, out) }
}

/// Replaces every x by exp(x - max) and returns their sum. `max` must not be below any x.
pub fn exp(x: &mut [f32], max: f32) -> f32 {
    // SAFETY: as in `dots`.
    unsafe { (chosen().exp)(x, max) }
}

/// Adds `scale * y + offset` to `x`, [n] both, and returns the largest of the sums (minus infinity
/// if n is 0).
pub fn shift(x: &mut [f32], scale: f32, y: &[f32], offset: f32) -> f32 {
    // SAFETY: as in `dots`.
    unsafe { (chosen().shift)(x, scale, y, offset) }
}

/// Lanes of a sum or maximum, enough for the widest registers. Plain code is as fast as memory.
const LANES: usize = 16;

/// The sum of `x`.
pub fn sum(x: &[f32]) -> f32 {
    let (blocks, mut sums) = (x.chunks_exact(LANES), [0.0f32; LANES]);
    let rest: f32 = blocks.remainder().iter().sum();
    blocks.for_each(|block| sums.iter_mut().zip(block).for_each(|(s, x)| *s += x));
    sums.iter().sum::<f32>() + rest
}

/// The largest of `x`, which holds no NaN; minus infinity if it is empty.
pub fn max(x: &[f32]) -> f32 {
    // A comparison vectorises; `f32::max`, which minds NaN, does not.
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (blocks, mut highest) = (x.chunks_exact(LANES), [f32::NEG_INFINITY; LANES]);
    let rest = blocks
        .remainder()
        .iter()
        .copied()
        .fold(f32::NEG_INFINITY, larger);
    blocks.for_each(|block| {
        highest
            .iter_mut()
            .zip(block)
            .for_each(|(h, &x)| *h = larger(*h, x))
    });
    highest.into_iter().fold(rest, larger)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::rows::{Dtype, RowStore, to_f32};
    use proptest::prelude::*;

    fn numbers(random: &mut Random, n: usize) -> Vec<f32> {
        (0..n)
            .map(|_| random.below(4001) as f32 / 1000.0 - 2.0)
            .collect()
    }

    proptest! {
        #[test]
        fn every_set_agrees_with_plain_sums(
            seed in any::<u64>(), dim in 0usize..300, g in 1usize..10, n in 0usize..40,
            gather in any::<bool>(), dtype in prop::sample::select(vec![Dtype::F32, Dtype::F16, Dtype::Bf16]),
            gap in 0usize..4, spare in 0usize..2,
        ) {
            let mut random = Random::new(seed, 1);
            let mut store = RowStore::new(dtype, dim);
            for _ in 0..n { store.push_f32(&numbers(&mut random, dim)); }
            // What lies beyond the rows, queries and weights is NaN, or not allocated.
            for _ in 0..spare { store.push_f32(&vec![f32::NAN; dim]); }
            store.shrink_to_fit();
            let rows = store.rows().slice(0..n);
            let poisoned = |random: &mut Random, len: usize| {
                let mut x = numbers(random, len);
                x.resize(len + spare * 64, f32::NAN);
                x.shrink_to_fit();
                x
            };
            let queries = poisoned(&mut random, g * dim);
            let queries = &queries[..g * dim];
            let index: Option<Vec<u32>> = gather
                .then(|| (0..random.below(2 * n + 1)).map(|_| random.below(n) as u32).collect());
            let count = index.as_ref().map_or(n, Vec::len);
            let stride = count + gap;
            let weights = poisoned(&mut random, g * stride);
            let weights = &weights[..g * stride];
            let plain: Vec<Vec<f32>> = (0..count).map(|i| {
                let mut row = vec![0.0; dim];
                to_f32(store.row(index.as_ref().map_or(i, |x| x[i] as usize)), &mut row);
                row
            }).collect();
            for kernels in supported() {
                let mut out = vec![7.0; g * stride + 64];
                let room = g * stride;
                // SAFETY: `supported` checked the CPU.
                unsafe { (kernels.dots)(queries, rows, index.as_deref(), &mut out[..room], stride) };
                let mut sums = vec![1.0; g * dim + 64];
                let room = g * dim;
                // SAFETY: as above.
                unsafe { (kernels.weighted_sum)(weights, stride, rows, index.as_deref(), &mut sums[..room]) };
                for q in 0..g {
                    for i in 0..count {
                        let want: f32 = (0..dim).map(|d| queries[q * dim + d] * plain[i][d]).sum();
                        prop_assert!((out[q * stride + i] - want).abs() <= 1e-3, "{}", kernels.name);
                    }
                    for i in count..stride { prop_assert_eq!(out[q * stride + i], 7.0); }
                    for d in 0..dim {
                        let want: f32 = 1.0 + (0..count).map(|i| weights[q * stride + i] * plain[i][d]).sum::<f32>();
                        prop_assert!((sums[q * dim + d] - want).abs() <= 1e-3, "{}", kernels.name);
                    }
                }
                prop_assert!(out[g * stride..].iter().all(|&x| x == 7.0), "{}", kernels.name);
                prop_assert!(sums[g * dim..].iter().all(|&x| x == 1.0), "{}", kernels.name);
            }
        }

        /// Rows, queries, weights and outputs that are not there: a panic, not an access.
        #[test]
        fn every_set_checks_its_bounds(dim in 1usize..80, g in 1usize..6, n in 1usize..20, half in any::<bool>()) {
            use std::panic::{AssertUnwindSafe, catch_unwind};
            let mut store = RowStore::new(if half { Dtype::F16 } else { Dtype::F32 }, dim);
            for _ in 0..n { store.push_f32(&vec![1.0; dim]); }
            let (rows, beyond) = (store.rows(), [0, n as u32]);
            let (queries, weights) = (vec![1.0; g * dim], vec![1.0; g * n.max(2)]);
            for kernels in supported() {
                let panics = |what: &dyn Fn(&mut [f32])| {
                    let mut out = vec![0.0; g * dim.max(n).max(2)];
                    catch_unwind(AssertUnwindSafe(|| what(&mut out))).is_err()
                };
                // SAFETY: `supported` checked the CPU.
                let dots = |q: &[f32], index, out: &mut [f32]| unsafe { (kernels.dots)(q, rows, index, out, n.max(2)) };
                // SAFETY: as above.
                let sum = |w: &[f32], index, out: &mut [f32]| unsafe { (kernels.weighted_sum)(w, n.max(2), rows, index, out) };
                prop_assert!(panics(&|out| dots(&queries, Some(&beyond), out)));
                prop_assert!(panics(&|out| dots(&queries, None, &mut out[..(g - 1) * n.max(2) + n - 1])));
                prop_assert!(panics(&|out| dots(&queries[..dim - 1], None, out)) || dim == 1);
                prop_assert!(panics(&|out| sum(&weights, Some(&beyond), &mut out[..g * dim])));
                prop_assert!(panics(&|out| sum(&weights[..(g - 1) * n.max(2) + n - 1], None, &mut out[..g * dim])));
                prop_assert!(!panics(&|out| dots(&queries, None, out)));
                prop_assert!(!panics(&|out| sum(&weights, None, &mut out[..g * dim])));
            }
        }

        #[test]
        fn exp_is_exp(seed in any::<u64>(), n in 0usize..70) {
            let mut random = Random::new(seed, 2);
            let x: Vec<f32> = (0..n).map(|_| -(random.below(100_000) as f32) / 1000.0).collect();
            for kernels in supported() {
                let mut y = x.clone();
                // SAFETY: `supported` checked the CPU.
                let sum = unsafe { (kernels.exp)(&mut y, 0.0) };
                for (&x, &y) in x.iter().zip(&y) {
                    let want = f64::from(x).exp();
                    prop_assert!((f64::from(y) - want).abs() <= 4e-7 * want + 2e-38, "{} {x} {y}", kernels.name);
                }
                let want: f32 = y.iter().sum();
                prop_assert!((sum - want).abs() <= 1e-4 * want.max(1.0));
            }
        }
    }

    proptest! {
        #[test]
        fn shift_is_a_shift(seed in any::<u64>(), n in 0usize..70, scale in -2f32..2.0, offset in -2f32..2.0) {
            let mut random = Random::new(seed, 4);
            let (x, y) = (numbers(&mut random, n), numbers(&mut random, n + 3));
            for kernels in supported() {
                let mut z = x.clone();
                // SAFETY: `supported` checked the CPU.
                let high = unsafe { (kernels.shift)(&mut z, scale, &y, offset) };
                for i in 0..n {
                    prop_assert!((z[i] - (x[i] + scale * y[i] + offset)).abs() <= 1e-5, "{}", kernels.name);
                }
                prop_assert_eq!(high, z.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b)));
            }
        }
    }

    proptest! {
        #[test]
        fn sum_and_max(seed in any::<u64>(), n in 0usize..70) {
            let x = numbers(&mut Random::new(seed, 5), n);
            prop_assert!((sum(&x) - x.iter().sum::<f32>()).abs() <= 1e-4);
            prop_assert_eq!(max(&x), x.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b)));
        }
    }

    #[test]
    fn exp_of_zero_is_one() {
        let mut x = [3.0f32; 17];
        assert_eq!(exp(&mut x, 3.0), 17.0);
    }
}
