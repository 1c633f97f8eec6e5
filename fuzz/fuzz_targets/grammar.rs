//! Constraints of structured outputs.
#![no_main]

use std::panic;

use ferrule_fuzz::grammar::grammar;
use libfuzzer_sys::fuzz_target;

fuzz_target!(
    // The engine catches panics of the grammar compiler and reports them as errors. libFuzzer would end the process.
    init: panic::set_hook(Box::new(|_| ())),
    |content: &[u8]| {
        grammar(content);
    }
);
