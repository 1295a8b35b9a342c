//! Packing rows of 256 bytes from random places into a staging buffer, against a copy of as many bytes
//! that lie side by side. Both take the same threads and turns, so that what else a machine does slows
//! down both; medians.
//!
//!     cargo bench --bench pack
//!
//! Every round reads other rows out of half a gigabyte, so that hardly any is in a cache. "Apart": every
//! key and value somewhere else; "in pages": a token's value six rows after its key, as pages of six
//! have them.

use half::bf16;
use icecache::memory::Numbers;
use icecache::pack::pack;
use icecache::random::Random;
use icecache::rows::Elements;
use icecache::threads::Workers;
use std::hint::black_box;
use std::time::Instant;

const ROW: usize = 256;
const ROWS: usize = 1 << 21;
const PAGE: usize = 6;
/// Tokens of a few steps of one layer; of a second turn. Rounds of each.
const SIZES: [(usize, usize); 2] = [(512, 2000), (16_384, 100)];
/// Bytes that one thread copies at a time.
const BLOCK: usize = 1 << 18;

fn copy(from: &[u8], to: &mut [u8]) {
    let mut blocks: Vec<_> = from.chunks(BLOCK).zip(to.chunks_mut(BLOCK)).collect();
    Workers::steady(0)
        .for_each_mut(&mut blocks, |_, (from, to)| to.copy_from_slice(from))
        .expect("nobody cancels it");
}

fn shuffled(random: &mut Random, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    (1..count).for_each(|i| order.swap(i, random.below(i + 1)));
    order
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn main() {
    let mut random = Random::new(0, 0);
    let mut memory = Numbers::<bf16>::zeros(ROWS * ROW / size_of::<bf16>());
    (memory.iter_mut().enumerate()).for_each(|(i, x)| *x = bf16::from_bits(i as u16));
    let memory = Elements::Bf16(&memory).as_bytes();
    let row = |i: usize| &memory[i * ROW..][..ROW];
    let apart = shuffled(&mut random, ROWS);
    let apart: Vec<[usize; 2]> = apart.chunks_exact(2).map(|two| [two[0], two[1]]).collect();
    let page = |i: usize| i / PAGE * 2 * PAGE + i % PAGE;
    let tokens = shuffled(&mut random, ROWS / (2 * PAGE) * PAGE);
    let in_pages: Vec<[usize; 2]> = tokens
        .into_iter()
        .map(|i| [page(i), page(i) + PAGE])
        .collect();
    println!("tokens | rows | packed, GB/s | copied, GB/s | share");
    for (size, rounds) in SIZES {
        let bytes = size * 2 * ROW;
        let mut out = vec![0; bytes];
        let starts = shuffled(&mut random, ROWS * ROW / bytes);
        for (name, tokens) in [("apart", &apart), ("in pages", &in_pages)] {
            let (mut packed, mut copied) = (Vec::new(), Vec::new());
            let lists = tokens.chunks_exact(size).cycle().take(rounds);
            for (tokens, start) in lists.zip(starts.iter().cycle()) {
                let begun = Instant::now();
                pack(tokens, |token| token.map(row), &mut out, Workers::steady(0))
                    .expect("nobody cancels it");
                packed.push(begun.elapsed().as_secs_f64());
                assert!(out[bytes - ROW..] == *row(tokens[size - 1][1]));
                let from = &memory[start * bytes..][..bytes];
                let begun = Instant::now();
                copy(black_box(from), &mut out);
                copied.push(begun.elapsed().as_secs_f64());
                black_box(&out);
            }
            let [packed, copied] =
                [packed, copied].map(|seconds| bytes as f64 / median(seconds) / 1e9);
            let share = packed / copied;
            println!("{size} | {name} | {packed:.1} | {copied:.1} | {share:.2}");
        }
    }
}
