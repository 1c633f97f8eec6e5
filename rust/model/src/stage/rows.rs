//! [`RowGroup`]: the workers that divide the rows of a stage's matrices (tensor parallelism).
//!
//! Each worker has all activations. It multiplies them with its own rows of a matrix, and all workers exchange the
//! outputs (all-gather). No sum is divided, so an output has the same bits as in one process, with any number of
//! workers.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrule_kernels::arch::LANES;
use ferrule_kernels::{Cancel, PoolError, Scratch};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Time in which a worker looks for the outputs of the others without sleeping. Waking up would take as long as the
/// exchange of a decode step.
const SPIN: Duration = Duration::from_micros(200);

/// Interval at which a sleeping worker looks whether it is cancelled.
const POLL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// A worker's place among those that divide the rows of matrices, with connections to the others.
pub struct RowGroup {
    rank: usize,
    ranks: usize,
    gather: Mutex<Gather>,
}

/// Buffers and connections of an exchange.
pub(crate) struct Gather {
    rank: usize,
    /// Connections to the other workers with their ranks, in ascending order.
    peers: Vec<(usize, UnixStream)>,
    own: Scratch<f32>,
    received: Scratch<f32>,
    /// Rank of the worker whose connection has ended.
    lost: Option<usize>,
}

impl RowGroup {
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
        let gather = Gather { rank, peers, own: Scratch::default(), received: Scratch::default(), lost: None };
        Ok(Self { rank, ranks, gather: Mutex::new(gather) })
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

    /// Begins an exchange.
    pub(crate) fn gather(&self) -> MutexGuard<'_, Gather> {
        self.gather.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the rank of the worker whose connection has ended during an exchange.
    pub(crate) fn lost(&self) -> Option<usize> {
        self.gather().lost
    }
}

impl Gather {
    /// Returns the buffer for the `count` numbers of this worker.
    pub fn own(&mut self, count: usize) -> &mut [f32] {
        self.own.take(count)
    }

    /// Sends the numbers of this worker to all others and receives theirs. Worker `rank` has `counts[rank]` numbers.
    /// Returns the numbers of each worker in the order of ranks.
    ///
    /// # Errors
    /// [`PoolError::Cancelled`] if `cancel` is set or a connection ended; the workers cannot go on then.
    pub fn exchange(&mut self, counts: &[usize], cancel: &Cancel) -> Result<Vec<&[f32]>, PoolError> {
        let Self { rank, peers, own, received, lost } = self;
        let own: &[f32] = own.take(counts[*rank]);
        let received = received.take(counts.iter().sum::<usize>() - own.len());
        let mut left = &mut *received;
        let mut transfers: Vec<Transfer<'_>> = peers
            .iter()
            .map(|(rank, stream)| {
                let (part, rest) = std::mem::take(&mut left).split_at_mut(counts[*rank]);
                left = rest;
                let (send, receive) = (bytemuck::cast_slice(own), bytemuck::cast_slice_mut(part));
                Transfer { rank: *rank, stream, send, receive }
            })
            .collect();
        if let Err(error) = complete(&mut transfers, cancel) {
            *lost = error;
            return Err(PoolError::Cancelled);
        }
        let mut left = &*received;
        let parts = counts.iter().enumerate().map(|(other, count)| {
            if other == *rank {
                return own;
            }
            let (part, rest) = left.split_at(*count);
            left = rest;
            part
        });
        Ok(parts.collect())
    }
}

/// Bytes that are still to be sent to and received from a worker.
struct Transfer<'a> {
    rank: usize,
    stream: &'a UnixStream,
    send: &'a [u8],
    receive: &'a mut [u8],
}

impl Transfer<'_> {
    fn is_complete(&self) -> bool {
        self.send.is_empty() && self.receive.is_empty()
    }

    /// Sends and receives what is possible without waiting. Returns whether that was anything.
    fn advance(&mut self) -> io::Result<bool> {
        let mut stream = self.stream;
        let sent = if self.send.is_empty() { 0 } else { moved(stream.write(self.send))? };
        self.send = &self.send[sent..];
        let received = if self.receive.is_empty() { 0 } else { moved(stream.read(self.receive))? };
        self.receive = &mut std::mem::take(&mut self.receive)[received..];
        Ok(sent + received > 0)
    }

    /// Returns what to wait for.
    fn events(&self) -> PollFd<'_> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::OUT, !self.send.is_empty());
        events.set(PollFlags::IN, !self.receive.is_empty());
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

/// Completes all transfers. The error is the rank whose connection ended, or `None` after a cancellation.
fn complete(transfers: &mut [Transfer<'_>], cancel: &Cancel) -> Result<(), Option<usize>> {
    let mut idle: Option<Instant> = None;
    loop {
        let mut advanced = false;
        for transfer in &mut *transfers {
            advanced |= transfer.advance().map_err(|_| Some(transfer.rank))?;
        }
        if transfers.iter().all(Transfer::is_complete) {
            return Ok(());
        }
        if advanced {
            idle = None;
        } else if idle.get_or_insert_with(Instant::now).elapsed() < SPIN {
            std::hint::spin_loop();
        } else if cancel.poll() {
            return Err(None);
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
    fn group(ranks: usize) -> Vec<RowGroup> {
        let mut streams: Vec<Vec<UnixStream>> = (0..ranks).map(|_| Vec::new()).collect();
        for low in 0..ranks {
            for high in low + 1..ranks {
                let (ours, theirs) = UnixStream::pair().unwrap();
                streams[low].push(ours);
                streams[high].push(theirs);
            }
        }
        streams.into_iter().enumerate().map(|(rank, peers)| RowGroup::new(rank, peers).unwrap()).collect()
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
    fn exchanges_of_any_size_complete_in_order() {
        let number = |rank: usize, index: usize| (rank * 1_000_000 + index) as f32;
        // The largest exceed the buffers of a socket, in both directions at once.
        let all_counts = [[1, 1, 1], [5, 0, 7], [0, 0, 0], [300_000, 200_001, 3], [400_000; 3]];
        std::thread::scope(|scope| {
            for worker in group(3) {
                scope.spawn(move || {
                    for counts in all_counts {
                        let mut gather = worker.gather();
                        let own = gather.own(counts[worker.rank()]);
                        own.iter_mut().enumerate().for_each(|(index, out)| *out = number(worker.rank(), index));
                        let parts = gather.exchange(&counts, &Cancel::new()).unwrap();
                        for (rank, (part, count)) in parts.into_iter().zip(counts).enumerate() {
                            assert!(part.iter().copied().eq((0..count).map(|index| number(rank, index))));
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn an_exchange_ends_with_a_lost_worker_or_a_cancellation() {
        let mut workers = group(3);
        drop(workers.pop());
        workers[0].gather().own(4).fill(0.0);
        assert_eq!(workers[0].gather().exchange(&[4, 0, 4], &Cancel::new()).unwrap_err(), PoolError::Cancelled);
        assert_eq!(workers[0].lost(), Some(2));

        let (workers, cancel) = (group(2), Cancel::new());
        cancel.cancel();
        assert_eq!(workers[1].gather().exchange(&[1, 0], &cancel).unwrap_err(), PoolError::Cancelled);
        assert_eq!(workers[1].lost(), None);
    }
}
