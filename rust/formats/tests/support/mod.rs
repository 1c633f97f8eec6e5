//! Model folders for tests, written byte by byte so that they can be malformed.

pub mod gguf;

use std::fs;
use std::path::Path;

use ferrule_formats::{Checkpoint, CheckpointError};
use tempfile::TempDir;

/// Returns a safetensors file with any header text and any data.
pub fn file(header: impl AsRef<[u8]>, data: &[u8]) -> Vec<u8> {
    let header = header.as_ref();
    [&(header.len() as u64).to_le_bytes()[..], header, data].concat()
}

/// Returns a valid file with f32 tensors of these names; the value of each is its index.
pub fn valid(names: &[&str]) -> Vec<u8> {
    let entry = |(i, name): (usize, &&str)| {
        format!(r#""{name}":{{"dtype":"F32","shape":[1],"data_offsets":[{},{}]}}"#, 4 * i, 4 * i + 4)
    };
    let entries: Vec<_> = names.iter().enumerate().map(entry).collect();
    let data: Vec<u8> = (0..names.len()).flat_map(|i| (i as f32).to_le_bytes()).collect();
    file(format!("{{{}}}", entries.join(",")), &data)
}

pub fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = TempDir::new().expect("a temporary folder");
    for (name, bytes) in files {
        write(folder.path(), name, bytes);
    }
    folder
}

pub fn write(folder: &Path, name: &str, bytes: &[u8]) {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
    fs::write(path, bytes).expect("a written file");
}

/// Opens a folder of one file `model.safetensors`.
pub fn open(bytes: &[u8]) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(folder(&[("model.safetensors", bytes)]).path())
}

/// Checks that opening fails, with an error that contains all of `fragments`; returns its message.
#[track_caller]
pub fn refused(result: Result<Checkpoint, CheckpointError>, fragments: &[&str]) -> String {
    let message = result.expect_err("this must be refused").to_string();
    for fragment in fragments {
        assert!(message.contains(fragment), "{fragment:?} is not in {message:?}");
    }
    message
}

/// Builds a valid file, tensor by tensor.
#[derive(Default)]
pub struct Packed {
    header: serde_json::Map<String, serde_json::Value>,
    data: Vec<u8>,
}

impl Packed {
    /// Appends a tensor.
    pub fn push(&mut self, name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>) {
        let begin = self.data.len();
        self.data.extend(bytes);
        let entry = serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, self.data.len()]});
        self.header.insert(name.to_owned(), entry);
    }

    pub fn file(&self) -> Vec<u8> {
        file(serde_json::Value::from(self.header.clone()).to_string(), &self.data)
    }
}

/// Pseudo-random numbers (SplitMix64, Steele et al. 2014).
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Returns an integer from 0 to `limit - 1`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Returns a number from -1 to 1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }
}
