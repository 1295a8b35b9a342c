//! Every invariant of a tree, verified from scratch. Slow; for tests and `check()`.

use super::Tree;
use super::project::Crowd;
use super::summary::Sums;
use crate::error::{Error, Result};
use crate::ids::{NO_PARENT, NodeId};
use crate::rows::{Dtype, norm, to_f32};
use std::collections::HashSet;

impl Tree {
    pub fn check(&self) -> Result<()> {
        self.check_links()
            .and_then(|()| self.check_crowds())
            .and_then(|()| self.check_pages())
            .and_then(|()| self.check_places())
            .and_then(|()| self.check_summaries())
            .map_err(Error::Invariant)
    }

    /// Parents and children agree; every node has exactly one parent, the top none; no node is
    /// empty or over-full.
    fn check_links(&self) -> std::result::Result<(), String> {
        let capacity = Tree::child_capacity(&self.options);
        for (depth, level) in self.levels.iter().enumerate() {
            let n = level.len();
            let links = if depth == 0 {
                level.pages.len()
            } else {
                level.children.len()
            };
            if [level.keys.len(), level.values.len(), links] != [n; 3] || n == 0 {
                return Err(format!(
                    "level {depth}: arrays of different lengths, or no node"
                ));
            }
            let Some(above) = self.levels.get(depth + 1) else {
                if level.scalars.iter().any(|s| s.parent != NO_PARENT) {
                    return Err(format!("level {depth}: a top node has a parent"));
                }
                continue;
            };
            let mut seen = vec![false; n];
            for (parent, children) in above.children.iter().enumerate() {
                if children.is_empty() || children.len() > capacity {
                    let count = children.len();
                    return Err(format!(
                        "level {}: node {parent} has {count} children",
                        depth + 1
                    ));
                }
                for &child in children {
                    let twice = std::mem::replace(&mut seen[child as usize], true);
                    if twice || level.scalars[child as usize].parent as usize != parent {
                        return Err(format!("level {depth}: node {child} is linked wrongly"));
                    }
                }
            }
            if let Some(orphan) = seen.iter().position(|&seen| !seen) {
                return Err(format!("level {depth}: node {orphan} has no parent"));
            }
        }
        Ok(())
    }

    /// Large families are sorted whole, or not at all.
    fn check_crowds(&self) -> std::result::Result<(), String> {
        let Some(crowds) = self.crowds.as_ref().filter(|crowds| !crowds.is_empty()) else {
            return Ok(());
        };
        for depth in 1..=self.levels.len() {
            let families: Vec<(NodeId, usize)> = match self.levels.get(depth) {
                None => vec![(NO_PARENT, self.levels[depth - 1].len())],
                Some(level) => (0..).zip(level.children.iter().map(Vec::len)).collect(),
            };
            for (node, count) in families {
                let sorted = crowds.get(depth, node).map(Crowd::count);
                if sorted != (count > self.options.scan_below).then_some(count) {
                    return Err(format!(
                        "level {depth}: node {node} has {count} children, {sorted:?} sorted"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Every token in one page, pages within capacity, the pool's books right.
    fn check_pages(&self) -> std::result::Result<(), String> {
        self.pages.check()?;
        let mut ids = HashSet::new();
        for &page in &self.levels[0].pages {
            let len = self.pages.len(page);
            if len == 0 || len > self.options.page_capacity || self.pages.references(page) == 0 {
                return Err(format!("page {page:?} holds {len} tokens"));
            }
            if let Some(id) = self.pages.ids(page).iter().find(|&&id| !ids.insert(id)) {
                return Err(format!("token {id} is in two pages"));
            }
        }
        if ids.len() != self.len || self.pages.rows_held() != self.len {
            return Err(format!(
                "{} tokens in pages, {} counted",
                ids.len(),
                self.len
            ));
        }
        Ok(())
    }

    /// Every node says what its tokens say, within rounding.
    fn check_summaries(&self) -> std::result::Result<(), String> {
        let (key_dim, value_dim) = (self.pages.key_dim(), self.pages.value_dim());
        for (depth, level) in self.levels.iter().enumerate() {
            for node in 0..level.len() {
                let mut truth = Sums::new(key_dim, value_dim);
                self.add_below(depth, node, &mut truth);
                let mut fresh = super::node::Level::new(Dtype::F32, key_dim, value_dim);
                truth.push_to(&mut fresh);
                let (ours, want) = (&level.scalars[node], &fresh.scalars[0]);
                if ours.count != want.count {
                    let (a, b) = (ours.count, want.count);
                    return Err(format!(
                        "level {depth}: node {node} counts {a} of {b} tokens"
                    ));
                }
                let scale = self.transform.radius() + want.key_radius + want.half_norm.sqrt();
                if !close(&level.keys, node, &fresh.keys, scale) {
                    return Err(format!("level {depth}: node {node} has a wrong mean key"));
                }
                if !close(&level.values, node, &fresh.values, want.value_spread) {
                    return Err(format!("level {depth}: node {node} has a wrong mean value"));
                }
            }
        }
        Ok(())
    }

    fn add_below(&self, depth: usize, node: usize, sums: &mut Sums) {
        if depth == 0 {
            return sums.add_page(&self.transform, &self.pages, self.levels[0].pages[node]);
        }
        for &child in &self.levels[depth].children[node] {
            self.add_below(depth - 1, child as usize, sums);
        }
    }
}

fn close(
    ours: &crate::rows::RowStore,
    node: usize,
    fresh: &crate::rows::RowStore,
    scale: f32,
) -> bool {
    let (mut a, mut b) = (vec![0.0; ours.dim()], vec![0.0; ours.dim()]);
    to_f32(ours.row(node), &mut a);
    to_f32(fresh.row(0), &mut b);
    if ours.dtype() == Dtype::F16 {
        // Means beyond the range of f16 are stored as its largest number.
        let most = half::f16::MAX.to_f32();
        b.iter_mut().for_each(|x| *x = x.clamp(-most, most));
    }
    // Below the floor squares vanish, and with them the scale.
    let size = scale + norm(&b) + 1e-15;
    let tolerance = match ours.dtype() {
        Dtype::F32 => 1e-4,
        Dtype::F16 => 2e-3,
        Dtype::Bf16 => 1e-2,
    } * size;
    a.iter().zip(&b).all(|(x, y)| (x - y).abs() <= tolerance)
}
