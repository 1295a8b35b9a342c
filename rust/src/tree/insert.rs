//! Growth: a token descends to its nearest leaf; full nodes split, up to a new root.

use super::Tree;
use super::cluster::Cloud;
use super::node::Level;
use super::search::{Frontier, Nearest};
use super::summary::Sums;
use crate::ids::{KeyId, NO_PARENT, NodeId, PageId};
use crate::rows::{Elements, make_room, to_f32};

/// Nodes opened at each level: what goes astray is put right when its family regroups.
const FIELD_OF_VIEW: usize = 2;

/// What an insertion works with; reused from one to the next.
#[derive(Debug)]
pub struct Inserter {
    frontier: Frontier,
    /// Centred key of the token, [key_dim].
    point: Vec<f32>,
    /// Its value, [value_dim].
    value: Vec<f32>,
    sums: Sums,
    mean: Vec<f32>,
    pub cloud: Cloud,
    /// Ancestors of the token just inserted, from its leaf up.
    path: Vec<NodeId>,
}

/// What is right below a node.
pub enum Members {
    Page(PageId),
    Nodes(Vec<NodeId>),
}

impl Inserter {
    pub fn new(key_dim: usize, value_dim: usize) -> Self {
        Self {
            frontier: Frontier::default(),
            point: vec![0.0; key_dim],
            value: vec![0.0; value_dim],
            sums: Sums::new(key_dim, value_dim),
            mean: Vec::new(),
            cloud: Cloud::default(),
            path: Vec::new(),
        }
    }

    /// Makes it one for these dimensions.
    pub fn fit(&mut self, key_dim: usize, value_dim: usize) {
        if (self.point.len(), self.value.len()) != (key_dim, value_dim) {
            *self = Self::new(key_dim, value_dim);
        }
    }

    /// Adds one token. Its id must not be in the tree. After the last, [`Tree::refresh_crowds`].
    pub fn insert(&mut self, tree: &mut Tree, key: Elements<'_>, value: Elements<'_>, id: KeyId) {
        let squared = tree.transform.centre(key, &mut self.point);
        to_f32(value, &mut self.value);
        let lift = tree.transform.lift(squared);
        let crowds = tree.crowds.as_deref();
        let mut nearest = Nearest::new(&self.point, lift, FIELD_OF_VIEW, crowds);
        let leaf = nearest.find(&tree.levels, 0, &mut self.frontier) as usize;

        let page = &mut tree.levels[0].pages[leaf];
        *page = tree.pages.push(*page, key, value, id);
        tree.len += 1;
        tree.place(leaf);
        self.path.clear();
        let mut node = leaf as NodeId;
        for depth in 0..tree.levels.len() {
            self.path.push(node);
            let (key, value, level) = (&self.point, &self.value, &mut tree.levels[depth]);
            if !level.grow(node as usize, key, lift, value, &mut self.mean) {
                self.recompute(tree, depth, node as usize);
            }
            node = tree.levels[depth].scalars[node as usize].parent;
        }
        self.split_if_full(tree, 0, leaf);
        self.path.push(node);
        for depth in 1..self.path.len() {
            self.regroup_if_due(tree, depth, self.path[depth]);
        }
    }

    /// Splits a node that holds more tokens or children than it may, until its parts do not, and
    /// its ancestors where they are full by that.
    pub fn split_if_full(&mut self, tree: &mut Tree, depth: usize, node: usize) {
        let held = match depth {
            0 => tree.pages.len(tree.levels[0].pages[node]),
            _ => tree.levels[depth].children[node].len(),
        };
        if held <= Tree::family(&tree.options, depth).1 {
            return;
        }
        self.cloud.clear();
        tree.add_members_to(&mut self.cloud, depth, node);
        let mut rest: Vec<u32> = (0..held as u32).collect();
        let half = self.cloud.halve(&mut rest);
        let new = tree.levels[depth].len();
        let parent = tree.levels[depth].scalars[node].parent;
        let moved = if depth == 0 {
            let full = tree.levels[0].pages[node];
            tree.levels[0].pages[node] = tree.pages.subset(full, &rest);
            let moved = tree.pages.subset(full, &half);
            tree.pages.release(full);
            Members::Page(moved)
        } else {
            let members = std::mem::take(&mut tree.levels[depth].children[node]);
            let pick = |half: &[u32]| half.iter().map(|&i| members[i as usize]).collect();
            tree.levels[depth].children[node] = pick(&rest);
            Members::Nodes(pick(&half))
        };
        self.recompute(tree, depth, node);
        self.push_node(tree, depth, parent, moved);

        if parent == NO_PARENT {
            if tree.levels[depth].len() > 2 * Tree::top_target(&tree.options) {
                self.add_root(tree);
            }
        } else {
            tree.levels[depth + 1].children[parent as usize].push(new as NodeId);
            self.split_if_full(tree, depth + 1, parent as usize);
        }
        self.split_if_full(tree, depth, node);
        self.split_if_full(tree, depth, new);
    }

    /// Puts a level above the top.
    pub fn add_root(&mut self, tree: &mut Tree) {
        let depth = tree.levels.len();
        let (n, dim) = (tree.levels[depth - 1].len(), tree.transform.mean().len());
        self.cloud.clear();
        (0..n).for_each(|node| tree.add_node_to(&mut self.cloud, depth - 1, node));
        let mut groups = vec![(0..n as NodeId).collect::<Vec<_>>()];
        let target = n.div_ceil(tree.options.fanout);
        let capacity = Tree::child_capacity(&tree.options);
        self.cloud.regroup(&mut groups, target, capacity);
        let dtype = tree.options.summary_dtype;
        tree.levels
            .push(Level::new(dtype, dim, tree.pages.value_dim()));
        for members in groups.into_iter().filter(|members| !members.is_empty()) {
            self.push_node(tree, depth, NO_PARENT, Members::Nodes(members));
        }
    }

    /// Adds a node to a level, and links its members to it. The parent's list is the caller's.
    pub fn push_node(&mut self, tree: &mut Tree, depth: usize, parent: NodeId, members: Members) {
        tree.forget_crowds();
        let node = tree.levels[depth].len();
        self.sums.clear();
        self.sums.push_to(&mut tree.levels[depth]);
        let level = &mut tree.levels[depth];
        level.scalars[node].parent = parent;
        match members {
            Members::Page(page) => {
                make_room(&mut level.pages, 1);
                level.pages.push(page);
            }
            Members::Nodes(children) => {
                level.children.push(Vec::new());
                tree.adopt(depth, node, children);
            }
        }
        self.recompute(tree, depth, node);
    }

    /// Brings a node's summary up to date with its page or children.
    pub fn recompute(&mut self, tree: &mut Tree, depth: usize, node: usize) {
        self.sums.clear();
        if depth == 0 {
            let page = tree.levels[0].pages[node];
            self.sums.add_page(&tree.transform, &tree.pages, page);
            tree.place(node);
        } else {
            let children = &tree.levels[depth].children[node];
            self.sums.add_nodes(&tree.levels[depth - 1], children);
        }
        self.sums.write_to(&mut tree.levels[depth], node);
    }
}

impl Tree {
    /// Adds the tokens (leaf) or children of a node, centred and lifted.
    pub fn add_members_to(&self, cloud: &mut Cloud, depth: usize, node: usize) {
        if depth > 0 {
            let children = self.levels[depth].children[node].iter();
            return children.for_each(|&c| self.add_node_to(cloud, depth - 1, c as usize));
        }
        let keys = self.pages.keys(self.levels[0].pages[node]);
        for i in 0..keys.len {
            let point = cloud.push(keys.dim + 1, 1.0);
            let squared = self.transform.centre(keys.row(i), &mut point[..keys.dim]);
            point[keys.dim] = self.transform.lift(squared);
        }
    }

    /// Adds the mean of a node, weighing as much as its tokens.
    fn add_node_to(&self, cloud: &mut Cloud, depth: usize, node: usize) {
        let level = &self.levels[depth];
        let (dim, scalars) = (level.keys.dim(), &level.scalars[node]);
        let point = cloud.push(dim + 1, scalars.count as f32);
        to_f32(level.keys.row(node), &mut point[..dim]);
        point[dim] = scalars.lift;
    }

    /// Makes `children` the children of a node.
    pub fn adopt(&mut self, depth: usize, node: usize, children: Vec<NodeId>) {
        self.forget_crowds();
        for &child in &children {
            self.levels[depth - 1].scalars[child as usize].parent = node as NodeId;
        }
        self.levels[depth].children[node] = children;
    }
}
