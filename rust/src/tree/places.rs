//! Where each token lies, for steps that are told which tokens to take. Kept once one was.

use super::Tree;
use crate::ids::{KeyId, NO_PARENT, NodeId, PageId};
use crate::rows::make_room;

/// The leaf of no token.
const NOWHERE: NodeId = NO_PARENT;

impl Tree {
    /// From now on the tree knows the leaf of each of its tokens.
    pub fn keep_places(&mut self) {
        if !self.places.is_empty() {
            return;
        }
        let mut last = 0;
        self.for_each_token(|id, _, _| last = last.max(id));
        self.places.reserve_exact(last as usize + 1);
        self.places.resize(last as usize + 1, NOWHERE);
        (0..self.levels[0].len()).for_each(|leaf| self.place(leaf));
    }

    /// To be called by whatever gives a leaf other tokens or another number.
    pub fn place(&mut self, leaf: usize) {
        if self.places.is_empty() {
            return;
        }
        for &id in self.pages.ids(self.levels[0].pages[leaf]) {
            if id as usize >= self.places.len() {
                let more = id as usize + 1 - self.places.len();
                make_room(&mut self.places, more);
                self.places.resize(id as usize + 1, NOWHERE);
            }
            self.places[id as usize] = leaf as NodeId;
        }
    }

    /// Leaf, page and row of a token, `None` if it is not in the tree. After [`Tree::keep_places`].
    pub fn place_of(&self, id: KeyId) -> Option<(NodeId, PageId, u32)> {
        let leaf = *self.places.get(id as usize)?;
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
        if self.places.is_empty() {
            return Ok(());
        }
        for (leaf, &page) in self.levels[0].pages.iter().enumerate() {
            let lost = |id: &&KeyId| self.places.get(**id as usize) != Some(&(leaf as NodeId));
            if let Some(id) = self.pages.ids(page).iter().find(lost) {
                return Err(format!("token {id} is in leaf {leaf}, taken for elsewhere"));
            }
        }
        let placed = self.places.iter().filter(|&&leaf| leaf != NOWHERE);
        match placed.count() {
            count if count == self.len => Ok(()),
            count => Err(format!("{count} tokens have a place, {} exist", self.len)),
        }
    }
}
