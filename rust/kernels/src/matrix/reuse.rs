//! Estimates whether weights are still in the last-level cache when they are read again.
//!
//! A decode step reads the weights of a model in the same order as the step before it. Those of a small model stay in a
//! large cache; those of a larger model come from memory, and then a product prefetches them further ahead.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::machine;

/// Counts the bytes of weights that products of this process read.
static READS: Reads = Reads(AtomicU64::new(0));

/// Number of bytes that have been read.
struct Reads(AtomicU64);

impl Reads {
    /// Records that weights of `bytes` bytes are read. Returns whether no more than `cache` bytes, their own among them, have
    /// been read since they were read before.
    fn record(&self, last: &LastRead, bytes: usize, cache: usize) -> bool {
        let now = self.0.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        let before = last.0.swap(now, Ordering::Relaxed);
        before > 0 && now.saturating_sub(before) <= cache as u64
    }
}

/// Number of bytes that this process had read after it read these weights; 0 if it did not read them yet.
#[derive(Default)]
pub(super) struct LastRead(AtomicU64);

impl LastRead {
    /// Records that weights of `bytes` bytes are read, and returns whether they probably still are in the last-level cache:
    /// whether weights that fit half of it were read since. The rest is left to other data and other processes.
    pub fn record(&self, bytes: usize) -> bool {
        static CACHE: OnceLock<usize> = OnceLock::new();
        READS.record(self, bytes, CACHE.get_or_init(machine::last_cache_bytes) / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_cached_if_what_was_read_since_fits() {
        let (reads, weights) = (Reads(AtomicU64::new(0)), [0; 3].map(|_| LastRead::default()));
        let step = |cache| [0, 1, 2].map(|index| reads.record(&weights[index], 10 * (index + 1), cache));
        assert_eq!(step(60), [false; 3], "never read before");
        assert_eq!(step(60), [true; 3]);
        assert_eq!(step(59), [false; 3]);
        // Only the smallest is read again at once.
        assert!(reads.record(&weights[0], 10, 60) && reads.record(&weights[0], 10, 10));
        assert_eq!(step(60), [true, false, false]);
    }
}
