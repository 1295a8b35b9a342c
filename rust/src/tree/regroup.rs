//! Upkeep of what grew: a node deals its grandchildren out among its children anew.
//!
//! A token that comes alone goes to the nearest leaf and never moves again, and a full node splits
//! in two without a look at its siblings. Once an eighth to a quarter of a node's tokens is new, it
//! regroups what lies two levels below it: a few rounds of k-means over one family. So a tree
//! that grew stays about as good as one that was built, and no insertion pays for more than one
//! family of each level.

use super::Tree;
use super::cluster;
use super::insert::{Inserter, Members};
use crate::ids::{NO_PARENT, NodeId};
use crate::random::Random;
use crate::rows::RowStore;
use std::ops::Range;

/// Regroupings while the tokens of a node double.
const REGROUPINGS: usize = 4;

/// Groups for so many members: more than their target size says, as a build has, whose full pages
/// split.
fn target(members: usize, size: usize) -> usize {
    (10 * members).div_ceil(9 * size)
}

impl Inserter {
    /// Regroups a node of level `depth`, above the leaves, when its count of tokens says so.
    /// [`NO_PARENT`] stands for the parent of the top level.
    pub fn regroup_if_due(&mut self, tree: &mut Tree, depth: usize, node: NodeId) {
        if (node == NO_PARENT) != (depth == tree.levels.len()) {
            return; // A new top level came between, or this node is no longer the top's parent.
        }
        let count = match node {
            NO_PARENT => tree.len,
            node => tree.levels[depth].scalars[node as usize].count as usize,
        };
        let period = (count.next_power_of_two() / (2 * REGROUPINGS)).max(1);
        // Heads whose counts are equal take turns.
        let turn = Random::new(tree.options.seed, tree.stream).below(period);
        if (count + turn).is_multiple_of(period) {
            self.regroup(tree, depth, node);
        }
    }

    /// Regroups a node that has more children than its grandchildren need.
    pub fn regroup_if_sparse(&mut self, tree: &mut Tree, depth: usize, node: NodeId) {
        let below = &tree.levels[depth - 1];
        let children: Vec<NodeId> = tree.children(depth, node);
        let members: usize = (children.iter())
            .map(|&child| match depth {
                1 => below.scalars[child as usize].count as usize,
                _ => below.children[child as usize].len(),
            })
            .sum();
        let size = Tree::family(&tree.options, depth - 1).0;
        if children.len() > cluster::most(target(members, size)) {
            self.regroup(tree, depth, node);
        }
    }

    /// Deals the tokens or nodes two levels below a node out among its children anew.
    pub fn regroup(&mut self, tree: &mut Tree, depth: usize, node: NodeId) {
        let below = depth - 1;
        let children = tree.children(depth, node);
        let cloud = &mut self.cloud;
        cloud.clear();
        let mut before = Vec::with_capacity(children.len());
        for &child in &children {
            let first = cloud.weights.len() as u32;
            tree.add_members_to(cloud, below, child as usize);
            before.push(first..cloud.weights.len() as u32);
        }
        let (size, capacity) = Tree::family(&tree.options, below);
        let mut groups = before.iter().map(|group| group.clone().collect()).collect();
        cloud.regroup(&mut groups, target(cloud.weights.len(), size), capacity);

        let members = self.regrouped(tree, below, &children, &before, &groups);
        let first_new = tree.levels[below].len() as NodeId;
        for (place, members) in members {
            match (children.get(place), members) {
                (None, members) => self.push_node(tree, below, node, members),
                (Some(&child), Members::Page(page)) => {
                    tree.levels[0].pages[child as usize] = page;
                    self.recompute(tree, 0, child as usize);
                }
                (Some(&child), Members::Nodes(nodes)) => {
                    tree.adopt(below, child as usize, nodes);
                    self.recompute(tree, below, child as usize);
                }
            }
        }
        if node != NO_PARENT {
            let new = first_new..tree.levels[below].len() as NodeId;
            tree.levels[depth].children[node as usize].extend(new);
        }
        // From the last on: closing a gap renumbers only the last node of the level.
        let mut empty: Vec<NodeId> = (children.iter().zip(&groups))
            .filter(|(_, group)| group.is_empty())
            .map(|(&child, _)| child)
            .collect();
        empty.sort_unstable();
        for &child in empty.iter().rev() {
            tree.drop_node(below, child as usize);
        }
        if node == NO_PARENT {
            tree.refresh_whole();
            if tree.levels[below].len() > 2 * Tree::top_target(&tree.options) {
                self.add_root(tree);
            }
            return;
        }
        self.recompute(tree, depth, node as usize);
        self.split_if_full(tree, depth, node as usize);
    }

    /// What the groups that changed and are not empty consist of now, by their place.
    fn regrouped(
        &self,
        tree: &mut Tree,
        below: usize,
        children: &[NodeId],
        before: &[Range<u32>],
        groups: &[Vec<u32>],
    ) -> Vec<(usize, Members)> {
        let changed = |&place: &usize| {
            let before = before.get(place).cloned().unwrap_or_default();
            !groups[place].iter().copied().eq(before)
        };
        let places = (0..groups.len()).filter(changed);
        let full = places.clone().filter(|&place| !groups[place].is_empty());
        if below > 0 {
            let level = &tree.levels[below];
            let nodes: Vec<NodeId> = (children.iter())
                .flat_map(|&child| level.children[child as usize].iter().copied())
                .collect();
            let pick = |place: usize| groups[place].iter().map(|&m| nodes[m as usize]).collect();
            return full.map(|p| (p, Members::Nodes(pick(p)))).collect();
        }
        // The rows leave their pages before they go into new ones: the pool need not grow.
        let pool = &mut tree.pages;
        let all = groups.iter().map(Vec::len).sum();
        let mut keys = RowStore::with_capacity(pool.dtype(), pool.key_dim(), all);
        let mut values = RowStore::with_capacity(pool.dtype(), pool.value_dim(), all);
        let mut ids = Vec::with_capacity(all);
        let mut stored = vec![0; all];
        for place in places.filter(|&place| place < children.len()) {
            let page = tree.levels[0].pages[children[place] as usize];
            for (row, member) in before[place].clone().enumerate() {
                stored[member as usize] = ids.len();
                keys.push(pool.keys(page).row(row));
                values.push(pool.values(page).row(row));
                ids.push(pool.ids(page)[row]);
            }
            pool.release(page);
        }
        full.map(|place| {
            let page = pool.allocate(groups[place].len());
            for (row, &member) in groups[place].iter().enumerate() {
                let at = stored[member as usize];
                pool.write(page, row, keys.row(at), values.row(at), ids[at]);
            }
            (place, Members::Page(page))
        })
        .collect()
    }
}

impl Tree {
    /// Children of a node above the leaves; [`NO_PARENT`]: the top level.
    fn children(&self, depth: usize, node: NodeId) -> Vec<NodeId> {
        match node {
            NO_PARENT => (0..self.levels[depth - 1].len() as NodeId).collect(),
            node => self.levels[depth].children[node as usize].clone(),
        }
    }
}
