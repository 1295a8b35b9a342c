//! The one descent, from the top level down, generic in how nodes are ranked.
//!
//! At each level all nodes on the frontier are scored; the priority says how many of the best are
//! opened, and their children are the next frontier. Linking, insertion and M-DCI search open a
//! field of view; a decode step opens a share and keeps what stays closed for its tail.

use super::Tree;
use super::node::Level;
use super::project::{Crowds, DIRECTIONS, Walk};
use crate::ids::{NO_PARENT, NodeId};
use crate::order::{Best, Order};
use crate::rows;
use crate::simd;

/// Ranks nodes for one purpose.
pub trait Priority {
    /// Replaces `out` by a score for each of `nodes`; higher is opened first.
    fn score(&mut self, level: &Level, nodes: &[NodeId], out: &mut Vec<f32>);

    /// How many of the nodes just scored, of level `depth`, to open. `order` ranks them.
    fn open(&mut self, depth: usize, level: &Level, nodes: &[NodeId], order: &mut Order) -> usize;

    /// Adds the children of an opened node, of level `depth`, that are worth scoring: all of them.
    fn expand(&mut self, _: usize, _: NodeId, children: &[NodeId], next: &mut Vec<NodeId>) {
        next.extend_from_slice(children);
    }

    /// Told which of the nodes just scored are opened, as places in `nodes`; the others stay closed.
    fn close(&mut self, _depth: usize, _nodes: &[NodeId], _opened: &[u32]) {}
}

/// Nodes opened per level, from the leaves up; the last number holds for all levels above. Never
/// empty.
#[derive(Debug, Clone, Copy)]
pub struct View<'a>(pub &'a [usize]);

impl View<'_> {
    pub fn at(self, depth: usize) -> usize {
        self.0[depth.min(self.0.len() - 1)]
    }
}

/// The frontier of a descent; reused from one to the next.
#[derive(Debug, Default)]
pub struct Frontier {
    /// Nodes of the level that the descent stopped at.
    pub nodes: Vec<NodeId>,
    /// Their scores.
    pub scores: Vec<f32>,
    pub order: Order,
    places: Vec<u32>,
    next: Vec<NodeId>,
    /// Nodes scored, over all levels.
    pub scored: usize,
}

/// Descends to level `stop` and leaves its reached nodes, scored, in `frontier`.
pub fn descend<P: Priority>(
    levels: &[Level],
    stop: usize,
    priority: &mut P,
    frontier: &mut Frontier,
) {
    frontier.scored = 0;
    frontier.nodes.clear();
    frontier.next.clear();
    let top = levels.len();
    frontier.next.extend(0..levels[top - 1].len() as NodeId);
    priority.expand(top, NO_PARENT, &frontier.next, &mut frontier.nodes);
    for depth in (stop..levels.len()).rev() {
        let level = &levels[depth];
        if depth > stop {
            // A node without children exists only during a build; it leads nowhere.
            let full = |&node: &NodeId| !level.children[node as usize].is_empty();
            frontier.nodes.retain(full);
        }
        priority.score(level, &frontier.nodes, &mut frontier.scores);
        frontier.scored += frontier.nodes.len();
        if depth == stop {
            return;
        }
        frontier.order.rank(&frontier.scores);
        let opened = priority.open(depth, level, &frontier.nodes, &mut frontier.order);
        frontier.order.take(opened, &mut frontier.places);
        let open = &frontier.places;
        priority.close(depth, &frontier.nodes, open);
        frontier.next.clear();
        for &place in open {
            let node = frontier.nodes[place as usize];
            let children = &level.children[node as usize];
            priority.expand(depth, node, children, &mut frontier.next);
        }
        std::mem::swap(&mut frontier.nodes, &mut frontier.next);
    }
}

/// Nearness of a lifted point to the nodes' lifted means: minus half the squared distance, up to a
/// constant of the point. For links, insertion and M-DCI search.
#[derive(Debug)]
pub struct Nearest<'a> {
    /// Centred key, [key_dim].
    point: &'a [f32],
    /// Its extra coordinate.
    lift: f32,
    /// Nodes opened at each level.
    field_of_view: usize,
    order: Prioritized<'a>,
}

impl Priority for Nearest<'_> {
    fn score(&mut self, level: &Level, nodes: &[NodeId], out: &mut Vec<f32>) {
        out.resize(nodes.len(), 0.0);
        simd::dots(self.point, level.keys.rows(), Some(nodes), out, nodes.len());
        for (score, &node) in out.iter_mut().zip(nodes) {
            let scalars = &level.scalars[node as usize];
            *score += self.lift * scalars.lift - scalars.half_norm;
        }
    }

    fn open(&mut self, _: usize, _: &Level, _: &[NodeId], _: &mut Order) -> usize {
        self.field_of_view
    }

    fn expand(&mut self, depth: usize, node: NodeId, children: &[NodeId], next: &mut Vec<NodeId>) {
        self.order
            .expand(depth, node, children, self.field_of_view, next);
    }
}

impl<'a> Nearest<'a> {
    pub fn new(
        point: &'a [f32],
        lift: f32,
        field_of_view: usize,
        crowds: Option<&'a Crowds>,
    ) -> Self {
        Self {
            point,
            lift,
            field_of_view,
            order: Prioritized::new(crowds, point, lift),
        }
    }

    /// The nearest reached node of level `stop`.
    pub fn find(&mut self, levels: &[Level], stop: usize, frontier: &mut Frontier) -> NodeId {
        descend(levels, stop, self, frontier);
        let mut best = 0;
        for (i, score) in frontier.scores.iter().enumerate() {
            if *score > frontier.scores[best] {
                best = i;
            }
        }
        frontier.nodes[best]
    }
}

/// Of a large family, which children to score: an eighth, and some for each node to be opened.
#[derive(Debug)]
struct Prioritized<'a> {
    crowds: Option<&'a Crowds>,
    projections: [f32; DIRECTIONS],
    walk: Walk,
}

impl<'a> Prioritized<'a> {
    fn new(crowds: Option<&'a Crowds>, point: &[f32], lift: f32) -> Self {
        let crowds = crowds.filter(|crowds| !crowds.is_empty());
        Self {
            crowds,
            projections: crowds.map_or([0.0; DIRECTIONS], |c| c.project(point, lift)),
            walk: Walk::default(),
        }
    }

    fn expand(
        &mut self,
        depth: usize,
        node: NodeId,
        children: &[NodeId],
        field_of_view: usize,
        next: &mut Vec<NodeId>,
    ) {
        match self.crowds.and_then(|crowds| crowds.get(depth, node)) {
            None => next.extend_from_slice(children),
            Some(crowd) => {
                let wanted = (children.len() / 8).max(field_of_view.saturating_mul(4));
                crowd.visit(&self.projections, wanted, &mut self.walk, |place| {
                    next.push(children[place]);
                });
            }
        }
    }
}

/// How many standard deviations above its mean a node counts for when a search ranks it. Keys do not
/// spread alike in all directions, hence more than one; 2 to 4 find about the same.
const REACH_WEIGHT: f32 = 3.0;

/// Ranks nodes by the largest inner product that one of their keys may have with a query: that of
/// their mean, raised by their spread.
struct Reach<'a> {
    query: &'a [f32],
    /// Raise per unit of key radius.
    deviation: f32,
    view: View<'a>,
    order: Prioritized<'a>,
}

impl Priority for Reach<'_> {
    fn score(&mut self, level: &Level, nodes: &[NodeId], out: &mut Vec<f32>) {
        out.resize(nodes.len(), 0.0);
        simd::dots(self.query, level.keys.rows(), Some(nodes), out, nodes.len());
        for (score, &node) in out.iter_mut().zip(nodes) {
            *score += self.deviation * level.scalars[node as usize].key_radius;
        }
    }

    fn open(&mut self, depth: usize, _: &Level, _: &[NodeId], _: &mut Order) -> usize {
        self.view.at(depth)
    }

    fn expand(&mut self, depth: usize, node: NodeId, children: &[NodeId], next: &mut Vec<NodeId>) {
        let field_of_view = self.view.at(depth - 1);
        self.order
            .expand(depth, node, children, field_of_view, next);
    }
}

/// Leaves that an M-DCI search with this field of view reaches, best first.
pub fn reach_leaves(
    tree: &Tree,
    query: &[f32],
    view: View<'_>,
    frontier: &mut Frontier,
) -> Vec<NodeId> {
    let norm = rows::norm(query);
    // On the sphere of the keys: the nearest to this point have the largest inner product.
    let scale = tree.transform.radius() / norm.max(f32::MIN_POSITIVE);
    let point: Vec<f32> = query.iter().map(|x| x * scale).collect();
    let mut reach = Reach {
        query,
        deviation: REACH_WEIGHT * norm / (query.len() as f32).sqrt(),
        view,
        order: Prioritized::new(tree.crowds.as_deref(), &point, 0.0),
    };
    descend(&tree.levels, 0, &mut reach, frontier);
    frontier.order.rank(&frontier.scores);
    let nodes = &frontier.nodes;
    frontier
        .order
        .best(view.at(0))
        .map(|place| nodes[place])
        .collect()
}

/// M-DCI search (paper section 3.2): scores exactly the keys of the leaves that it reaches. Adds
/// to `best`; returns how many nodes were scored on the way. [`crate::exact::search`] is its oracle.
pub fn search(
    tree: &Tree,
    query: &[f32],
    view: View<'_>,
    best: &mut Best,
    frontier: &mut Frontier,
) -> usize {
    for leaf in reach_leaves(tree, query, view, frontier) {
        let page = tree.levels[0].pages[leaf as usize];
        best.add(query, tree.pages.keys(page), tree.pages.ids(page));
    }
    frontier.scored
}
