//! Queue of the writer thread, bounded in bytes and without duplicates.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use ferrule_kernels::kv::PAGE_TOKENS;

use crate::pages::digest::Digest;

/// Bytes of queued payloads from which on the queue is full, about one second of writing.
pub const QUEUE_BYTES: usize = 64 << 20;

/// Pause after a failed write.
const PAUSE: Duration = Duration::from_secs(60);

/// A record to write.
#[derive(Debug)]
pub struct Job {
    pub digest: Digest,
    pub parent: Digest,
    pub tokens: [u32; PAGE_TOKENS],
    pub payload: Vec<u8>,
}

/// Queue of records to write.
#[derive(Debug, Default)]
pub struct Queue {
    jobs: VecDeque<Job>,
    /// Digests of the queued jobs and of the one being written.
    pending: HashSet<Digest>,
    /// Total bytes of their payloads.
    bytes: usize,
    /// No record is accepted before this time.
    pub paused_until: Option<Instant>,
    /// Set to end the thread once no job is left.
    pub closing: bool,
}

impl Queue {
    /// Adds a job, unless the queue is full or writing is paused. A queue that is not full accepts a job of any size,
    /// so that the pages of a prompt do not prevent the snapshot after them.
    pub fn push(&mut self, job: Job) -> bool {
        if self.pending.contains(&job.digest) {
            return true;
        }
        let is_full = self.bytes >= QUEUE_BYTES;
        if is_full || self.paused_until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        self.pending.insert(job.digest);
        self.bytes += job.payload.len();
        self.jobs.push_back(job);
        true
    }

    /// Takes the oldest job, which stays pending until [`Queue::done`].
    pub fn pop(&mut self) -> Option<Job> {
        self.jobs.pop_front()
    }

    /// Returns whether every accepted record was written or dropped.
    pub fn is_done(&self) -> bool {
        self.pending.is_empty()
    }

    /// Removes a job of this many bytes from the pending ones.
    pub fn done(&mut self, digest: &Digest, bytes: usize) {
        self.pending.remove(digest);
        self.bytes -= bytes;
    }

    /// Drops all queued jobs and pauses. Returns the number of dropped jobs.
    pub fn pause(&mut self) -> usize {
        self.paused_until = Some(Instant::now() + PAUSE);
        let dropped_jobs: Vec<Job> = self.jobs.drain(..).collect();
        dropped_jobs.iter().for_each(|job| self.done(&job.digest, job.payload.len()));
        dropped_jobs.len()
    }
}
