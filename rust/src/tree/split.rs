//! Dividing one group of points in two: how every full node of every level splits.

/// Rounds of 2-means; more change few groups of this size.
const ROUNDS: usize = 4;

/// Which half each of the points [n, dim] goes to (n >= 2); neither half is empty.
///
/// 2-means from two far points. Points that cannot be told apart are halved in their order.
pub fn bisect(points: &[f32], dim: usize) -> Vec<bool> {
    let n = points.len() / dim;
    let point = |i: usize| &points[i * dim..][..dim];
    let mut centres = [mean(points, dim, |_| true), Vec::new()];
    let first = farthest(points, dim, &centres[0]);
    let second = farthest(points, dim, point(first));
    if distance(point(first), point(second)) <= 0.0 {
        return (0..n).map(|i| i >= n / 2).collect();
    }
    centres = [point(first).to_vec(), point(second).to_vec()];
    let mut sides = vec![false; n];
    for _ in 0..ROUNDS {
        for (i, side) in sides.iter_mut().enumerate() {
            *side = distance(point(i), &centres[1]) < distance(point(i), &centres[0]);
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

fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| (x - y) * (x - y)).sum()
}

/// The first of the points farthest from `origin`.
fn farthest(points: &[f32], dim: usize, origin: &[f32]) -> usize {
    let mut best = (0, -1.0);
    for (i, point) in points.chunks_exact(dim).enumerate() {
        let d = distance(point, origin);
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

    #[test]
    fn separates_two_clumps() {
        let points = [0.0, 0.1, 9.0, 0.2, 9.1];
        let sides = bisect(&points, 1);
        assert_eq!(sides[0], sides[1]);
        assert_eq!(sides[0], sides[3]);
        assert_eq!(sides[2], sides[4]);
        assert_ne!(sides[0], sides[2]);
    }

    #[test]
    fn identical_points_are_halved() {
        assert_eq!(bisect(&[1.0; 4], 1), [false, false, true, true]);
        assert_eq!(bisect(&[1.0; 3], 1), [false, true, true]);
    }
}
