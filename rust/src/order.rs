//! Partial sorts that give the same answer whatever the order of work: places by score, ties by
//! place.

use crate::ids::KeyId;
use crate::rows::Rows;
use crate::simd;

/// Places ordered by score, best first, ties by place: partial sorts that are deterministic.
#[derive(Debug, Default)]
pub struct Order(Vec<u64>);

impl Order {
    /// Starts over with these scores.
    pub fn rank(&mut self, scores: &[f32]) {
        self.0.clear();
        self.0.extend(scores.iter().enumerate().map(|(i, &score)| {
            // Bits of a float, made to order like an unsigned number, highest first.
            let bits = score.to_bits();
            let ascending = if bits >> 31 == 1 {
                !bits
            } else {
                bits | 1 << 31
            };
            u64::from(!ascending) << 32 | i as u64
        }));
    }

    /// How many of the best it takes until their weights add up to `target` (all, if they never
    /// do).
    pub fn count_until(&mut self, target: usize, weight: impl Fn(usize) -> usize) -> usize {
        let (mut low, mut high, mut below) = (0, self.0.len(), 0);
        while low < high {
            let middle = low + (high - low) / 2;
            self.0[low..high].select_nth_unstable(middle - low);
            let sum: usize = self.0[low..=middle]
                .iter()
                .map(|&key| weight(place(key)))
                .sum();
            if below + sum >= target {
                high = middle;
            } else {
                below += sum;
                low = middle + 1;
            }
        }
        // `low` is the first place whose running weight reaches the target.
        (low + 1).min(self.0.len())
    }

    /// Writes all places: first the best `count`, then the rest, each part in ascending order.
    pub fn partition(&mut self, count: usize, places: &mut Vec<u32>) {
        let count = count.min(self.0.len());
        if 0 < count && count < self.0.len() {
            self.0.select_nth_unstable(count - 1);
        }
        places.clear();
        places.extend(self.0.iter().map(|&key| place(key) as u32));
        places[..count].sort_unstable();
        places[count..].sort_unstable();
    }

    /// The best `count` places, best first.
    pub fn best(&mut self, count: usize) -> impl Iterator<Item = usize> + '_ {
        let count = count.min(self.0.len());
        if 0 < count && count < self.0.len() {
            self.0.select_nth_unstable(count - 1);
        }
        self.0[..count].sort_unstable();
        self.0[..count].iter().map(|&key| place(key))
    }
}

fn place(key: u64) -> usize {
    (key & 0xffff_ffff) as usize
}

/// The best keys of a search in progress.
#[derive(Debug, Default)]
pub struct Best {
    ids: Vec<KeyId>,
    scores: Vec<f32>,
    order: Order,
}

impl Best {
    pub fn clear(&mut self) {
        self.ids.clear();
        self.scores.clear();
    }

    /// Scores rows by inner product with the query.
    pub fn add(&mut self, query: &[f32], keys: Rows<'_>, ids: &[KeyId]) {
        let start = self.scores.len();
        self.scores.resize(start + keys.len, 0.0);
        simd::dots(query, keys, None, &mut self.scores[start..], keys.len);
        self.ids.extend_from_slice(ids);
    }

    /// Keys scored so far.
    pub fn scored(&self) -> usize {
        self.scores.len()
    }

    /// Writes the best, best first; ties by id; what is missing becomes -1 and minus infinity.
    pub fn write(&mut self, ids: &mut [i64], scores: &mut [f32]) {
        let mut by_id: Vec<u32> = (0..self.ids.len() as u32).collect();
        by_id.sort_unstable_by_key(|&i| self.ids[i as usize]);
        let sorted: Vec<f32> = by_id.iter().map(|&i| self.scores[i as usize]).collect();
        self.order.rank(&sorted);
        ids.fill(-1);
        scores.fill(f32::NEG_INFINITY);
        for (slot, place) in self.order.best(ids.len()).enumerate() {
            ids[slot] = i64::from(self.ids[by_id[place] as usize]);
            scores[slot] = sorted[place];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn order_is_a_sort(scores in prop::collection::vec(-8i8..8, 1..60), target in 0usize..200) {
            let scores: Vec<f32> = scores.into_iter().map(f32::from).collect();
            let mut sorted: Vec<usize> = (0..scores.len()).collect();
            sorted.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
            let weight = |i: usize| 1 + i % 5;
            let mut order = Order::default();
            order.rank(&scores);
            let count = order.count_until(target, weight);
            let running: Vec<usize> = sorted.iter().scan(0, |s, &i| { *s += weight(i); Some(*s) }).collect();
            let want = running.iter().position(|&s| s >= target).map_or(scores.len(), |p| p + 1);
            prop_assert_eq!(count, want);
            let mut places = Vec::new();
            order.partition(count, &mut places);
            let mut expected: Vec<u32> = sorted[..count].iter().map(|&i| i as u32).collect();
            expected.sort_unstable();
            prop_assert_eq!(&places[..count], &expected[..]);
            prop_assert_eq!(order.best(count).collect::<Vec<_>>(), &sorted[..count]);
        }
    }
}
