//! SentencePiece character maps.
#![no_main]

use ferrule_fuzz::formats::charsmap;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|content: &[u8]| {
    charsmap(content);
});
