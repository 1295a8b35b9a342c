//! The SIMD kernels, in elements per second: dot products of one query and of a group of four,
//! weighted sums, exponentials; rows in order and gathered, in every dtype.
//!
//!     cargo bench --bench kernels                      # all
//!     cargo bench --bench kernels -- dots/bf16         # some
//!     ICECACHE_SIMD=avx2 cargo bench --bench kernels   # another instruction set
//!
//! 2,048 rows stay in the caches: what is measured is arithmetic, not memory.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use icecache::random::Random;
use icecache::rows::{Dtype, RowStore};
use icecache::simd;
use std::hint::black_box;

const ROWS: usize = 2048;

/// Uniform numbers of -1 to 1.
fn numbers(random: &mut Random, n: usize) -> Vec<f32> {
    (0..n)
        .map(|_| random.below(2001) as f32 / 1000.0 - 1.0)
        .collect()
}

fn rows(c: &mut Criterion) {
    let mut random = Random::new(0, 0);
    let gathered: Vec<u32> = (0..ROWS).map(|_| random.below(ROWS) as u32).collect();
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for dim in [64, 128] {
            let mut store = RowStore::new(dtype, dim);
            for _ in 0..ROWS {
                store.push_f32(&numbers(&mut random, dim));
            }
            for queries in [1, 4] {
                let q = numbers(&mut random, queries * dim);
                let weights = numbers(&mut random, queries * ROWS);
                for (order, index) in [("in order", None), ("gathered", Some(&gathered[..]))] {
                    let name = format!("{} x {dim}, {queries} queries, {order}", dtype.name());
                    let mut group = c.benchmark_group("dots");
                    group.throughput(Throughput::Elements((queries * ROWS * dim) as u64));
                    let mut out = vec![0.0; queries * ROWS];
                    group.bench_function(&name, |b| {
                        b.iter(|| {
                            simd::dots(black_box(&q), store.rows(), index, &mut out, ROWS);
                            black_box(&out);
                        })
                    });
                    group.finish();
                    let mut group = c.benchmark_group("weighted_sum");
                    group.throughput(Throughput::Elements((queries * ROWS * dim) as u64));
                    let mut sums = vec![0.0; queries * dim];
                    group.bench_function(&name, |b| {
                        b.iter(|| {
                            sums.fill(0.0);
                            let weights = black_box(&weights[..]);
                            simd::weighted_sum(weights, ROWS, store.rows(), index, &mut sums);
                            black_box(&sums);
                        })
                    });
                    group.finish();
                }
            }
        }
    }
}

fn exp(c: &mut Criterion) {
    let x = numbers(&mut Random::new(0, 1), ROWS);
    let mut y = x.clone();
    let mut group = c.benchmark_group("exp");
    group.throughput(Throughput::Elements(ROWS as u64));
    group.bench_function(format!("{ROWS} numbers"), |b| {
        b.iter(|| {
            y.copy_from_slice(black_box(&x));
            black_box(simd::exp(&mut y, 1.0))
        })
    });
    group.finish();
}

criterion_group!(kernels, rows, exp);
criterion_main!(kernels);
