//! The loop that reads many inputs.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use super::random::{Culprit, Random, requested};

/// Number of inputs in a run of the test suite.
const INPUTS: u64 = 20_000;

/// Reads the requested number of inputs. Returns how often each error occurred; the key "" counts accepted inputs.
pub(super) fn run<E: fmt::Debug>(
    name: &str,
    make: fn(&mut Random) -> Vec<u8>,
    read: fn(&[u8], &mut Random) -> Result<(), E>,
) -> Errors {
    let numbers = requested(INPUTS);
    let (seed, inputs) = (numbers.start, numbers.end - numbers.start);
    let started = Instant::now();
    let mut faults = Errors::new();
    for input in numbers {
        let _culprit = Culprit(input);
        let mut random = Random::new(input);
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
