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

    /// The nearest node of level `stop` to each point that a descent reaches which opens `view`
    /// nodes (1 or the link field of view) at each level. Below the top every listed child leads
    /// down to that level.
    pub fn find_parents(
        &mut self,
        levels: &[Level],
        stop: usize,
        view: usize,
        parents: &mut [NodeId],
    ) {
        let keep = |depth: usize| if depth == stop { 1 } else { view };
        let top = levels.len() - 1;
        let leads_down =
            |&node: &NodeId| top == stop || !levels[top].children[node as usize].is_empty();
        let nodes: Vec<NodeId> = (0..levels[top].len() as NodeId)
            .filter(leads_down)
            .collect();
        let everyone: Vec<u32> = (0..self.lifts.len() as u32).collect();
        self.nearest.resize(self.lifts.len(), Nearest::NONE);
        self.score(&levels[top], &nodes, &everyone, keep(top));
        let (mut ends, mut points) = (Vec::new(), Vec::new());
        for depth in (stop..top).rev() {
            self.sort_opened(levels[depth + 1].len(), &mut ends, &mut points);
            self.nearest.fill(Nearest::NONE);
            let mut first = 0;
            for (children, &end) in levels[depth + 1].children.iter().zip(&ends) {
                if first < end {
                    self.score(&levels[depth], children, &points[first..end], keep(depth));
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
    /// distance, up to a constant of the point.
    fn score(&mut self, level: &Level, nodes: &[NodeId], points: &[u32], keep: usize) {
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
            if keep == 1 {
                offers.for_each(|(&score, &node)| nearest.offer_only(score, node));
            } else {
                offers.for_each(|(&score, &node)| nearest.offer(score, node));
            }
        }
    }
}
