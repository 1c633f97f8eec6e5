//! Random numbers and damage to bytes.

use std::env;
use std::ops::Range;
use std::thread;

/// Random numbers (SplitMix64, <https://prng.di.unimi.it/splitmix64.c>).
pub struct Random(u64);

impl Random {
    /// Returns the numbers that follow from a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Returns true once in `times` calls on average.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// Returns one of the elements.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }

    /// Returns `usual`, or sometimes a number that makes arithmetic overflow.
    pub fn number(&mut self, usual: u64) -> u64 {
        if !self.once_in(100) {
            return usual;
        }
        match self.below(8) {
            0 => 0,
            1 => u64::MAX >> self.below(64),
            2 => 1 << self.below(64),
            3 => (1u64 << self.below(64)).wrapping_neg(),
            4 => usual.wrapping_add(1),
            5 => usual.wrapping_sub(1),
            6 => usual ^ (1 << self.below(64)),
            _ => self.next(),
        }
    }

    /// Changes, removes or repeats some bytes.
    pub fn damage(&mut self, bytes: &mut Vec<u8>) {
        let at = self.below(bytes.len() as u64 + 1) as usize;
        let end = (at + 1 + self.below(9) as usize).min(bytes.len());
        match self.below(5) {
            0 => bytes.truncate(at),
            1 => drop(bytes.drain(at..end)),
            2 => {
                let repeated = bytes[at..end].to_vec();
                bytes.splice(at..at, repeated);
            }
            3 => bytes.insert(at, *self.pick(b"\0\x01\xff\x80\"{}[],:0e-. ")),
            _ => bytes[at..end].iter_mut().for_each(|byte| *byte ^= 1 << self.below(8)),
        }
    }
}

/// Returns the numbers of the inputs to read: `FERRULE_FUZZ_INPUTS` (default `inputs`) from `FERRULE_FUZZ_SEED` on.
pub fn requested(inputs: u64) -> Range<u64> {
    let asked = |variable: &str| env::var(variable).ok().map(|number| number.parse().expect("a number"));
    let first: u64 = asked("FERRULE_FUZZ_SEED").unwrap_or(0);
    first..first + asked("FERRULE_FUZZ_INPUTS").unwrap_or(inputs)
}

/// The number of an input, which is printed if reading it panics.
pub struct Culprit(pub u64);

impl Drop for Culprit {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the input of FERRULE_FUZZ_SEED={} FERRULE_FUZZ_INPUTS=1", self.0);
        }
    }
}
