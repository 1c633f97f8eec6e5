//! Fuzz targets of model files. Each reads an input and returns whether it was accepted.

use std::path::PathBuf;

use ferrule_formats::gguf::Value;
use ferrule_formats::{Checkpoint, GgufFile, PackedFile, check_charsmap, check_tokenizer_json};
use tempfile::TempDir;

// Removed with the thread of a test.
thread_local! {
    static GGUF: InputFile = InputFile::new("model.gguf");
    static SAFETENSORS: InputFile = InputFile::new("model.safetensors");
}

/// Checks a SentencePiece character map.
pub fn charsmap(content: &[u8]) -> bool {
    check_charsmap(content).is_ok()
}

/// Reads a GGUF file: header, metadata and tensors.
pub fn gguf(content: &[u8]) -> bool {
    let Ok(file) = GgufFile::open(&GGUF.with(|file| file.write(content))) else { return false };
    for key in file.keys() {
        if let Ok(Some(Value::Array(array))) = file.value(key) {
            assert!(array.iter().count() == array.len());
        }
    }
    read_tensors(file.checkpoint());
    true
}

/// Reads a packed file: header and checksums.
pub fn packed(content: &[u8]) -> bool {
    let path = SAFETENSORS.with(|file| file.write(content));
    let read = |mapped| {
        let Ok(file) = PackedFile::open(&path, 1, mapped) else { return false };
        for (index, name) in file.names().iter().enumerate() {
            let _ = file.verify(index);
            let bytes = file.bytes_of(name).expect("a tensor of the file");
            file.range(name, bytes).expect("the range of a tensor of the file");
        }
        true
    };
    let [mapped, copied] = [true, false].map(read);
    assert!(mapped == copied, "only one way to open the file accepts it");
    mapped
}

/// Reads a safetensors file: header and tensors.
pub fn safetensors(content: &[u8]) -> bool {
    let path = SAFETENSORS.with(|file| file.write(content));
    let folder = path.parent().expect("the folder of the file");
    let Ok(checkpoint) = Checkpoint::open(folder) else { return false };
    read_tensors(&checkpoint);
    true
}

/// Checks a tokenizer.json before a library reads it.
pub fn tokenizer_json(content: &[u8]) -> bool {
    check_tokenizer_json(content).is_ok()
}

/// A folder with one file, whose content is the input.
struct InputFile {
    folder: TempDir,
    name: &'static str,
}

impl InputFile {
    /// Creates the folder, in memory where the system has `/dev/shm`.
    fn new(name: &'static str) -> Self {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new());
        Self { folder: folder.expect("a temporary folder"), name }
    }

    /// Replaces the content of the file and returns its path.
    fn write(&self, content: &[u8]) -> PathBuf {
        let path = self.folder.path().join(self.name);
        // A new file: the old one may still be mapped.
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, content).expect("a temporary file");
        path
    }
}

/// Reads a few values of every tensor of a checkpoint.
fn read_tensors(checkpoint: &Checkpoint) {
    for name in checkpoint.names() {
        let Ok(weight) = checkpoint.weight(name) else { continue };
        let mut values = vec![0.0; weight.elements().min(4096)];
        weight.read_f32(0, &mut values);
    }
}
