//! Work stealing over ranges of tasks.
//!
//! Each worker starts with a contiguous range of tasks: neighbouring tasks touch neighbouring memory, so hardware
//! prefetches are useful. A worker whose range is empty steals the second half of the largest remaining range, which is
//! farthest from where its owner works. It steals from workers of its own node first. Slow or preempted cores therefore
//! run fewer tasks.

use std::ops::Range;

use super::sync::atomic::{AtomicU64, Ordering};

/// Remaining tasks of every worker.
pub struct TaskRanges(Vec<TaskRange>);

/// Range of tasks of one worker, alone on its cache lines.
#[repr(align(128))]
struct TaskRange {
    /// First and end in the two halves of one word.
    word: AtomicU64,
    /// Node that the worker runs on.
    node: usize,
}

/// First and end of a range.
type Bounds = (u32, u32);

fn pack((first, end): Bounds) -> u64 {
    u64::from(first) << 32 | u64::from(end)
}

fn unpack(word: u64) -> Bounds {
    ((word >> 32) as u32, word as u32)
}

/// Returns the tasks that worker `thread` begins with, of `tasks` for the first `threads` workers.
pub fn share(tasks: usize, threads: usize, thread: usize) -> Range<usize> {
    let edge = |thread: usize| (tasks as u64 * thread.min(threads) as u64 / threads as u64) as usize;
    edge(thread)..edge(thread + 1)
}

impl TaskRange {
    fn get(&self) -> Bounds {
        unpack(self.word.load(Ordering::Relaxed))
    }

    fn set(&self, bounds: Bounds) {
        self.word.store(pack(bounds), Ordering::Relaxed);
    }

    /// Replaces the range if it still equals `seen`. There is no ABA problem: a range never recurs, because its first
    /// task has been taken by then.
    fn replace(&self, seen: Bounds, new: Bounds) -> bool {
        self.word.compare_exchange_weak(pack(seen), pack(new), Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

impl TaskRanges {
    /// Creates empty ranges for workers on these nodes.
    pub fn new(nodes: impl Iterator<Item = usize>) -> Self {
        Self(nodes.map(|node| TaskRange { word: AtomicU64::new(0), node }).collect())
    }

    /// Partitions `0..tasks` among the first `threads` workers. No worker may be taking tasks.
    ///
    /// # Panics
    /// If `tasks` is 2^32 or more.
    pub fn partition(&self, tasks: usize, threads: usize) {
        u32::try_from(tasks).expect("fewer than 2^32 tasks");
        for (thread, range) in self.0.iter().enumerate() {
            let Range { start, end } = share(tasks, threads, thread);
            range.set((start as u32, end as u32));
        }
    }

    /// Takes a task for worker `thread`, stealing from others if its own range is empty. Returns `None` when no tasks
    /// are left.
    pub fn take(&self, thread: usize) -> Option<usize> {
        let own = &self.0[thread];
        loop {
            let (first, end) = own.get();
            if first < end {
                if own.replace((first, end), (first + 1, end)) {
                    return Some(first as usize);
                }
                continue;
            }
            let preference = |(range, (first, end)): &(&TaskRange, Bounds)| match end.saturating_sub(*first) {
                0 => (false, 0),
                remaining => (range.node == own.node, remaining),
            };
            let (victim, (first, end)) = self.0.iter().map(|range| (range, range.get())).max_by_key(preference)?;
            if first >= end {
                return None;
            }
            let middle = first + (end - first) / 2;
            if victim.replace((first, end), (first, middle)) {
                // Only its owner changes an empty range. Until `set` returns, other workers do not see these tasks and
                // may leave the run; the owner still runs all of them.
                own.set((middle + 1, end));
                return Some(middle as usize);
            }
        }
    }
}
