//! [`StageQueues`]: queues of the stages, and the batches on their way through them.
//!
//! A batch goes from stage to stage through this process. Each stage has a queue: it may get a batch while it computes the
//! one before, and answers them in order.
//!
//! If the rows of the embedding and the lm_head are divided among the workers, a batch begins with a look-up of its
//! tokens by the workers that have their rows, and ends with the logits of all workers. The last stage computes its
//! logits immediately; the other ones get its hidden states, and compute logits before the batches in their queues.

use std::collections::VecDeque;
use std::ops::Range;

use ferrule_kernels::Cancel;

use super::link::{Answer, LinkError};
use super::workers::{Failure, Workers};
use crate::spec::ModelSpec;

/// Queues of the stages, and the batches in flight.
pub(super) struct StageQueues {
    workers: Workers,
    /// Batches in the order in which they began.
    batches: VecDeque<QueuedBatch>,
    /// Numbers of a row of the embedding and the lm_head, if the rows are divided among the workers.
    divided: Option<usize>,
    vocab_size: usize,
}

struct QueuedBatch {
    /// Bytes of the [`StageStep`](super::StageStep).
    step: Vec<u8>,
    tokens: Vec<u32>,
    /// Number of rows whose logits are needed.
    logit_rows: usize,
    place: Place,
    /// Workers whose answer is missing at this place.
    pending_answers: Vec<usize>,
    /// Input of the stage that it is before, or answer of the last stage.
    output: Vec<f32>,
    /// Workers whose logits are missing.
    pending_logits: Vec<usize>,
    /// Logits `[logit_rows, vocab_size]`, if workers have parts of them.
    logits: Vec<f32>,
}

/// Place of a batch in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Workers look up the rows of its tokens.
    LookUp,
    /// Place before a stage, to which it can be sent.
    Before(usize),
    /// Place in the queue of a stage, to which it was sent.
    At(usize),
    /// Place after the last stage.
    AfterLast,
}

impl QueuedBatch {
    /// Returns a worker whose answer a batch that was sent as far as possible needs next; `None` if it has all of them.
    fn awaited(&self) -> Option<usize> {
        self.pending_answers.first().or(self.pending_logits.first()).copied()
    }

    /// Returns whether the answer of a worker is missing at a place.
    fn awaits(&self, place: Place, worker: usize) -> bool {
        self.place == place && self.pending_answers.contains(&worker)
    }
}

impl StageQueues {
    /// Creates empty queues.
    pub fn new(workers: Workers, spec: &ModelSpec) -> Self {
        let divided = (workers.stages() > 1).then(|| spec.embedding_width());
        Self { workers, batches: VecDeque::new(), divided, vocab_size: spec.vocab_size }
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

    /// Sends a batch with these tokens to the first stage, or to the workers that have the rows of its tokens. The logits
    /// of `logit_rows` rows are needed.
    pub fn begin(&mut self, step: Vec<u8>, tokens: Vec<u32>, logit_rows: usize) -> Result<(), Failure> {
        let (mut place, mut pending_answers, mut pending_logits) = (Place::Before(0), Vec::new(), Vec::new());
        let (mut output, mut logits) = (Vec::new(), Vec::new());
        if let Some(width) = self.divided {
            for worker in 0..self.workers.count() {
                let own = self.workers.tokens_of(worker);
                let tokens: Vec<u32> = tokens.iter().copied().filter(|token| is_among(&own, *token)).collect();
                if !tokens.is_empty() {
                    self.workers.send_look_up(worker, &tokens)?;
                    pending_answers.push(worker);
                }
                if logit_rows > 0 && !own.is_empty() {
                    pending_logits.push(worker);
                }
            }
            // If no worker has a row of any token, the first stage returns the error.
            if !pending_answers.is_empty() {
                place = Place::LookUp;
            }
            (output, logits) = (vec![0.0; tokens.len() * width], vec![0.0; logit_rows * self.vocab_size]);
        }
        let batch = QueuedBatch { step, tokens, logit_rows, place, pending_answers, output, pending_logits, logits };
        self.batches.push_back(batch);
        self.advance()
    }

    /// Waits for the oldest batch and returns the answer of the last stage, or the logits of all workers.
    ///
    /// # Panics
    /// If no batch is in flight.
    pub fn finish(&mut self, cancel: &Cancel) -> Result<Vec<f32>, Failure> {
        while let Some(awaited) = self.batches.front().expect("a batch is in flight").awaited() {
            let all = 0..self.workers.count();
            let answering: Vec<usize> = all.filter(|worker| self.is_answering(*worker)).collect();
            let worker = self.workers.wait(&answering, awaited, cancel)?;
            self.take_answer(worker, cancel)?;
            self.advance()?;
        }
        let done = |batch: QueuedBatch| if batch.logits.is_empty() { batch.output } else { batch.logits };
        Ok(self.batches.pop_front().map(done).unwrap_or_default())
    }

    /// Returns whether an answer of a worker is missing, or will be once it gets its request.
    fn is_answering(&self, worker: usize) -> bool {
        self.batches
            .iter()
            .any(|batch| batch.pending_answers.contains(&worker) || batch.pending_logits.contains(&worker))
    }

    /// Sends each batch to its next stage. A batch whose tokens are looked up sooner does not overtake an older one.
    fn advance(&mut self) -> Result<(), Failure> {
        for batch in self.batches.iter_mut().take_while(|batch| batch.place != Place::LookUp) {
            if let Place::Before(stage) = batch.place {
                self.workers.send_step(stage, &batch.step, &std::mem::take(&mut batch.output))?;
                (batch.place, batch.pending_answers) = (Place::At(stage), self.workers.of_stage(stage).collect());
            }
        }
        Ok(())
    }

    /// Receives the next answer of a worker.
    fn take_answer(&mut self, worker: usize, cancel: &Cancel) -> Result<(), Failure> {
        let answer = self.workers.receive(worker, cancel)?;
        let Self { workers, batches, divided, vocab_size } = self;
        let (own, stages) = (workers.tokens_of(worker), workers.stages());
        let stage = workers.worker(worker).stage;
        let protocol = |what| Err((workers.worker(worker), LinkError::Protocol(what)));
        let batch = batches.iter_mut().find(|batch| match &answer {
            Answer::Output(_) => batch.awaits(Place::At(stage), worker),
            Answer::LookedUp(_) => batch.awaits(Place::LookUp, worker),
            Answer::Logits(_) => batch.pending_logits.contains(&worker),
        });
        let Some(batch) = batch else { return protocol("an answer without a request".to_owned()) };
        let width = divided.unwrap_or(0);
        match answer {
            Answer::LookedUp(rows) => {
                let places = batch.tokens.iter().zip(batch.output.chunks_exact_mut(width));
                let mut places: Vec<_> = places.filter(|(token, _)| is_among(&own, **token)).collect();
                if rows.len() != places.len() * width {
                    let what = format!("{} numbers for {} tokens, not {width} each", rows.len(), places.len());
                    return protocol(what);
                }
                places.iter_mut().zip(rows.chunks_exact(width)).for_each(|((_, out), row)| out.copy_from_slice(row));
                batch.pending_answers.retain(|other| *other != worker);
                if batch.pending_answers.is_empty() {
                    batch.place = Place::Before(0);
                }
            }
            Answer::Logits(logits) => {
                let rows = batch.logits.chunks_exact_mut(*vocab_size);
                if logits.len() != batch.logit_rows * own.len() {
                    let what = format!("{} logits for {} rows, not {} each", logits.len(), batch.logit_rows, own.len());
                    return protocol(what);
                }
                rows.zip(logits.chunks_exact(own.len())).for_each(|(out, row)| out[own.clone()].copy_from_slice(row));
                batch.pending_logits.retain(|other| *other != worker);
            }
            Answer::Output(numbers) => {
                // The other ranks of the stage have the same hidden states, and do not send them.
                if worker == workers.of_stage(stage).start {
                    batch.output = numbers;
                }
                batch.pending_answers.retain(|other| *other != worker);
                if !batch.pending_answers.is_empty() {
                    return Ok(());
                }
                if stage + 1 < stages {
                    batch.place = Place::Before(stage + 1);
                    return Ok(());
                }
                batch.place = Place::AfterLast;
                if batch.logits.is_empty() {
                    return Ok(());
                }
                if batch.output.len() != batch.logit_rows * width {
                    let what =
                        format!("{} numbers for {} rows, not {width} each", batch.output.len(), batch.logit_rows);
                    return protocol(what);
                }
                for worker in 0..workers.of_stage(stage).start {
                    if batch.pending_logits.contains(&worker) {
                        workers.send_logits(worker, &batch.output)?;
                    }
                }
            }
        }
        Ok(())
    }
}

fn is_among(tokens: &Range<usize>, token: u32) -> bool {
    tokens.contains(&(token as usize))
}
