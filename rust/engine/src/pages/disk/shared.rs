//! State shared by the cache and its writer thread, and eviction.

use std::io;

use super::folder::Folder;
use super::sync::atomic::{AtomicU64, Ordering};

/// The directory with its limit, and the counters that both threads update.
#[derive(Debug)]
pub struct Shared {
    pub folder: Folder,
    /// Maximum size of the directory in bytes.
    pub limit: u64,
    pub stored: AtomicU64,
    pub dropped: AtomicU64,
    pub bytes: AtomicU64,
}

impl Shared {
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn count(&self, counter: &AtomicU64, events: u64) {
        counter.fetch_add(events, Ordering::Relaxed);
    }

    /// Measures the directory. Above the limit, removes the least recently used records down to nine tenths of it, so
    /// that not every new record causes a scan.
    pub fn evict_to_limit(&self) {
        let mut entries = self.folder.scan();
        // Sizes come from the file system: a few sparse files can overflow the sum.
        let mut bytes = entries.iter().map(|entry| entry.bytes).fold(0, u64::saturating_add);
        if bytes > self.limit {
            let target = self.limit - self.limit / 10;
            // Temporary files belong to other writers.
            entries.retain(|entry| !entry.is_temporary);
            entries.sort_unstable_by_key(|entry| entry.used);
            for entry in entries {
                if bytes <= target {
                    break;
                }
                match self.folder.remove_file(&entry.path) {
                    // Another process may have removed it first.
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {}
                    _ => bytes = bytes.saturating_sub(entry.bytes),
                }
            }
        }
        self.bytes.store(bytes, Ordering::Relaxed);
    }
}
