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
#[derive(Debug, Default)]
pub struct Block {
    /// Centred keys, [len, dim].
    points: Vec<f32>,
    /// Their extra coordinates.
    lifts: Vec<f32>,
    nearest: Vec<Nearest>,
    scratch: Scratch,
}

#[derive(Debug, Default)]
struct Scratch {
    points: Vec<f32>,
    /// Extra coordinate and half squared norm of each node that is scored.
    nodes: Vec<(f32, f32)>,
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

    /// Keeps the `keep` best of what was offered.
    #[inline(always)]
    fn offer(&mut self, score: f32, node: NodeId, keep: usize) {
        if score > self.scores[keep - 1] {
            let mut at = keep - 1;
            while at > 0 && score > self.scores[at - 1] {
                self.scores[at] = self.scores[at - 1];
                self.nodes[at] = self.nodes[at - 1];
                at -= 1;
            }
            self.scores[at] = score;
            self.nodes[at] = node;
        }
    }
}

impl Block {
    /// Adds a point. `write` fills in its centred key and returns its extra coordinate.
    pub fn push(&mut self, dim: usize, write: impl FnOnce(&mut [f32]) -> f32) {
        let start = self.points.len();
        self.points.resize(start + dim, 0.0);
        self.lifts.push(write(&mut self.points[start..]));
    }

    /// The nearest reached node of level `stop` to each point. Below the top every listed child
    /// leads down to that level.
    pub fn find_parents(&mut self, levels: &[Level], stop: usize, parents: &mut [NodeId]) {
        let keep = |depth: usize| if depth > stop { LINK_FIELD_OF_VIEW } else { 1 };
        let top = levels.len() - 1;
        let leads_down =
            |&node: &NodeId| top == stop || !levels[top].children[node as usize].is_empty();
        let nodes: Vec<NodeId> = (0..levels[top].len() as NodeId)
            .filter(leads_down)
            .collect();
        let everyone: Vec<u32> = (0..self.lifts.len() as u32).collect();
        self.nearest.resize(self.lifts.len(), Nearest::NONE);
        self.score(&levels[top], &nodes, &everyone, keep(top));
        let mut opened: Vec<(NodeId, u32)> = Vec::new();
        for depth in (stop..top).rev() {
            opened.clear();
            for (point, nearest) in self.nearest.iter_mut().enumerate() {
                let nodes = nearest.nodes.iter().filter(|&&node| node != NO_PARENT);
                opened.extend(nodes.map(|&node| (node, point as u32)));
                *nearest = Nearest::NONE;
            }
            opened.sort_unstable();
            for family in opened.chunk_by(|a, b| a.0 == b.0) {
                let children = &levels[depth + 1].children[family[0].0 as usize];
                let points: Vec<u32> = family.iter().map(|pair| pair.1).collect();
                self.score(&levels[depth], children, &points, keep(depth));
            }
        }
        for (parent, nearest) in parents.iter_mut().zip(&self.nearest) {
            *parent = nearest.nodes[0];
        }
    }

    /// Offers all of `nodes` to all of `points`, ranked by minus half the squared distance, up to a
    /// constant of the point.
    fn score(&mut self, level: &Level, nodes: &[NodeId], points: &[u32], keep: usize) {
        let rows = level.keys.rows();
        let scratch = &mut self.scratch;
        scratch.points.clear();
        for &point in points {
            let start = point as usize * rows.dim;
            (scratch.points).extend_from_slice(&self.points[start..start + rows.dim]);
        }
        scratch.nodes.clear();
        let scalars = nodes.iter().map(|&node| &level.scalars[node as usize]);
        (scratch.nodes).extend(scalars.map(|scalars| (scalars.lift, scalars.half_norm)));
        scratch.scores.resize(points.len() * nodes.len(), 0.0);
        simd::dots(
            &scratch.points,
            rows,
            Some(nodes),
            &mut scratch.scores,
            nodes.len(),
        );
        for (scores, &point) in scratch.scores.chunks_exact(nodes.len()).zip(points) {
            let point_lift = self.lifts[point as usize];
            let nearest = &mut self.nearest[point as usize];
            for ((product, (lift, half_norm)), &node) in
                scores.iter().zip(&scratch.nodes).zip(nodes)
            {
                nearest.offer(product + point_lift * lift - half_norm, node, keep);
            }
        }
    }
}
