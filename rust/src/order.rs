//! Partial sorts that give the same answer whatever the order of work: places by score, ties by
//! place.

use crate::ids::KeyId;
use crate::rows::Rows;
use crate::simd;

/// Scores are told apart by this many of their highest bits first: sign, exponent, 3 bits more.
const BUCKET_BITS: u32 = 12;
/// Below so many places one partial sort is faster than counting.
const FEW: usize = 256;

/// Places ordered by score, best first, ties by place: partial sorts that are deterministic.
#[derive(Debug, Default)]
pub struct Order {
    /// Bits of the scores, made to order like unsigned numbers, the best first.
    keys: Vec<u32>,
    buckets: Vec<u32>,
    /// Keys with their places below them: those that a decision is still about.
    near: Vec<u64>,
}

impl Order {
    /// Starts over with these scores.
    pub fn rank(&mut self, scores: &[f32]) {
        self.keys.clear();
        self.keys.extend(scores.iter().map(|score| {
            let bits = score.to_bits();
            let sign = (bits as i32 >> 31) as u32;
            !(bits ^ (sign | 1 << 31))
        }));
    }

    /// How many of the best it takes until their weights add up to `target` (all, if they never
    /// do).
    pub fn count_until(&mut self, target: usize, weight: impl Fn(usize) -> usize) -> usize {
        let (better, mut sum) = self.narrow(target, &weight);
        let (mut low, mut high) = (0, self.near.len());
        while low < high {
            let middle = low + (high - low) / 2;
            self.near[low..high].select_nth_unstable(middle - low);
            let half = self.near[low..=middle].iter();
            let half: usize = half.map(|&key| weight(place(key))).sum();
            if sum + half >= target {
                high = middle;
            } else {
                sum += half;
                low = middle + 1;
            }
        }
        // `low` is the first place whose running weight reaches the target.
        (better + low + 1).min(self.keys.len())
    }

    /// Writes the best `count` places, in ascending order.
    pub fn take(&mut self, count: usize, places: &mut Vec<u32>) {
        let count = count.min(self.keys.len());
        places.clear();
        if count == self.keys.len() {
            places.extend(0..count as u32);
        } else if count > 0 {
            let last = self.nth(count);
            // Without a branch that nothing predicts: what is not taken is overwritten.
            places.resize(count + 1, 0);
            let mut taken = 0;
            for (i, &key) in self.keys.iter().enumerate() {
                places[taken] = i as u32;
                taken += usize::from(with_place(key, i) <= last);
            }
            places.truncate(count);
        }
    }

    /// The best `count` places, best first.
    pub fn best(&mut self, count: usize) -> impl Iterator<Item = usize> + '_ {
        let count = count.min(self.keys.len());
        let last = if count > 0 { self.nth(count) } else { 0 };
        self.near.clear();
        if count > 0 {
            let all = self.keys.iter().enumerate();
            let all = all.map(|(i, &key)| with_place(key, i));
            self.near.extend(all.filter(|&key| key <= last));
        }
        self.near.sort_unstable();
        self.near.iter().map(|&key| place(key))
    }

    /// The `count`-th best key with its place, `count` from 1 on.
    fn nth(&mut self, count: usize) -> u64 {
        let (better, _) = self.narrow(count, |_| 1);
        *self.near.select_nth_unstable(count - 1 - better).1
    }

    /// Leaves in `near` the keys around the one where the running weight of the best reaches
    /// `target`. Returns how many keys are better than all of these, and their weight.
    fn narrow(&mut self, target: usize, weight: impl Fn(usize) -> usize) -> (usize, usize) {
        self.near.clear();
        let all = self.keys.iter().enumerate();
        if self.keys.len() < FEW {
            self.near.extend(all.map(|(i, &key)| with_place(key, i)));
            return (0, 0);
        }
        let bucket = |key: u32| key >> (32 - BUCKET_BITS);
        self.buckets.clear();
        self.buckets.resize(1 << BUCKET_BITS, 0);
        for (i, &key) in all.clone() {
            self.buckets[bucket(key) as usize] += weight(i) as u32;
        }
        let mut sum = 0;
        let mut reached = |held: u32| {
            let reached = sum + held as usize >= target;
            sum += if reached { 0 } else { held as usize };
            reached
        };
        let Some(within) = self.buckets.iter().position(|&held| reached(held)) else {
            return (self.keys.len(), sum);
        };
        let mut better = 0;
        for (i, &key) in all {
            better += usize::from(bucket(key) < within as u32);
            if bucket(key) == within as u32 {
                self.near.push(with_place(key, i));
            }
        }
        (better, sum)
    }
}

fn with_place(key: u32, place: usize) -> u64 {
    u64::from(key) << 32 | place as u64
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
        fn order_is_a_sort(scores in prop::collection::vec(-8i8..8, 1..700), target in 0usize..2500) {
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
            order.take(count, &mut places);
            let mut expected: Vec<u32> = sorted[..count].iter().map(|&i| i as u32).collect();
            expected.sort_unstable();
            prop_assert_eq!(&places, &expected);
            prop_assert_eq!(order.best(count).collect::<Vec<_>>(), &sorted[..count]);
        }
    }
}
