//! Names for the numbers that must not be mixed up.

/// Position of a token in its sequence; for a bare index, the order of insertion.
pub type KeyId = u32;

/// A page of a [`crate::pages::PagePool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

impl PageId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Index of a node inside its level. Levels are dense: nodes `0..len` all exist.
pub type NodeId = u32;

/// The parent of the nodes of the top level.
pub const NO_PARENT: NodeId = NodeId::MAX;

/// A slot of one KV head on a device: room for the key and the value of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SlotId(pub u32);

impl SlotId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a token lies in a forest: tree, page, row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TreePlace {
    pub tree: u32,
    pub page: PageId,
    pub row: u32,
}

/// Where a head keeps a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Sink(u32),
    Window(u32),
    Tree(TreePlace),
}
