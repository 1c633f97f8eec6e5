//! One engine step: propose drafts, schedule, copy pages, run one forward pass.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use ferrule_kernels::Cancel;
use ferrule_model::{Batch, ForwardError, LanguageModel, LogitRows, SequenceChunk};

use super::Engine;
use super::failure::panic_message;
use crate::draft::DraftLimits;
use crate::scheduler::{Schedule, Scheduled};
use crate::sequence::Sequence;
use crate::structured;
use crate::{EngineError, EngineFailure, StepOutput};

impl<M: LanguageModel> Engine<M> {
    /// Runs one engine step: schedules, runs one forward pass, samples a token for each sequence that is fully
    /// computed. Returns one output for each request that got tokens, finished, or reports the progress of its prompt. A
    /// model that computes several batches at the same time has some in flight after the step.
    ///
    /// A panic inside the step ends the engine: this call returns an error output for every request, and later calls
    /// are refused.
    ///
    /// # Errors
    /// Returns [`EngineError::Cancelled`] if `cancel` was set (no token is lost; the next step repeats the work, or waits
    /// for the batches in flight), and [`EngineError::Dead`] if an earlier call ended the engine.
    pub fn step(&mut self, cancel: &Cancel) -> Result<Vec<StepOutput>, EngineError> {
        if self.ready_outputs.is_empty() && self.final_outputs.is_empty() {
            self.check_alive()?;
            let outcome = catch_unwind(AssertUnwindSafe(|| self.run_step(cancel)))
                .unwrap_or_else(|panic| Err(ForwardError::Panicked(panic_message(panic.as_ref()))));
            match outcome.map_err(EngineFailure::of) {
                Ok(()) => {}
                Err(None) => return Err(EngineError::Cancelled),
                Err(Some(failure)) => self.mark_dead(failure),
            }
        }
        let outputs = if self.ready_outputs.is_empty() { &mut self.final_outputs } else { &mut self.ready_outputs };
        Ok(std::mem::take(outputs))
    }

    /// Runs one step without the panic boundary.
    fn run_step(&mut self, cancel: &Cancel) -> Result<(), ForwardError> {
        if let Some(capacity) = self.model.batch_queue().map(|queue| queue.capacity()) {
            return self.run_step_in_flight(capacity, cancel);
        }
        let begin = Instant::now();
        let plan = self.plan(cancel)?;
        if plan.chunks.is_empty() {
            return Ok(());
        }
        let begin_forward = Instant::now();
        self.run_while_masking(&plan.chunks, |engine| {
            let Self { model, scheduler, logits, .. } = engine;
            with_batch(&scheduler.running, &plan.chunks, |batch| model.forward(batch, cancel, logits))
        })?;
        self.ready_outputs = self.postprocess(&plan.chunks);
        let chunks = plan.chunks.iter().map(|chunk| (chunk.count, chunk.rows()));
        self.record_step(begin.elapsed(), begin_forward.elapsed(), chunks);
        Ok(())
    }

    /// Proposes drafts, schedules a step, and moves pages for it.
    pub(super) fn plan(&mut self, cancel: &Cancel) -> Result<Schedule, ForwardError> {
        let streamed = self.scheduler.running.iter().any(|one| one.params.streams && one.pending() == 1);
        let prompt_tokens = self.prefill_budget.tokens(streamed, self.scheduler.cycle());
        let limits = DraftLimits { max_total_tokens: self.limits.tokens(), prompt_tokens };
        self.speculator.propose(&mut self.scheduler.running, limits, &mut self.sampler, cancel)?;
        let plan = self.scheduler.schedule(prompt_tokens);
        for page_move in &plan.moves {
            page_move.apply(&mut self.model);
        }
        Ok(plan)
    }

    /// Records the durations of a step and of its forward pass. Each chunk has pending tokens and rows. If several
    /// batches are computed at the same time, both are the time since the batch before was finished.
    pub(super) fn record_step(
        &mut self,
        step: Duration,
        forward: Duration,
        chunks: impl Iterator<Item = (usize, usize)>,
    ) {
        let (mut decode_rows, mut prefill_tokens, mut all_rows) = (0, 0, 0);
        for (count, rows) in chunks {
            if count == 1 {
                decode_rows += 1
            } else {
                prefill_tokens += count
            }
            all_rows += rows;
        }
        self.prefill_budget.record(step.as_secs_f64(), decode_rows, prefill_tokens);
        if prefill_tokens == 0 {
            self.speculator.record(all_rows, forward.as_secs_f64());
        }
        self.metrics.steps += 1;
        self.metrics.step_seconds.record(step);
        self.metrics.step_tokens.record(all_rows);
        self.publish();
    }

    /// Runs `run` while another thread computes the slow grammar masks of the chunks; fast masks are computed at sampling
    /// time.
    pub(super) fn run_while_masking(
        &mut self,
        chunks: &[Scheduled],
        run: impl FnOnce(&mut Self) -> Result<(), ForwardError>,
    ) -> Result<(), ForwardError> {
        let mut constraints = Vec::new();
        for &Scheduled { index, count, .. } in chunks {
            let sequence = &mut self.scheduler.running[index];
            if count == sequence.pending() {
                let slow = sequence.constraint.take_if(|constraint| constraint.is_slow());
                constraints.extend(slow.map(|constraint| (index, constraint)));
            }
        }
        let done =
            structured::prepare_masks_during(constraints.iter_mut().map(|(_, constraint)| constraint), || run(self));
        for (index, constraint) in constraints {
            self.scheduler.running[index].constraint = Some(constraint);
        }
        done
    }
}

/// Calls `run` with the batch of the scheduled chunks. It has logits only for rows that are sampled or need prompt
/// log-probabilities.
pub(super) fn with_batch<T>(running: &[Sequence], chunks: &[Scheduled], run: impl FnOnce(Batch<'_>) -> T) -> T {
    let tokens = |&Scheduled { index, count, drafts }| {
        let sequence = &running[index];
        let pending = &sequence.tokens[sequence.begun()..][..count];
        if drafts == 0 { Cow::from(pending) } else { Cow::from([pending, sequence.drafts.tokens()].concat()) }
    };
    let tokens: Vec<Cow<'_, [u32]>> = chunks.iter().map(tokens).collect();
    let sequences = chunks.iter().zip(&tokens).map(|(scheduled, tokens)| {
        let sequence = &running[scheduled.index];
        SequenceChunk {
            tokens,
            first_position: sequence.begun(),
            prompt_len: sequence.prompt_len,
            pages: sequence.tables.tables(),
            token_types: &[],
            features: &sequence.features,
            logits: wanted_logits(sequence, sequence.begun(), scheduled),
            adapter: sequence.adapter.as_deref(),
        }
    });
    let sequences: Vec<SequenceChunk<'_>> = sequences.collect();
    run(Batch { sequences: &sequences })
}

/// Returns which rows of the chunk that begins at token `first` need logits: all of a decode row with drafts, since each
/// draft is verified.
pub(super) fn wanted_logits(
    sequence: &Sequence,
    first: usize,
    &Scheduled { count, drafts, .. }: &Scheduled,
) -> LogitRows {
    if drafts > 0 || sequence.chunk_has_prompt_logprobs(count) {
        LogitRows::All
    } else if first + count == sequence.tokens.len() {
        if sequence.needs_only_largest() { LogitRows::LastLargest } else { LogitRows::Last }
    } else {
        LogitRows::None
    }
}
