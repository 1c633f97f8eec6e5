//! Model of the disk cache's writer: loom runs the code of its thread in all interleavings with the thread that queues
//! records.
//!
//! A lost notification is a deadlock, and a record that `flush` did not wait for is an access without synchronization;
//! loom reports both. A test fails if one of the notifications is removed, if the end is announced before its flag is
//! set, or if a record counts as written before it is in the directory or before old ones are evicted.

use std::time::{Duration, Instant};

use loom::model::Builder;

#[allow(dead_code)] // tests of other modules use the rest
mod pages {
    pub mod digest {
        /// Number in place of the hash of a page's tokens.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub struct Digest(pub u8);
    }

    pub mod record {
        use ferrule_kernels::kv::PAGE_TOKENS;

        use super::digest::Digest;

        /// Returns the payload in place of a record.
        pub fn encode(_: &Digest, _: &[u32; PAGE_TOKENS], payload: &[u8]) -> Vec<u8> {
            payload.to_vec()
        }
    }

    pub mod disk {
        pub mod folder;
        #[path = "../../../../src/pages/disk/queue.rs"]
        pub mod queue;
        #[path = "../../../../src/pages/disk/shared.rs"]
        pub mod shared;
        pub mod sync;
        #[path = "../../../../src/pages/disk/writer.rs"]
        pub mod writer;
    }
}

use pages::digest::Digest;
use pages::disk::folder::Folder;
use pages::disk::queue::Job;
use pages::disk::shared::Shared;
use pages::disk::sync::Arc;
use pages::disk::sync::atomic::{AtomicU64, Ordering};
use pages::disk::writer::Writer;

/// Bytes of a record in the model.
const RECORD: usize = 10;

/// Explores all interleavings, without a limit on preemptions unless `LOOM_MAX_PREEMPTIONS` sets one.
fn explore(check: impl Fn() + Sync + Send + 'static) {
    Builder::new().check(check);
}

/// Returns a directory of at most `limit` bytes, and its writer.
fn start(limit: u64, failing: Option<Digest>) -> (Arc<Shared>, Writer) {
    let (stored, dropped, bytes) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let shared = Arc::new(Shared { folder: Folder::new(failing), limit, stored, dropped, bytes });
    let writer = Writer::start(Arc::clone(&shared)).expect("a thread");
    (shared, writer)
}

fn push(writer: &Writer, number: u8) -> bool {
    writer.push(Job { digest: Digest(number), parent: Digest(0), tokens: [0; 16], payload: vec![number; RECORD] })
}

/// Returns a time that no execution reaches.
fn never() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// Returns the numbers of the records in the directory. Loom reports it if the writer may be at work.
fn written(shared: &Shared) -> Vec<u8> {
    shared.folder.records().into_iter().map(|(digest, _)| digest.0).collect()
}

fn counted(shared: &Shared) -> (u64, u64) {
    (shared.stored.load(Ordering::Relaxed), shared.dropped.load(Ordering::Relaxed))
}

#[test]
fn flush_waits_for_all_records() {
    explore(|| {
        let (shared, writer) = start(1000, None);
        assert!(push(&writer, 1) && push(&writer, 2));
        assert!(writer.flush(None));
        assert_eq!((written(&shared), counted(&shared)), (vec![1, 2], (2, 0)));
        writer.close(never());
    });
}

#[test]
fn a_flushed_writer_waits_for_the_next_record() {
    explore(|| {
        let (shared, writer) = start(1000, None);
        assert!(push(&writer, 1) && writer.flush(Some(never())));
        assert!(push(&writer, 2) && writer.flush(Some(never())));
        assert_eq!(written(&shared), [1, 2]);
        writer.close(never());
    });
}

#[test]
fn closing_writes_the_queue_and_ends_the_thread() {
    explore(|| {
        let (shared, writer) = start(1000, None);
        assert!(push(&writer, 1));
        writer.close(never());
        assert_eq!(Arc::strong_count(&shared), 1, "the thread has ended");
        assert_eq!(written(&shared), [1]);
    });
}

#[test]
fn a_writer_without_records_ends() {
    explore(|| start(1000, None).1.close(never()));
}

#[test]
fn a_writer_that_is_not_waited_for_writes_the_queue_and_ends() {
    explore(|| {
        let (shared, writer) = start(1000, None);
        assert!(push(&writer, 1));
        writer.close(Instant::now());
        while Arc::strong_count(&shared) > 1 {
            loom::thread::yield_now();
        }
        assert_eq!(written(&shared), [1]);
    });
}

#[test]
fn a_flushed_directory_is_within_its_limit() {
    explore(|| {
        let (shared, writer) = start(RECORD as u64, None);
        assert!(push(&writer, 1) && push(&writer, 2));
        writer.flush(None);
        // Evicting goes down to nine tenths of the limit.
        assert_eq!((written(&shared), shared.bytes()), (vec![], 0));
        writer.close(never());
    });
}

#[test]
fn a_failed_write_drops_the_queue() {
    explore(|| {
        let (shared, writer) = start(1000, Some(Digest(1)));
        assert!(push(&writer, 1));
        let is_accepted = push(&writer, 2);
        writer.flush(None);
        assert!(!push(&writer, 3), "writing has paused");
        // A record that the queue refuses is counted by the caller.
        assert_eq!((written(&shared), counted(&shared)), (vec![], (0, 1 + u64::from(is_accepted))));
        writer.close(never());
    });
}
