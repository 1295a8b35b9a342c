//! The DCI-tree of one KV head: levels of nodes over pages of tokens.
//!
//! build: promotion, links, refinement, splits. search: the one descent. insert: growth, splits up
//! to a new root. regroup: upkeep of what grew. remove: crops. check: every invariant. The paper's
//! section 3.2.

pub mod build;
pub mod check;
pub mod cluster;
pub mod insert;
pub mod link;
pub mod node;
pub mod places;
pub mod project;
pub mod regroup;
pub mod remove;
pub mod search;
pub mod summary;

use crate::config::TreeOptions;
use crate::ids::NodeId;
use crate::pages::PagePool;
use crate::rows::{Dtype, RowStore, Rows};
use crate::transform::Transform;
use node::Level;
use project::Crowds;
use std::sync::OnceLock;
use summary::Sums;

/// Nodes opened at each level when a point looks for its parent.
pub const LINK_FIELD_OF_VIEW: usize = 4;

/// An index of tokens: never empty.
#[derive(Debug, Clone)]
pub struct Tree {
    pub options: TreeOptions,
    /// Random stream of this tree, so that heads differ under one seed.
    pub stream: u64,
    pub transform: Transform,
    pub pages: PagePool,
    /// Level 0 holds the leaves; the last level is the top, whose nodes are always scored.
    pub levels: Vec<Level>,
    /// Tokens held.
    pub len: usize,
    pub whole: Whole,
    /// Only where options make families so large that scoring all of one is too much.
    pub crowds: Option<Box<Crowds>>,
    /// The leaf of each token by its id, see `places`; not there while nobody asks.
    places: OnceLock<Vec<NodeId>>,
}

/// What stands for tokens that hardly count. As of the last time the top level changed much.
#[derive(Debug, Clone)]
pub struct Whole {
    /// Mean value of all tokens, one row.
    values: RowStore,
    /// Root mean square distance of the values to it.
    pub value_spread: f32,
}

impl Whole {
    /// Of the nodes of a tree's top level.
    pub fn of(top: &Level) -> Self {
        let (key_dim, value_dim) = (top.keys.dim(), top.values.dim());
        let mut sums = Sums::new(key_dim, value_dim);
        (0..top.len()).for_each(|node| sums.add_node(top, node));
        let mut one = Level::with_capacity(Dtype::F32, key_dim, value_dim, 1, true);
        sums.push_to(&mut one);
        Self {
            value_spread: one.scalars[0].value_spread,
            values: one.values,
        }
    }

    pub fn values(&self) -> Rows<'_> {
        self.values.rows()
    }
}

impl Tree {
    /// Most nodes of the top level after a build.
    pub fn top_target(options: &TreeOptions) -> usize {
        4 * options.fanout
    }

    /// Most children of an upper node.
    pub fn child_capacity(options: &TreeOptions) -> usize {
        2 * options.fanout
    }

    /// Target mean, and the most, of the tokens or children of a node of a level.
    pub fn family(options: &TreeOptions, depth: usize) -> (usize, usize) {
        match depth {
            0 => (options.page_size, options.page_capacity),
            _ => (options.fanout, Self::child_capacity(options)),
        }
    }

    /// Sorts large families again, after the last change of a call.
    pub fn refresh_crowds(&mut self) {
        if let Some(crowds) = &mut self.crowds {
            crowds.refresh(&self.levels, self.options.scan_below);
        }
    }

    /// To be called by whatever changes who is whose child, or the number of a node.
    pub fn forget_crowds(&mut self) {
        if let Some(crowds) = &mut self.crowds {
            crowds.forget();
        }
    }

    pub fn leaves(&self) -> &Level {
        &self.levels[0]
    }

    /// Brings `whole` up to date.
    pub fn refresh_whole(&mut self) {
        self.whole = Whole::of(&self.levels[self.levels.len() - 1]);
    }

    /// Bytes of the pages' rows alone: the raw keys and values.
    pub fn row_bytes(&self) -> usize {
        self.len * (self.pages.key_dim() + self.pages.value_dim()) * self.pages.dtype().bytes()
    }

    /// Bytes of everything held, the rows included.
    pub fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.transform.bytes()
            + self.pages.bytes()
            + self.whole.values.bytes()
            + self.levels.iter().map(Level::bytes).sum::<usize>()
            + self.places.get().map_or(0, Vec::capacity) * size_of::<NodeId>()
            + self.crowds.as_ref().map_or(0, |crowds| crowds.bytes())
    }
}
