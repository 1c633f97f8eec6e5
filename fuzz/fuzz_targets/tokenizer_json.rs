//! tokenizer.json files.
#![no_main]

use ferrule_fuzz::formats::tokenizer_json;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|content: &[u8]| {
    tokenizer_json(content);
});
