//! Building a tree from a bulk of keys: promote, link, refine, regroup, split, lay out.
//!
//! No step scans all pairs: every link is found by a descent through the levels above it. All
//! choices depend on the seed and the keys alone, never on the number of threads.

use super::cluster::Cloud;
use super::link::{BLOCK, Block};
use super::node::{Level, Scalars};
use super::project::Crowds;
use super::summary::Sums;
use super::{Tree, Whole};
use crate::config::TreeOptions;
use crate::error::Result;
use crate::ids::{KeyId, NO_PARENT, NodeId};
use crate::pages::PagePool;
use crate::random::Random;
use crate::rows::{Dtype, Element, Elements, Strided, squares, to_f32, typed};
use crate::threads::Workers;
use crate::transform::{Transform, fold_rows};
use std::sync::OnceLock;

/// Nodes whose means one work item takes.
const NODES: usize = 256;

/// Keys, values and ids of the tokens to index; the arrays are equally long and not empty.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    pub keys: Strided<'a>,
    pub values: Strided<'a>,
    pub ids: &'a [KeyId],
}

impl Tree {
    /// Fails only if the workers are cancelled. With `like`, tokens are centred and lifted as those of
    /// another tree, and their means kept in the same type.
    pub fn build(
        tokens: Tokens<'_>,
        like: Option<&Self>,
        options: &TreeOptions,
        stream: u64,
        workers: Workers<'_>,
    ) -> Result<Self> {
        let (transform, mut options) = match like {
            Some(tree) => (tree.transform.clone(), tree.options.clone()),
            None => (Transform::fit(tokens.keys, workers)?, options.clone()),
        };
        if options.summary_dtype == Dtype::F16 && !fits_f16(&transform, tokens.values, workers)? {
            options.summary_dtype = Dtype::Bf16;
        }
        let options = &options;
        let mut draft = Draft::promote(tokens.keys, &transform, options, stream, workers)?;
        draft.link_all(workers)?;
        for _ in 0..options.refine_passes {
            draft.move_to_means(workers)?;
            draft.link_all(workers)?;
        }
        if options.refine_passes > 0 {
            draft.move_to_means(workers)?;
            for depth in (1..=draft.levels.len()).rev() {
                draft.regroup(depth, options, workers)?;
            }
        }
        draft.split_full_leaves(options.page_capacity, workers)?;
        draft.move_to_means(workers)?;
        draft.split_full_nodes(Tree::child_capacity(options), workers)?;
        let mut tree = draft.lay_out(tokens, options, stream, workers)?;
        if 2 * Tree::top_target(options) > options.scan_below {
            let width = tokens.keys.dim + 1;
            tree.crowds = Some(Box::new(Crowds::new(width, options.seed, stream)));
            tree.refresh_crowds();
        }
        Ok(tree)
    }
}

/// Levels under construction: f32 means of keys alone; the children of a leaf are points.
struct Draft<'a> {
    keys: Strided<'a>,
    /// Extra coordinates of the keys.
    lifts: Vec<f32>,
    transform: &'a Transform,
    levels: Vec<Level>,
}

impl<'a> Draft<'a> {
    /// Random points seed the leaves, 1/fanout of those the level above, and so on.
    fn promote(
        keys: Strided<'a>,
        transform: &'a Transform,
        options: &TreeOptions,
        stream: u64,
        workers: Workers<'_>,
    ) -> Result<Self> {
        let mut sizes = vec![keys.len.div_ceil(options.page_size)];
        while sizes[sizes.len() - 1] > Tree::top_target(options) {
            sizes.push(sizes[sizes.len() - 1].div_ceil(options.fanout));
        }
        let seeds = Random::new(options.seed, stream).sample(keys.len, sizes[0]);
        let mut draft = Self {
            keys,
            lifts: transform.lifts(keys, workers)?,
            transform,
            levels: Vec::with_capacity(sizes.len()),
        };
        let mut point = vec![0.0; keys.dim];
        for size in sizes {
            let mut level = Level::with_capacity(Dtype::F32, keys.dim, 0, size, true);
            for &seed in &seeds[..size] {
                let lift = draft.coordinates(0, seed as usize, &mut point);
                push(&mut level, &point, lift, 1);
            }
            draft.levels.push(level);
        }
        Ok(draft)
    }

    /// Links every level to the one above, top down, and the points to the leaves.
    fn link_all(&mut self, workers: Workers<'_>) -> Result<()> {
        for depth in (0..self.levels.len()).rev() {
            let items = self.items(depth);
            let mut found = vec![NO_PARENT; items.len()];
            let mut blocks: Vec<_> = items.chunks(BLOCK).zip(found.chunks_mut(BLOCK)).collect();
            workers.for_each_mut(&mut blocks, |_, (items, found)| {
                let mut block = Block::with_capacity(items.len(), self.keys.dim);
                for &item in *items {
                    block.push(self.keys.dim, |point| {
                        self.coordinates(depth, item as usize, point)
                    });
                }
                block.find_parents(&self.levels, depth, found);
            })?;
            let mut parents = vec![NO_PARENT; items.len()];
            for (&item, &parent) in items.iter().zip(&found) {
                parents[item as usize] = parent;
            }
            let level = &mut self.levels[depth];
            level.children.resize_with(level.len(), Vec::new);
            level.children.iter_mut().for_each(Vec::clear);
            for (item, &parent) in parents.iter().enumerate() {
                level.children[parent as usize].push(item as u32);
            }
            self.unlink_empty(depth);
        }
        Ok(())
    }

    /// Takes nodes without children out of the lists above, from `depth` upwards, so that every
    /// opened node leads down to level `depth`. They are linked again by the next pass.
    fn unlink_empty(&mut self, depth: usize) {
        for above in depth + 1..self.levels.len() {
            let (below, from) = self.levels.split_at_mut(above);
            let full = |node: &NodeId| !below[above - 1].children[*node as usize].is_empty();
            from[0]
                .children
                .iter_mut()
                .for_each(|list| list.retain(full));
        }
    }

    /// All that is to be linked to level `depth`. Points that shared a leaf before are neighbours:
    /// they will open the same nodes.
    fn items(&self, depth: usize) -> Vec<u32> {
        if depth > 0 || self.levels[0].children.is_empty() {
            let count = match depth {
                0 => self.keys.len,
                _ => self.levels[depth - 1].len(),
            };
            return (0..count as u32).collect();
        }
        let top = (0..self.levels[self.levels.len() - 1].len() as u32).collect();
        self.levels
            .iter()
            .rev()
            .fold(top, |nodes: Vec<u32>, level| {
                let children = nodes
                    .iter()
                    .flat_map(|&node| &level.children[node as usize]);
                children.copied().collect()
            })
    }

    /// Centred key and lift of a child of level `depth`: a point, or a node of the level below.
    fn coordinates(&self, depth: usize, item: usize, point: &mut [f32]) -> f32 {
        if depth == 0 {
            to_f32(self.keys.row(item), point);
            let mean = self.transform.mean().iter();
            point.iter_mut().zip(mean).for_each(|(x, m)| *x -= m);
            return self.lifts[item];
        }
        let below = &self.levels[depth - 1];
        to_f32(below.keys.row(item), point);
        below.scalars[item].lift
    }

    /// Tokens of a child of level `depth`.
    fn count(&self, depth: usize, item: u32) -> u32 {
        match depth {
            0 => 1,
            _ => self.levels[depth - 1].scalars[item as usize].count,
        }
    }

    fn move_to_means(&mut self, workers: Workers<'_>) -> Result<()> {
        (0..self.levels.len()).try_for_each(|depth| self.move_level(depth, workers))
    }

    /// Moves the nodes of a level to the means of their tokens; an empty one stays where it was.
    fn move_level(&mut self, depth: usize, workers: Workers<'_>) -> Result<()> {
        let width = self.keys.dim + 1;
        let mut means = vec![0.0; self.levels[depth].len() * width];
        let mut blocks: Vec<&mut [f32]> = means.chunks_mut(NODES * width).collect();
        workers.for_each_mut(&mut blocks, |block, means| {
            let first = block * NODES;
            for (node, mean) in means.chunks_exact_mut(width).enumerate() {
                self.mean(depth, &self.levels[depth].children[first + node], mean);
            }
        })?;
        for (node, mean) in means.chunks_exact(width).enumerate() {
            self.move_node(depth, node, mean);
        }
        Ok(())
    }

    /// Writes the mean centred key and lift of the tokens below children of level `depth`.
    fn mean(&self, depth: usize, children: &[u32], out: &mut [f32]) {
        let (lift, key) = out.split_last_mut().expect("a mean has a lift");
        for &child in children {
            let (item, weight) = (child as usize, self.count(depth, child) as f32);
            match depth {
                0 => {
                    add(self.keys.row(item), 1.0, key);
                    *lift += self.lifts[item];
                }
                _ => {
                    let below = &self.levels[depth - 1];
                    add(below.keys.row(item), weight, key);
                    *lift += weight * below.scalars[item].lift;
                }
            }
        }
        let count: u32 = children.iter().map(|&child| self.count(depth, child)).sum();
        let share = 1.0 / count.max(1) as f32;
        out.iter_mut().for_each(|x| *x *= share);
        if depth == 0 {
            let mean = self.transform.mean().iter();
            out.iter_mut().zip(mean).for_each(|(x, m)| *x -= m);
        }
    }

    /// Makes a node say this mean centred key and lift, unless it has no tokens.
    fn move_node(&mut self, depth: usize, node: usize, mean: &[f32]) {
        let children = self.levels[depth].children[node].iter();
        let count = children.map(|&child| self.count(depth, child)).sum();
        let level = &mut self.levels[depth];
        level.scalars[node].count = count;
        if count > 0 {
            let (&lift, key) = mean.split_last().expect("a mean has a lift");
            level.keys.set_f32(node, key);
            level.scalars[node].lift = lift;
            level.scalars[node].half_norm = 0.5 * (squares(key) + lift * lift);
        }
    }

    /// The families of level `depth` deal their grandchildren out anew: other nodes below.
    fn regroup(&mut self, depth: usize, options: &TreeOptions, workers: Workers<'_>) -> Result<()> {
        let below = depth - 1;
        let all = || (0..self.levels[below].len() as NodeId).collect();
        let families = match self.levels.get(depth) {
            Some(level) => level.children.clone(),
            None => vec![all()],
        };
        let dim = self.keys.dim;
        let (size, capacity) = Tree::family(options, below);
        let mut dealt: Vec<Vec<Vec<u32>>> = vec![Vec::new(); families.len()];
        workers.for_each_mut(&mut dealt, |family, dealt| {
            let (mut cloud, mut members) = (Cloud::default(), Vec::new());
            let mut groups = Vec::new();
            for &child in &families[family] {
                let children = &self.levels[below].children[child as usize];
                let first = members.len() as u32;
                self.add_to(&mut cloud, below, children);
                members.extend_from_slice(children);
                groups.push((first..members.len() as u32).collect());
            }
            cloud.regroup(&mut groups, members.len().div_ceil(size), capacity);
            let full = groups.into_iter().filter(|group| !group.is_empty());
            let named = |group: Vec<u32>| group.iter().map(|&i| members[i as usize]).collect();
            *dealt = full.map(named).collect();
        })?;
        let mut level = Level::new(Dtype::F32, dim, 0);
        for (family, groups) in dealt.into_iter().enumerate() {
            let first = level.children.len() as NodeId;
            level.children.extend(groups);
            if let Some(above) = self.levels.get_mut(depth) {
                above.children[family] = (first..level.children.len() as NodeId).collect();
            }
        }
        let (nowhere, nodes) = (vec![0.0; dim], level.children.len());
        (0..nodes).for_each(|_| push(&mut level, &nowhere, 0.0, 0));
        self.levels[below] = level;
        self.move_level(below, workers)
    }

    /// Adds children of level `depth` to the points of a cloud.
    fn add_to(&self, cloud: &mut Cloud, depth: usize, children: &[u32]) {
        let dim = self.keys.dim;
        for &child in children {
            let point = cloud.push(dim + 1, self.count(depth, child) as f32);
            point[dim] = self.coordinates(depth, child as usize, &mut point[..dim]);
        }
    }

    fn split_full_leaves(&mut self, capacity: usize, workers: Workers<'_>) -> Result<()> {
        self.split_level(0, capacity, workers)
    }

    /// Splits upper nodes with too many children, from below, so that splits go up.
    fn split_full_nodes(&mut self, capacity: usize, workers: Workers<'_>) -> Result<()> {
        (1..self.levels.len()).try_for_each(|depth| self.split_level(depth, capacity, workers))
    }

    /// Halves every node of a level until none has more than `capacity` children. New nodes
    /// become siblings.
    fn split_level(&mut self, depth: usize, capacity: usize, workers: Workers<'_>) -> Result<()> {
        let parents = self.parents(depth);
        let mut mean = vec![0.0; self.keys.dim + 1];
        for node in 0..self.levels[depth].len() {
            let mut waiting = vec![node];
            while let Some(full) = waiting.pop() {
                workers.check()?;
                let children = &self.levels[depth].children[full];
                if children.len() <= capacity {
                    continue;
                }
                let mut cloud = Cloud::default();
                self.add_to(&mut cloud, depth, children);
                let mut rest = (0..children.len() as u32).collect();
                let half = cloud.halve(&mut rest);
                let named = |half: Vec<u32>| half.iter().map(|&i| children[i as usize]).collect();
                let halves: [Vec<u32>; 2] = [named(rest), named(half)];
                let level = &mut self.levels[depth];
                let new = level.len();
                push(level, &mean[..mean.len() - 1], 0.0, 0);
                level.children.push(Vec::new());
                for (side, half) in [full, new].into_iter().zip(halves) {
                    mean.fill(0.0);
                    self.mean(depth, &half, &mut mean);
                    self.levels[depth].children[side] = half;
                    self.move_node(depth, side, &mean);
                }
                if let (Some(parents), Some(above)) = (&parents, self.levels.get_mut(depth + 1)) {
                    above.children[parents[node] as usize].push(new as NodeId);
                }
                waiting.extend([full, new]);
            }
        }
        Ok(())
    }

    /// Parents of the nodes of a level, unless it is the top.
    fn parents(&self, depth: usize) -> Option<Vec<NodeId>> {
        let above = self.levels.get(depth + 1)?;
        let mut parents = vec![NO_PARENT; self.levels[depth].len()];
        for (node, children) in above.children.iter().enumerate() {
            children
                .iter()
                .for_each(|&c| parents[c as usize] = node as NodeId);
        }
        Some(parents)
    }

    /// Numbers the nodes so that the children of a node are neighbours, without empty ones, and
    /// copies the rows into pages in that order.
    fn lay_out(
        self,
        tokens: Tokens<'_>,
        options: &TreeOptions,
        stream: u64,
        workers: Workers<'_>,
    ) -> Result<Tree> {
        let (key_dim, value_dim) = (tokens.keys.dim, tokens.values.dim);
        let top = self.levels.len() - 1;
        let full =
            |depth: usize, node: &NodeId| self.levels[depth].scalars[*node as usize].count > 0;
        let mut orders: Vec<Vec<NodeId>> = vec![Vec::new(); top + 1];
        orders[top] = (0..self.levels[top].len() as NodeId)
            .filter(|n| full(top, n))
            .collect();
        for depth in (0..top).rev() {
            let above = &self.levels[depth + 1];
            let children = orders[depth + 1]
                .iter()
                .flat_map(|&n| &above.children[n as usize]);
            orders[depth] = children.copied().filter(|n| full(depth, n)).collect();
        }

        let mut pages = PagePool::new(tokens.keys.dtype(), key_dim, value_dim);
        pages.reserve(tokens.keys.len, orders[0].len());
        let mut sums = Sums::new(key_dim, value_dim);
        let mut levels: Vec<Level> = Vec::with_capacity(top + 1);
        for (depth, order) in orders.iter().enumerate() {
            let mut level =
                Level::with_capacity(options.summary_dtype, key_dim, value_dim, order.len(), true);
            let mut next_child = 0;
            for &node in order {
                workers.check()?;
                let members = &self.levels[depth].children[node as usize];
                sums.clear();
                if let Some(below) = levels.last_mut() {
                    let count = members.iter().filter(|n| full(depth - 1, n)).count();
                    let children: Vec<NodeId> =
                        (next_child..next_child + count as NodeId).collect();
                    next_child += count as NodeId;
                    for &child in &children {
                        sums.add_node(below, child as usize);
                        below.scalars[child as usize].parent = level.len() as NodeId;
                    }
                    level.children.push(children);
                } else {
                    let page = pages.allocate(members.len());
                    for (i, &member) in members.iter().enumerate() {
                        let member = member as usize;
                        let (key, value) = (tokens.keys.row(member), tokens.values.row(member));
                        pages.write(page, i, key, value, tokens.ids[member]);
                    }
                    sums.add_page(self.transform, &pages, page);
                    level.pages.push(page);
                }
                sums.push_to(&mut level);
            }
            levels.push(level);
        }
        let leaves = &mut levels[0];
        leaves.children = Vec::new();
        leaves.pages.shrink_to_fit();
        Ok(Tree {
            options: options.clone(),
            stream,
            transform: self.transform.clone(),
            pages,
            whole: Whole::of(&levels[top]),
            levels,
            len: tokens.keys.len,
            crowds: None,
            places: OnceLock::new(),
        })
    }
}

/// Appends a node without children.
fn push(level: &mut Level, key: &[f32], lift: f32, count: u32) {
    level.keys.push_f32(key);
    level.values.push_f32(&[]);
    level.scalars.push(Scalars {
        parent: NO_PARENT,
        count,
        log_count: 0.0,
        lift,
        half_norm: 0.5 * (squares(key) + lift * lift),
        key_radius: 0.0,
        value_spread: 0.0,
    });
}

/// `sum += weight * row`
fn add(row: Elements<'_>, weight: f32, sum: &mut [f32]) {
    typed!(Elements, row, row => {
        sum.iter_mut().zip(row).for_each(|(s, &x)| *s += weight * Element::to_f32(x));
    });
}

/// Whether means of these keys and values are well inside the range of f16.
fn fits_f16(transform: &Transform, values: Strided<'_>, workers: Workers<'_>) -> Result<bool> {
    let inside = |largest: f32| largest == 0.0 || (1e-2..3e4).contains(&largest);
    let largest = fold_rows(values, workers, |largest: &mut Vec<f32>, row| {
        largest.resize(row.len(), 0.0);
        let each = largest.iter_mut().zip(row);
        each.for_each(|(a, x)| *a = a.max(x.abs()));
    })?;
    let largest = largest.iter().flatten().fold(0.0, |a: f32, &x| a.max(x));
    Ok(inside(transform.radius()) && inside(largest))
}
