//! safetensors files.
#![no_main]

use ferrule_fuzz::formats::safetensors;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|content: &[u8]| {
    safetensors(content);
});
