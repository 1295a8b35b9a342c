//! Taking tokens out again: deep crops.

use super::Tree;
use super::insert::Inserter;
use super::node::Level;
use crate::ids::{KeyId, NO_PARENT, NodeId};
use crate::span::Span;

impl Tree {
    /// Calls `visit(id, page, row)` for every token, page by page.
    pub fn for_each_token(&self, mut visit: impl FnMut(KeyId, crate::ids::PageId, usize)) {
        for &page in &self.levels[0].pages {
            for (row, &id) in self.pages.ids(page).iter().enumerate() {
                visit(id, page, row);
            }
        }
    }

    /// Copies of the tokens with ids from `first` on, in the order of their ids.
    pub fn tokens_from(&self, first: KeyId) -> (Vec<KeyId>, Span) {
        let mut found = Vec::new();
        self.for_each_token(|id, page, row| {
            if id >= first {
                found.push((id, page, row));
            }
        });
        found.sort_unstable_by_key(|token| token.0);
        let pool = &self.pages;
        let mut tokens = Span::new(pool.dtype(), pool.key_dim(), pool.value_dim());
        tokens.reserve(found.len());
        for &(_, page, row) in &found {
            tokens.keys.push(pool.keys(page).row(row));
            tokens.values.push(pool.values(page).row(row));
        }
        (found.into_iter().map(|token| token.0).collect(), tokens)
    }

    /// Removes the tokens with ids from `first` on. `false`: none would be left, nothing was done.
    pub fn remove_from(&mut self, first: KeyId) -> bool {
        let mut kept = 0;
        self.for_each_token(|id, _, _| kept += usize::from(id < first));
        if kept == 0 {
            return false;
        }
        let mut inserter = Inserter::new(self.pages.key_dim(), self.pages.value_dim());
        for leaf in 0..self.levels[0].len() {
            let page = self.levels[0].pages[leaf];
            let ids = self.pages.ids(page);
            let keep: Vec<u32> = (0..ids.len() as u32)
                .filter(|&i| ids[i as usize] < first)
                .collect();
            if keep.len() == ids.len() {
                continue;
            }
            if keep.is_empty() {
                self.levels[0].scalars[leaf].count = 0;
            } else {
                self.levels[0].pages[leaf] = self.pages.subset(page, &keep);
                inserter.recompute(self, 0, leaf);
            }
            self.pages.release(page);
        }
        self.len = kept;
        if let Some(places) = self.places.get_mut() {
            places.truncate(first as usize);
        }
        for depth in 0..self.levels.len() {
            self.drop_empty(depth);
            if depth + 1 < self.levels.len() {
                for node in 0..self.levels[depth + 1].len() {
                    inserter.recompute(self, depth + 1, node);
                }
            }
        }
        // Families that have shrunk close up.
        for depth in 1..=self.levels.len() {
            let nodes = self.levels.get(depth).map_or(0, Level::len);
            for node in 0..nodes {
                inserter.regroup_if_sparse(self, depth, node as NodeId);
            }
        }
        inserter.regroup_if_sparse(self, self.levels.len(), NO_PARENT);
        // A top of one node says nothing: its children become the top.
        while self.levels.len() > 1 && self.levels[self.levels.len() - 1].len() == 1 {
            self.levels.pop();
            let top = self.levels.len() - 1;
            for scalars in &mut self.levels[top].scalars {
                scalars.parent = NO_PARENT;
            }
            self.forget_crowds();
        }
        self.refresh_whole();
        self.pages.compact();
        self.levels.iter_mut().for_each(Level::shrink_to_fit);
        self.refresh_crowds();
        true
    }

    /// Closes the gaps of nodes without tokens, and renumbers what points at the others.
    fn drop_empty(&mut self, depth: usize) {
        for node in (0..self.levels[depth].len()).rev() {
            if self.levels[depth].scalars[node].count == 0 {
                self.drop_node(depth, node);
            }
        }
    }

    /// Takes a node out of its level; the last node of the level gets its number. Its page or
    /// children are the caller's.
    pub fn drop_node(&mut self, depth: usize, node: usize) {
        self.forget_crowds();
        let last = self.levels[depth].len() - 1;
        let parent = self.levels[depth].scalars[node].parent;
        let level = &mut self.levels[depth];
        level.keys.swap_remove(node);
        level.values.swap_remove(node);
        level.scalars.swap_remove(node);
        if depth == 0 {
            level.pages.swap_remove(node);
        } else {
            level.children.swap_remove(node);
        }
        if let Some(above) = self.levels.get_mut(depth + 1) {
            above.children[parent as usize].retain(|&child| child as usize != node);
        }
        if node == last {
            return;
        }
        if depth == 0 {
            self.place(node);
        }
        let parent = self.levels[depth].scalars[node].parent;
        if let Some(above) = self.levels.get_mut(depth + 1) {
            for child in &mut above.children[parent as usize] {
                if *child as usize == last {
                    *child = node as NodeId;
                }
            }
        }
        if depth > 0 {
            let (below, from) = self.levels.split_at_mut(depth);
            for &child in &from[0].children[node] {
                below[depth - 1].scalars[child as usize].parent = node as NodeId;
            }
        }
    }
}
