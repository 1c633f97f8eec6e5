//! Tests of the writer's queue. They are not in its file, because `tests/writer_model` compiles that too.

use std::time::Instant;

use ferrule_kernels::kv::PAGE_TOKENS;

use super::queue::{Job, QUEUE_BYTES, Queue};
use crate::pages::Namespace;
use crate::pages::digest::Digest;

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
    let first = queue.pop().unwrap();
    assert!(!queue.push(job(1, 0)), "the record being written counts");
    queue.done(&first.digest, first.payload.len());
    for _ in 0..5 {
        assert!(queue.push(job(1, QUEUE_BYTES / 2)));
    }
    assert!(queue.push(job(2, QUEUE_BYTES)), "a snapshot follows the pages");
    assert!(!queue.push(job(3, 1)));
    let bytes: Vec<usize> = std::iter::from_fn(|| queue.pop()).map(|job| job.payload.len()).collect();
    assert_eq!(bytes, [QUEUE_BYTES / 2, QUEUE_BYTES]);
}

#[test]
fn a_pause_drops_the_queue_and_accepts_nothing() {
    let mut queue = Queue::default();
    queue.push(job(0, 10));
    queue.push(job(1, 10));
    let first = queue.pop().unwrap();
    assert_eq!(queue.pause(), 1);
    assert!(!queue.is_done(), "the record being written is pending");
    queue.done(&first.digest, 10);
    assert!(queue.is_done());
    assert!(!queue.push(job(2, 1)));
    queue.paused_until = Some(Instant::now());
    assert!(queue.push(job(2, QUEUE_BYTES)));
    assert!(!queue.push(job(3, 1)), "the bytes of dropped jobs are free, those of others are not");
}
