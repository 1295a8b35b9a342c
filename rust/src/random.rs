//! A small seeded generator (SplitMix64): the tree of a seed must never change with a library.

/// SplitMix64 (Steele, Lea, Flood 2014): one multiply-xorshift round per number.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A stream of its own for every pair of seed and stream number.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut mixed = Self(seed);
        let first = mixed.next_u64();
        Self(first ^ stream.wrapping_mul(0xD1B5_4A32_D192_ED03))
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number in `0..bound` (bias below 2^-32 for every bound that fits in 32 bits).
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// `count` distinct numbers of `0..n` in random order.
    pub fn sample(&mut self, n: usize, count: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..n as u32).collect();
        for i in 0..count.min(n) {
            let j = i + self.below(n - i);
            all.swap(i, j);
        }
        all.truncate(count);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_is_distinct_and_seeded() {
        let a = Random::new(7, 3).sample(1000, 400);
        let b = Random::new(7, 3).sample(1000, 400);
        let c = Random::new(7, 4).sample(1000, 400);
        assert_eq!(a, b);
        assert_ne!(a, c);
        let mut sorted = a.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), 400);
    }
}
