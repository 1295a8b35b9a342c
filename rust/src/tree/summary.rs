//! What a node says of its tokens: count, mean key, mean value, and how far they spread.
//!
//! A leaf is always recomputed from the rows of its page. Upper nodes keep running sums in f32,
//! added in a fixed order; the copies in the summary dtype are for reading.

use super::node::{Level, Scalars};
use crate::ids::{NO_PARENT, PageId};
use crate::pages::PagePool;
use crate::rows::{Elements, make_room, to_f32};
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
        let value_squared = values.iter().map(|v| v * v).sum();
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

    /// Adds an upper node's running sums.
    pub fn add_node(&mut self, level: &Level, node: usize) {
        let Elements::F32(sums) = level.sums.row(node) else {
            unreachable!("sums are f32")
        };
        self.row.iter_mut().zip(sums).for_each(|(s, t)| *s += t);
        self.count += level.scalars[node].count;
    }

    /// Appends a node that says this, without parent or links.
    pub fn push_to(&self, level: &mut Level, upper: bool) {
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
        if upper {
            level.sums.push_f32(&self.row);
        }
        self.write_to(level, level.len() - 1, upper);
    }

    /// Makes `node` say this.
    pub fn write_to(&self, level: &mut Level, node: usize, upper: bool) {
        let width = self.row.len();
        let share = 1.0 / self.count.max(1) as f32;
        let mean: Vec<f32> = self.row.iter().map(|s| s * share).collect();
        let (key, value) = (&mean[..self.key_dim], &mean[self.key_dim..width - 3]);
        let [lift, key_squares, value_squares] = mean[width - 3..] else {
            unreachable!("three sums follow keys and values")
        };
        let key_norm: f32 = key.iter().map(|x| x * x).sum();
        let value_norm: f32 = value.iter().map(|x| x * x).sum();
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
        if upper {
            level.sums.set_f32(node, &self.row);
        }
    }

    /// Adds one more token to an upper node.
    pub fn add_token_to(&mut self, level: &mut Level, node: usize) {
        // `self` holds exactly that token; bring in what the node had.
        let token = self.clone();
        self.add_node(level, node);
        self.write_to(level, node, true);
        *self = token;
    }
}
