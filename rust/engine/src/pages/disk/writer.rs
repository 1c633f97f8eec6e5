//! The thread that writes records, so that no step of the engine waits for a disk.
//!
//! What waits to be written is bounded in bytes, and dropped where the disk is too slow, full, or gone: a cache may
//! forget. It also keeps the directory within its limit, since that belongs to writing.

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

/// Bytes of payloads that may wait. About a second's writing.
const QUEUE_BYTES: usize = 64 << 20;

/// How long nothing is written after the disk refused a file.
const PAUSE: Duration = Duration::from_secs(60);

/// How often who waits for the writer looks whether it still lives.
const WAIT_INTERVAL: Duration = Duration::from_millis(50);

/// A record to be written.
#[derive(Debug)]
pub(super) struct Job {
    pub digest: Digest,
    pub parent: Digest,
    pub tokens: [u32; PAGE_TOKENS],
    pub payload: Vec<u8>,
}

/// What waits.
#[derive(Debug, Default)]
pub(super) struct Queue {
    jobs: VecDeque<Job>,
    /// Digests of the jobs, the one that is being written among them.
    pending: HashSet<Digest>,
    /// Bytes of their payloads.
    bytes: usize,
    /// Nothing is accepted before this.
    paused_until: Option<Instant>,
    closing: bool,
}

impl Queue {
    /// Takes a job, unless there is no room for it or the disk has lately failed. One is taken however large it is.
    pub fn push(&mut self, job: Job) -> bool {
        if self.pending.contains(&job.digest) {
            return true;
        }
        let is_full = !self.pending.is_empty() && self.bytes.saturating_add(job.payload.len()) > QUEUE_BYTES;
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

    /// Forgets what waits, and accepts nothing for a while; gives how many jobs were forgotten.
    fn pause(&mut self) -> usize {
        self.paused_until = Some(Instant::now() + PAUSE);
        let forgotten: Vec<Job> = self.jobs.drain(..).collect();
        forgotten.iter().for_each(|job| self.done(&job.digest, job.payload.len()));
        forgotten.len()
    }
}

/// The queue with its two ends.
#[derive(Debug, Default)]
struct Channel {
    queue: Mutex<Queue>,
    /// There is something to write, or it is time to end.
    filled: Condvar,
    /// Nothing waits any more.
    emptied: Condvar,
}

impl Channel {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // A panic between two lines of bookkeeping leaves nothing that could do harm.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The handle to the thread. It belongs to the process that started it; in a forked child it must be forgotten, since
/// the thread is not there and may have held the lock.
#[derive(Debug)]
pub(super) struct Writer {
    channel: Arc<Channel>,
    thread: JoinHandle<()>,
}

impl Writer {
    /// Starts the thread; none if the system grants none.
    pub fn start(shared: Arc<Shared>) -> Option<Self> {
        let channel = Arc::new(Channel::default());
        let of_thread = Arc::clone(&channel);
        let thread = thread::Builder::new().name("ferrule-disk".into()).spawn(move || run(&shared, &of_thread));
        Some(Self { channel, thread: thread.ok()? })
    }

    /// Hands a record over, if there is room.
    pub fn push(&self, job: Job) -> bool {
        let accepted = self.channel.lock().push(job);
        self.channel.filled.notify_one();
        accepted
    }

    /// Waits until all is written, at most up to `deadline`; false if that was not enough.
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

    /// Holds the lock until what it gives is dropped, as a thread that a fork has taken away does for ever.
    #[cfg(test)]
    pub fn hold_lock(&self) -> std::sync::mpsc::Sender<()> {
        let channel = Arc::clone(&self.channel);
        let ((is_held, held), (drop_to_release, release)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
        thread::spawn(move || {
            let _lock = channel.lock();
            is_held.send(()).expect("the caller waits");
            // Ends when the other end is dropped.
            let _: Result<(), _> = release.recv();
        });
        held.recv().expect("the thread says when");
        drop_to_release
    }

    /// Ends the thread after what waits is written; after `deadline` it is left to itself.
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
        // Room is made before the record counts as written, so that who flushes finds the directory within its limit.
        match &written {
            Ok(bytes) => {
                written_since_scan += bytes;
                // Others write here too: what they add is seen by a scan alone.
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
            let forgotten = queue.pause();
            shared.count(&shared.dropped, forgotten as u64);
        }
        if queue.pending.is_empty() {
            channel.emptied.notify_all();
        }
    }
}

/// Writes a record that is not there yet; gives the bytes that the directory grew by.
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

/// Whether the next record would fail too. It would not where something odd has the name of this one.
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
    fn what_waits_is_bounded_and_waits_once() {
        let mut queue = Queue::default();
        assert!(queue.push(job(0, QUEUE_BYTES + 1)), "the first is taken however large it is");
        assert!(!queue.push(job(1, 0)));
        let first = queue.jobs.pop_front().unwrap();
        assert!(!queue.push(job(1, 0)), "what is being written takes room");
        queue.done(&first.digest, first.payload.len());
        for _ in 0..5 {
            assert!(queue.push(job(1, QUEUE_BYTES / 2)));
        }
        assert_eq!(queue.jobs.len(), 1);
        assert!(queue.push(job(2, QUEUE_BYTES / 2)));
        assert!(!queue.push(job(3, 1)));
    }

    #[test]
    fn a_pause_forgets_what_waits_and_takes_nothing() {
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
