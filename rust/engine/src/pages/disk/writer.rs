//! Writer thread, so that no engine step waits for the disk.
//!
//! The queue is bounded in bytes, and records are dropped if the disk is too slow, full or missing: a cache may lose
//! entries. The thread also keeps the directory within its size limit.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ferrule_kernels::kv::PAGE_TOKENS;

use super::Shared;
use crate::pages::digest::Digest;
use crate::pages::record;

/// Bytes of queued payloads from which on the queue is full, about one second of writing.
const QUEUE_BYTES: usize = 64 << 20;

/// Pause after a failed write.
const PAUSE: Duration = Duration::from_secs(60);

/// Interval at which waiting callers check that the writer is alive.
const WAIT_INTERVAL: Duration = Duration::from_millis(50);

/// A record to write.
#[derive(Debug)]
pub(super) struct Job {
    pub digest: Digest,
    pub parent: Digest,
    pub tokens: [u32; PAGE_TOKENS],
    pub payload: Vec<u8>,
}

/// Queue of records to write.
#[derive(Debug, Default)]
pub(super) struct Queue {
    jobs: VecDeque<Job>,
    /// Digests of the queued jobs and of the one being written.
    pending: HashSet<Digest>,
    /// Total bytes of their payloads.
    bytes: usize,
    /// No record is accepted before this time.
    paused_until: Option<Instant>,
    closing: bool,
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

    fn done(&mut self, digest: &Digest, bytes: usize) {
        self.pending.remove(digest);
        self.bytes -= bytes;
    }

    /// Drops all queued jobs and pauses. Returns the number of dropped jobs.
    fn pause(&mut self) -> usize {
        self.paused_until = Some(Instant::now() + PAUSE);
        let dropped_jobs: Vec<Job> = self.jobs.drain(..).collect();
        dropped_jobs.iter().for_each(|job| self.done(&job.digest, job.payload.len()));
        dropped_jobs.len()
    }
}

/// The queue with its condition variables.
#[derive(Debug, Default)]
struct Channel {
    queue: Mutex<Queue>,
    /// Signals a new job, or the end.
    filled: Condvar,
    /// Signals an empty queue.
    emptied: Condvar,
}

impl Channel {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // A panic cannot leave the queue inconsistent in a harmful way.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Handle of the thread. It belongs to the process that started it; in a forked child it must be leaked, since the
/// thread does not exist there and its lock may be held.
#[derive(Debug)]
pub(super) struct Writer {
    channel: Arc<Channel>,
    thread: JoinHandle<()>,
}

impl Writer {
    /// Starts the thread; `None` if the system refuses.
    pub fn start(shared: Arc<Shared>) -> Option<Self> {
        let channel = Arc::new(Channel::default());
        let thread_channel = Arc::clone(&channel);
        let thread = thread::Builder::new().name("ferrule-disk".into()).spawn(move || run(&shared, &thread_channel));
        Some(Self { channel, thread: thread.ok()? })
    }

    /// Queues a record, if there is room.
    pub fn push(&self, job: Job) -> bool {
        let accepted = self.channel.lock().push(job);
        self.channel.filled.notify_one();
        accepted
    }

    /// Waits until the queue is empty, at most until `deadline`. Returns whether it is.
    pub fn flush(&self, deadline: Option<Instant>) -> bool {
        let mut queue = self.channel.lock();
        while !queue.pending.is_empty() && !self.thread.is_finished() {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return false;
            }
            let woken = self.channel.emptied.wait_timeout(queue, WAIT_INTERVAL);
            queue = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Holds the lock until the returned sender is dropped, like a thread that a fork removed.
    #[cfg(test)]
    pub fn hold_lock(&self) -> std::sync::mpsc::Sender<()> {
        let channel = Arc::clone(&self.channel);
        let ((is_held, held), (drop_to_release, release)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
        thread::spawn(move || {
            let _lock = channel.lock();
            is_held.send(()).expect("the caller receives");
            // Ends when the sender is dropped.
            let _: Result<(), _> = release.recv();
        });
        held.recv().expect("the thread holds the lock");
        drop_to_release
    }

    /// Ends the thread after the queue is written; after `deadline` it is detached.
    pub fn close(self, deadline: Instant) {
        let is_flushed = self.flush(Some(deadline));
        self.channel.lock().closing = true;
        self.channel.filled.notify_one();
        if is_flushed {
            let _ = self.thread.join();
        }
    }
}

fn run(shared: &Shared, channel: &Channel) {
    let mut written_since_scan = 0;
    loop {
        let mut queue = channel.lock();
        let job = loop {
            if let Some(job) = queue.jobs.pop_front() {
                break job;
            }
            if queue.closing {
                return;
            }
            queue = channel.filled.wait(queue).unwrap_or_else(PoisonError::into_inner);
        };
        drop(queue);
        let written = write(shared, &job);
        // Evict before the record counts as written, so that `flush` leaves the directory within its limit.
        match &written {
            Ok(bytes) => {
                written_since_scan += bytes;
                // Other processes write too; only a scan sees their files.
                if shared.bytes() > shared.limit || written_since_scan > shared.limit / 10 {
                    shared.evict_to_limit();
                    written_since_scan = 0;
                }
            }
            Err(_) => shared.count(&shared.dropped, 1),
        }
        let mut queue = channel.lock();
        queue.done(&job.digest, job.payload.len());
        if written.is_err_and(|error| stops_writing(&error)) {
            let dropped_jobs = queue.pause();
            shared.count(&shared.dropped, dropped_jobs as u64);
        }
        if queue.pending.is_empty() {
            channel.emptied.notify_all();
        }
    }
}

/// Writes a record unless it exists. Returns the bytes added.
fn write(shared: &Shared, job: &Job) -> io::Result<u64> {
    if shared.folder.contains(&job.digest) {
        return Ok(0);
    }
    let bytes = record::encode(&job.parent, &job.tokens, &job.payload);
    shared.folder.write(&job.digest, &bytes)?;
    shared.count(&shared.stored, 1);
    shared.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    Ok(bytes.len() as u64)
}

/// Returns whether the next record would fail too; not if just this name is occupied by something else.
fn stops_writing(error: &io::Error) -> bool {
    !matches!(error.kind(), io::ErrorKind::IsADirectory | io::ErrorKind::DirectoryNotEmpty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::Namespace;

    fn job(number: u32, bytes: usize) -> Job {
        let parent = Digest::root(&[0; 32], &Namespace::default());
        let tokens = [number; PAGE_TOKENS];
        Job { digest: parent.child(&tokens), parent, tokens, payload: vec![0; bytes] }
    }

    #[test]
    fn the_queue_is_bounded_and_without_duplicates() {
        let mut queue = Queue::default();
        assert!(queue.push(job(0, QUEUE_BYTES + 1)), "an empty queue accepts any size");
        assert!(!queue.push(job(1, 0)));
        let first = queue.jobs.pop_front().unwrap();
        assert!(!queue.push(job(1, 0)), "the record being written counts");
        queue.done(&first.digest, first.payload.len());
        for _ in 0..5 {
            assert!(queue.push(job(1, QUEUE_BYTES / 2)));
        }
        assert_eq!(queue.jobs.len(), 1);
        assert!(queue.push(job(2, QUEUE_BYTES)), "a snapshot follows the pages");
        assert!(!queue.push(job(3, 1)));
    }

    #[test]
    fn a_pause_drops_the_queue_and_accepts_nothing() {
        let mut queue = Queue::default();
        queue.push(job(0, 10));
        queue.push(job(1, 10));
        let first = queue.jobs.pop_front().unwrap();
        assert_eq!(queue.pause(), 1);
        assert_eq!((queue.bytes, queue.pending.len()), (10, 1));
        queue.done(&first.digest, 10);
        assert!(!queue.push(job(2, 1)));
        queue.paused_until = Some(Instant::now());
        assert!(queue.push(job(2, 1)));
    }
}
