//! A panic inside the engine, or a lost pipeline stage: every request gets an error, and later calls are refused.

use std::any::Any;

use ferrule_model::{ForwardError, LanguageModel};

use super::in_flight::BatchesInFlight;
use super::{Engine, new_scheduler};
use crate::beams::BeamSearches;
use crate::sequence::Sequence;
use crate::{EngineError, FinishReason, StepOutput};

/// Failure that ended an engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct EngineFailure {
    /// Message of the panic, or the reason that a pipeline stage is lost.
    pub reason: String,
    /// Index of the pipeline stage that is lost; `None` after a panic.
    pub lost_stage: Option<usize>,
}

impl EngineFailure {
    /// Returns the failure after which an engine cannot continue; `None` for a forward pass that can be repeated.
    pub(super) fn of(error: ForwardError) -> Option<Self> {
        match error {
            ForwardError::Cancelled => None,
            ForwardError::Panicked(reason) => Some(Self { reason, lost_stage: None }),
            ForwardError::StageLost { stage, reason } => Some(Self { reason, lost_stage: Some(stage) }),
        }
    }
}

impl<M: LanguageModel> Engine<M> {
    /// Returns [`EngineError::Dead`] if an earlier failure ended the engine.
    pub(crate) fn check_alive(&self) -> Result<(), EngineError> {
        match &self.dead {
            Some(failure) => Err(EngineError::Dead(failure.clone())),
            None => Ok(()),
        }
    }

    /// Ends the engine: every request finishes with an error. The state of its parts is unknown after a panic, so all
    /// of it is replaced.
    pub(crate) fn mark_dead(&mut self, failure: EngineFailure) {
        let finish = FinishReason::Dead(failure.clone());
        let output = |sequence: &Sequence| StepOutput { finish: Some(finish.clone()), ..StepOutput::empty(sequence) };
        self.final_outputs = self.scheduler.sequences().filter(|one| one.is_primary()).map(output).collect();
        self.searches = BeamSearches::default();
        self.in_flight = BatchesInFlight::default();
        self.metrics.requests_finished.error += self.final_outputs.len() as u64;
        let scheduler = new_scheduler(&mut self.model, &self.config);
        let old = std::mem::replace(&mut self.scheduler, scheduler);
        self.speculator.release(|_| true);
        // Closing the disk cache takes time, and callers should learn of the failure first.
        self.scheduler.kv_cache.take_disk_from(old.kv_cache);
        self.dead = Some(failure);
        self.publish();
    }
}

/// Returns the message of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(message), _) => (*message).to_owned(),
        (_, Some(message)) => message.clone(),
        _ => "a panic without a message".to_owned(),
    }
}
