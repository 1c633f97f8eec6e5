//! Who does which tasks of a run.
//!
//! Each thread begins with a stretch of tasks of its own, since neighbours are neighbours in memory too: what a thread
//! asks for ahead of its use is what it will use. A thread with nothing left takes half of what the richest other has
//! left, the half that is farthest from where that one works: slow cores and disturbed ones end with fewer tasks.

use std::sync::atomic::{AtomicU64, Ordering};

/// The stretches of all threads.
pub struct Shares(Vec<Share>);

/// A stretch of tasks, first and end in the two halves of one word; on cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Share(AtomicU64);

/// First and end of a stretch.
type Stretch = (u32, u32);

fn pack((first, end): Stretch) -> u64 {
    u64::from(first) << 32 | u64::from(end)
}

fn unpack(word: u64) -> Stretch {
    ((word >> 32) as u32, word as u32)
}

impl Share {
    fn get(&self) -> Stretch {
        unpack(self.0.load(Ordering::Relaxed))
    }

    fn set(&self, stretch: Stretch) {
        self.0.store(pack(stretch), Ordering::Relaxed);
    }

    /// Replaces `seen` if that is still what is there. No stretch comes twice: its first task was taken by then.
    fn replace(&self, seen: Stretch, new: Stretch) -> bool {
        self.0.compare_exchange_weak(pack(seen), pack(new), Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

impl Shares {
    /// For so many threads; there are no tasks yet.
    pub fn new(threads: usize) -> Self {
        Self((0..threads).map(|_| Share::default()).collect())
    }

    /// Shares `0..tasks` out among the first `threads`, while no thread takes any.
    ///
    /// # Panics
    /// If the numbers of the tasks do not fit 32 bits.
    pub fn deal(&self, tasks: usize, threads: usize) {
        let tasks = u32::try_from(tasks).expect("fewer than 2^32 tasks");
        let edge = |thread: usize| (u64::from(tasks) * thread.min(threads) as u64 / threads as u64) as u32;
        for (thread, share) in self.0.iter().enumerate() {
            share.set((edge(thread), edge(thread + 1)));
        }
    }

    /// A task for thread number `thread` that nobody else gets; `None` where all are given away.
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
            let (richest, (first, end)) = self.0.iter().map(|share| (share, share.get())).max_by_key(left)?;
            if first >= end {
                return None;
            }
            let middle = first + (end - first) / 2;
            if richest.replace((first, end), (first, middle)) {
                // Nobody changes an empty share but its owner. Until then others do not see these tasks and may go home:
                // they are done all the same.
                own.set((middle + 1, end));
                return Some(middle as usize);
            }
        }
    }
}

/// Tasks left.
fn left((_, (first, end)): &(&Share, Stretch)) -> u32 {
    end.saturating_sub(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_begins_with_neighbours_and_then_takes_from_the_end_of_others() {
        let shares = Shares::new(3);
        shares.deal(8, 2);
        let all: Vec<_> = std::iter::from_fn(|| shares.take(0)).collect();
        assert_eq!(all, [0, 1, 2, 3, 6, 7, 5, 4]);
        assert_eq!((shares.take(1), shares.take(2)), (None, None));
        shares.deal(1, 3);
        assert_eq!((shares.take(0), shares.take(1)), (Some(0), None));
        shares.deal(0, 3);
        assert_eq!(shares.take(2), None);
    }

    #[test]
    fn every_task_is_given_once() {
        for threads in 1..=8 {
            let shares = Shares::new(threads);
            for tasks in [1, 2, 7, 1000, 20_000] {
                shares.deal(tasks, threads);
                let mut given: Vec<usize> = std::thread::scope(|scope| {
                    let take = |thread| std::iter::from_fn(|| shares.take(thread)).collect::<Vec<_>>();
                    let takers: Vec<_> = (0..threads).map(|thread| scope.spawn(move || take(thread))).collect();
                    takers.into_iter().flat_map(|taker| taker.join().expect("no panic")).collect()
                });
                given.sort_unstable();
                assert_eq!(given, (0..tasks).collect::<Vec<_>>(), "{threads} threads");
            }
        }
    }
}
