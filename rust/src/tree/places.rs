//! Where each token lies, for steps that are told which tokens to take. Kept once one was.

use super::Tree;
use crate::ids::{KeyId, NO_PARENT, NodeId, PageId};
use crate::rows::make_room;

/// The leaf of no token.
const NOWHERE: NodeId = NO_PARENT;

impl Tree {
    /// To be called by whatever gives a leaf other tokens or another number.
    pub fn place(&mut self, leaf: usize) {
        if let Some(places) = self.places.get_mut() {
            put(places, leaf, self.pages.ids(self.levels[0].pages[leaf]));
        }
    }

    /// Leaf, page and row of a token, `None` if it is not in the tree. From the first call on the tree
    /// knows the leaf of each of its tokens.
    pub fn place_of(&self, id: KeyId) -> Option<(NodeId, PageId, u32)> {
        let places = self.places.get_or_init(|| {
            let mut last = 0;
            self.for_each_token(|id, _, _| last = last.max(id));
            let mut places = Vec::with_capacity(last as usize + 1);
            for (leaf, &page) in self.levels[0].pages.iter().enumerate() {
                put(&mut places, leaf, self.pages.ids(page));
            }
            places
        });
        let leaf = *places.get(id as usize)?;
        let page = *self.levels[0].pages.get(leaf as usize)?;
        let row = self.pages.ids(page).iter().position(|&held| held == id)?;
        Some((leaf, page, row as u32))
    }

    /// The node of level `depth` above a leaf, or the leaf itself.
    pub fn ancestor(&self, leaf: NodeId, depth: usize) -> NodeId {
        let below = self.levels[..depth].iter();
        below.fold(leaf, |node, level| level.scalars[node as usize].parent)
    }

    /// Every token is where the tree takes it for, and no other is anywhere.
    pub fn check_places(&self) -> Result<(), String> {
        let Some(places) = self.places.get() else {
            return Ok(());
        };
        for (leaf, &page) in self.levels[0].pages.iter().enumerate() {
            let lost = |id: &&KeyId| places.get(**id as usize) != Some(&(leaf as NodeId));
            if let Some(id) = self.pages.ids(page).iter().find(lost) {
                return Err(format!("token {id} is in leaf {leaf}, taken for elsewhere"));
            }
        }
        let placed = places.iter().filter(|&&leaf| leaf != NOWHERE);
        match placed.count() {
            count if count == self.len => Ok(()),
            count => Err(format!("{count} tokens have a place, {} exist", self.len)),
        }
    }
}

/// Notes the leaf of tokens.
fn put(places: &mut Vec<NodeId>, leaf: usize, ids: &[KeyId]) {
    for &id in ids {
        if id as usize >= places.len() {
            make_room(places, id as usize + 1 - places.len());
            places.resize(id as usize + 1, NOWHERE);
        }
        places[id as usize] = leaf as NodeId;
    }
}
