//! safetensors files: header and tensors.
#![no_main]

use std::sync::LazyLock;

use ferrule_formats::Checkpoint;
use ferrule_fuzz::{InputFile, read_tensors};
use libfuzzer_sys::fuzz_target;

static FILE: LazyLock<InputFile> = LazyLock::new(|| InputFile::new("model.safetensors"));

fuzz_target!(|content: &[u8]| {
    let path = FILE.write(content);
    let folder = path.parent().expect("the folder of the file");
    if let Ok(checkpoint) = Checkpoint::open(folder) {
        read_tensors(&checkpoint);
    }
});
