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
use crate::{EngineError, StepOutput};

impl<M: LanguageModel> Engine<M> {
    /// One forward pass over what the scheduler picks, and a token for each sequence that is computed to its end.
    /// Gives one output for each request that got a token or ended.
    ///
    /// A defect of ferrule in here ends the engine: this call then gives every request its error, all later ones are
    /// refused.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`]: tokens are as they were before, and the next step does the same work again.
    /// [`EngineError::Dead`]: an earlier call ended the engine.
    pub fn step(&mut self, cancel: &Cancel) -> Result<Vec<StepOutput>, EngineError> {
        if self.final_outputs.is_empty() {
            self.check_alive()?;
            match catch_unwind(AssertUnwindSafe(|| self.schedule_forward_sample(cancel))) {
                Ok(Ok(outputs)) => return Ok(outputs),
                Ok(Err(ForwardError::Cancelled)) => return Err(EngineError::Cancelled),
                Ok(Err(ForwardError::Panicked(reason))) => self.mark_dead(reason),
                Err(panic) => self.mark_dead(panic_message(panic.as_ref())),
            }
        }
        Ok(std::mem::take(&mut self.final_outputs))
    }

    fn schedule_forward_sample(&mut self, cancel: &Cancel) -> Result<Vec<StepOutput>, ForwardError> {
        let begin = Instant::now();
        let watched = self.scheduler.running.iter().any(|one| one.params.streams && one.pending() == 1);
        let prompt_tokens = self.prefill_budget.tokens(watched);
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
        self.forward_beside_masks(&plan, cancel)?;
        let outputs = self.postprocess(&plan);
        let time = begin.elapsed();
        let decoded = plan.chunks.iter().filter(|chunk| chunk.count == 1).count();
        let prompts = plan.chunks.iter().map(|chunk| chunk.count).filter(|&count| count > 1).sum();
        self.prefill_budget.record(time.as_secs_f64(), decoded, prompts);
        if prompts == 0 {
            self.speculator.record(plan.rows(), begin_forward.elapsed().as_secs_f64());
        }
        self.metrics.steps += 1;
        self.metrics.step_seconds.record(time);
        self.publish();
        Ok(outputs)
    }

    /// Computes what was planned; logits only where a token is sampled or told of.
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

    /// As [`Engine::forward`]; masks that take long are made meanwhile, the others when their token is sampled.
    fn forward_beside_masks(&mut self, plan: &Schedule, cancel: &Cancel) -> Result<(), ForwardError> {
        let mut constraints = Vec::new();
        for &Scheduled { index, count, .. } in &plan.chunks {
            let sequence = &mut self.scheduler.running[index];
            if count == sequence.pending() {
                let slow = sequence.constraint.take_if(|constraint| constraint.is_slow());
                constraints.extend(slow.map(|constraint| (index, constraint)));
            }
        }
        let forward =
            structured::beside(constraints.iter_mut().map(|(_, constraint)| constraint), || self.forward(plan, cancel));
        for (index, constraint) in constraints {
            self.scheduler.running[index].constraint = Some(constraint);
        }
        forward
    }
}

/// The logits that are wanted of the part of a sequence that is computed: of a decode step those of its drafts too.
pub(super) fn wanted_logits(sequence: &Sequence, &Scheduled { count, drafts, .. }: &Scheduled) -> LogitRows {
    if drafts > 0 || sequence.chunk_has_prompt_logprobs(count) {
        LogitRows::All
    } else if count == sequence.pending() {
        LogitRows::Last
    } else {
        LogitRows::None
    }
}
