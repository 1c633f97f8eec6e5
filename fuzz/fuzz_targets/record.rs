//! Records of the prefix cache on disk.
#![no_main]

use std::sync::{LazyLock, Mutex};

use ferrule_engine::pages::fuzz::RecordFile;
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

/// The directory lives as long as the file.
static FILE: LazyLock<(TempDir, Mutex<RecordFile>)> = LazyLock::new(|| {
    let directory = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a temporary folder");
    let file = RecordFile::new(&directory.path().join("cache"));
    (directory, Mutex::new(file))
});

fuzz_target!(|content: &[u8]| {
    FILE.1.lock().expect("no panic before").load(content);
});
