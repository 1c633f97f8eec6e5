//! Saved states of sequences.
#![no_main]

use ferrule_engine::pages::fuzz::restore_state;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|content: &[u8]| {
    restore_state(content);
});
