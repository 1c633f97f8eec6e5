//! [`StageQueues`]: queues of the stages, and the batches on their way through them.
//!
//! A batch goes from stage to stage through this process. Each stage has a queue: it may get a batch while it computes the
//! one before, and answers them in order.
//!
//! If the last stage looks up the rows of tokens for the first one, it does so while it computes. Several workers that
//! divide the rows do everything in order, and a look-up must not wait behind a batch: the first stage would be idle
//! meanwhile, and then the last one. So such workers get a batch only after they have answered the one before and, if the
//! engine begins another batch with that answer, after the look-up for this one.

use std::collections::VecDeque;

use ferrule_kernels::Cancel;

use super::link::{Answer, LinkError};
use super::workers::{Failure, Workers};
use crate::spec::ModelSpec;

/// Queues of the stages, and the batches in flight.
pub(super) struct StageQueues {
    workers: Workers,
    /// Batches in the order in which they began.
    batches: VecDeque<QueuedBatch>,
    /// Numbers of a token that the last stage looks up for the first one; `None` if the first stage has the embedding.
    looked_up: Option<usize>,
}

struct QueuedBatch {
    /// Bytes of the [`StageStep`](super::StageStep).
    step: Vec<u8>,
    /// Number of tokens.
    tokens: usize,
    place: Place,
    /// Input of the stage that it is before, or answer of the last stage.
    output: Vec<f32>,
}

/// Place of a batch in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// The last stage looks up the rows of its tokens.
    LookUp,
    /// Place before a stage, to which it can be sent.
    Before(usize),
    /// Place in the queue of a stage, to which it was sent.
    At(usize),
    /// Place after the last stage.
    Done,
}

impl StageQueues {
    /// Creates empty queues.
    pub fn new(workers: Workers, spec: &ModelSpec) -> Self {
        let stages = workers.stages();
        let looked_up = (stages > 1 && spec.has_tied_lm_head()).then(|| spec.embedding_width());
        Self { workers, batches: VecDeque::new(), looked_up }
    }

    pub fn workers(&self) -> &Workers {
        &self.workers
    }

    pub fn workers_mut(&mut self) -> &mut Workers {
        &mut self.workers
    }

    /// Returns the number of stages.
    pub fn stages(&self) -> usize {
        self.workers.stages()
    }

    /// Returns whether no batch is in flight.
    pub fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Sends a batch with these tokens to the first stage, or to the last one for the rows of its tokens.
    pub fn begin(&mut self, step: Vec<u8>, tokens: &[u32]) -> Result<(), Failure> {
        let mut place = Place::Before(0);
        if self.looked_up.is_some() {
            self.workers.send_look_up(self.stages() - 1, tokens)?;
            place = Place::LookUp;
        }
        self.batches.push_back(QueuedBatch { step, tokens: tokens.len(), place, output: Vec::new() });
        self.advance()
    }

    /// Waits for the oldest batch and returns the answer of the last stage.
    ///
    /// # Panics
    /// If no batch is in flight.
    pub fn finish(&mut self, cancel: &Cancel) -> Result<Vec<f32>, Failure> {
        while self.batches.front().expect("a batch is in flight").place != Place::Done {
            self.advance()?;
            let stages = 0..self.stages();
            let answering: Vec<usize> = stages.filter(|stage| self.is_answering(*stage)).collect();
            let stage = self.workers.wait(&answering, cancel)?;
            self.take_answer(stage, cancel)?;
        }
        Ok(self.batches.pop_front().map(|batch| batch.output).unwrap_or_default())
    }

    /// Returns whether a stage has a request that it has not answered.
    fn is_answering(&self, stage: usize) -> bool {
        let looks_up = stage == self.stages() - 1 && self.has_batch(Place::LookUp);
        looks_up || self.has_batch(Place::At(stage))
    }

    fn has_batch(&self, place: Place) -> bool {
        self.batches.iter().any(|batch| batch.place == place)
    }

    /// Sends each batch to its next stage, if it may have it already.
    fn advance(&mut self) -> Result<(), Failure> {
        let last = self.stages() - 1;
        let in_order = self.looked_up.is_some() && self.workers.ranks() > 1;
        for index in 0..self.batches.len() {
            let Place::Before(stage) = self.batches[index].place else { continue };
            if in_order && stage == last && self.has_batch(Place::At(last)) {
                continue;
            }
            let batch = &mut self.batches[index];
            self.workers.send_step(stage, &batch.step, &std::mem::take(&mut batch.output))?;
            batch.place = Place::At(stage);
        }
        Ok(())
    }

    /// Receives the next answer of a stage.
    fn take_answer(&mut self, stage: usize, cancel: &Cancel) -> Result<(), Failure> {
        let last = self.stages() - 1;
        let (numbers, place) = match self.workers.receive(stage, cancel)? {
            Answer::Output(numbers) => (numbers, Place::At(stage)),
            Answer::LookedUp(numbers) => (numbers, Place::LookUp),
        };
        let protocol = |what| (self.workers.first_of(stage), LinkError::Protocol(what));
        let Some(batch) = self.batches.iter_mut().find(|batch| batch.place == place) else {
            return Err(protocol("an answer without a request".to_owned()));
        };
        if let (Place::LookUp, Some(width)) = (place, self.looked_up)
            && numbers.len() != batch.tokens * width
        {
            let what = format!("{} numbers for {} tokens, not {width} each", numbers.len(), batch.tokens);
            return Err(protocol(what));
        }
        batch.output = numbers;
        batch.place = match place {
            Place::LookUp => Place::Before(0),
            _ if stage < last => Place::Before(stage + 1),
            _ => Place::Done,
        };
        Ok(())
    }
}
