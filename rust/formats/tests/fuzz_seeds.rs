//! The fuzz targets of model files, run on their seeds and on random damage to them.

#[path = "../../../fuzz/formats.rs"]
mod formats;
#[path = "../../../fuzz/replay.rs"]
mod replay;

use replay::replay;

#[test]
fn damaged_character_maps_are_refused_or_read() {
    replay("charsmap", 50_000, formats::charsmap);
}

#[test]
fn damaged_gguf_files_are_refused_or_read() {
    replay("gguf", 5000, formats::gguf);
}

#[test]
fn damaged_packed_files_are_refused_or_read() {
    replay("packed", 5000, formats::packed);
}

#[test]
fn damaged_safetensors_files_are_refused_or_read() {
    replay("safetensors", 5000, formats::safetensors);
}

#[test]
fn damaged_tokenizer_files_are_refused_or_read() {
    replay("tokenizer_json", 50_000, formats::tokenizer_json);
}
