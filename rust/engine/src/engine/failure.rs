//! A panic inside the engine: every request gets an error, and later calls are refused.

use std::any::Any;

use ferrule_model::LanguageModel;

use super::{Engine, new_scheduler};
use crate::beams::BeamSearches;
use crate::sequence::Sequence;
use crate::{EngineError, FinishReason, StepOutput};

impl<M: LanguageModel> Engine<M> {
    pub(crate) fn check_alive(&self) -> Result<(), EngineError> {
        match &self.dead {
            Some(reason) => Err(EngineError::Dead { reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Ends the engine. What its parts hold is not to be trusted any more, so that nothing of it is used again.
    pub(crate) fn mark_dead(&mut self, reason: String) {
        let finish = FinishReason::Dead { reason: reason.clone() };
        let output = |sequence: &Sequence| StepOutput { finish: Some(finish.clone()), ..StepOutput::empty(sequence) };
        self.final_outputs = self.scheduler.sequences().filter(|one| one.is_primary()).map(output).collect();
        self.searches = BeamSearches::default();
        self.metrics.requests_finished.error += self.final_outputs.len() as u64;
        let scheduler = new_scheduler(&self.model, &self.config);
        let old = std::mem::replace(&mut self.scheduler, scheduler);
        self.speculator.forget(|_| true);
        // A disk takes its time to close, and those who wait for this engine should hear of it first.
        self.scheduler.pages.take_disk_from(old.pages);
        self.dead = Some(reason);
        self.publish();
    }
}

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(message), _) => (*message).to_owned(),
        (_, Some(message)) => message.clone(),
        _ => "a panic without a message".to_owned(),
    }
}
