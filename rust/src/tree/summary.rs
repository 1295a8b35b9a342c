//! What a node says of its tokens: count, mean key, mean value, and how far they spread.
//!
//! A node is always recomputed from what is right below it: a leaf from the rows of its page, an
//! upper node from the means of its children. Nothing accumulates over time, and one rounding per
//! level is as small as the rounding of the stored mean itself.

use super::node::{Level, Scalars};
use crate::ids::{NO_PARENT, PageId};
use crate::pages::PagePool;
use crate::rows::{Elements, make_room, squares, to_f32};
use crate::transform::Transform;

/// Sums over tokens: centred keys, values, extra coordinates, squared norms of both.
#[derive(Debug, Clone)]
pub struct Sums {
    /// [key_dim + value_dim + 3]
    row: Vec<f32>,
    pub count: u32,
    key_dim: usize,
    token: Vec<f32>,
}

impl Sums {
    pub fn new(key_dim: usize, value_dim: usize) -> Self {
        let width = key_dim + value_dim + 3;
        Self {
            row: vec![0.0; width],
            count: 0,
            key_dim,
            token: vec![0.0; width],
        }
    }

    pub fn clear(&mut self) {
        self.row.fill(0.0);
        self.count = 0;
    }

    pub fn add_token(&mut self, transform: &Transform, key: Elements<'_>, value: Elements<'_>) {
        let (key_dim, width) = (self.key_dim, self.row.len());
        let squared = transform.centre(key, &mut self.token[..key_dim]);
        let values = &mut self.token[key_dim..width - 3];
        to_f32(value, values);
        let value_squared = squares(values);
        self.token[width - 3..].copy_from_slice(&[transform.lift(squared), squared, value_squared]);
        self.row
            .iter_mut()
            .zip(&self.token)
            .for_each(|(s, t)| *s += t);
        self.count += 1;
    }

    pub fn add_page(&mut self, transform: &Transform, pool: &PagePool, page: PageId) {
        let (keys, values) = (pool.keys(page), pool.values(page));
        (0..keys.len).for_each(|i| self.add_token(transform, keys.row(i), values.row(i)));
    }

    /// Adds the tokens of a node, by its summary.
    pub fn add_node(&mut self, level: &Level, node: usize) {
        let (key_dim, width) = (self.key_dim, self.row.len());
        let scalars = &level.scalars[node];
        let count = scalars.count as f32;
        to_f32(level.keys.row(node), &mut self.token[..key_dim]);
        to_f32(level.values.row(node), &mut self.token[key_dim..width - 3]);
        let mean_square = |mean: &[f32], spread: f32| squares(mean) + spread * spread;
        let key_square = mean_square(&self.token[..key_dim], scalars.key_radius);
        let value_square = mean_square(&self.token[key_dim..width - 3], scalars.value_spread);
        self.token[width - 3..].copy_from_slice(&[scalars.lift, key_square, value_square]);
        let terms = self.row.iter_mut().zip(&self.token);
        terms.for_each(|(s, t)| *s += count * t);
        self.count += scalars.count;
    }

    /// Appends a node that says this, without parent or links.
    pub fn push_to(&self, level: &mut Level) {
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
    pub fn write_to(&self, level: &mut Level, node: usize) {
        let width = self.row.len();
        let share = 1.0 / self.count.max(1) as f32;
        let mean: Vec<f32> = self.row.iter().map(|s| s * share).collect();
        let (key, value) = (&mean[..self.key_dim], &mean[self.key_dim..width - 3]);
        let [lift, key_squares, value_squares] = mean[width - 3..] else {
            unreachable!("three sums follow keys and values")
        };
        let key_norm = squares(key);
        let value_norm = squares(value);
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
