//! Steps that fuzz targets of model files share.

use std::path::PathBuf;

use ferrule_formats::Checkpoint;
use tempfile::TempDir;

/// A folder with one file, whose content is the fuzzer's input.
pub struct InputFile {
    folder: TempDir,
    name: &'static str,
}

impl InputFile {
    /// Creates the folder in memory where the system has `/dev/shm`.
    pub fn new(name: &'static str) -> Self {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new());
        Self { folder: folder.expect("a temporary folder"), name }
    }

    /// Replaces the content of the file and returns its path.
    pub fn write(&self, content: &[u8]) -> PathBuf {
        let path = self.folder.path().join(self.name);
        // A new file: the old one may still be mapped.
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, content).expect("a temporary file");
        path
    }
}

/// Reads a few values of every tensor of a checkpoint.
pub fn read_tensors(checkpoint: &Checkpoint) {
    for name in checkpoint.names() {
        let Ok(weight) = checkpoint.weight(name) else { continue };
        let mut values = vec![0.0; weight.elements().min(4096)];
        weight.read_f32(0, &mut values);
    }
}
