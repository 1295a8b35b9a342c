//! One build and one step of a head, for counting instructions: a number that does not depend on
//! what else a machine does.
//!
//!     cargo bench --bench instructions --no-run       # prints where the program is
//!     valgrind --tool=callgrind --callgrind-out-file=/dev/null --collect-atstart=no \
//!         --toggle-collect=instructions::step PROGRAM 36864     # "Collected"; or ::build
//!
//! One KV head of so many tokens of topics that return, head_dim 128, bf16, four queries, one
//! thread. callgrind knows AVX2 at most, and takes minutes for 36,864 tokens.

use icecache::random::Random;
use icecache::rows::{Dtype, ElementsMut, RowStore};
use icecache::{Layer, Options, Shape};
use std::hint::black_box;
use std::sync::atomic::AtomicBool;

const TOKENS: usize = 4096;
const DIM: usize = 128;
const GROUP: usize = 4;
const TOPICS: usize = 400;

/// Numbers of -1 to 1.
fn numbers(random: &mut Random, n: usize) -> Vec<f32> {
    (0..n)
        .map(|_| random.below(2001) as f32 / 1000.0 - 1.0)
        .collect()
}

/// Tokens scattered around the topics in turn.
fn rows(random: &mut Random, topic_of: &[usize]) -> RowStore {
    let topics = numbers(random, TOPICS * DIM);
    let mut store = RowStore::new(Dtype::Bf16, DIM);
    for &topic in topic_of {
        let noise = numbers(random, DIM);
        let row: Vec<f32> = (0..DIM)
            .map(|d| topics[topic * DIM + d] + 0.4 * noise[d])
            .collect();
        store.push_f32(&row);
    }
    store
}

#[inline(never)]
fn build(layer: &mut Layer, keys: &RowStore, values: &RowStore) {
    let (k, v) = (vec![keys.strided()], vec![values.strided()]);
    layer
        .prefill(&k, &v, None, &AtomicBool::new(false))
        .expect("the rows fit the layer");
}

#[inline(never)]
fn step(layer: &mut Layer, queries: &[RowStore], out: &mut [f32]) {
    let q: Vec<_> = queries.iter().map(RowStore::strided).collect();
    layer
        .attend(&q, ElementsMut::F32(out))
        .expect("the queries fit the layer");
}

fn main() {
    let tokens = std::env::args()
        .find_map(|argument| argument.parse().ok())
        .unwrap_or(TOKENS);
    let mut random = Random::new(0, 0);
    let topic_of: Vec<usize> = (0..tokens).map(|_| random.below(TOPICS)).collect();
    let (keys, values) = (rows(&mut random, &topic_of), rows(&mut random, &topic_of));
    let queries: Vec<RowStore> = (0..GROUP)
        .map(|_| {
            let mut store = RowStore::new(Dtype::Bf16, DIM);
            let query: Vec<f32> = numbers(&mut random, DIM).iter().map(|x| 3.0 * x).collect();
            store.push_f32(&query);
            store
        })
        .collect();
    let options = Options {
        num_threads: 1,
        ..Options::default()
    };
    let shape = Shape {
        q_heads: GROUP,
        kv_heads: 1,
        head_dim: DIM,
    };
    let scale = (DIM as f32).sqrt().recip();
    let mut layer = Layer::new(shape, scale, 0, 0, options).expect("the shape is valid");
    build(&mut layer, &keys, &values);
    let mut out = vec![0.0; GROUP * DIM];
    step(&mut layer, &queries, &mut out);
    println!("{} tokens, {:?}", layer.seq_len(), black_box(&out)[0]);
}
