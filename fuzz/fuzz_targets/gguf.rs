//! GGUF files: header, metadata and tensors.
#![no_main]

use std::sync::LazyLock;

use ferrule_formats::GgufFile;
use ferrule_formats::gguf::Value;
use ferrule_fuzz::{InputFile, read_tensors};
use libfuzzer_sys::fuzz_target;

static FILE: LazyLock<InputFile> = LazyLock::new(|| InputFile::new("model.gguf"));

fuzz_target!(|content: &[u8]| {
    let Ok(file) = GgufFile::open(&FILE.write(content)) else { return };
    for key in file.keys() {
        if let Ok(Some(Value::Array(array))) = file.value(key) {
            assert!(array.iter().count() == array.len());
        }
    }
    read_tensors(file.checkpoint());
});
