//! Reading ahead: threads that wait for each other prefetch what they will probably read first in the next run.
//!
//! A decode step is as fast as memory delivers the weights, but between two matrices one thread does what is too small
//! to share, and the first thread at the end of a run waits for the last. Memory would be idle meanwhile. A step reads
//! the same matrices in the same order as the step before it, so a [`Predictor`] learns which run follows which, and
//! waiting threads prefetch the beginning of their share of it into their cache. A prediction that is wrong costs a
//! little bandwidth that nobody needed; results do not depend on it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a cache line.
const LINE: usize = 64;

/// Maximum number of lines that a thread prefetches for a run: 256 KiB, an eighth to a half of its L2 cache.
const MAX_LINES: usize = 4096;

/// Number of bits that hold a number of lines; the others hold the number of the first line.
const COUNT_BITS: u32 = 13;
const _: () = assert!(MAX_LINES < 1 << COUNT_BITS);

/// Number of lines that are prefetched between two checks whether the wait is over: about as many as a core can have
/// under way.
const LINES_PER_CHECK: u64 = 16;

/// Number of runs that a prediction looks back. The experts of a token are unpredictable, but what follows them is known
/// from the runs before them.
const DEPTH: usize = 4;

/// Number of runs that a predictor knows, which bounds its memory.
const MAX_RUNS: usize = 1 << 13;

/// Lines of memory that a thread reads first in a run: number of the first line and number of lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span(u64);

impl Span {
    /// Returns the lines of a thread whose first and last tasks read these bytes and those that follow them.
    pub fn new(first: &[u8], last: &[u8]) -> Self {
        let (start, end) = (first.as_ptr().addr(), first.as_ptr_range().end.addr());
        // The last task may read another matrix.
        let end = Some(last.as_ptr().addr()).filter(|last| (start + 1..end).contains(last)).unwrap_or(end);
        let lines = (end - start).div_ceil(LINE).min(MAX_LINES);
        Self(((start / LINE) as u64) << COUNT_BITS | lines as u64)
    }

    /// Returns the numbers of the first line and the line after the last.
    fn lines(self) -> (u64, u64) {
        let first = self.0 >> COUNT_BITS;
        (first, first + (self.0 & ((1 << COUNT_BITS) - 1)))
    }
}

/// Lines that one thread should prefetch, alone on its cache lines.
///
/// The word is not part of the synchronization of runs: a thread may see an old one, which only costs bandwidth.
#[derive(Default)]
#[repr(align(128))]
pub struct PrefetchLines(AtomicU64);

impl PrefetchLines {
    /// Replaces the lines; `None` means none.
    pub fn set(&self, span: Option<Span>) {
        self.0.store(span.map_or(0, |span| span.0), Ordering::Relaxed);
    }

    /// Prefetches the next few lines, if any are left.
    pub fn prefetch_next(&self) {
        let word = self.0.load(Ordering::Relaxed);
        let (first, end) = Span(word).lines();
        let now = LINES_PER_CHECK.min(end - first);
        let rest = (first + now) << COUNT_BITS | (end - first - now);
        // Fails if the caller has replaced the lines.
        if now > 0 && self.0.compare_exchange(word, rest, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            (first..first + now).for_each(prefetch);
        }
    }
}

/// Prefetches a line into the L2 cache.
fn prefetch(line: u64) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch is a hint; it neither reads nor faults, whatever the address. SSE is part of x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(std::ptr::without_provenance(line as usize * LINE));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = line;
}

/// Learns the order of runs.
#[derive(Default)]
pub struct Predictor {
    runs: Vec<Run>,
    /// Indices of the runs by the lines that they read first.
    by_spans: HashMap<Vec<Span>, usize>,
    /// The latest runs, the last one first.
    latest: [Option<usize>; DEPTH],
}

/// A run that was seen before.
struct Run {
    /// Lines that each thread reads first.
    spans: Vec<Span>,
    /// Runs that followed: the next one, the one after it, and so on.
    followers: [Follower; DEPTH],
}

/// The run that followed another one at some distance.
#[derive(Clone, Copy, Default)]
struct Follower {
    run: Option<usize>,
    /// Whether it was the same run the last two times.
    is_sure: bool,
}

impl Predictor {
    /// Records a run, in which each thread first reads its span, and returns the spans of the run that probably follows.
    pub fn follow(&mut self, spans: &[Span]) -> Option<&[Span]> {
        let run = match self.next() {
            Some(run) if self.runs[run].spans == spans => run,
            _ => self.find(spans),
        };
        for (distance, before) in self.latest.into_iter().enumerate() {
            let Some(before) = before else { break };
            let follower = &mut self.runs[before].followers[distance];
            *follower = Follower { run: Some(run), is_sure: follower.run == Some(run) };
        }
        self.latest.rotate_right(1);
        self.latest[0] = Some(run);
        self.next().map(|run| &*self.runs[run].spans)
    }

    /// Returns the run that probably follows the latest one.
    fn next(&self) -> Option<usize> {
        let followers = self.latest.iter().enumerate().map_while(|(distance, run)| {
            let run = (*run)?;
            Some(self.runs[run].followers[distance])
        });
        followers.filter(|follower| follower.is_sure).find_map(|follower| follower.run)
    }

    /// Returns the index of a run, which is added if it is new.
    fn find(&mut self, spans: &[Span]) -> usize {
        if let Some(run) = self.by_spans.get(spans) {
            return *run;
        }
        if self.runs.len() == MAX_RUNS {
            *self = Self::default();
        }
        self.by_spans.insert(spans.to_vec(), self.runs.len());
        self.runs.push(Run { spans: spans.to_vec(), followers: [Follower::default(); DEPTH] });
        self.runs.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the spans of run `number`, of two threads.
    fn spans(number: u64) -> [Span; 2] {
        [0, 1].map(|thread| Span((2 * number + thread) << COUNT_BITS | 1))
    }

    fn follow(predictor: &mut Predictor, runs: &[u64]) -> Vec<Option<u64>> {
        let number = |spans: &[Span]| spans[0].lines().0 / 2;
        runs.iter().map(|run| predictor.follow(&spans(*run)).map(number)).collect()
    }

    #[test]
    fn a_span_ends_where_the_last_task_begins() {
        let bytes = [0; 4 * LINE];
        let (other, line) = ([0; LINE], |span: Span| span.lines().1 - span.lines().0);
        assert_eq!(line(Span::new(&bytes, &bytes[2 * LINE..])), 2);
        assert_eq!(line(Span::new(&bytes, &bytes)), 4, "one task reads all");
        assert_eq!(line(Span::new(&bytes, &other)), 4);
        assert_eq!(line(Span::new(&[], &[])), 0);
        assert_eq!(line(Span::new(&vec![0; 2 * LINE * MAX_LINES], &[])), MAX_LINES as u64);
        assert_eq!(Span::new(&bytes, &other).lines().0, (bytes.as_ptr().addr() / LINE) as u64);
    }

    #[test]
    fn lines_are_prefetched_once() {
        let (bytes, ahead) = ([0; 20 * LINE], PrefetchLines::default());
        ahead.prefetch_next();
        ahead.set(Some(Span::new(&bytes, &[])));
        let left = || {
            let (first, end) = Span(ahead.0.load(Ordering::Relaxed)).lines();
            end - first
        };
        let seen = [0; 4].map(|_| {
            ahead.prefetch_next();
            left()
        });
        assert_eq!(seen, [4, 0, 0, 0]);
        ahead.set(Some(Span::new(&bytes, &[])));
        ahead.set(None);
        assert_eq!(left(), 0);
    }

    #[test]
    fn a_run_is_predicted_once_it_followed_twice() {
        let mut predictor = Predictor::default();
        assert_eq!(follow(&mut predictor, &[1, 2, 3, 1, 2, 3]), [None; 6]);
        assert_eq!(follow(&mut predictor, &[1, 2, 3, 1]), [2, 3, 1, 2].map(Some));
        // Something else once: what is uncertain is not predicted.
        assert_eq!(follow(&mut predictor, &[7, 3, 1, 2]), [Some(3), Some(1), None, Some(3)]);
    }

    #[test]
    fn what_follows_unpredictable_runs_is_predicted() {
        let mut predictor = Predictor::default();
        for expert in 10..14 {
            follow(&mut predictor, &[1, 2, expert, 2 * expert]);
        }
        assert_eq!(follow(&mut predictor, &[1, 2, 50, 51]), [Some(2), None, None, Some(1)]);
    }

    #[test]
    fn a_predictor_forgets_before_it_grows_too_large() {
        let mut predictor = Predictor::default();
        let runs: Vec<u64> = (0..2 * MAX_RUNS as u64 + 1).collect();
        follow(&mut predictor, &runs);
        assert_eq!((predictor.runs.len(), predictor.by_spans.len()), (1, 1));
        assert_eq!(follow(&mut predictor, &[1, 2, 1, 2, 1]).last(), Some(&Some(2)));
    }
}
