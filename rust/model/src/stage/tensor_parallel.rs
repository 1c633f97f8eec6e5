//! [`TensorParallelGroup`]: the workers that divide the rows of a stage's matrices (tensor parallelism).
//!
//! Each worker has all activations. It multiplies them with its own rows of a matrix, and an all-gather gives all
//! workers the outputs of all. No sum is divided, so an output has the same bits as in one process, with any number of
//! workers.
//!
//! In an all-gather, a worker sends to each other one the number of its outputs (64 bits, little-endian), then the
//! outputs as in memory.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrule_kernels::arch::LANES;
use ferrule_kernels::{Cancel, PoolError, Scratch};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Numbers of 32 bits before the outputs of a worker: their count.
const HEADER: usize = size_of::<u64>() / size_of::<f32>();

/// Time in which a worker looks for the outputs of the others without sleeping. Waking up would take as long as an
/// all-gather of a decode step.
const SPIN: Duration = Duration::from_micros(200);

/// Interval at which a sleeping worker looks whether it is cancelled.
const POLL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// A worker's place among those that divide the rows of matrices, with connections to the others.
pub struct TensorParallelGroup {
    rank: usize,
    ranks: usize,
    gather: Mutex<Gather>,
}

/// Buffers and connections of all-gathers.
pub(crate) struct Gather {
    rank: usize,
    /// Connections to the other workers with their ranks, in ascending order.
    peers: Vec<(usize, UnixStream)>,
    own: Scratch<f32>,
    received: Scratch<f32>,
    /// First failure of an all-gather or of a batch, after which the workers are no longer alike.
    failure: Option<GatherError>,
}

/// Reason why an all-gather or a batch failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GatherError {
    /// The connection to worker `rank` ended.
    Lost { rank: usize },
    /// Worker `rank` has sent `found` numbers, where this worker needs `expected`.
    Count { rank: usize, expected: usize, found: u64 },
    /// This worker did not finish.
    Pool(PoolError),
}

impl GatherError {
    /// Returns the error for the caller of a kernel. The cause is in [`TensorParallelGroup::failure`].
    fn pool_error(&self) -> PoolError {
        match self {
            Self::Pool(error) => error.clone(),
            Self::Lost { .. } | Self::Count { .. } => PoolError::Cancelled,
        }
    }
}

impl TensorParallelGroup {
    /// Creates the place of worker `rank`; `peers` are connections to the others, in the order of their ranks.
    ///
    /// # Errors
    /// [`io::Error`] if a socket cannot be set to non-blocking.
    ///
    /// # Panics
    /// If `rank` is greater than the number of the others.
    pub fn new(rank: usize, peers: Vec<UnixStream>) -> io::Result<Self> {
        let ranks = peers.len() + 1;
        assert!(rank < ranks, "rank {rank} of {ranks} workers");
        peers.iter().try_for_each(|stream| stream.set_nonblocking(true))?;
        let peers = (0..ranks).filter(|other| *other != rank).zip(peers).collect();
        Ok(Self::with_peers(rank, ranks, peers))
    }

    /// Creates the place of worker `rank` of `ranks` without connections, to measure its part.
    ///
    /// # Panics
    /// If `rank` is not less than `ranks`.
    #[must_use]
    pub fn unconnected(rank: usize, ranks: usize) -> Self {
        assert!(rank < ranks, "rank {rank} of {ranks} workers");
        Self::with_peers(rank, ranks, Vec::new())
    }

    fn with_peers(rank: usize, ranks: usize, peers: Vec<(usize, UnixStream)>) -> Self {
        let gather = Gather { rank, peers, own: Scratch::default(), received: Scratch::default(), failure: None };
        Self { rank, ranks, gather: Mutex::new(gather) }
    }

    /// Returns the rank of this worker.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of workers.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the panels of a matrix of `rows` rows that this worker has; `None` if each worker has all of them,
    /// because there are too few.
    pub(crate) fn panels(&self, rows: usize) -> Option<Range<usize>> {
        (rows.div_ceil(LANES) >= self.ranks).then(|| self.panels_of(self.rank, rows))
    }

    /// Returns the rows that worker `rank` has of a divided matrix of `rows` rows.
    pub(crate) fn rows_of(&self, rank: usize, rows: usize) -> Range<usize> {
        let panels = self.panels_of(rank, rows);
        panels.start * LANES..rows.min(panels.end * LANES)
    }

    fn panels_of(&self, rank: usize, rows: usize) -> Range<usize> {
        let first = |rank: usize| rows.div_ceil(LANES) * rank / self.ranks;
        first(rank)..first(rank + 1)
    }

    /// Returns the buffers and connections, for one all-gather.
    pub(crate) fn gather(&self) -> MutexGuard<'_, Gather> {
        self.gather.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the first failure, after which all later all-gathers fail.
    pub(crate) fn failure(&self) -> Option<GatherError> {
        self.gather().failure.clone()
    }

    /// Records that a batch failed with `error`, and returns the first failure: that of an all-gather, or this one.
    pub(crate) fn fail(&self, error: PoolError) -> GatherError {
        self.gather().failure.get_or_insert(GatherError::Pool(error)).clone()
    }
}

impl Gather {
    /// Sends the numbers of this worker, which `fill` writes, to all others and receives theirs (all-gather). Worker
    /// `rank` has `counts[rank]` numbers. Returns the numbers of each worker in the order of ranks.
    ///
    /// # Errors
    /// That of `fill`; [`PoolError::Cancelled`] if `cancel` is set, a connection ended, or another worker has sent
    /// another count than this one needs. The workers are not alike then, and every later call fails too.
    pub fn all_gather(
        &mut self,
        counts: &[usize],
        cancel: &Cancel,
        fill: impl FnOnce(&mut [f32]) -> Result<(), PoolError>,
    ) -> Result<Vec<&[f32]>, PoolError> {
        let Self { rank, peers, own, received, failure } = self;
        if let Some(failure) = failure {
            return Err(failure.pool_error());
        }
        let own = own.take(HEADER + counts[*rank]);
        let (header, numbers) = own.split_at_mut(HEADER);
        bytemuck::cast_slice_mut(header).copy_from_slice(&(numbers.len() as u64).to_le_bytes());
        let received = received.take(peers.iter().map(|(rank, _)| HEADER + counts[*rank]).sum());
        let done = fill(numbers).map_err(GatherError::Pool).and_then(|()| {
            let mut left = &mut *received;
            let mut transfers: Vec<Transfer<'_>> = peers
                .iter()
                .map(|(rank, stream)| {
                    let (part, rest) = std::mem::take(&mut left).split_at_mut(HEADER + counts[*rank]);
                    left = rest;
                    let (send, receive) = (bytemuck::cast_slice(own), bytemuck::cast_slice_mut(part));
                    Transfer { rank: *rank, expected: counts[*rank], stream, send, receive, received: 0 }
                })
                .collect();
            complete(&mut transfers, cancel)
        });
        if let Err(error) = done {
            return Err(failure.insert(error).pool_error());
        }
        let mut left = &*received;
        let parts = counts.iter().enumerate().map(|(other, count)| {
            if other == *rank {
                return &own[HEADER..];
            }
            let (part, rest) = left.split_at(HEADER + *count);
            left = rest;
            &part[HEADER..]
        });
        Ok(parts.collect())
    }
}

/// Bytes that are sent to and received from a worker.
struct Transfer<'a> {
    rank: usize,
    /// Numbers that the other worker must send.
    expected: usize,
    stream: &'a UnixStream,
    /// Bytes that are still to be sent.
    send: &'a [u8],
    /// The header and the numbers of the other worker.
    receive: &'a mut [u8],
    /// Bytes of `receive` that have arrived.
    received: usize,
}

impl Transfer<'_> {
    fn is_complete(&self) -> bool {
        self.send.is_empty() && self.received == self.receive.len()
    }

    /// Sends and receives what is possible without waiting. Returns whether that was anything.
    fn advance(&mut self) -> Result<bool, GatherError> {
        let lost = |_| GatherError::Lost { rank: self.rank };
        let mut stream = self.stream;
        let sent = if self.send.is_empty() { Ok(0) } else { moved(stream.write(self.send)) };
        let left = &mut self.receive[self.received..];
        let received = if left.is_empty() { 0 } else { moved(stream.read(left)).map_err(lost)? };
        let before = self.received;
        self.received += received;
        if let Some(header) =
            self.receive[..self.received].first_chunk::<{ size_of::<u64>() }>().filter(|header| before < header.len())
        {
            let found = u64::from_le_bytes(*header);
            if found != self.expected as u64 {
                return Err(GatherError::Count { rank: self.rank, expected: self.expected, found });
            }
        }
        // A worker that has sent another count has perhaps ended: the count is the cause.
        let sent = sent.map_err(lost)?;
        self.send = &self.send[sent..];
        Ok(sent + received > 0)
    }

    /// Returns what to wait for.
    fn events(&self) -> PollFd<'_> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::OUT, !self.send.is_empty());
        events.set(PollFlags::IN, self.received < self.receive.len());
        PollFd::new(self.stream, events)
    }
}

/// Returns the number of bytes of a non-blocking operation on a socket: 0 if it would have to wait.
fn moved(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(0),
        result => result,
    }
}

/// Completes all transfers.
fn complete(transfers: &mut [Transfer<'_>], cancel: &Cancel) -> Result<(), GatherError> {
    let mut idle: Option<Instant> = None;
    loop {
        let mut advanced = false;
        for transfer in &mut *transfers {
            advanced |= transfer.advance()?;
        }
        if transfers.iter().all(Transfer::is_complete) {
            return Ok(());
        }
        if advanced {
            idle = None;
        } else if idle.get_or_insert_with(Instant::now).elapsed() < SPIN {
            std::hint::spin_loop();
        } else if cancel.poll() {
            return Err(GatherError::Pool(PoolError::Cancelled));
        } else {
            let waiting = transfers.iter().filter(|transfer| !transfer.is_complete());
            // An error or a timeout is found out above.
            let _ = poll(&mut waiting.map(Transfer::events).collect::<Vec<_>>(), Some(&POLL));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the places of `ranks` workers that are connected to each other.
    fn group(ranks: usize) -> Vec<TensorParallelGroup> {
        let mut streams: Vec<Vec<UnixStream>> = (0..ranks).map(|_| Vec::new()).collect();
        for low in 0..ranks {
            for high in low + 1..ranks {
                let (ours, theirs) = UnixStream::pair().unwrap();
                streams[low].push(ours);
                streams[high].push(theirs);
            }
        }
        streams.into_iter().enumerate().map(|(rank, peers)| TensorParallelGroup::new(rank, peers).unwrap()).collect()
    }

    #[test]
    fn each_row_belongs_to_one_worker() {
        for ranks in 1..5 {
            let workers = group(ranks);
            for rows in [0, 1, 16, 17, 31, 33, 48, 100, 1000] {
                let divided = workers[0].panels(rows).is_some();
                assert_eq!(divided, rows.div_ceil(LANES) >= ranks);
                let all: Vec<usize> = (0..ranks).flat_map(|rank| workers[0].rows_of(rank, rows)).collect();
                assert!(all.into_iter().eq(0..rows));
                assert!(!divided || (0..ranks).all(|rank| !workers[0].rows_of(rank, rows).is_empty()) || rows == 0);
            }
        }
    }

    #[test]
    fn all_gathers_of_any_size_complete_in_order() {
        let number = |rank: usize, index: usize| (rank * 1_000_000 + index) as f32;
        // The largest exceed the buffers of a socket, in both directions at once.
        let all_counts = [[1, 1, 1], [5, 0, 7], [0, 0, 0], [300_000, 200_001, 3], [400_000; 3]];
        std::thread::scope(|scope| {
            for worker in group(3) {
                scope.spawn(move || {
                    for counts in all_counts {
                        let mut gather = worker.gather();
                        let fill = |own: &mut [f32]| {
                            own.iter_mut().enumerate().for_each(|(index, out)| *out = number(worker.rank(), index));
                            Ok(())
                        };
                        let parts = gather.all_gather(&counts, &Cancel::new(), fill).unwrap();
                        for (rank, (part, count)) in parts.into_iter().zip(counts).enumerate() {
                            assert!(part.iter().copied().eq((0..count).map(|index| number(rank, index))));
                        }
                    }
                });
            }
        });
    }

    /// Gathers zeros.
    fn zeros(worker: &TensorParallelGroup, counts: &[usize], cancel: &Cancel) -> Result<(), PoolError> {
        let fill = |own: &mut [f32]| {
            own.fill(0.0);
            Ok(())
        };
        worker.gather().all_gather(counts, cancel, fill).map(drop)
    }

    #[test]
    fn an_all_gather_ends_with_a_lost_worker_or_a_cancellation_and_so_do_later_ones() {
        let mut workers = group(3);
        drop(workers.pop());
        for _ in 0..2 {
            assert_eq!(zeros(&workers[0], &[4, 0, 4], &Cancel::new()), Err(PoolError::Cancelled));
            assert_eq!(workers[0].failure(), Some(GatherError::Lost { rank: 2 }));
        }

        let (workers, cancel) = (group(2), Cancel::new());
        cancel.cancel();
        assert_eq!(zeros(&workers[1], &[1, 0], &cancel), Err(PoolError::Cancelled));
        // The numbers of an all-gather that only one worker has left would be taken for those of the next one.
        assert_eq!(zeros(&workers[1], &[1, 0], &Cancel::new()), Err(PoolError::Cancelled));
        assert_eq!(workers[1].failure(), Some(GatherError::Pool(PoolError::Cancelled)));
    }

    #[test]
    fn an_all_gather_fails_after_its_numbers_could_not_be_computed() {
        let (workers, panicked) = (group(2), PoolError::Panicked("task".to_owned()));
        let failed = workers[0].gather().all_gather(&[1, 1], &Cancel::new(), |_| Err(panicked.clone())).map(drop);
        assert_eq!(failed, Err(panicked.clone()));
        assert_eq!(zeros(&workers[0], &[1, 1], &Cancel::new()), Err(panicked));
    }

    #[test]
    fn workers_that_disagree_about_counts_fail() {
        // The second worker computes another number of outputs, of its own or of the other one, more or fewer.
        for (counts, found) in [([4, 5], 5), ([4, 3], 3), ([4, 0], 0), ([4, 300_000], 300_000)] {
            let workers = group(2);
            std::thread::scope(|scope| {
                let other = &workers[1];
                let thread = scope.spawn(move || zeros(other, &counts, &Cancel::new()));
                assert_eq!(zeros(&workers[0], &[4, 4], &Cancel::new()), Err(PoolError::Cancelled));
                assert_eq!(workers[0].failure(), Some(GatherError::Count { rank: 1, expected: 4, found }));
                // The first worker ends.
                workers[0].gather().peers.clear();
                let _ = thread.join().unwrap();
            });
        }
    }
}
