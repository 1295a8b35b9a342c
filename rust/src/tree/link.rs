//! Links of a build: the nearest node of a level to each of a block of points.
//!
//! The descent of `search`, turned around: the children of a node are scored once, against all the
//! points that opened it. What a point finds does not depend on the others of its block.

use super::LINK_FIELD_OF_VIEW;
use super::node::Level;
use crate::ids::{NO_PARENT, NodeId};
use crate::simd;

/// Points of one block, so that it stays in a core's own cache.
pub const BLOCK: usize = 1024;

/// Points that look for their parents together.
#[derive(Debug)]
pub struct Block {
    /// Centred keys, [len, dim].
    points: Vec<f32>,
    /// Their extra coordinates.
    lifts: Vec<f32>,
    nearest: Vec<Nearest>,
    scratch: Scratch,
}

/// Of one family: a node's children and the points that opened it.
#[derive(Debug, Default)]
struct Scratch {
    /// [points, dim]
    points: Vec<f32>,
    /// Of each child.
    lifts: Vec<f32>,
    half_norms: Vec<f32>,
    /// [points, children]
    scores: Vec<f32>,
}

/// The nearest nodes to a point so far, nearest first; of equally near ones the earlier.
#[derive(Debug, Clone, Copy)]
struct Nearest {
    scores: [f32; LINK_FIELD_OF_VIEW],
    nodes: [NodeId; LINK_FIELD_OF_VIEW],
}

impl Nearest {
    const NONE: Self = Self {
        scores: [f32::NEG_INFINITY; LINK_FIELD_OF_VIEW],
        nodes: [NO_PARENT; LINK_FIELD_OF_VIEW],
    };

    #[inline(always)]
    fn offer(&mut self, score: f32, node: NodeId) {
        let mut at = LINK_FIELD_OF_VIEW;
        while at > 0 && score > self.scores[at - 1] {
            at -= 1;
        }
        if at < LINK_FIELD_OF_VIEW {
            self.scores.copy_within(at..LINK_FIELD_OF_VIEW - 1, at + 1);
            self.nodes.copy_within(at..LINK_FIELD_OF_VIEW - 1, at + 1);
            self.scores[at] = score;
            self.nodes[at] = node;
        }
    }

    /// Where only the nearest will be asked for.
    #[inline(always)]
    fn offer_only(&mut self, score: f32, node: NodeId) {
        let nearer = score > self.scores[0];
        self.scores[0] = if nearer { score } else { self.scores[0] };
        self.nodes[0] = if nearer { node } else { self.nodes[0] };
    }
}

impl Block {
    /// Room for so many points.
    pub fn with_capacity(len: usize, dim: usize) -> Self {
        Self {
            points: Vec::with_capacity(len * dim),
            lifts: Vec::with_capacity(len),
            nearest: Vec::new(),
            scratch: Scratch::default(),
        }
    }

    /// Adds a point. `write` fills in its centred key and returns its extra coordinate.
    pub fn push(&mut self, dim: usize, write: impl FnOnce(&mut [f32]) -> f32) {
        let start = self.points.len();
        self.points.resize(start + dim, 0.0);
        self.lifts.push(write(&mut self.points[start..]));
    }

    /// The nearest node of level `stop` to each point that a descent reaches which opens
    /// [`LINK_FIELD_OF_VIEW`] nodes at each level. Below the top every listed child leads down to
    /// that level.
    pub fn find_parents(&mut self, levels: &[Level], stop: usize, parents: &mut [NodeId]) {
        let top = levels.len() - 1;
        let leads_down =
            |&node: &NodeId| top == stop || !levels[top].children[node as usize].is_empty();
        let nodes: Vec<NodeId> = (0..levels[top].len() as NodeId)
            .filter(leads_down)
            .collect();
        let everyone: Vec<u32> = (0..self.lifts.len() as u32).collect();
        self.nearest.resize(self.lifts.len(), Nearest::NONE);
        self.score(&levels[top], &nodes, &everyone, top == stop);
        let (mut ends, mut points) = (Vec::new(), Vec::new());
        for depth in (stop..top).rev() {
            self.sort_opened(levels[depth + 1].len(), &mut ends, &mut points);
            self.nearest.fill(Nearest::NONE);
            let mut first = 0;
            for (children, &end) in levels[depth + 1].children.iter().zip(&ends) {
                if first < end {
                    self.score(&levels[depth], children, &points[first..end], depth == stop);
                }
                first = end;
            }
        }
        for (parent, nearest) in parents.iter_mut().zip(&self.nearest) {
            *parent = nearest.nodes[0];
        }
    }

    /// Writes the points that open each node of a level of `len`, node by node, and where those of
    /// each node end.
    fn sort_opened(&self, len: usize, ends: &mut Vec<usize>, points: &mut Vec<u32>) {
        let opened = |nearest: &'_ Nearest| nearest.nodes.into_iter().filter(|&n| n != NO_PARENT);
        ends.clear();
        ends.resize(len + 1, 0);
        for node in self.nearest.iter().flat_map(opened) {
            ends[node as usize + 1] += 1;
        }
        for node in 0..len {
            ends[node + 1] += ends[node];
        }
        points.resize(ends[len], 0);
        // Now these are starts; each moves to its end as the points are written.
        for (point, nearest) in self.nearest.iter().enumerate() {
            for node in opened(nearest) {
                points[ends[node as usize]] = point as u32;
                ends[node as usize] += 1;
            }
        }
    }

    /// Offers all of `nodes` to some of the points, given in order, ranked by minus half the squared
    /// distance, up to a constant of the point. `last`: only the nearest will be asked for.
    fn score(&mut self, level: &Level, nodes: &[NodeId], points: &[u32], last: bool) {
        let (rows, count) = (level.keys.rows(), nodes.len());
        let scratch = &mut self.scratch;
        let mut queries = &self.points;
        if points.len() < self.lifts.len() {
            scratch.points.clear();
            for &point in points {
                let start = point as usize * rows.dim;
                (scratch.points).extend_from_slice(&self.points[start..start + rows.dim]);
            }
            queries = &scratch.points;
        }
        let scalars = nodes.iter().map(|&node| &level.scalars[node as usize]);
        scratch.lifts.clear();
        scratch.half_norms.clear();
        (scratch.lifts).extend(scalars.clone().map(|scalars| scalars.lift));
        (scratch.half_norms).extend(scalars.map(|scalars| scalars.half_norm));
        scratch.scores.resize(points.len() * count, 0.0);
        simd::dots(queries, rows, Some(nodes), &mut scratch.scores, count);
        for (scores, &point) in scratch.scores.chunks_exact_mut(count).zip(points) {
            let point_lift = self.lifts[point as usize];
            let of_nodes = scratch.lifts.iter().zip(&scratch.half_norms);
            for (score, (lift, half_norm)) in scores.iter_mut().zip(of_nodes) {
                *score += point_lift * lift - half_norm;
            }
            let nearest = &mut self.nearest[point as usize];
            let offers = scores.iter().zip(nodes);
            if last {
                offers.for_each(|(&score, &node)| nearest.offer_only(score, node));
            } else {
                offers.for_each(|(&score, &node)| nearest.offer(score, node));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TreeOptions;
    use crate::ids::KeyId;
    use crate::random::Random;
    use crate::rows::{Elements, NO_ELEMENTS, Strided};
    use crate::threads::Workers;
    use crate::tree::Tree;
    use crate::tree::build::Tokens;
    use crate::tree::search::{self, Frontier};

    /// A block finds for each of its points what the descent of that point alone finds.
    #[test]
    fn a_block_finds_what_single_descents_find() {
        for (seed, dim, n) in [(1, 5, 700), (2, 16, 3000), (3, 40, 300)] {
            let mut random = Random::new(seed, 0);
            let mut number = || random.below(20_001) as f32 / 10_000.0 - 1.0;
            let keys: Vec<f32> = (0..n * dim).map(|_| number()).collect();
            let strided = |dim, elements| Strided {
                dim,
                len: n,
                stride: dim,
                elements,
            };
            let ids: Vec<KeyId> = (0..n as KeyId).collect();
            let tokens = Tokens {
                keys: strided(dim, Elements::F32(&keys)),
                values: strided(0, NO_ELEMENTS),
                ids: &ids,
            };
            let options = TreeOptions {
                fanout: 4,
                ..TreeOptions::default()
            };
            let levels = Tree::build(tokens, None, &options, 0, Workers::steady(1))
                .unwrap()
                .levels;
            let points: Vec<(Vec<f32>, f32)> = (0..2 * BLOCK)
                .map(|_| ((0..dim).map(|_| number()).collect(), number()))
                .collect();
            for stop in 0..levels.len() {
                let mut block = Block::with_capacity(points.len(), dim);
                for (point, lift) in &points {
                    block.push(dim, |to| {
                        to.copy_from_slice(point);
                        *lift
                    });
                }
                let mut parents = vec![NO_PARENT; points.len()];
                block.find_parents(&levels, stop, &mut parents);
                let mut frontier = Frontier::default();
                let mut same = 0;
                for ((point, lift), &parent) in points.iter().zip(&parents) {
                    let mut alone = search::Nearest::new(point, *lift, LINK_FIELD_OF_VIEW, None);
                    same += usize::from(alone.find(&levels, stop, &mut frontier) == parent);
                }
                // Two nodes may be equally near up to rounding.
                assert!(same + 3 >= points.len(), "{same} of {}", points.len());
            }
        }
    }
}
