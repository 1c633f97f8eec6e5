//! Random numbers, damage to bytes, and the loop that reads many inputs.

use std::collections::BTreeMap;
use std::fmt;
use std::thread;
use std::time::Instant;

/// Number of inputs in a run of the test suite.
const INPUTS: u64 = 20_000;

/// Random numbers (SplitMix64, <https://prng.di.unimi.it/splitmix64.c>).
pub(super) struct Random(u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Returns true once in `times` calls on average.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

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

/// Prints the input that panicked.
struct Culprit(u64);

impl Drop for Culprit {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the input of FERRULE_FUZZ_SEED={} FERRULE_FUZZ_INPUTS=1", self.0);
        }
    }
}

/// Reads the requested number of inputs. Returns how often each error occurred; the key "" counts accepted inputs.
pub(super) fn run<E: fmt::Debug>(
    name: &str,
    make: fn(&mut Random) -> Vec<u8>,
    read: fn(&[u8], &mut Random) -> Result<(), E>,
) -> Errors {
    let asked = |variable: &str| std::env::var(variable).ok().map(|number| number.parse().expect("a number"));
    let inputs = asked("FERRULE_FUZZ_INPUTS").unwrap_or(INPUTS);
    let seed: u64 = asked("FERRULE_FUZZ_SEED").unwrap_or(0);
    let started = Instant::now();
    let mut faults = Errors::new();
    for input in seed..seed + inputs {
        let _culprit = Culprit(input);
        let mut random = Random(input);
        let mut bytes = make(&mut random);
        if random.once_in(4) {
            random.damage(&mut bytes);
        }
        let found = read(&bytes, &mut random).err().map_or(String::new(), |fault| variant(&fault));
        *faults.entry(found).or_default() += 1;
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("{name}: {inputs} inputs from seed {seed} on in {seconds:.1} s without a panic: {faults:?}");
    faults
}

type Errors = BTreeMap<String, u64>;

/// Returns the name of an error's variant, and of the variant inside of a `File` error.
fn variant(error: &impl fmt::Debug) -> String {
    let shown = format!("{error:?}");
    let shown = shown.strip_prefix("File(").unwrap_or(&shown);
    shown.split([' ', '(', '{']).next().unwrap_or_default().trim_end_matches(')').to_owned()
}

/// Checks that every expected error occurred and that some inputs were valid, unless there were few inputs.
#[track_caller]
pub(super) fn assert_found(faults: &Errors, expected: &[&str]) {
    let total: u64 = faults.values().sum();
    if total >= INPUTS {
        let missing: Vec<_> = expected.iter().filter(|fault| !faults.contains_key(**fault)).collect();
        assert!(missing.is_empty(), "never found: {missing:?} in {faults:?}");
        assert!(faults.get("").is_some_and(|valid| valid * 20 > total), "few are valid: {faults:?}");
    }
}
