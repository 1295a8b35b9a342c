//! Growth: a token descends to its nearest leaf; full nodes split, up to a new root.

use super::node::Level;
use super::search::{Frontier, Nearest};
use super::split::bisect;
use super::summary::Sums;
use super::{LINK_FIELD_OF_VIEW, Tree};
use crate::ids::{KeyId, NO_PARENT, NodeId};
use crate::random::Random;
use crate::rows::{Elements, make_room, to_f32};

/// What an insertion works with; reused from one to the next.
#[derive(Debug)]
pub struct Inserter {
    frontier: Frontier,
    point: Vec<f32>,
    sums: Sums,
}

impl Inserter {
    pub fn new(key_dim: usize, value_dim: usize) -> Self {
        Self {
            frontier: Frontier::default(),
            point: vec![0.0; key_dim],
            sums: Sums::new(key_dim, value_dim),
        }
    }

    /// Adds one token. Its id must not be in the tree.
    pub fn insert(&mut self, tree: &mut Tree, key: Elements<'_>, value: Elements<'_>, id: KeyId) {
        let squared = tree.transform.centre(key, &mut self.point);
        let mut nearest = Nearest {
            point: &self.point,
            lift: tree.transform.lift(squared),
            field_of_view: LINK_FIELD_OF_VIEW,
        };
        let leaf = nearest.find(&tree.levels, 0, &mut self.frontier) as usize;

        let page = &mut tree.levels[0].pages[leaf];
        *page = tree.pages.push(*page, key, value, id);
        let mut node = leaf;
        for depth in 0..tree.levels.len() {
            self.recompute(tree, depth, node);
            node = tree.levels[depth].scalars[node].parent as usize;
        }
        tree.len += 1;
        if tree.pages.len(tree.levels[0].pages[leaf]) > tree.options.page_capacity {
            self.split(tree, 0, leaf);
        }
    }

    /// Splits a full node in two, and its ancestors where they are full by that.
    fn split(&mut self, tree: &mut Tree, depth: usize, node: usize) {
        let sides = bisect(
            &tree.member_points(depth, node),
            tree.transform.mean().len() + 1,
        );
        let half = |side: bool| -> Vec<u32> {
            (0..sides.len() as u32)
                .filter(|&i| sides[i as usize] == side)
                .collect()
        };
        let new = tree.levels[depth].len();
        self.sums.clear();
        self.sums.push_to(&mut tree.levels[depth]);
        let level = &mut tree.levels[depth];
        let parent = level.scalars[node].parent;
        level.scalars[new].parent = parent;
        if depth == 0 {
            let full = level.pages[node];
            level.pages[node] = tree.pages.subset(full, &half(false));
            make_room(&mut level.pages, 1);
            level.pages.push(tree.pages.subset(full, &half(true)));
            tree.pages.release(full);
        } else {
            let members = std::mem::take(&mut level.children[node]);
            let pick = |side| {
                half(side)
                    .iter()
                    .map(|&i| members[i as usize])
                    .collect::<Vec<_>>()
            };
            level.children[node] = pick(false);
            let moved = pick(true);
            for &child in &moved {
                tree.levels[depth - 1].scalars[child as usize].parent = new as NodeId;
            }
            tree.levels[depth].children.push(moved);
        }
        self.recompute(tree, depth, node);
        self.recompute(tree, depth, new);

        if parent == NO_PARENT {
            if tree.levels[depth].len() > 2 * Tree::top_target(&tree.options) {
                self.add_root(tree);
            }
            return;
        }
        let siblings = &mut tree.levels[depth + 1].children[parent as usize];
        siblings.push(new as NodeId);
        if siblings.len() > Tree::child_capacity(&tree.options) {
            self.split(tree, depth + 1, parent as usize);
        }
    }

    /// Puts a level above the top: random nodes of it seed the new ones, then two passes of means.
    fn add_root(&mut self, tree: &mut Tree) {
        let depth = tree.levels.len();
        let top = &tree.levels[depth - 1];
        let (n, dim) = (top.len(), tree.transform.mean().len());
        let count = n.div_ceil(tree.options.fanout);
        let points: Vec<Vec<f32>> = (0..n).map(|i| top.coordinates(i)).collect();
        let mut random = Random::new(tree.options.seed, tree.stream ^ tree.len as u64);
        let seeds = random.sample(n, count);
        let mut centres: Vec<Vec<f32>> =
            seeds.iter().map(|&i| points[i as usize].clone()).collect();
        let mut groups = group(&points, &centres);
        for _ in 0..2 {
            for (centre, members) in centres.iter_mut().zip(&groups) {
                if !members.is_empty() {
                    centre.fill(0.0);
                    let share = 1.0 / members.len() as f32;
                    for &m in members {
                        let point = &points[m as usize];
                        centre
                            .iter_mut()
                            .zip(point)
                            .for_each(|(c, x)| *c += share * x);
                    }
                }
            }
            groups = group(&points, &centres);
        }
        let mut level = Level::new(tree.options.summary_dtype, dim, tree.pages.value_dim());
        for members in groups.into_iter().filter(|members| !members.is_empty()) {
            self.sums.clear();
            self.sums.push_to(&mut level);
            level.children.push(members);
        }
        tree.levels.push(level);
        for node in 0..tree.levels[depth].len() {
            for child in tree.levels[depth].children[node].clone() {
                tree.levels[depth - 1].scalars[child as usize].parent = node as NodeId;
            }
            self.recompute(tree, depth, node);
        }
        let capacity = Tree::child_capacity(&tree.options);
        let full = |tree: &Tree| {
            let children = &tree.levels[depth].children;
            children.iter().position(|members| members.len() > capacity)
        };
        while let Some(node) = full(tree) {
            self.split(tree, depth, node);
        }
    }

    /// Brings a node's summary up to date with its page or children.
    pub fn recompute(&mut self, tree: &mut Tree, depth: usize, node: usize) {
        self.sums.clear();
        if depth == 0 {
            let page = tree.levels[0].pages[node];
            self.sums.add_page(&tree.transform, &tree.pages, page);
        } else {
            for &child in &tree.levels[depth].children[node] {
                self.sums.add_node(&tree.levels[depth - 1], child as usize);
            }
        }
        self.sums.write_to(&mut tree.levels[depth], node);
    }
}

impl Tree {
    /// Centred, lifted vectors of a node's tokens (leaf) or children, [n, key_dim + 1].
    fn member_points(&self, depth: usize, node: usize) -> Vec<f32> {
        let level = &self.levels[depth];
        if depth > 0 {
            let children = level.children[node].iter();
            return children
                .flat_map(|&c| self.levels[depth - 1].coordinates(c as usize))
                .collect();
        }
        let keys = self.pages.keys(level.pages[node]);
        let width = keys.dim + 1;
        let mut points = vec![0.0; keys.len * width];
        for (i, point) in points.chunks_exact_mut(width).enumerate() {
            let squared = self.transform.centre(keys.row(i), &mut point[..width - 1]);
            point[width - 1] = self.transform.lift(squared);
        }
        points
    }
}

impl Level {
    /// Mean key and mean lift of a node, [key_dim + 1].
    fn coordinates(&self, node: usize) -> Vec<f32> {
        let mut point = vec![0.0; self.keys.dim() + 1];
        let (key, lift) = point.split_at_mut(self.keys.dim());
        to_f32(self.keys.row(node), key);
        lift[0] = self.scalars[node].lift;
        point
    }
}

/// Members of each centre: the points nearest to it.
fn group(points: &[Vec<f32>], centres: &[Vec<f32>]) -> Vec<Vec<u32>> {
    let mut groups = vec![Vec::new(); centres.len()];
    for (i, point) in points.iter().enumerate() {
        let distance = |centre: &[f32]| -> f32 {
            point
                .iter()
                .zip(centre)
                .map(|(x, c)| (x - c) * (x - c))
                .sum()
        };
        let nearest = (0..centres.len())
            .min_by(|&a, &b| distance(&centres[a]).total_cmp(&distance(&centres[b])))
            .expect("at least one centre");
        groups[nearest].push(i as u32);
    }
    groups
}
