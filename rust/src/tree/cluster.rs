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
    /// Half the squared norms of the points.
    half_norms: Vec<f32>,
    means: Means,
    /// Of the two halves of the last group that was split.
    halves: Means,
    /// Products of means or points with points.
    products: Vec<f32>,
    /// Of each point: the group with the nearest mean, and its score.
    nearest: Vec<u32>,
    scores: Vec<f32>,
}

/// The means of groups that have points.
#[derive(Debug, Default)]
struct Means {
    /// Places of the groups.
    groups: Vec<usize>,
    /// [groups, width]
    rows: Vec<f32>,
    /// Half the squared norms of the means.
    half_norms: Vec<f32>,
    /// Summed weights of the groups.
    weights: Vec<f32>,
    /// Work space: the weights of the points of one group.
    shares: Vec<f32>,
}

impl Means {
    fn clear(&mut self) {
        self.groups.clear();
        self.rows.clear();
        self.half_norms.clear();
        self.weights.clear();
    }

    /// Adds the mean of a group of points, unless it is empty.
    fn push(&mut self, place: usize, group: &[u32], points: Rows<'_>, weights: &[f32]) {
        if group.is_empty() {
            return;
        }
        self.shares.clear();
        (self.shares).extend(group.iter().map(|&i| weights[i as usize]));
        let start = self.rows.len();
        self.rows.resize(start + points.dim, 0.0);
        let mean = &mut self.rows[start..];
        simd::weighted_sum(&self.shares, group.len(), points, Some(group), mean);
        let total: f32 = self.shares.iter().sum();
        let share = 1.0 / total;
        mean.iter_mut().for_each(|x| *x *= share);
        self.half_norms.push(0.5 * squares(mean));
        self.groups.push(place);
        self.weights.push(total);
    }

    fn as_rows(&self, width: usize) -> Rows<'_> {
        rows(&self.rows, width)
    }
}

fn rows(elements: &[f32], dim: usize) -> Rows<'_> {
    Rows {
        dim,
        len: elements.len() / dim,
        elements: Elements::F32(elements),
    }
}

impl Cloud {
    pub fn clear(&mut self) {
        self.points.clear();
        self.weights.clear();
    }

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
    pub fn regroup(&mut self, groups: &mut Vec<Vec<u32>>, target: usize, capacity: usize) {
        self.measure();
        self.find_means(groups);
        self.divide_widest(groups, target);
        self.merge_closest(groups, most(target));
        for round in 0..REGROUP_ROUNDS {
            if round > 0 {
                self.find_means(groups);
            }
            if !self.assign(groups) {
                break;
            }
        }
        let mut at = 0;
        while at < groups.len() {
            if groups[at].len() > capacity {
                let half = self.split(&mut groups[at]);
                groups.push(half);
            } else {
                at += 1;
            }
        }
    }

    /// Takes one half of a group of two points or more out of it.
    pub fn halve(&mut self, group: &mut Vec<u32>) -> Vec<u32> {
        self.measure();
        self.split(group)
    }

    fn measure(&mut self) {
        self.half_norms.clear();
        let points = self.points.chunks_exact(self.width);
        self.half_norms
            .extend(points.map(|point| 0.5 * squares(point)));
    }

    fn find_means(&mut self, groups: &[Vec<u32>]) {
        let points = rows(&self.points, self.width);
        self.means.clear();
        for (place, group) in groups.iter().enumerate() {
            self.means.push(place, group, points, &self.weights);
        }
    }

    /// Halves the group of largest scatter until there are `target` groups with points.
    fn divide_widest(&mut self, groups: &mut Vec<Vec<u32>>, target: usize) {
        let full = self.means.groups.len();
        if full >= target {
            return;
        }
        let mut scatters = vec![0.0; groups.len()];
        for (mean, &place) in self.means.groups.iter().enumerate() {
            scatters[place] = self.scatter(&groups[place], &self.means, mean);
        }
        for _ in full..target {
            let widest = (0..groups.len()).max_by(|&a, &b| scatters[a].total_cmp(&scatters[b]));
            let Some(widest) = widest.filter(|&widest| scatters[widest] > 0.0) else {
                break;
            };
            let half = self.split(&mut groups[widest]);
            scatters[widest] = self.scatter(&groups[widest], &self.halves, 0);
            scatters.push(self.scatter(&half, &self.halves, 1));
            groups.push(half);
        }
        self.find_means(groups);
    }

    /// Half the weighted sum of squared distances to the mean of a group, which is `means[at]`.
    fn scatter(&self, group: &[u32], means: &Means, at: usize) -> f32 {
        if group.len() < 2 {
            return 0.0;
        }
        let term = |&i: &u32| self.weights[i as usize] * self.half_norms[i as usize];
        let around_zero: f32 = group.iter().map(term).sum();
        (around_zero - means.weights[at] * means.half_norms[at]).max(0.0)
    }

    /// Merges the two groups whose union scatters least more than they do (Ward), until at most
    /// `most` have points.
    fn merge_closest(&mut self, groups: &mut [Vec<u32>], most: usize) {
        for _ in most..self.means.groups.len() {
            let (a, b) = self.closest();
            let moved = std::mem::take(&mut groups[b]);
            groups[a].extend(moved);
            groups[a].sort_unstable();
            self.find_means(groups);
        }
    }

    /// The two groups whose union would scatter least more than they do.
    fn closest(&mut self) -> (usize, usize) {
        let (means, n) = (&self.means, self.means.groups.len());
        self.products.resize(n * n, 0.0);
        let products = &mut self.products[..n * n];
        simd::dots(&means.rows, means.as_rows(self.width), None, products, n);
        let (mut best, mut least) = ((0, 1), f32::INFINITY);
        for a in 0..n {
            for b in a + 1..n {
                let half_distance = means.half_norms[a] + means.half_norms[b] - products[a * n + b];
                let share =
                    means.weights[a] * means.weights[b] / (means.weights[a] + means.weights[b]);
                let cost = half_distance.max(0.0) * share;
                if cost < least {
                    (best, least) = ((a, b), cost);
                }
            }
        }
        (means.groups[best.0], means.groups[best.1])
    }

    /// Gives every point to the group with the nearest mean; empty groups stay empty. `false`:
    /// every point was there already.
    fn assign(&mut self, groups: &mut [Vec<u32>]) -> bool {
        let (means, n) = (&self.means, self.weights.len());
        self.products.resize(means.groups.len() * n, 0.0);
        let products = &mut self.products[..means.groups.len() * n];
        simd::dots(
            &means.rows,
            rows(&self.points, self.width),
            None,
            products,
            n,
        );
        self.nearest.clear();
        self.nearest.resize(n, 0);
        self.scores.clear();
        self.scores.resize(n, f32::NEG_INFINITY);
        let of_means = means.half_norms.iter().zip(&means.groups);
        for (products, (half_norm, &place)) in products.chunks_exact(n).zip(of_means) {
            let best = self.nearest.iter_mut().zip(&mut self.scores);
            for ((nearest, highest), product) in best.zip(products) {
                let score = product - half_norm;
                let nearer = score > *highest;
                *highest = if nearer { score } else { *highest };
                *nearest = if nearer { place as u32 } else { *nearest };
            }
        }
        let stays = |place: usize, &i: &u32| self.nearest[i as usize] == place as u32;
        let all_stay = |(place, group): (usize, &Vec<u32>)| group.iter().all(|i| stays(place, i));
        if groups.iter().enumerate().all(all_stay) {
            return false;
        }
        groups.iter_mut().for_each(Vec::clear);
        for (i, &place) in self.nearest.iter().enumerate() {
            groups[place as usize].push(i as u32);
        }
        true
    }

    /// Takes one half of a group of two points or more out of it: 2-means from two far points.
    /// Points that cannot be told apart are halved in their order. Leaves the means of both halves.
    fn split(&mut self, group: &mut Vec<u32>) -> Vec<u32> {
        let n = group.len();
        self.find_halves(group, &[]);
        let first = self.farthest(group);
        self.find_halves(&[first], &[]);
        let second = self.farthest(group);
        self.find_halves(&[first], &[second]);
        let alike = squared_distance(self.point(first), self.point(second)) <= 0.0;
        let all = std::mem::take(group);
        let mut half = Vec::with_capacity(n);
        for _ in 0..if alike { 0 } else { ROUNDS } {
            self.multiply(&all);
            let border = self.halves.half_norms[1] - self.halves.half_norms[0];
            let (to_rest, to_half) = self.products[..2 * n].split_at(n);
            let mut moved = false;
            let mut known = half.iter().copied().peekable();
            for (i, (a, b)) in to_rest.iter().zip(to_half).enumerate() {
                moved |= known.next_if_eq(&all[i]).is_some() != (b - a > border);
            }
            if !moved {
                break;
            }
            half.clear();
            group.clear();
            for (i, (a, b)) in to_rest.iter().zip(to_half).enumerate() {
                let side = if b - a > border {
                    &mut half
                } else {
                    &mut *group
                };
                side.push(all[i]);
            }
            if group.is_empty() || half.is_empty() {
                break;
            }
            self.find_halves(group, &half);
        }
        if group.is_empty() || half.is_empty() {
            *group = all;
            half = group.split_off(n / 2);
            self.find_halves(group, &half);
        }
        half
    }

    fn find_halves(&mut self, rest: &[u32], half: &[u32]) {
        let points = rows(&self.points, self.width);
        self.halves.clear();
        self.halves.push(0, rest, points, &self.weights);
        self.halves.push(1, half, points, &self.weights);
    }

    /// Products of the means of the halves with each of a group.
    fn multiply(&mut self, group: &[u32]) {
        let (points, n) = (rows(&self.points, self.width), group.len());
        self.products.resize(2 * n, 0.0);
        let products = &mut self.products[..2 * n];
        simd::dots(&self.halves.rows, points, Some(group), products, n);
    }

    /// The first of a group that is farthest from the mean of the first half.
    fn farthest(&mut self, group: &[u32]) -> u32 {
        self.multiply(group);
        let mut best = (group[0], f32::NEG_INFINITY);
        for (&i, product) in group.iter().zip(&self.products) {
            let distance = self.half_norms[i as usize] - product;
            if distance > best.1 {
                best = (i, distance);
            }
        }
        best.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use proptest::prelude::*;

    /// Which half each point of one coordinate goes to.
    fn halve(points: &[f32]) -> Vec<bool> {
        let mut cloud = Cloud::default();
        points.iter().for_each(|&x| cloud.push(1, 1.0)[0] = x);
        let mut all = (0..points.len() as u32).collect();
        let half = cloud.halve(&mut all);
        (0..points.len() as u32)
            .map(|i| half.contains(&i))
            .collect()
    }

    #[test]
    fn separates_two_clumps() {
        let points = [0.0, 0.1, 9.0, 0.2, 9.1];
        let sides = halve(&points);
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
            let mut cloud = Cloud { width, points, weights, ..Cloud::default() };
            let mut dealt = vec![Vec::new(); groups];
            (0..n as u32).for_each(|i| dealt[random.below(groups)].push(i));
            let scatter = |cloud: &mut Cloud, groups: &[Vec<u32>]| {
                cloud.measure();
                cloud.find_means(groups);
                let means = cloud.means.groups.iter().enumerate();
                means.map(|(at, &g)| cloud.scatter(&groups[g], &cloud.means, at)).sum::<f32>()
            };
            let before = scatter(&mut cloud, &dealt);
            let full = dealt.iter().filter(|group| !group.is_empty()).count();
            cloud.regroup(&mut dealt, target, capacity);
            let mut all = dealt.concat();
            all.sort_unstable();
            prop_assert!(all.iter().copied().eq(0..n as u32));
            prop_assert!(dealt.iter().all(|group| group.len() <= capacity));
            if full <= most(target) {
                prop_assert!(scatter(&mut cloud, &dealt) <= before * 1.0001 + 1e-2);
            }
        }
    }

    #[test]
    fn identical_points_are_halved() {
        assert_eq!(halve(&[1.0; 4]), [false, false, true, true]);
        assert_eq!(halve(&[1.0; 3]), [false, true, true]);
    }
}
