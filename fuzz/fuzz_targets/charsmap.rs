//! Checks of a SentencePiece character map before a library reads it.
#![no_main]

use ferrule_formats::check_charsmap;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|map: &[u8]| {
    let _ = check_charsmap(map);
});
