//! One engine step: propose drafts, schedule, copy pages, run one forward pass.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

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
    /// computed. Returns one output for each request that got tokens, finished, or reports the progress of its prompt.
    ///
    /// A panic inside the step ends the engine: this call returns an error output for every request, and later calls
    /// are refused.
    ///
    /// # Errors
    /// Returns [`EngineError::Cancelled`] if `cancel` was set (no token is lost; the next step repeats the work), and
    /// [`EngineError::Dead`] if an earlier call ended the engine.
    pub fn step(&mut self, cancel: &Cancel) -> Result<Vec<StepOutput>, EngineError> {
        if self.final_outputs.is_empty() {
            self.check_alive()?;
            let outcome = catch_unwind(AssertUnwindSafe(|| self.run_step(cancel)))
                .unwrap_or_else(|panic| Err(ForwardError::Panicked(panic_message(panic.as_ref()))));
            match outcome.map_err(EngineFailure::of) {
                Ok(outputs) => return Ok(outputs),
                Err(None) => return Err(EngineError::Cancelled),
                Err(Some(failure)) => self.mark_dead(failure),
            }
        }
        Ok(std::mem::take(&mut self.final_outputs))
    }

    /// Runs one step without the panic boundary.
    fn run_step(&mut self, cancel: &Cancel) -> Result<Vec<StepOutput>, ForwardError> {
        let begin = Instant::now();
        let streamed = self.scheduler.running.iter().any(|one| one.params.streams && one.pending() == 1);
        let prompt_tokens = self.prefill_budget.tokens(streamed);
        let limits = DraftLimits { max_total_tokens: self.limits.tokens(), prompt_tokens };
        self.speculator.propose(&mut self.scheduler.running, limits, &mut self.sampler, cancel)?;
        let begin_forward = Instant::now();
        let plan = self.scheduler.schedule(prompt_tokens);
        for page_move in &plan.moves {
            page_move.apply(&mut self.model);
        }
        if plan.chunks.is_empty() {
            return Ok(Vec::new());
        }
        self.forward_while_masking(&plan, cancel)?;
        let outputs = self.postprocess(&plan);
        let time = begin.elapsed();
        let decode_rows = plan.chunks.iter().filter(|chunk| chunk.count == 1).count();
        let prefill_tokens = plan.chunks.iter().map(|chunk| chunk.count).filter(|&count| count > 1).sum();
        self.prefill_budget.record(time.as_secs_f64(), decode_rows, prefill_tokens);
        if prefill_tokens == 0 {
            self.speculator.record(plan.rows(), begin_forward.elapsed().as_secs_f64());
        }
        self.metrics.steps += 1;
        self.metrics.step_seconds.record(time);
        self.metrics.step_tokens.record(plan.rows());
        self.publish();
        Ok(outputs)
    }

    /// Runs the scheduled chunks through the model. Logits are computed only for rows that are sampled or need prompt
    /// log-probabilities.
    fn forward(&mut self, plan: &Schedule, cancel: &Cancel) -> Result<(), ForwardError> {
        let running: &[Sequence] = &self.scheduler.running;
        let tokens = |&Scheduled { index, count, drafts }| {
            let sequence = &running[index];
            let pending = &sequence.tokens[sequence.computed..][..count];
            if drafts == 0 { Cow::from(pending) } else { Cow::from([pending, sequence.drafts.tokens()].concat()) }
        };
        let tokens: Vec<Cow<'_, [u32]>> = plan.chunks.iter().map(tokens).collect();
        let chunks = plan.chunks.iter().zip(&tokens).map(|(scheduled, tokens)| {
            let sequence = &running[scheduled.index];
            SequenceChunk {
                tokens,
                first_position: sequence.computed,
                prompt_len: sequence.prompt_len,
                pages: sequence.tables.tables(),
                token_types: &[],
                logits: wanted_logits(sequence, scheduled),
                adapter: sequence.adapter.as_deref(),
            }
        });
        let sequences: Vec<SequenceChunk<'_>> = chunks.collect();
        self.model.forward(Batch { sequences: &sequences }, cancel, &mut self.logits)
    }

    /// Runs [`Engine::forward`] while other threads compute the slow grammar masks; fast masks are computed at sampling
    /// time.
    fn forward_while_masking(&mut self, plan: &Schedule, cancel: &Cancel) -> Result<(), ForwardError> {
        let mut constraints = Vec::new();
        for &Scheduled { index, count, .. } in &plan.chunks {
            let sequence = &mut self.scheduler.running[index];
            if count == sequence.pending() {
                let slow = sequence.constraint.take_if(|constraint| constraint.is_slow());
                constraints.extend(slow.map(|constraint| (index, constraint)));
            }
        }
        let forward =
            structured::prepare_masks_during(constraints.iter_mut().map(|(_, constraint)| constraint), || {
                self.forward(plan, cancel)
            });
        for (index, constraint) in constraints {
            self.scheduler.running[index].constraint = Some(constraint);
        }
        forward
    }
}

/// Returns which rows of a chunk need logits: all of a decode row with drafts, since each draft is verified.
pub(super) fn wanted_logits(sequence: &Sequence, &Scheduled { count, drafts, .. }: &Scheduled) -> LogitRows {
    if drafts > 0 || sequence.chunk_has_prompt_logprobs(count) {
        LogitRows::All
    } else if count == sequence.pending() {
        LogitRows::Last
    } else {
        LogitRows::None
    }
}
