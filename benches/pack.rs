//! Packing rows of 256 bytes from random places into a staging buffer, against a copy of as many bytes
//! that lie side by side, both on all threads.
//!
//!     cargo bench --bench pack
//!
//! Every round reads other rows out of half a gigabyte, so that none is in a cache.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use icecache::pack::pack;
use icecache::random::Random;
use icecache::threads::Workers;
use std::hint::black_box;

const ROW: usize = 256;
const ROWS: usize = 1 << 21;
/// Tokens of a few steps of one layer; of a second turn.
const SIZES: [usize; 2] = [512, 16_384];
/// Bytes that one thread copies at a time.
const COPY: usize = 1 << 18;

fn copy(from: &[u8], to: &mut [u8]) {
    let mut blocks: Vec<_> = from.chunks(COPY).zip(to.chunks_mut(COPY)).collect();
    Workers::steady(0)
        .for_each_mut(&mut blocks, |_, (from, to)| to.copy_from_slice(from))
        .expect("nobody cancels it");
}

fn rows(c: &mut Criterion) {
    let mut random = Random::new(0, 0);
    let memory: Vec<u8> = (0..ROWS * ROW).map(|i| i as u8).collect();
    let mut order: Vec<u32> = (0..ROWS as u32).collect();
    (1..ROWS).for_each(|i| order.swap(i, random.below(i + 1)));
    let tokens: Vec<[u32; 2]> = order
        .chunks_exact(2)
        .map(|pair| [pair[0], pair[1]])
        .collect();
    let row = |i: u32| &memory[i as usize * ROW..][..ROW];
    for size in SIZES {
        let bytes = size * 2 * ROW;
        let mut out = vec![0; bytes];
        let mut group = c.benchmark_group(format!("{size} tokens"));
        group.throughput(Throughput::Bytes(bytes as u64));
        let mut lists = tokens.chunks_exact(size).cycle();
        group.bench_function("packed", |b| {
            b.iter(|| {
                let tokens = black_box(lists.next().expect("a cycle has no end"));
                pack(tokens, |token| token.map(row), &mut out, Workers::steady(0))
                    .expect("nobody cancels it");
                black_box(&out);
            })
        });
        let mut places = memory.chunks_exact(bytes).cycle();
        group.bench_function("copied", |b| {
            b.iter(|| {
                copy(
                    black_box(places.next().expect("a cycle has no end")),
                    &mut out,
                );
                black_box(&out);
            })
        });
        group.finish();
    }
}

criterion_group!(packing, rows);
criterion_main!(packing);
