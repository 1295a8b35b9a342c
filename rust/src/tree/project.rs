//! Prioritized order in large nodes: which children of a node to score, when scoring all is too
//! much (Li and Malik, Prioritized DCI, 2017; the paper's M-DCI search uses it at every level).
//!
//! Points near each other stay near along every direction, so the children are sorted along a few
//! random ones. A search walks each order outwards from its own projection, nearest first; a child
//! met along all simple directions of one composite index is a candidate.

use super::node::Level;
use crate::ids::{NO_PARENT, NodeId};
use crate::random::Random;
use crate::rows::to_f32;
use std::collections::HashMap;

/// Composite indices: a child is a candidate once one of them says so.
const COMPOSITE: usize = 2;
/// Simple directions of a composite index, all of which must meet a child.
const SIMPLE: usize = 2;
pub const DIRECTIONS: usize = COMPOSITE * SIMPLE;

/// Random directions of a tree.
#[derive(Debug, Clone)]
pub struct Projector {
    /// [DIRECTIONS, dim], signs.
    signs: Vec<f32>,
    dim: usize,
}

impl Projector {
    pub fn new(dim: usize, seed: u64, stream: u64) -> Self {
        let mut random = Random::new(seed, !stream);
        let sign = |_| if random.below(2) == 0 { 1.0 } else { -1.0 };
        Self {
            signs: (0..DIRECTIONS * dim).map(sign).collect(),
            dim,
        }
    }

    /// Projections of a point [dim], or of the point and its extra coordinate.
    pub fn project(&self, point: &[f32], lift: f32) -> [f32; DIRECTIONS] {
        let mut rows = self.signs.chunks_exact(self.dim);
        std::array::from_fn(|_| {
            let signs = rows.next().expect("a row per direction");
            let terms = point.iter().zip(signs);
            terms.map(|(x, s)| x * s).sum::<f32>() + lift * signs[self.dim - 1]
        })
    }

    pub fn bytes(&self) -> usize {
        self.signs.capacity() * size_of::<f32>()
    }
}

/// The large families of a tree. Whatever changes the links of a tree forgets them all, and
/// everything is scored until they are made again.
#[derive(Debug, Clone)]
pub struct Crowds {
    projector: Projector,
    /// Level and node of the parent, with [`NO_PARENT`] for that of the top level.
    by_parent: HashMap<(usize, NodeId), Crowd>,
}

impl Crowds {
    /// `width`: of a lifted point.
    pub fn new(width: usize, seed: u64, stream: u64) -> Self {
        Self {
            projector: Projector::new(width, seed, stream),
            by_parent: HashMap::new(),
        }
    }

    pub fn forget(&mut self) {
        self.by_parent.clear();
    }

    /// Sorts the families of more than `scan_below` children, unless none was forgotten.
    pub fn refresh(&mut self, levels: &[Level], scan_below: usize) {
        if !self.by_parent.is_empty() {
            return;
        }
        for depth in 1..=levels.len() {
            let below = &levels[depth - 1];
            let mut point = vec![0.0; below.keys.dim()];
            let mut sort = |node: NodeId, children: &[NodeId]| {
                if children.len() > scan_below {
                    let crowd = Crowd::new(children.iter().map(|&child| {
                        to_f32(below.keys.row(child as usize), &mut point);
                        let lift = below.scalars[child as usize].lift;
                        self.projector.project(&point, lift)
                    }));
                    self.by_parent.insert((depth, node), crowd);
                }
            };
            match levels.get(depth) {
                None => sort(NO_PARENT, &(0..below.len() as NodeId).collect::<Vec<_>>()),
                Some(level) => (0..).zip(&level.children).for_each(|(n, c)| sort(n, c)),
            }
        }
    }

    pub fn get(&self, depth: usize, node: NodeId) -> Option<&Crowd> {
        self.by_parent.get(&(depth, node))
    }

    pub fn project(&self, point: &[f32], lift: f32) -> [f32; DIRECTIONS] {
        self.projector.project(point, lift)
    }

    pub fn is_empty(&self) -> bool {
        self.by_parent.is_empty()
    }

    pub fn bytes(&self) -> usize {
        let entry = size_of::<((usize, NodeId), Crowd)>();
        let crowds: usize = self.by_parent.values().map(Crowd::bytes).sum();
        self.projector.bytes() + self.by_parent.capacity() * entry + crowds
    }
}

/// The children of one node, sorted along every direction.
#[derive(Debug, Clone)]
pub struct Crowd {
    /// Per direction: projection and place in the node's list of children, ascending.
    orders: [Vec<(f32, u32)>; DIRECTIONS],
}

/// Working memory of a walk.
#[derive(Debug, Default)]
pub struct Walk {
    hits: Vec<[u8; COMPOSITE]>,
}

impl Crowd {
    pub fn new(children: impl ExactSizeIterator<Item = [f32; DIRECTIONS]>) -> Self {
        let mut orders: [Vec<(f32, u32)>; DIRECTIONS] =
            std::array::from_fn(|_| Vec::with_capacity(children.len()));
        for (place, projections) in children.enumerate() {
            let pairs = orders.iter_mut().zip(projections);
            pairs.for_each(|(order, x)| order.push((x, place as u32)));
        }
        for order in &mut orders {
            order.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        }
        Self { orders }
    }

    /// Children sorted.
    pub fn count(&self) -> usize {
        self.orders[0].len()
    }

    pub fn bytes(&self) -> usize {
        let pairs: usize = self.orders.iter().map(Vec::capacity).sum();
        size_of::<Self>() + pairs * size_of::<(f32, u32)>()
    }

    /// Calls `found(place)` for about `wanted` children, likely the nearest to a point with these
    /// projections; each once.
    pub fn visit(
        &self,
        point: &[f32; DIRECTIONS],
        wanted: usize,
        walk: &mut Walk,
        mut found: impl FnMut(usize),
    ) {
        walk.hits.clear();
        walk.hits.resize(self.count(), [0; COMPOSITE]);
        let mut fronts: [Front<'_>; DIRECTIONS] =
            std::array::from_fn(|i| Front::new(&self.orders[i], point[i]));
        let mut count = 0;
        // Every composite index takes its nearest next child in turn.
        for _ in 0..self.count() * SIMPLE {
            for (composite, fronts) in fronts.chunks_exact_mut(SIMPLE).enumerate() {
                let nearest = (0..SIMPLE)
                    .min_by(|&a, &b| fronts[a].distance().total_cmp(&fronts[b].distance()))
                    .expect("a composite index has directions");
                let Some(place) = fronts[nearest].step() else {
                    return; // Every child was met along every direction.
                };
                let hits = &mut walk.hits[place];
                let before = hits.iter().all(|&h| h < SIMPLE as u8);
                hits[composite] += 1;
                if before && hits[composite] == SIMPLE as u8 {
                    found(place);
                    count += 1;
                    if count == wanted {
                        return;
                    }
                }
            }
        }
    }
}

/// A walk outwards along one order.
struct Front<'a> {
    order: &'a [(f32, u32)],
    at: f32,
    /// Children `left..right` were met.
    left: usize,
    right: usize,
}

impl<'a> Front<'a> {
    fn new(order: &'a [(f32, u32)], at: f32) -> Self {
        let start = order.partition_point(|x| x.0 < at);
        Self {
            order,
            at,
            left: start,
            right: start,
        }
    }

    fn sides(&self) -> (f32, f32) {
        let left = self
            .left
            .checked_sub(1)
            .map_or(f32::INFINITY, |i| self.at - self.order[i].0);
        let right = self
            .order
            .get(self.right)
            .map_or(f32::INFINITY, |x| x.0 - self.at);
        (left, right)
    }

    /// Distance of the next child along this order.
    fn distance(&self) -> f32 {
        let (left, right) = self.sides();
        left.min(right)
    }

    fn step(&mut self) -> Option<usize> {
        let (left, right) = self.sides();
        if left.min(right) == f32::INFINITY {
            return None;
        }
        let i = if left < right {
            self.left -= 1;
            self.left
        } else {
            self.right += 1;
            self.right - 1
        };
        Some(self.order[i].1 as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn points(random: &mut Random, n: usize, dim: usize) -> Vec<f32> {
        (0..n * dim)
            .map(|_| random.below(2001) as f32 / 1000.0 - 1.0)
            .collect()
    }

    fn crowd_of(points: &[f32], dim: usize, projector: &Projector) -> Crowd {
        let rows: Vec<_> = points.chunks_exact(dim).collect();
        Crowd::new(rows.iter().map(|p| projector.project(p, 0.0)))
    }

    proptest! {
        /// Every child comes once at most, as many as are wanted.
        #[test]
        fn a_walk_meets_every_child_once(seed in any::<u64>(), n in 1usize..60, wanted in 1usize..80) {
            let mut random = Random::new(seed, 0);
            let (points, query) = (points(&mut random, n, 3), points(&mut random, 1, 3));
            let projector = Projector::new(3, seed, 0);
            let crowd = crowd_of(&points, 3, &projector);
            let mut met = Vec::new();
            let projected = projector.project(&query, 0.0);
            crowd.visit(&projected, wanted, &mut Walk::default(), |place| met.push(place));
            prop_assert_eq!(met.len(), wanted.min(n));
            // The first is the nearest of its composite index: by the wider of its two gaps.
            let gap = |place: usize, composite: usize| {
                let child = projector.project(&points[place * 3..][..3], 0.0);
                let simple = composite * SIMPLE..(composite + 1) * SIMPLE;
                simple.map(|i| (child[i] - projected[i]).abs()).fold(0.0f32, f32::max)
            };
            let nearest = |c: usize| (0..n).map(|place| gap(place, c)).fold(f32::INFINITY, f32::min);
            prop_assert!((0..COMPOSITE).any(|c| gap(met[0], c) <= nearest(c)));
            met.sort_unstable();
            met.dedup();
            prop_assert_eq!(met.len(), wanted.min(n));
        }
    }

    #[test]
    fn an_eighth_of_the_children_holds_the_nearest() {
        let (n, dim) = (4096, 16);
        let mut random = Random::new(3, 0);
        let points = points(&mut random, n, dim);
        let projector = Projector::new(dim, 1, 0);
        let crowd = crowd_of(&points, dim, &projector);
        let mut walk = Walk::default();
        let found = (0..200).filter(|_| {
            let want = random.below(n);
            let mut query = points[want * dim..][..dim].to_vec();
            query
                .iter_mut()
                .for_each(|x| *x += random.below(401) as f32 / 1000.0 - 0.2);
            let mut met = false;
            let projected = projector.project(&query, 0.0);
            crowd.visit(&projected, n / 8, &mut walk, |place| met |= place == want);
            met
        });
        let found = found.count();
        assert!(found >= 180, "found {found} of 200");
    }
}
