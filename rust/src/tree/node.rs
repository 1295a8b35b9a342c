//! One level of the tree: its nodes as parallel arrays, dense from 0 to `len`.

use crate::ids::{NodeId, PageId};
use crate::rows::{Dtype, RowStore};

/// The numbers of a node that a descent reads beside its mean key.
#[derive(Debug, Clone, Copy)]
pub struct Scalars {
    /// Node of the level above, or [`crate::ids::NO_PARENT`].
    pub parent: NodeId,
    /// Tokens below.
    pub count: u32,
    pub log_count: f32,
    /// Mean extra coordinate of the tokens (see `transform`).
    pub lift: f32,
    /// Half the squared norm of the mean key with its extra coordinate.
    pub half_norm: f32,
    /// Root mean square distance of the keys to their mean.
    pub key_radius: f32,
    /// Root mean square distance of the values to their mean.
    pub value_spread: f32,
}

/// Leaves (level 0, one page each) or upper nodes (children one level below).
#[derive(Debug, Clone)]
pub struct Level {
    /// Mean centred key, [len, key_dim], in the summary dtype.
    pub keys: RowStore,
    /// Mean value, [len, value_dim], in the summary dtype.
    pub values: RowStore,
    pub scalars: Vec<Scalars>,
    /// Leaves only.
    pub pages: Vec<PageId>,
    /// Upper nodes only.
    pub children: Vec<Vec<NodeId>>,
}

impl Level {
    pub fn new(dtype: Dtype, key_dim: usize, value_dim: usize) -> Self {
        Self::with_capacity(dtype, key_dim, value_dim, 0, true)
    }

    pub fn with_capacity(
        dtype: Dtype,
        key_dim: usize,
        value_dim: usize,
        nodes: usize,
        upper: bool,
    ) -> Self {
        let (leaves, uppers) = if upper { (0, nodes) } else { (nodes, 0) };
        Self {
            keys: RowStore::with_capacity(dtype, key_dim, nodes),
            values: RowStore::with_capacity(dtype, value_dim, nodes),
            scalars: Vec::with_capacity(nodes),
            pages: Vec::with_capacity(leaves),
            children: Vec::with_capacity(uppers),
        }
    }

    pub fn len(&self) -> usize {
        self.scalars.len()
    }

    pub fn is_empty(&self) -> bool {
        self.scalars.is_empty()
    }

    /// Gives unused capacity back.
    pub fn shrink_to_fit(&mut self) {
        self.keys.shrink_to_fit();
        self.values.shrink_to_fit();
        self.scalars.shrink_to_fit();
        self.pages.shrink_to_fit();
        self.children.iter_mut().for_each(Vec::shrink_to_fit);
        self.children.shrink_to_fit();
    }

    /// Bytes of all arrays, unused capacity included.
    pub fn bytes(&self) -> usize {
        let children: usize = self
            .children
            .iter()
            .map(|c| c.capacity() * size_of::<NodeId>())
            .sum();
        size_of::<Self>()
            + self.keys.bytes()
            + self.values.bytes()
            + self.scalars.capacity() * size_of::<Scalars>()
            + self.pages.capacity() * size_of::<PageId>()
            + self.children.capacity() * size_of::<Vec<NodeId>>()
            + children
    }
}
