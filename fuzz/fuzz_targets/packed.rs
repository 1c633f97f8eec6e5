//! Packed files: header and checksums.
#![no_main]

use std::sync::LazyLock;

use ferrule_formats::PackedFile;
use ferrule_fuzz::InputFile;
use libfuzzer_sys::fuzz_target;

static FILE: LazyLock<InputFile> = LazyLock::new(|| InputFile::new("model.safetensors"));

fuzz_target!(|content: &[u8]| {
    let path = FILE.write(content);
    for mapped in [true, false] {
        let Ok(file) = PackedFile::open(&path, 1, mapped) else { continue };
        for (index, name) in file.names().iter().enumerate() {
            let _ = file.verify(index);
            let bytes = file.bytes_of(name).expect("a tensor of the file");
            file.range(name, bytes).expect("the range of a tensor of the file");
        }
    }
});
