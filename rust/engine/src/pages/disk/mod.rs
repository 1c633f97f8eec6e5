//! Pages on a disk: what memory no longer holds, and what outlives the process.
//!
//! The tier below the prefix cache. It may forget anything at any time, and is never believed: a record is found by
//! the digest of all its tokens, and read only if every byte is as it was written ([`super::record`]). Reading happens
//! where it is asked for, since a page that is read need not be computed; writing happens on a thread of its own
//! ([`writer`]). Several processes may use one directory ([`folder`]).

mod folder;
mod writer;

use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferrule_kernels::kv::PAGE_TOKENS;

use super::digest::Digest;
use super::record::{self, record_len};
use folder::{Folder, ReadError};
use writer::{Job, Writer};

/// How long a process that ends waits for a disk.
const CLOSE_TIME: Duration = Duration::from_millis(500);

/// Why a directory cannot be a disk cache.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiskCacheError {
    /// The system refused something.
    #[error("cannot {action} the disk cache's directory {}: {reason}", path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the system said.
        reason: String,
    },
    /// Something else is there.
    #[error("the disk cache's directory {} is {found}, must be a directory", path.display())]
    NotDirectory {
        /// The path.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// Another user could look into it.
    #[error("the disk cache's directory {} belongs to user {found}, must belong to user {required}", path.display())]
    Owner {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        found: u32,
        /// The user as whom this process runs.
        required: u32,
    },
    /// Others could look into it, or put pages there.
    #[error(
        "the disk cache's directory {} has mode {found:o}, must give nothing to group and others (chmod 700)",
        path.display()
    )]
    Mode {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        found: u32,
    },
}

/// What a disk cache did since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskStatistics {
    /// Records read.
    pub hits: u64,
    /// Records asked for that were not there, or damaged.
    pub misses: u64,
    /// Records written.
    pub stored: u64,
    /// Files that were not the record that their name says; they were removed.
    pub damaged: u64,
    /// Records that were not written, because too much waited, or the disk refused them.
    pub dropped: u64,
    /// Bytes in the directory, as far as is known: other processes may use it too.
    pub bytes: u64,
}

/// What the cache and its writer both use.
#[derive(Debug)]
struct Shared {
    folder: Folder,
    /// Bytes that the directory may hold.
    limit: u64,
    stored: AtomicU64,
    dropped: AtomicU64,
    bytes: AtomicU64,
}

impl Shared {
    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn count(&self, counter: &AtomicU64, events: u64) {
        counter.fetch_add(events, Ordering::Relaxed);
    }

    /// Counts what is in the directory; if that is over the limit, removes what was not used for longest, down to nine
    /// tenths of it, so that not every record scans anew.
    fn evict_to_limit(&self) {
        let mut entries = self.folder.scan();
        // Sizes are what the file system says: a few sparse files can be more than a number holds.
        let mut bytes = entries.iter().map(|entry| entry.bytes).fold(0, u64::saturating_add);
        if bytes > self.limit {
            let target = self.limit - self.limit / 10;
            // What others are writing is left to them.
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

/// A writer with the process that it belongs to.
#[derive(Debug)]
struct OwnedWriter {
    process: u32,
    writer: Writer,
}

/// The pages in one directory.
#[derive(Debug)]
pub(crate) struct DiskCache {
    shared: Arc<Shared>,
    /// Started by the first record to write.
    writer: Option<OwnedWriter>,
    hits: u64,
    misses: u64,
    damaged: u64,
}

impl DiskCache {
    /// Opens a directory for at most `limit` bytes of records; makes it if it is missing. What is over the limit, and
    /// what killed processes left half written, is removed.
    ///
    /// # Errors
    /// [`DiskCacheError`] if the directory cannot be used, or is not this user's alone.
    pub fn open(directory: &Path, limit: u64) -> Result<Self, DiskCacheError> {
        let counter = AtomicU64::default;
        let folder = Folder::open(directory)?;
        let shared = Shared { folder, limit, stored: counter(), dropped: counter(), bytes: counter() };
        shared.evict_to_limit();
        Ok(Self { shared: Arc::new(shared), writer: None, hits: 0, misses: 0, damaged: 0 })
    }

    /// Whether there is a file for a record; it may still turn out to be damaged, or vanish. What waits to be written
    /// is not there yet.
    pub fn contains(&self, digest: &Digest) -> bool {
        self.shared.folder.contains(digest)
    }

    /// The payload of the page `digest`: of `tokens`, which follow those of `parent`. `None` if it is not there, or not
    /// whole; then it is there no more.
    pub fn load(
        &mut self,
        digest: &Digest,
        parent: &Digest,
        tokens: &[u32; PAGE_TOKENS],
        payload_len: usize,
    ) -> Option<Vec<u8>> {
        match self.read(digest, parent, tokens, payload_len) {
            Ok(payload) => {
                self.hits += 1;
                return Some(payload);
            }
            Err(ReadError::Missing) => {}
            Err(ReadError::Invalid) => {
                self.damaged += 1;
                self.shared.folder.remove(digest);
            }
        }
        self.misses += 1;
        None
    }

    fn read(
        &self,
        digest: &Digest,
        parent: &Digest,
        tokens: &[u32; PAGE_TOKENS],
        payload_len: usize,
    ) -> Result<Vec<u8>, ReadError> {
        let mut bytes = self.shared.folder.read(digest, record_len(payload_len))?;
        record::decode(&bytes, parent, tokens, payload_len).map_err(|_| ReadError::Invalid)?;
        bytes.truncate(record::PAYLOAD + payload_len);
        bytes.drain(..record::PAYLOAD);
        Ok(bytes)
    }

    /// Hands the payload of a page over to be written. False if it will not be: too much waits already, or the disk has
    /// lately failed. Never waits for the disk.
    pub fn store(&mut self, digest: &Digest, parent: &Digest, tokens: &[u32; PAGE_TOKENS], payload: Vec<u8>) -> bool {
        let job = Job { digest: *digest, parent: *parent, tokens: *tokens, payload };
        let fits = record_len(job.payload.len()) <= self.shared.limit;
        let accepted = fits && self.writer().is_some_and(|writer| writer.push(job));
        if !accepted {
            self.shared.count(&self.shared.dropped, 1);
        }
        accepted
    }

    /// The writer of this process, started if there is none.
    fn writer(&mut self) -> Option<&Writer> {
        self.forget_writer_of_other_process();
        if self.writer.is_none() {
            let writer = Writer::start(Arc::clone(&self.shared))?;
            self.writer = Some(OwnedWriter { process: process::id(), writer });
        }
        self.writer.as_ref().map(|owned| &owned.writer)
    }

    /// After a fork the parent still has the thread and writes what waited; here its locks may be held for ever.
    fn forget_writer_of_other_process(&mut self) {
        if self.writer.as_ref().is_some_and(|owned| owned.process != process::id()) {
            std::mem::forget(self.writer.take());
        }
    }

    /// Takes records back, those that still wait to be written too, unless the disk is so slow that waiting for it would
    /// hold others up.
    pub fn discard(&mut self, digests: &[Digest]) {
        if digests.is_empty() {
            return;
        }
        self.forget_writer_of_other_process();
        if let Some(owned) = &self.writer {
            owned.writer.flush(Some(Instant::now() + CLOSE_TIME));
        }
        digests.iter().for_each(|digest| self.shared.folder.remove(digest));
    }

    /// Waits until all that was handed over is written, or was found not to be writable.
    #[cfg(test)]
    pub fn flush(&mut self) {
        self.forget_writer_of_other_process();
        if let Some(owned) = &self.writer {
            owned.writer.flush(None);
        }
    }

    /// What happened so far.
    pub fn statistics(&self) -> DiskStatistics {
        DiskStatistics {
            hits: self.hits,
            misses: self.misses,
            damaged: self.damaged,
            stored: self.shared.stored.load(Ordering::Relaxed),
            dropped: self.shared.dropped.load(Ordering::Relaxed),
            bytes: self.shared.bytes(),
        }
    }
}

/// Writes what waits, as far as that takes a few seconds.
impl Drop for DiskCache {
    fn drop(&mut self) {
        self.forget_writer_of_other_process();
        if let Some(owned) = self.writer.take() {
            owned.writer.close(Instant::now() + CLOSE_TIME);
        }
    }
}

#[cfg(test)]
mod tests;
