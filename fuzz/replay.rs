//! Runs a fuzz target in a test, without a fuzzer: on its seeds, and on random damage to them.

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "random.rs"]
mod random;

use std::fs;
use std::path::Path;

use random::{Culprit, Random, requested};

/// Passes the seeds of a target to `accepts`, and then `inputs` damaged ones. `FERRULE_FUZZ_INPUTS` asks for more, and
/// `FERRULE_FUZZ_SEED` for others.
///
/// # Panics
/// If a seed is not accepted, or every damaged one is.
#[track_caller]
pub fn replay(target: &str, inputs: u64, mut accepts: impl FnMut(&[u8]) -> bool) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
    let entries = fs::read_dir(&folder).expect("a folder of seeds");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("a seed").path()).collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).expect("a seed")).collect();
    for (path, seed) in paths.iter().zip(&seeds) {
        assert!(accepts(seed), "{} is not accepted", path.display());
    }
    let numbers = requested(inputs);
    let accepted = numbers.clone().filter(|number| {
        let _culprit = Culprit(*number);
        let mut random = Random::new(*number);
        let mut bytes = random.pick(&seeds).clone();
        for _ in 0..=random.below(3) {
            random.damage(&mut bytes);
        }
        accepts(&bytes)
    });
    let (accepted, inputs) = (accepted.count() as u64, numbers.end - numbers.start);
    println!("{target}: {accepted} of {inputs} damaged inputs from seed {} on were accepted", numbers.start);
    assert!(inputs < 100 || accepted < inputs, "no damage was found");
}
