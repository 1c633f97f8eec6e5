//! Directory in memory in place of `src/pages/disk/folder.rs`. Loom reports accesses that are not ordered.

use std::io;

use loom::cell::UnsafeCell;

use crate::pages::digest::Digest;

/// A record in the directory.
#[derive(Debug)]
pub struct Entry {
    pub path: String,
    pub bytes: u64,
    pub used: i128,
    pub is_temporary: bool,
}

/// The records, oldest first, and the digest whose writing fails.
#[derive(Debug)]
pub struct Folder {
    records: UnsafeCell<Vec<(Digest, u64)>>,
    failing: Option<Digest>,
}

// SAFETY: loom reports concurrent accesses before they happen, and runs one thread at a time.
unsafe impl Sync for Folder {}

impl Folder {
    pub fn new(failing: Option<Digest>) -> Self {
        Self { records: UnsafeCell::new(Vec::new()), failing }
    }

    pub fn records(&self) -> Vec<(Digest, u64)> {
        // SAFETY: the pointer is valid; see `Sync`.
        self.records.with(|records| unsafe { (*records).clone() })
    }

    fn change(&self, change: impl FnOnce(&mut Vec<(Digest, u64)>)) {
        // SAFETY: the pointer is valid; see `Sync`.
        self.records.with_mut(|records| change(unsafe { &mut *records }));
    }

    pub fn contains(&self, digest: &Digest) -> bool {
        self.records().iter().any(|record| record.0 == *digest)
    }

    pub fn write(&self, digest: &Digest, bytes: &[u8]) -> io::Result<()> {
        if self.failing == Some(*digest) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.change(|records| records.push((*digest, bytes.len() as u64)));
        Ok(())
    }

    pub fn scan(&self) -> Vec<Entry> {
        let entry = |(used, (digest, bytes)): (i128, (Digest, u64))| Entry {
            path: digest.0.to_string(),
            bytes,
            used,
            is_temporary: false,
        };
        (0..).zip(self.records()).map(entry).collect()
    }

    pub fn remove_file(&self, path: &str) -> io::Result<()> {
        self.change(|records| records.retain(|record| record.0.0.to_string() != path));
        Ok(())
    }
}
