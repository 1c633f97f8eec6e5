//! Packed files.
#![no_main]

use ferrule_fuzz::formats::packed;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|content: &[u8]| {
    packed(content);
});
