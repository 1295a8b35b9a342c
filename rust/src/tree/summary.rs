//! What a node says of its tokens: count, mean key, mean value, and how far they spread.
//!
//! A node is computed from what is right below it: a leaf from the rows of its page, an upper node
//! from the means of its children. One rounding per level is as small as the rounding of the stored
//! mean itself. While single tokens come, a node runs along for [`STEPS`] of them at most and is then
//! computed anew, so that nothing accumulates over time.

use super::node::{Level, Scalars};
use crate::ids::{NO_PARENT, NodeId, PageId};
use crate::pages::PagePool;
use crate::rows::{
    Element, Elements, RowStore, make_room, squared_distance, squares, to_f32, typed,
};
use crate::simd;
use crate::transform::Transform;

/// Tokens that the summary of a node takes up between computations: as many roundings of its
/// means, by half a unit in the last place each, add up.
const STEPS: u32 = 8;

/// Sums over tokens: centred keys, values, extra coordinates, squared norms of both.
#[derive(Debug, Clone)]
pub struct Sums {
    /// [key_dim + value_dim + 3]
    row: Vec<f32>,
    pub count: u32,
    key_dim: usize,
    /// Work space, as long as `row`.
    mean: Vec<f32>,
    /// Work space, one for each node that is added.
    weights: Vec<f32>,
}

impl Sums {
    pub fn new(key_dim: usize, value_dim: usize) -> Self {
        let width = key_dim + value_dim + 3;
        Self {
            row: vec![0.0; width],
            count: 0,
            key_dim,
            mean: vec![0.0; width],
            weights: Vec::new(),
        }
    }

    pub fn clear(&mut self) {
        self.row.fill(0.0);
        self.count = 0;
    }

    pub fn add_token(&mut self, transform: &Transform, key: Elements<'_>, value: Elements<'_>) {
        let (keys, rest) = self.row.split_at_mut(self.key_dim);
        let (values, extra) = rest.split_at_mut(rest.len() - 3);
        let squared = typed!(Elements, key, x => add_row(x, Some(transform.mean()), keys));
        let value_squared = typed!(Elements, value, x => add_row(x, None, values));
        let terms = [transform.lift(squared), squared, value_squared];
        extra.iter_mut().zip(terms).for_each(|(s, t)| *s += t);
        self.count += 1;
    }

    pub fn add_page(&mut self, transform: &Transform, pool: &PagePool, page: PageId) {
        let (keys, values) = (pool.keys(page), pool.values(page));
        (0..keys.len).for_each(|i| self.add_token(transform, keys.row(i), values.row(i)));
    }

    /// Adds the tokens of a node, by its summary.
    pub fn add_node(&mut self, level: &Level, node: usize) {
        self.add_nodes(level, &[node as NodeId]);
    }

    /// Adds the tokens of nodes, by their summaries.
    pub fn add_nodes(&mut self, level: &Level, nodes: &[NodeId]) {
        let width = self.row.len();
        let (key_dim, values) = (self.key_dim, self.key_dim..width - 3);
        self.weights.clear();
        for &node in nodes {
            let scalars = &level.scalars[node as usize];
            let count = scalars.count as f32;
            to_f32(level.keys.row(node as usize), &mut self.mean[..key_dim]);
            to_f32(
                level.values.row(node as usize),
                &mut self.mean[values.clone()],
            );
            let mean_square = |mean: &[f32], spread: f32| squares(mean) + spread * spread;
            let key_square = mean_square(&self.mean[..key_dim], scalars.key_radius);
            let value_square = mean_square(&self.mean[values.clone()], scalars.value_spread);
            let extra = self.row[width - 3..].iter_mut();
            let terms = [scalars.lift, key_square, value_square];
            extra.zip(terms).for_each(|(s, t)| *s += count * t);
            self.weights.push(count);
            self.count += scalars.count;
        }
        let (keys, values) = self.row[..width - 3].split_at_mut(self.key_dim);
        for (rows, sums) in [(&level.keys, keys), (&level.values, values)] {
            simd::weighted_sum(&self.weights, nodes.len(), rows.rows(), Some(nodes), sums);
        }
    }

    /// Appends a node that says this, without parent or links.
    pub fn push_to(&mut self, level: &mut Level) {
        let width = self.row.len();
        level.keys.push_f32(&self.row[..self.key_dim]);
        level.values.push_f32(&self.row[self.key_dim..width - 3]);
        make_room(&mut level.scalars, 1);
        level.scalars.push(Scalars {
            parent: NO_PARENT,
            count: 0,
            log_count: 0.0,
            lift: 0.0,
            half_norm: 0.0,
            key_radius: 0.0,
            value_spread: 0.0,
        });
        self.write_to(level, level.len() - 1);
    }

    /// Makes `node` say this.
    pub fn write_to(&mut self, level: &mut Level, node: usize) {
        let width = self.row.len();
        let share = 1.0 / self.count.max(1) as f32;
        let means = self.mean.iter_mut().zip(&self.row);
        means.for_each(|(mean, sum)| *mean = sum * share);
        let (key, value) = self.mean[..width - 3].split_at(self.key_dim);
        let [lift, key_squares, value_squares] = self.mean[width - 3..] else {
            unreachable!("three sums follow keys and values")
        };
        let (key_norm, value_norm) = (squares(key), squares(value));
        level.keys.set_f32(node, key);
        level.values.set_f32(node, value);
        let scalars = &mut level.scalars[node];
        *scalars = Scalars {
            parent: scalars.parent,
            count: self.count,
            log_count: (self.count.max(1) as f32).ln(),
            lift,
            half_norm: 0.5 * (key_norm + lift * lift),
            key_radius: (key_squares - key_norm).max(0.0).sqrt(),
            value_spread: (value_squares - value_norm).max(0.0).sqrt(),
        };
    }
}

impl Level {
    /// Adds one token to what `node` says: its centred key [key_dim] with extra coordinate, and its
    /// value [value_dim]. `mean` is work space. `false`: the node is to be computed anew instead.
    pub fn grow(
        &mut self,
        node: usize,
        key: &[f32],
        lift: f32,
        value: &[f32],
        mean: &mut Vec<f32>,
    ) -> bool {
        let scalars = &mut self.scalars[node];
        if scalars.count.is_multiple_of(STEPS) {
            return false;
        }
        let old = scalars.count as f32;
        let share = 1.0 / (old + 1.0);
        // Mean and spread of a growing sample (Welford). The spread of what is new is that to the
        // old mean, less what the mean moves.
        let mut update = |means: &mut RowStore, spread: f32, row: &[f32]| {
            mean.resize(row.len(), 0.0);
            to_f32(means.row(node), mean);
            let new = squared_distance(row, mean);
            (mean.iter_mut().zip(row)).for_each(|(m, x)| *m += (x - *m) * share);
            means.set_f32(node, mean);
            ((spread * spread + new * share) * (old * share)).sqrt()
        };
        scalars.value_spread = update(&mut self.values, scalars.value_spread, value);
        scalars.key_radius = update(&mut self.keys, scalars.key_radius, key);
        scalars.count += 1;
        scalars.log_count = (scalars.count as f32).ln();
        scalars.lift += (lift - scalars.lift) * share;
        scalars.half_norm = 0.5 * (squares(&mean[..key.len()]) + scalars.lift * scalars.lift);
        true
    }
}

/// Adds `row`, less `offset` if there is one, to `sums`; returns its squared norm, summed
/// exactly as [`squares`] does: a node of one token has no spread. One pass, in blocks that vectorise.
fn add_row<T: Element>(row: &[T], offset: Option<&[f32]>, sums: &mut [f32]) -> f32 {
    const BLOCK: usize = 16;
    let (mut squares, mut rest) = ([0.0f32; BLOCK], 0.0);
    for (at, (row, sums)) in row.chunks(BLOCK).zip(sums.chunks_mut(BLOCK)).enumerate() {
        let offset = offset.map(|offset| &offset[at * BLOCK..][..row.len()]);
        if let (Ok(row), Ok(sums)) = (
            <&[T; BLOCK]>::try_from(row),
            <&mut [f32; BLOCK]>::try_from(&mut *sums),
        ) {
            let mut x = row.map(Element::to_f32);
            if let Some(offset) = offset {
                x.iter_mut().zip(offset).for_each(|(x, o)| *x -= o);
            }
            for i in 0..BLOCK {
                sums[i] += x[i];
                squares[i] += x[i] * x[i];
            }
        } else {
            for (i, (x, sum)) in row.iter().zip(sums).enumerate() {
                let x = x.to_f32() - offset.map_or(0.0, |offset| offset[i]);
                *sum += x;
                rest += x * x;
            }
        }
    }
    squares.iter().sum::<f32>() + rest
}
