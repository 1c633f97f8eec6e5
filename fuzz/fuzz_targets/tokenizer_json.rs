//! Checks of tokenizer.json before a library reads it.
#![no_main]

use ferrule_formats::check_tokenizer_json;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|content: &[u8]| {
    let _ = check_tokenizer_json(content);
});
