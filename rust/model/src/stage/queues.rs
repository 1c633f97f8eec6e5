//! [`StageQueues`]: queues of the stages, and the batches on their way through them.
//!
//! A batch goes from stage to stage through this process. Each stage has a queue: it may get a batch while it computes the
//! one before, and answers them in order.
//!
//! If the rows of the embedding and the lm_head are divided among the workers, a batch begins with a look-up of its
//! tokens by the workers that have their rows, and ends with the logits of all workers. The last stage computes its
//! logits immediately; the other ones get its hidden states, and compute logits before the batches in their queues.

use std::collections::VecDeque;
use std::io::Read;
use std::ops::Range;

use ferrule_kernels::Cancel;

use super::link::{AnswerKind, LinkError, read_numbers};
use super::logit_words::{NeededLogits, clear_unsent, read_rows};
use super::workers::{Failure, Workers};
use crate::spec::ModelSpec;

/// Maximum capacity of a spare buffer relative to the logits that are written to it.
const MAX_SPARE_RATIO: usize = 8;

/// Queues of the stages, and the batches in flight.
pub(super) struct StageQueues {
    workers: Workers,
    /// Batches in the order in which they began.
    batches: VecDeque<QueuedBatch>,
    /// Numbers of a row of the embedding and the lm_head, if the rows are divided among the workers.
    divided: Option<usize>,
    vocab_size: usize,
    /// Buffer for the logits of the next batch, since new memory for megabytes costs as much as their arrival.
    spare: Vec<f32>,
}

struct QueuedBatch {
    /// Bytes of the [`StageStep`](super::StageStep).
    step: Vec<u8>,
    tokens: Vec<u32>,
    /// Needed logits of each wanted row.
    needed: Vec<NeededLogits>,
    place: Place,
    /// Workers whose answer is missing at this place.
    pending_answers: Vec<usize>,
    /// Input of the stage that it is before, or answer of the last stage.
    output: Vec<f32>,
    /// Workers whose logits are missing.
    pending_logits: Vec<usize>,
    /// Logits `[needed.len(), vocab_size]`, if workers have parts of them.
    logits: Vec<f32>,
    /// Whether the logits that are not sent are cleared.
    is_cleared: bool,
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
        Self { workers, batches: VecDeque::new(), divided, vocab_size: spec.vocab_size, spare: Vec::new() }
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

    /// Sends a batch with these tokens to the first stage, or to the workers that have the rows of its tokens. `needed` has
    /// the needed logits of each wanted row.
    pub fn begin(&mut self, step: Vec<u8>, tokens: Vec<u32>, needed: Vec<NeededLogits>) -> Result<(), Failure> {
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
                if !needed.is_empty() && !own.is_empty() {
                    pending_logits.push(worker);
                }
            }
            // If no worker has a row of any token, the first stage returns the error.
            if !pending_answers.is_empty() {
                place = Place::LookUp;
            }
            output = vec![0.0; tokens.len() * width];
            if !needed.is_empty() {
                logits = self.spare_logits(needed.len() * self.vocab_size);
            }
        }
        let batch = QueuedBatch {
            step,
            tokens,
            needed,
            place,
            pending_answers,
            output,
            pending_logits,
            logits,
            is_cleared: false,
        };
        self.batches.push_back(batch);
        self.advance()
    }

    /// Waits for the oldest batch and overwrites `numbers` with the answer of the last stage, or with the logits of all
    /// workers.
    ///
    /// # Panics
    /// If no batch is in flight.
    pub fn finish(&mut self, cancel: &Cancel, numbers: &mut Vec<f32>) -> Result<(), Failure> {
        while let Some(awaited) = self.batches.front().expect("a batch is in flight").awaited() {
            let all = 0..self.workers.count();
            let answering: Vec<usize> = all.filter(|worker| self.is_answering(*worker)).collect();
            let worker = self.workers.wait(&answering, awaited, cancel)?;
            self.take_answer(worker, cancel)?;
            self.advance()?;
        }
        let QueuedBatch { output, logits, .. } = self.batches.pop_front().expect("a batch is in flight");
        let before = std::mem::replace(numbers, if logits.is_empty() { output } else { logits });
        if before.capacity() > self.spare.capacity() {
            self.spare = before;
        }
        Ok(())
    }

    /// Returns a buffer of `count` logits: the spare one, unless it is much larger.
    fn spare_logits(&mut self, count: usize) -> Vec<f32> {
        let mut logits = std::mem::take(&mut self.spare);
        if logits.capacity() / MAX_SPARE_RATIO > count {
            logits = Vec::new();
        }
        logits.resize(count, 0.0);
        logits
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
            // While the stage computes, since the next layers wait for the logits.
            if !std::mem::replace(&mut batch.is_cleared, true) {
                clear_unsent(&batch.needed, &mut batch.logits);
            }
        }
        Ok(())
    }

    /// Receives the next answer of a worker.
    fn take_answer(&mut self, worker: usize, cancel: &Cancel) -> Result<(), Failure> {
        let answer = self.workers.receive(worker, cancel)?;
        let Self { workers, batches, divided, .. } = self;
        let (own, stages) = (workers.tokens_of(worker), workers.stages());
        let sender = workers.worker(worker);
        let stage = sender.stage;
        let protocol = |what| Err((sender, LinkError::Protocol(what)));
        let batch = batches.iter_mut().find(|batch| match answer.kind {
            AnswerKind::Output => batch.awaits(Place::At(stage), worker),
            AnswerKind::LookedUp => batch.awaits(Place::LookUp, worker),
            AnswerKind::Logits => batch.pending_logits.contains(&worker),
        });
        let Some(batch) = batch else { return protocol("an answer without a request".to_owned()) };
        let width = divided.unwrap_or(0);
        match answer.kind {
            AnswerKind::LookedUp => {
                let places = batch.tokens.iter().zip(batch.output.chunks_exact_mut(width));
                let mut places: Vec<_> = places.filter(|(token, _)| is_among(&own, **token)).collect();
                if answer.words != places.len() * width {
                    let what = format!("{} numbers for {} tokens, not {width} each", answer.words, places.len());
                    return protocol(what);
                }
                workers.read(worker, cancel, |reader| {
                    let mut places = places.iter_mut();
                    Ok(places.try_for_each(|(_, row)| reader.read_exact(bytemuck::cast_slice_mut(row)))?)
                })?;
                batch.pending_answers.retain(|other| *other != worker);
                if batch.pending_answers.is_empty() {
                    batch.place = Place::Before(0);
                }
            }
            AnswerKind::Logits => {
                let QueuedBatch { needed, logits, .. } = batch;
                workers.read(worker, cancel, |reader| read_rows(reader, answer.words, needed, &own, logits))?;
                batch.pending_logits.retain(|other| *other != worker);
            }
            AnswerKind::Output => {
                let numbers = workers.read(worker, cancel, |reader| read_numbers(reader, answer.words))?;
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
                let (found, rows) = (batch.output.len(), batch.needed.len());
                if found != rows * width {
                    return protocol(format!("{found} numbers for {rows} rows, not {width} each"));
                }
                for worker in 0..workers.of_stage(stage).start {
                    if batch.pending_logits.contains(&worker) {
                        workers.send_logits(worker, &batch.output, &batch.needed)?;
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
