//! GGUF files.
#![no_main]

use ferrule_fuzz::formats::gguf;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|content: &[u8]| {
    gguf(content);
});
