//! [`Workers`]: the connections to the workers of all stages.

use std::fmt;
use std::io::{self, Read};
use std::ops::Range;
use std::time::Instant;

use ferrule_kernels::Cancel;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::link::{Answer, CANCEL_LIMIT, LinkError, POLL, StageInfo, StageLink, Waiting, no_answer};
use super::logit_words::NeededLogits;

/// A worker of a model over several processes: a pipeline stage, or one of the workers that divide its matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Worker {
    /// Index of the stage.
    pub stage: usize,
    /// Rank among the workers of the stage; `None` for the only one.
    pub rank: Option<usize>,
}

impl Worker {
    /// Returns worker `index` of all, stage by stage, of stages with `ranks` workers each.
    #[must_use]
    pub fn new(index: usize, ranks: usize) -> Self {
        Self { stage: index / ranks, rank: (ranks > 1).then_some(index % ranks) }
    }
}

impl fmt::Display for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pipeline stage {}", self.stage)?;
        self.rank.map_or(Ok(()), |rank| write!(f, ", tensor-parallel rank {rank}"))
    }
}

/// A worker that failed, and how.
pub(super) type Failure = (Worker, LinkError);

/// Connections to the workers, stage by stage and in the order of ranks.
pub(super) struct Workers {
    links: Vec<StageLink>,
    /// Number of workers of a stage.
    ranks: usize,
}

impl Workers {
    /// Creates the workers of stages with `ranks` workers each.
    pub fn new(links: Vec<StageLink>, ranks: usize) -> Self {
        Self { links, ranks }
    }

    /// Returns the descriptions of the workers.
    pub fn infos(&self) -> impl Iterator<Item = &StageInfo> {
        self.links.iter().map(StageLink::info)
    }

    /// Returns the number of stages.
    pub fn stages(&self) -> usize {
        self.links.len() / self.ranks
    }

    /// Returns the number of all workers.
    pub fn count(&self) -> usize {
        self.links.len()
    }

    /// Returns worker `index` of all.
    pub fn worker(&self, index: usize) -> Worker {
        Worker::new(index, self.ranks)
    }

    /// Returns the indices of the workers of a stage.
    pub fn of_stage(&self, stage: usize) -> Range<usize> {
        stage * self.ranks..(stage + 1) * self.ranks
    }

    /// Returns the tokens whose rows of the embedding and the lm_head a worker has.
    pub fn tokens_of(&self, index: usize) -> Range<usize> {
        let info = self.links[index].info();
        info.first_token..info.end_token
    }

    /// Allocates pages for each group in all workers.
    pub fn allocate_kv(&mut self, pages: &[usize], cancel: &Cancel) -> Result<(), Failure> {
        let ranks = self.ranks;
        let mut links = self.links.iter_mut().enumerate();
        links.try_for_each(|(index, link)| {
            link.allocate_kv(pages, cancel).map_err(|error| (Worker::new(index, ranks), error))
        })
    }

    /// Sends a step and its input to all workers of a stage.
    pub fn send_step(&mut self, stage: usize, step: &[u8], input: &[f32]) -> Result<(), Failure> {
        self.of_stage(stage).try_for_each(|index| self.send(index, |link| link.send_step(step, input)))
    }

    /// Sends tokens, whose rows of the embedding are looked up, to the worker that has them.
    pub fn send_look_up(&mut self, index: usize, tokens: &[u32]) -> Result<(), Failure> {
        self.send(index, |link| link.send_look_up(tokens))
    }

    /// Sends rows to a worker, which multiplies them with its rows of the lm_head, and the needed logits of each.
    pub fn send_logits(&mut self, index: usize, rows: &[f32], needed: &[NeededLogits]) -> Result<(), Failure> {
        let needed: Vec<u32> = needed.iter().map(|needed| *needed as u32).collect();
        self.send(index, |link| link.send_logits(rows, &needed))
    }

    fn send(&mut self, index: usize, send: impl Fn(&mut StageLink) -> Result<(), LinkError>) -> Result<(), Failure> {
        send(&mut self.links[index]).map_err(|error| (self.worker(index), error))
    }

    /// Waits until one of the workers `answering` answers, and returns the first one that does. After a cancellation it
    /// waits for 10 s; then worker `awaited` has failed.
    pub fn wait(&self, answering: &[usize], awaited: usize, cancel: &Cancel) -> Result<usize, Failure> {
        let interval = Timespec { tv_sec: 0, tv_nsec: POLL.subsec_nanos().into() };
        if let Some(index) = answering.iter().find(|index| self.links[**index].has_read_ahead()) {
            return Ok(*index);
        }
        let mut cancelled: Option<Instant> = None;
        loop {
            let mut sockets: Vec<_> =
                answering.iter().map(|index| PollFd::new(self.links[*index].socket(), PollFlags::IN)).collect();
            // After an error or a timeout no socket has events.
            let _ = poll(&mut sockets, Some(&interval));
            if let Some(place) = sockets.iter().position(|socket| !socket.revents().is_empty()) {
                return Ok(answering[place]);
            }
            if cancel.poll() && cancelled.get_or_insert_with(Instant::now).elapsed() > CANCEL_LIMIT {
                return Err((self.worker(awaited), no_answer(CANCEL_LIMIT).into()));
            }
        }
    }

    /// Receives the beginning of the next answer of a worker, whose words are read next.
    pub fn receive(&mut self, index: usize, cancel: &Cancel) -> Result<Answer, Failure> {
        let received = self.links[index].receive(cancel);
        received.map_err(|error| self.first_loss((index / self.ranks, index % self.ranks), error, cancel))
    }

    /// Reads the words of a worker's answer.
    pub fn read<T>(
        &mut self,
        index: usize,
        cancel: &Cancel,
        read: impl FnOnce(&mut Waiting<'_>) -> Result<T, LinkError>,
    ) -> Result<T, Failure> {
        read(&mut self.links[index].words(cancel)).map_err(|error| (self.worker(index), error))
    }

    /// Returns the worker of a stage whose failure is the cause of another's `error`, and the failure. A worker that has
    /// lost another names it, and ends.
    fn first_loss(&mut self, (stage, mut rank): (usize, usize), mut error: LinkError, cancel: &Cancel) -> Failure {
        for _ in 1..self.ranks {
            let LinkError::RankLost { rank: lost } = error else { break };
            let Some(link) = self.links[stage * self.ranks..][..self.ranks].get_mut(lost) else { break };
            rank = lost;
            error = loop {
                let skipped = link.receive(cancel).and_then(|answer| {
                    let words = (size_of::<u32>() * answer.words) as u64;
                    Ok(io::copy(&mut link.words(cancel).take(words), &mut io::sink())?)
                });
                if let Err(error) = skipped {
                    break error;
                }
            };
        }
        (Worker::new(stage * self.ranks + rank, self.ranks), error)
    }
}
