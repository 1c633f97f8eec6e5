//! [`StageQueues`]: queues of the stages, and the batches on their way through them.
//!
//! A batch goes from stage to stage through this process. Each stage has a queue: it may get a batch while it computes the
//! one before, and answers them in order.
//!
//! If the last stage looks up the rows of tokens for the first one, a look-up must not wait behind a batch. The first
//! stage would be idle meanwhile, and then the last one. So the last stage gets a batch only after it has answered the
//! one before and, if the engine begins another batch with that answer, after the look-up for this one.

use std::collections::VecDeque;

use ferrule_kernels::Cancel;

use super::link::LinkError;
use super::workers::{Failure, Workers};
use crate::spec::ModelSpec;

/// Queues of the stages, and the batches in flight.
pub(super) struct StageQueues {
    workers: Workers,
    /// Batches in the order in which they began.
    batches: VecDeque<QueuedBatch>,
    /// Unanswered requests to each stage, oldest first.
    unanswered: Vec<VecDeque<Request>>,
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
    /// Place in the queue of the last stage, which looks up the rows of its tokens.
    LookUp,
    /// Place before a stage, to which it can be sent.
    Before(usize),
    /// Place in the queue of a stage, to which it was sent.
    At(usize),
    /// Place after the last stage.
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    LookUp,
    Step,
}

impl StageQueues {
    /// Creates empty queues.
    pub fn new(workers: Workers, spec: &ModelSpec) -> Self {
        let stages = workers.stages();
        let looked_up = (stages > 1 && spec.has_tied_lm_head()).then(|| spec.embedding_width());
        Self { workers, batches: VecDeque::new(), unanswered: vec![VecDeque::new(); stages], looked_up }
    }

    pub fn workers(&self) -> &Workers {
        &self.workers
    }

    pub fn workers_mut(&mut self) -> &mut Workers {
        &mut self.workers
    }

    /// Returns the number of stages.
    pub fn stages(&self) -> usize {
        self.unanswered.len()
    }

    /// Returns whether no batch is in flight.
    pub fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Sends a batch with these tokens to the first stage, or to the last one for the rows of its tokens.
    pub fn begin(&mut self, step: Vec<u8>, tokens: &[u32]) -> Result<(), Failure> {
        let mut place = Place::Before(0);
        if self.looked_up.is_some() {
            let last = self.stages() - 1;
            self.workers.send_look_up(last, tokens)?;
            self.unanswered[last].push_back(Request::LookUp);
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
            let answering: Vec<usize> = stages.filter(|stage| !self.unanswered[*stage].is_empty()).collect();
            let stage = self.workers.wait(&answering, cancel)?;
            self.take_answer(stage, cancel)?;
        }
        Ok(self.batches.pop_front().map(|batch| batch.output).unwrap_or_default())
    }

    /// Sends each batch to its next stage, if it may have it already.
    fn advance(&mut self) -> Result<(), Failure> {
        let last = self.stages() - 1;
        for batch in &mut self.batches {
            let Place::Before(stage) = batch.place else { continue };
            let unanswered = &mut self.unanswered[stage];
            if self.looked_up.is_some() && stage == last && unanswered.contains(&Request::Step) {
                continue;
            }
            self.workers.send_step(stage, &batch.step, &std::mem::take(&mut batch.output))?;
            unanswered.push_back(Request::Step);
            batch.place = Place::At(stage);
        }
        Ok(())
    }

    /// Receives the next answer of a stage.
    fn take_answer(&mut self, stage: usize, cancel: &Cancel) -> Result<(), Failure> {
        let numbers = self.workers.receive(stage, cancel)?;
        let request = self.unanswered[stage].pop_front();
        let place = if request == Some(Request::LookUp) { Place::LookUp } else { Place::At(stage) };
        let mut batches = self.batches.iter_mut();
        let batch = batches.find(|batch| batch.place == place).expect("a batch waits for each request");
        let last = self.unanswered.len() - 1;
        if let (Place::LookUp, Some(width)) = (place, self.looked_up)
            && numbers.len() != batch.tokens * width
        {
            let what = format!("{} numbers for {} tokens, not {width} each", numbers.len(), batch.tokens);
            return Err((self.workers.first_of(last), LinkError::Protocol(what)));
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
