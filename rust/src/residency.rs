//! Which tokens of one KV head lie on a device, and in which slots.
//!
//! A slot holds the key and the value of one token. All slots are in one list, from the least to the
//! most recently wanted, empty ones first; a token that has no slot gets the first of the list.

use crate::ids::{KeyId, SlotId};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// The token of an empty slot.
const EMPTY: KeyId = KeyId::MAX;
/// The end of the list.
const NONE: u32 = u32::MAX;

/// What the tokens wanted so far met with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tokens that had a slot.
    pub hits: usize,
    /// Tokens that got one.
    pub misses: usize,
    /// Tokens that lost theirs to another.
    pub evictions: usize,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    token: KeyId,
    /// The turn that last wanted the token.
    turn: u32,
    before: u32,
    after: u32,
}

#[derive(Debug)]
pub struct Residency {
    slots: Vec<Slot>,
    /// Least and most recently wanted.
    first: u32,
    last: u32,
    places: HashMap<KeyId, SlotId, BuildHasherDefault<TokenHasher>>,
    turn: u32,
    counts: Counts,
}

impl Residency {
    /// As many empty slots, at least one.
    pub fn new(slots: usize) -> Self {
        let count = slots as u32;
        let slot = |i: u32| Slot {
            token: EMPTY,
            turn: 0,
            before: i.checked_sub(1).unwrap_or(NONE),
            after: if i + 1 < count { i + 1 } else { NONE },
        };
        // Twice as many as there are slots: then the map never grows, however often tokens change.
        let places = HashMap::with_capacity_and_hasher(2 * slots, Default::default());
        Self {
            slots: (0..count).map(slot).collect(),
            first: 0,
            last: count - 1,
            places,
            turn: 0,
            counts: Counts::default(),
        }
    }

    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Starts a turn: until the next one, no token that is wanted loses its slot.
    pub fn next_turn(&mut self) {
        self.turn = self.turn.wrapping_add(1);
    }

    /// Gives every token of `wanted` (distinct) a slot, `slots` in the same order. What has one keeps
    /// it. Each of the others, `misses` by index in `wanted` and in ascending order of the slots, takes
    /// an empty one or that of the token that was not wanted for longest.
    ///
    /// Panics if one turn wants more tokens than there are slots.
    pub fn admit(
        &mut self,
        wanted: &[KeyId],
        slots: &mut Vec<SlotId>,
        misses: &mut Vec<(usize, SlotId)>,
    ) {
        slots.clear();
        misses.clear();
        // First what is there, so that no miss takes its slot.
        for (i, token) in wanted.iter().enumerate() {
            let place = self.places.get(token).copied();
            match place {
                Some(slot) => self.want(slot),
                None => misses.push((i, SlotId(NONE))),
            }
            slots.push(place.unwrap_or(SlotId(NONE)));
        }
        self.counts.hits += wanted.len() - misses.len();
        self.counts.misses += misses.len();
        for (i, slot) in misses.iter_mut() {
            *slot = self.claim(wanted[*i]);
            slots[*i] = *slot;
        }
        misses.sort_unstable_by_key(|miss| miss.1);
    }

    /// Empties the slots of all tokens from position `n` on.
    pub fn forget_from(&mut self, n: usize) {
        // Backwards, so that the first slots become the first of the list.
        for i in (0..self.slots.len() as u32).rev() {
            let token = self.slots[i as usize].token;
            if token != EMPTY && token as usize >= n {
                self.places.remove(&token);
                self.slots[i as usize].token = EMPTY;
                self.unlink(i);
                self.link_first(i);
            }
        }
    }

    pub fn bytes(&self) -> usize {
        // The map's tables hold an eighth more entries than it promises, and a byte beside each.
        let entry = size_of::<(KeyId, SlotId)>() + 1;
        self.slots.capacity() * size_of::<Slot>()
            + (self.places.capacity() * 8 / 7).next_power_of_two() * entry
    }

    /// Every invariant: the list holds all slots, empty ones first, and the map those with a token.
    pub fn check(&self) -> Result<(), String> {
        let (mut seen, mut at, mut before, mut held) = (0, self.first, NONE, 0);
        while at != NONE && seen < self.slots.len() {
            let slot = &self.slots[at as usize];
            if slot.before != before {
                return Err(format!("slot {at} is not linked to the one before it"));
            }
            if slot.token == EMPTY && held > 0 {
                return Err(format!("slot {at} is empty and follows one that is not"));
            }
            held += usize::from(slot.token != EMPTY);
            let known = self.places.get(&slot.token);
            if slot.token != EMPTY && known != Some(&SlotId(at)) {
                return Err(format!("token {} of slot {at} is at {known:?}", slot.token));
            }
            (seen, before, at) = (seen + 1, at, slot.after);
        }
        if seen != self.slots.len() || at != NONE || self.last != before {
            return Err(format!("{seen} of {} slots are linked", self.slots.len()));
        }
        if held != self.places.len() {
            let known = self.places.len();
            return Err(format!("{held} slots hold a token, {known} are known"));
        }
        Ok(())
    }

    /// The slot of least recent use, now that of `token`.
    fn claim(&mut self, token: KeyId) -> SlotId {
        let slot = SlotId(self.first);
        let old = self.slots[slot.index()];
        if old.token != EMPTY {
            assert!(old.turn != self.turn, "more tokens wanted than slots");
            self.places.remove(&old.token);
            self.counts.evictions += 1;
        }
        self.slots[slot.index()].token = token;
        self.places.insert(token, slot);
        self.want(slot);
        slot
    }

    fn want(&mut self, slot: SlotId) {
        self.slots[slot.index()].turn = self.turn;
        self.unlink(slot.0);
        self.link_last(slot.0);
    }

    fn unlink(&mut self, slot: u32) {
        let Slot { before, after, .. } = self.slots[slot as usize];
        match before {
            NONE => self.first = after,
            _ => self.slots[before as usize].after = after,
        }
        match after {
            NONE => self.last = before,
            _ => self.slots[after as usize].before = before,
        }
    }

    fn link_first(&mut self, slot: u32) {
        let after = std::mem::replace(&mut self.first, slot);
        self.slots[slot as usize].before = NONE;
        self.slots[slot as usize].after = after;
        match after {
            NONE => self.last = slot,
            _ => self.slots[after as usize].before = slot,
        }
    }

    fn link_last(&mut self, slot: u32) {
        let before = std::mem::replace(&mut self.last, slot);
        self.slots[slot as usize].after = NONE;
        self.slots[slot as usize].before = before;
        match before {
            NONE => self.first = slot,
            _ => self.slots[before as usize].after = slot,
        }
    }
}

/// One multiplication: positions are not chosen by an adversary.
#[derive(Debug, Default)]
struct TokenHasher(u64);

impl Hasher for TokenHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u32(u32::from(byte));
        }
    }

    fn write_u32(&mut self, token: u32) {
        let mixed = (self.0 ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use proptest::prelude::*;

    /// Slots and their tokens, from the least to the most recently wanted.
    type Model = Vec<(u32, Option<KeyId>)>;

    fn wanted(random: &mut Random, most: usize, tokens: usize) -> Vec<KeyId> {
        let count = 1 + random.below(most);
        let mut wanted: Vec<KeyId> = (0..count).map(|_| random.below(tokens) as KeyId).collect();
        wanted.sort_unstable();
        wanted.dedup();
        // In no particular order.
        (1..wanted.len()).for_each(|i| wanted.swap(i, random.below(i + 1)));
        wanted
    }

    proptest! {
        /// Against a plain list: who has which slot, what is missed, evicted and forgotten.
        #[test]
        fn behaves_like_a_list(
            seed in any::<u64>(), slots in 1usize..40, tokens in 1usize..120, steps in 1usize..80,
        ) {
            let mut random = Random::new(seed, 0);
            let (mut residency, mut twin) = (Residency::new(slots), Residency::new(slots));
            let mut model: Model = (0..slots as u32).map(|slot| (slot, None)).collect();
            let (mut counts, bytes) = (Counts::default(), residency.bytes());
            let (mut found, mut misses) = (Vec::new(), Vec::new());
            for _ in 0..steps {
                if random.below(8) == 0 {
                    let n = random.below(tokens + 1);
                    residency.forget_from(n);
                    twin.forget_from(n);
                    let gone = |token: Option<KeyId>| token.is_none_or(|token| token as usize >= n);
                    // What was empty already comes after what is emptied now.
                    let mut empty: Model = model.iter().copied().filter(|s| s.1.is_some() && gone(s.1)).collect();
                    empty.sort_unstable();
                    empty.iter_mut().for_each(|slot| slot.1 = None);
                    empty.extend(model.iter().filter(|slot| slot.1.is_none()));
                    empty.extend(model.iter().filter(|slot| !gone(slot.1)));
                    model = empty;
                    prop_assert_eq!(residency.check(), Ok(()));
                    continue;
                }
                residency.next_turn();
                twin.next_turn();
                let mut this_turn: Vec<KeyId> = Vec::new();
                // Positions of one turn, as long as the slots hold all that they want.
                for _ in 0..4 {
                    let wanted = wanted(&mut random, slots, tokens);
                    let mut all = [&this_turn[..], &wanted].concat();
                    all.sort_unstable();
                    all.dedup();
                    if all.len() > slots {
                        break;
                    }
                    this_turn = all;
                    residency.admit(&wanted, &mut found, &mut misses);
                    let mut again = (Vec::new(), Vec::new());
                    twin.admit(&wanted, &mut again.0, &mut again.1);
                    prop_assert_eq!((&found, &misses), (&again.0, &again.1));

                    let mut want = vec![NONE; wanted.len()];
                    let mut missed = Vec::new();
                    for had in [true, false] {
                        for (i, &token) in wanted.iter().enumerate() {
                            let held = model.iter().position(|slot| slot.1 == Some(token));
                            if want[i] != NONE || held.is_some() != had {
                                continue;
                            }
                            let (slot, old) = model.remove(held.unwrap_or(0));
                            if had {
                                counts.hits += 1;
                            } else {
                                counts.misses += 1;
                                counts.evictions += usize::from(old.is_some());
                                prop_assert!(old.is_none_or(|old| !this_turn.contains(&old)));
                                missed.push((i, SlotId(slot)));
                            }
                            model.push((slot, Some(token)));
                            want[i] = slot;
                        }
                    }
                    missed.sort_unstable_by_key(|miss| miss.1);
                    prop_assert!(found.iter().map(|slot| slot.0).eq(want));
                    prop_assert_eq!(&misses, &missed);
                    // Whatever this turn wanted, now or before, is still there.
                    for token in &this_turn {
                        prop_assert!(residency.places.contains_key(token));
                    }
                    prop_assert_eq!(residency.check(), Ok(()));
                }
            }
            prop_assert_eq!(residency.counts(), counts);
            let held = model.iter().filter_map(|&(slot, token)| Some((token?, SlotId(slot))));
            prop_assert!(held.clone().count() == residency.places.len());
            prop_assert!(held.clone().all(|(token, slot)| residency.places[&token] == slot));
            prop_assert_eq!(residency.bytes(), bytes);
        }
    }

    #[test]
    fn years_of_turnover_take_no_more_memory() {
        let mut residency = Residency::new(100);
        let (bytes, mut slots, mut misses) = (residency.bytes(), Vec::new(), Vec::new());
        for turn in 0..20_000 {
            residency.next_turn();
            let wanted: Vec<KeyId> = (0..50).map(|i| turn * 37 + i).collect();
            residency.admit(&wanted, &mut slots, &mut misses);
        }
        assert_eq!(residency.bytes(), bytes);
        assert_eq!(
            residency.counts().hits + residency.counts().misses,
            50 * 20_000
        );
        assert_eq!(residency.check(), Ok(()));
    }

    #[test]
    #[should_panic(expected = "more tokens wanted than slots")]
    fn a_turn_that_wants_too_much_is_a_defect() {
        Residency::new(3).admit(&[5, 6, 7, 8], &mut Vec::new(), &mut Vec::new());
    }
}
