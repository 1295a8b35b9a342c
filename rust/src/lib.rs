//! A KV-cache in host memory with an index over its keys: attention to a few tokens exactly and to
//! a summary of all the rest.
//!
//! The flows, each spelled out in [`layer`]:
//!
//! **Prefill** (`Layer::prefill`)
//! 1. [`head`] stores the new rows: sink first, then the window.
//! 2. Exact attention over everything stored ([`attend`]), causal.
//! 3. All but sink and window is centred and lifted ([`transform`]), linked into levels
//!    ([`tree::build`]) and laid out in [`pages`] of similar tokens, each node with the mean of
//!    its keys and values ([`tree::summary`]).
//!
//! **Decode** (`Layer::decode`)
//! 1. If the window is full, its oldest token goes into the tree ([`tree::insert`]); the new
//!    row goes into the window.
//! 2. Sink and window are attended exactly ([`attend`]).
//! 3. One descent opens the nodes that hold most of the softmax ([`tree::search`]); the keys of
//!    the best pages are scored exactly and the best tokens kept ([`select`]).
//! 4. The kept tokens are attended exactly; every other token counts through the mean of the
//!    deepest node that was scored, and both are merged under one maximum ([`attend`]).
//!
//! A sequence that forks shares what both have; the index of a head is then several trees, and a step
//! searches all ([`forest`]). Several sequences decode in one call (`Layer::decode_batch`).
//!
//! A layer that follows another does no step 3: it takes the tokens that the other selected, and one
//! level of nodes without them for the rest ([`select::reuse`]).
//!
//! **Decode for a device** (`Layer::stage`)
//! 1. Decode's steps 1 to 3, reading only keys of sink and window.
//! 2. The tokens that a position attends to exactly get slots on the device ([`residency`]).
//! 3. The summary of every other token, and the rows of those that had no slot, go into one staging
//!    buffer ([`pack`]): the device attends to its slots and merges the summary.
//!
//! A file uses only files above it in this list.

pub mod memory;
pub mod rows;
pub mod error;
pub mod ids;
pub mod config;
pub mod threads;
pub mod guard;
pub mod random;
pub mod simd;
pub mod transform;
pub mod order;
pub mod pages;
pub mod span;
pub mod tree;
pub mod exact;
pub mod index;
pub mod forest;
pub mod select;
pub mod attend;
pub mod residency;
pub mod pack;
pub mod head;
pub mod layer;
#[cfg(feature = "python")]
mod python;

pub use config::{Options, Selection, Tail, TreeOptions};
pub use error::{Error, Result};
pub use index::Index;
pub use layer::{Heads, Layer, Shape};
pub use rows::{Dtype, Elements, Strided};
