//! Writer thread, so that no engine step waits for the disk.
//!
//! The queue is bounded in bytes, and records are dropped if the disk is too slow, full or missing: a cache may lose
//! entries. The thread also keeps the directory within its size limit. `tests/writer_model` explores the interleavings.

use std::io;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::queue::{Job, Queue};
use super::shared::Shared;
use super::sync::atomic::Ordering;
use super::sync::thread::{self, JoinHandle};
use super::sync::{Arc, Condvar, Mutex, MutexGuard};
use crate::pages::record;

/// Interval at which waiting callers check that the writer is alive.
const WAIT_INTERVAL: Duration = Duration::from_millis(50);

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
pub struct Writer {
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
        while !queue.is_done() && !self.thread.is_finished() {
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
            if let Some(job) = queue.pop() {
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
        if queue.is_done() {
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
