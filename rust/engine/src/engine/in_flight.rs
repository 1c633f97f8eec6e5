//! Steps of a model that computes several batches at the same time, such as the stages of a pipeline.
//!
//! A step waits for the oldest batch in flight, samples its tokens, and begins a batch with the sequences that are not in
//! flight, and with further chunks of prompts that are. So each batch is on its way again as soon as its tokens are known,
//! while the model computes the others. Batches are finished in the order in which they began: pages of a chunk are cached,
//! and its tokens counted as computed, when its own batch is finished. A request that ends while a batch has its tokens is
//! removed at once, and its logits are dropped when they arrive.

use std::collections::VecDeque;
use std::time::Instant;

use ferrule_kernels::Cancel;
use ferrule_model::{BatchQueue, ForwardError, LanguageModel};

use super::Engine;
use super::step::{wanted_logits, with_batch};
use crate::StepOutput;
use crate::scheduler::Scheduled;
use crate::sequence::{Rank, Sequence};

/// Batches in flight, oldest first.
#[derive(Debug)]
pub(super) struct BatchesInFlight {
    batches: VecDeque<InFlight>,
    /// When the last of them was finished, or when the engine began to work again after that.
    since: Instant,
}

impl Default for BatchesInFlight {
    fn default() -> Self {
        Self { batches: VecDeque::new(), since: Instant::now() }
    }
}

impl BatchesInFlight {
    /// Excludes the time in which the engine did nothing from the durations of the batches.
    fn resume(&mut self) {
        let idle = self.since.elapsed();
        self.since += idle;
        for batch in &mut self.batches {
            batch.begin += idle;
        }
    }
}

/// A batch in flight.
#[derive(Debug)]
struct InFlight {
    chunks: Vec<ChunkInFlight>,
    begin: Instant,
}

/// The tokens of one sequence in a batch in flight.
#[derive(Debug)]
struct ChunkInFlight {
    /// Rank of the sequence, whose index among the running ones may change.
    rank: Rank,
    /// Number of pending tokens.
    count: usize,
    /// Number of draft tokens after them.
    drafts: usize,
    /// Number of rows of logits.
    logits: usize,
}

impl<M: LanguageModel> Engine<M> {
    /// Runs one step of a model that keeps `capacity` batches in flight.
    pub(super) fn run_step_in_flight(&mut self, capacity: usize, cancel: &Cancel) -> Result<(), ForwardError> {
        if cancel.poll() {
            return Err(ForwardError::Cancelled);
        }
        self.in_flight.resume();
        self.begin_batches(capacity, cancel)?;
        self.ready_outputs = self.finish_oldest(cancel)?;
        // The caller reads the outputs while the model computes.
        let begun = self.begin_batches(capacity, cancel);
        self.in_flight.since = Instant::now();
        begun
    }

    /// Finishes all batches in flight. The next step returns their outputs.
    pub(super) fn finish_all(&mut self, cancel: &Cancel) -> Result<(), ForwardError> {
        self.in_flight.resume();
        while !self.in_flight.batches.is_empty() {
            let outputs = self.finish_oldest(cancel)?;
            self.ready_outputs.extend(outputs);
        }
        Ok(())
    }

    /// Begins batches until `capacity` are in flight or no sequence is left.
    fn begin_batches(&mut self, capacity: usize, cancel: &Cancel) -> Result<(), ForwardError> {
        while self.in_flight.batches.len() < capacity {
            let begin = Instant::now();
            let plan = self.plan(cancel)?;
            if plan.chunks.is_empty() {
                break;
            }
            let Self { model, scheduler, .. } = self;
            with_batch(&scheduler.running, &plan.chunks, |batch| queue(model).begin(batch))?;
            let chunks = plan.chunks.iter().map(|chunk| {
                let sequence = &mut scheduler.running[chunk.index];
                let &Scheduled { count, drafts, .. } = chunk;
                let logits = wanted_logits(sequence, sequence.begun(), chunk).of(chunk.rows()).len();
                sequence.in_flight += count;
                ChunkInFlight { rank: sequence.rank(), count, drafts, logits }
            });
            self.in_flight.batches.push_back(InFlight { chunks: chunks.collect(), begin });
        }
        Ok(())
    }

    /// Waits for the oldest batch in flight, if there is one, and returns its outputs.
    fn finish_oldest(&mut self, cancel: &Cancel) -> Result<Vec<StepOutput>, ForwardError> {
        let Some(batch) = self.in_flight.batches.pop_front() else { return Ok(Vec::new()) };
        let running = &self.scheduler.running;
        let scheduled = |&ChunkInFlight { rank, count, drafts, .. }: &ChunkInFlight| {
            let index = running.binary_search_by_key(&rank, Sequence::rank).ok()?;
            Some(Scheduled { index, count, drafts })
        };
        let scheduled: Vec<Option<Scheduled>> = batch.chunks.iter().map(scheduled).collect();
        let chunks: Vec<Scheduled> = scheduled.iter().copied().flatten().collect();
        let finished = self.run_while_masking(&chunks, |engine| {
            let Self { model, logits, .. } = engine;
            queue(model).finish(cancel, logits)
        });
        if let Err(error) = finished {
            self.in_flight.batches.push_front(batch);
            return Err(error);
        }
        self.drop_logits(batch.chunks.iter().zip(&scheduled).map(|(chunk, kept)| (chunk.logits, kept.is_some())));
        for chunk in &chunks {
            self.scheduler.running[chunk.index].in_flight -= chunk.count;
        }
        let outputs = self.postprocess(&chunks);
        let rows = batch.chunks.iter().map(|chunk| (chunk.count, chunk.count + chunk.drafts));
        // Batches are computed at the same time: each counts from the end of the one before it.
        let step = batch.begin.max(self.in_flight.since).elapsed();
        self.in_flight.since = Instant::now();
        self.record_step(step, step, rows);
        Ok(outputs)
    }

    /// Removes the logits of chunks that are not kept. Each chunk has a number of rows.
    fn drop_logits(&mut self, chunks: impl Iterator<Item = (usize, bool)>) {
        let vocab_size = self.model.vocab_size();
        let mut begin = 0;
        for (rows, is_kept) in chunks {
            let end = begin + rows * vocab_size;
            if is_kept {
                begin = end;
            } else {
                self.logits.drain(begin..end);
            }
        }
    }
}

/// Returns the queue of a model that has one.
fn queue<M: LanguageModel>(model: &mut M) -> &mut dyn BatchQueue {
    model.batch_queue().expect("the model computes several batches at the same time")
}
