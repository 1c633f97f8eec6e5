//! Disk tier of the prefix cache: pages that outlive memory and the process.
//!
//! The tier may lose anything at any time and is never trusted: a record is found by the digest of all its tokens and
//! accepted only if every byte is as written ([`super::record`]). Reads are synchronous, because a page that is read
//! need not be computed; writes happen on a separate thread ([`writer`]). Several processes may share a directory
//! ([`folder`]).

mod folder;
mod queue;
#[cfg(test)]
mod queue_tests;
mod shared;
mod sync;
mod writer;

use std::path::{Path, PathBuf};
use std::process;
use std::time::{Duration, Instant};

use ferrule_kernels::kv::PAGE_TOKENS;

use super::digest::Digest;
use super::record::{self, record_len};
use folder::{Folder, ReadError};
use queue::Job;
use shared::Shared;
use sync::Arc;
use sync::atomic::{AtomicU64, Ordering};
use writer::Writer;

/// Maximum wait for pending writes when a process ends.
const CLOSE_TIME: Duration = Duration::from_millis(500);

/// Reason why a directory cannot be used as a disk cache.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiskCacheError {
    /// A file system operation failed.
    #[error("cannot {action} the disk cache directory {}: {reason}", path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// The operation.
        action: &'static str,
        /// Error message of the system.
        reason: String,
    },
    /// The path is not a directory.
    #[error("the disk cache path {} must be a directory, found {found}", path.display())]
    NotDirectory {
        /// The path.
        path: PathBuf,
        /// Kind of file found.
        found: &'static str,
    },
    /// The directory belongs to another user, who could read it.
    #[error("the disk cache directory {} must belong to user {required}, but belongs to user {found}", path.display())]
    Owner {
        /// The directory.
        path: PathBuf,
        /// User id of the owner.
        found: u32,
        /// User id of this process.
        required: u32,
    },
    /// The directory's mode lets other users read or write it.
    #[error(
        "the disk cache directory {} has mode {found:o}; group and others must have no access (chmod 700)",
        path.display()
    )]
    Mode {
        /// The directory.
        path: PathBuf,
        /// Permission bits of the directory.
        found: u32,
    },
}

/// Statistics of a disk cache since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskStatistics {
    /// Records read.
    pub hits: u64,
    /// Records that were missing or damaged.
    pub misses: u64,
    /// Records written.
    pub stored: u64,
    /// Invalid files that were removed.
    pub damaged: u64,
    /// Records not written because the queue was full or the disk failed.
    pub dropped: u64,
    /// Bytes in the directory at the last scan; other processes may use it too.
    pub bytes: u64,
}

/// A writer and the id of the process that started it.
#[derive(Debug)]
struct OwnedWriter {
    process: u32,
    writer: Writer,
}

/// Cached pages in one directory.
#[derive(Debug)]
pub(crate) struct DiskCache {
    shared: Arc<Shared>,
    /// Writer thread, started by the first record.
    writer: Option<OwnedWriter>,
    hits: u64,
    misses: u64,
    damaged: u64,
}

impl DiskCache {
    /// Opens a directory for at most `limit` bytes of records, creating it if needed. Evicts records over the limit and
    /// removes incomplete files of killed processes.
    ///
    /// # Errors
    /// Returns [`DiskCacheError`] if the directory cannot be used or is accessible to other users.
    pub fn open(directory: &Path, limit: u64) -> Result<Self, DiskCacheError> {
        let counter = AtomicU64::default;
        let folder = Folder::open(directory)?;
        let shared = Shared { folder, limit, stored: counter(), dropped: counter(), bytes: counter() };
        shared.evict_to_limit();
        Ok(Self { shared: Arc::new(shared), writer: None, hits: 0, misses: 0, damaged: 0 })
    }

    /// Returns whether a record's file exists. It may still be damaged or vanish; records waiting to be written do not
    /// exist yet.
    pub fn contains(&self, digest: &Digest) -> bool {
        self.shared.folder.contains(digest)
    }

    /// Reads the payload of the page `digest`, whose `tokens` follow the prefix `parent`. Returns `None` if it is
    /// missing or damaged; a damaged file is removed.
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

    /// Queues the payload of a page for writing, without waiting for the disk. Returns false if the queue is full or
    /// the disk has recently failed.
    pub fn store(&mut self, digest: &Digest, parent: &Digest, tokens: &[u32; PAGE_TOKENS], payload: Vec<u8>) -> bool {
        let job = Job { digest: *digest, parent: *parent, tokens: *tokens, payload };
        let is_within_limit = record_len(job.payload.len()) <= self.shared.limit;
        let accepted = is_within_limit && self.writer().is_some_and(|writer| writer.push(job));
        if !accepted {
            self.shared.count(&self.shared.dropped, 1);
        }
        accepted
    }

    /// Returns the writer of this process, starting it if needed.
    fn writer(&mut self) -> Option<&Writer> {
        self.forget_writer_of_other_process();
        if self.writer.is_none() {
            let writer = Writer::start(Arc::clone(&self.shared))?;
            self.writer = Some(OwnedWriter { process: process::id(), writer });
        }
        self.writer.as_ref().map(|owned| &owned.writer)
    }

    /// Only the parent of a fork has the thread and writes the queue; in the child the thread's locks may be held
    /// forever.
    fn forget_writer_of_other_process(&mut self) {
        if self.writer.as_ref().is_some_and(|owned| owned.process != process::id()) {
            std::mem::forget(self.writer.take());
        }
    }

    /// Deletes records, including queued ones; waits at most `CLOSE_TIME` for a slow disk.
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

    /// Waits until all queued records are written or dropped.
    #[cfg(test)]
    pub fn flush(&mut self) {
        self.forget_writer_of_other_process();
        if let Some(owned) = &self.writer {
            owned.writer.flush(None);
        }
    }

    /// Returns the statistics so far.
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

/// Writes queued records, for at most `CLOSE_TIME`.
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
