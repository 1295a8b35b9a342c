//! Dividing points among groups: a full node splits in two, a grown one regroups.

use crate::rows::{Elements, Rows, squared_distance, squares};
use crate::simd;

/// Rounds of 2-means; more change few groups of this size.
const ROUNDS: usize = 4;
/// Rounds of k-means when points regroup; they start from means that are nearly right.
const REGROUP_ROUNDS: usize = 2;

/// Groups that a regrouping leaves at most, before full ones are halved.
pub fn most(target: usize) -> usize {
    target + target / 4
}

/// Points [n, width] of equal or different weight.
#[derive(Debug, Default)]
pub struct Cloud {
    pub width: usize,
    pub points: Vec<f32>,
    pub weights: Vec<f32>,
}

impl Cloud {
    /// Adds a point of zeros, to be filled in.
    pub fn push(&mut self, width: usize, weight: f32) -> &mut [f32] {
        self.width = width;
        self.weights.push(weight);
        let start = self.points.len();
        self.points.resize(start + width, 0.0);
        &mut self.points[start..]
    }

    fn point(&self, i: u32) -> &[f32] {
        &self.points[i as usize * self.width..][..self.width]
    }

    /// Deals the points out anew among `groups`, which hold each of them once: to about `target`
    /// groups, each point to the nearest mean, at most `capacity` points to a group. Groups keep
    /// their places; some may end empty, new ones come last.
    pub fn regroup(&self, groups: &mut Vec<Vec<u32>>, target: usize, capacity: usize) {
        self.divide_widest(groups, target);
        self.merge_closest(groups, most(target));
        for _ in 0..REGROUP_ROUNDS {
            self.assign(groups);
        }
        let mut at = 0;
        while at < groups.len() {
            if groups[at].len() > capacity {
                let half = self.halve(&mut groups[at]);
                groups.push(half);
            } else {
                at += 1;
            }
        }
    }

    /// Halves the group of largest scatter until there are `target` groups with points.
    fn divide_widest(&self, groups: &mut Vec<Vec<u32>>, target: usize) {
        let mut full = groups.iter().filter(|group| !group.is_empty()).count();
        if full >= target {
            return;
        }
        let mut scatters: Vec<f32> = groups.iter().map(|group| self.scatter(group)).collect();
        while full < target {
            let widest = (0..groups.len()).max_by(|&a, &b| scatters[a].total_cmp(&scatters[b]));
            let Some(widest) = widest.filter(|&widest| scatters[widest] > 0.0) else {
                return;
            };
            let half = self.halve(&mut groups[widest]);
            scatters[widest] = self.scatter(&groups[widest]);
            scatters.push(self.scatter(&half));
            groups.push(half);
            full += 1;
        }
    }

    /// Merges the two groups whose union scatters least more than they do (Ward), until at most
    /// `most` have points.
    fn merge_closest(&self, groups: &mut [Vec<u32>], most: usize) {
        let full = groups.iter().filter(|group| !group.is_empty()).count();
        for _ in most..full {
            if let Some((a, b, _)) = self.closest(groups) {
                let moved = std::mem::take(&mut groups[b]);
                groups[a].extend(moved);
                groups[a].sort_unstable();
            }
        }
    }

    /// The two groups whose union would scatter least more than they do, and how much more.
    fn closest(&self, groups: &[Vec<u32>]) -> Option<(usize, usize, f32)> {
        let (full, centres, half_norms) = self.centres(groups);
        let weights: Vec<f32> = full
            .iter()
            .map(|&i| groups[i].iter().map(|&m| self.weights[m as usize]).sum())
            .collect();
        let rows = Rows {
            dim: self.width,
            len: full.len(),
            elements: Elements::F32(&centres),
        };
        let mut products = vec![0.0; full.len() * full.len()];
        simd::dots(&centres, rows, None, &mut products, full.len());
        let mut best: Option<(usize, usize, f32)> = None;
        for a in 0..full.len() {
            for b in a + 1..full.len() {
                let half_distance = half_norms[a] + half_norms[b] - products[a * full.len() + b];
                let cost = 2.0 * half_distance.max(0.0) * weights[a] * weights[b]
                    / (weights[a] + weights[b]);
                if best.is_none_or(|best| cost < best.2) {
                    best = Some((full[a], full[b], cost));
                }
            }
        }
        best
    }

    /// Groups with points, their means one after another, half the squared norms of these.
    fn centres(&self, groups: &[Vec<u32>]) -> (Vec<usize>, Vec<f32>, Vec<f32>) {
        let full: Vec<usize> = (0..groups.len())
            .filter(|&i| !groups[i].is_empty())
            .collect();
        let mut centres = Vec::with_capacity(full.len() * self.width);
        full.iter()
            .for_each(|&i| centres.extend(self.mean(&groups[i])));
        let half_norm = |c: &[f32]| 0.5 * squares(c);
        let half_norms = centres.chunks_exact(self.width).map(half_norm).collect();
        (full, centres, half_norms)
    }

    /// Gives every point to the group with the nearest mean; empty groups stay empty.
    fn assign(&self, groups: &mut [Vec<u32>]) {
        let (full, centres, half_norms) = self.centres(groups);
        let rows = Rows {
            dim: self.width,
            len: full.len(),
            elements: Elements::F32(&centres),
        };
        let mut scores = vec![0.0; self.weights.len() * full.len()];
        simd::dots(&self.points, rows, None, &mut scores, full.len());
        groups.iter_mut().for_each(Vec::clear);
        for (i, scores) in scores.chunks_exact(full.len()).enumerate() {
            let mut best = 0;
            for place in 1..full.len() {
                if scores[place] - half_norms[place] > scores[best] - half_norms[best] {
                    best = place;
                }
            }
            groups[full[best]].push(i as u32);
        }
    }

    /// Takes one half of a group of two points or more out of it.
    pub fn halve(&self, group: &mut Vec<u32>) -> Vec<u32> {
        let points: Vec<f32> = group.iter().flat_map(|&i| self.point(i)).copied().collect();
        let sides = bisect(&points, self.width);
        let mut side = sides.iter();
        let members = std::mem::take(group);
        let (half, rest) = members.iter().partition(|_| side.next() == Some(&true));
        *group = rest;
        half
    }

    fn mean(&self, group: &[u32]) -> Vec<f32> {
        let mut mean = vec![0.0; self.width];
        let mut total = 0.0;
        for &i in group {
            let weight = self.weights[i as usize];
            total += weight;
            let terms = mean.iter_mut().zip(self.point(i));
            terms.for_each(|(m, x)| *m += weight * x);
        }
        mean.iter_mut().for_each(|m| *m /= total);
        mean
    }

    /// Weighted sum of squared distances to the mean.
    fn scatter(&self, group: &[u32]) -> f32 {
        if group.len() < 2 {
            return 0.0;
        }
        let mean = self.mean(group);
        let terms = group.iter();
        terms
            .map(|&i| self.weights[i as usize] * squared_distance(self.point(i), &mean))
            .sum()
    }
}

/// Which half each of the points [n, dim] goes to (n >= 2); neither half is empty.
///
/// 2-means from two far points. Points that cannot be told apart are halved in their order.
pub fn bisect(points: &[f32], dim: usize) -> Vec<bool> {
    let n = points.len() / dim;
    let point = |i: usize| &points[i * dim..][..dim];
    let mut centres = [mean(points, dim, |_| true), Vec::new()];
    let first = farthest(points, dim, &centres[0]);
    let second = farthest(points, dim, point(first));
    if squared_distance(point(first), point(second)) <= 0.0 {
        return (0..n).map(|i| i >= n / 2).collect();
    }
    centres = [point(first).to_vec(), point(second).to_vec()];
    let mut sides = vec![false; n];
    for _ in 0..ROUNDS {
        for (i, side) in sides.iter_mut().enumerate() {
            *side =
                squared_distance(point(i), &centres[1]) < squared_distance(point(i), &centres[0]);
        }
        let ones = sides.iter().filter(|&&side| side).count();
        if ones == 0 || ones == n {
            return (0..n).map(|i| i >= n / 2).collect();
        }
        centres = [
            mean(points, dim, |i| !sides[i]),
            mean(points, dim, |i| sides[i]),
        ];
    }
    sides
}

/// The first of the points farthest from `origin`.
fn farthest(points: &[f32], dim: usize, origin: &[f32]) -> usize {
    let mut best = (0, -1.0);
    for (i, point) in points.chunks_exact(dim).enumerate() {
        let d = squared_distance(point, origin);
        if d > best.1 {
            best = (i, d);
        }
    }
    best.0
}

fn mean(points: &[f32], dim: usize, among: impl Fn(usize) -> bool) -> Vec<f32> {
    let mut sum = vec![0.0; dim];
    let mut count = 0.0f32;
    for (i, point) in points.chunks_exact(dim).enumerate() {
        if among(i) {
            sum.iter_mut().zip(point).for_each(|(s, x)| *s += x);
            count += 1.0;
        }
    }
    sum.iter_mut().for_each(|s| *s /= count.max(1.0));
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use proptest::prelude::*;

    #[test]
    fn separates_two_clumps() {
        let points = [0.0, 0.1, 9.0, 0.2, 9.1];
        let sides = bisect(&points, 1);
        assert_eq!(sides[0], sides[1]);
        assert_eq!(sides[0], sides[3]);
        assert_eq!(sides[2], sides[4]);
        assert_ne!(sides[0], sides[2]);
    }

    proptest! {
        /// Every point once, no group over capacity, and no point with another group's mean nearer
        /// than before: the scatter within groups never rises.
        #[test]
        fn regrouping_keeps_every_point_and_lowers_the_scatter(
            seed in any::<u64>(), n in 1usize..60, width in 1usize..5, groups in 1usize..8,
            target in 1usize..12, capacity in 1usize..9,
        ) {
            let mut random = Random::new(seed, 0);
            let points = (0..n * width).map(|_| random.below(100) as f32 / 10.0).collect();
            let weights = (0..n).map(|_| 1.0 + random.below(5) as f32).collect();
            let cloud = Cloud { width, points, weights };
            let mut dealt = vec![Vec::new(); groups];
            (0..n as u32).for_each(|i| dealt[random.below(groups)].push(i));
            let scatter = |groups: &[Vec<u32>]| groups.iter().map(|g| cloud.scatter(g)).sum::<f32>();
            let before = scatter(&dealt);
            let full = dealt.iter().filter(|group| !group.is_empty()).count();
            cloud.regroup(&mut dealt, target, capacity);
            let mut all = dealt.concat();
            all.sort_unstable();
            prop_assert!(all.iter().copied().eq(0..n as u32));
            prop_assert!(dealt.iter().all(|group| group.len() <= capacity));
            if full <= most(target) {
                prop_assert!(scatter(&dealt) <= before * 1.0001 + 1e-3);
            }
        }
    }

    #[test]
    fn identical_points_are_halved() {
        assert_eq!(bisect(&[1.0; 4], 1), [false, false, true, true]);
        assert_eq!(bisect(&[1.0; 3], 1), [false, true, true]);
    }
}
