//! A panic inside the engine: every request gets an error, and later calls are refused.

use std::any::Any;

use ferrule_model::LanguageModel;

use super::{Engine, new_scheduler};
use crate::beams::BeamSearches;
use crate::sequence::Sequence;
use crate::{EngineError, FinishReason, StepOutput};

impl<M: LanguageModel> Engine<M> {
    /// Returns [`EngineError::Dead`] if an earlier panic ended the engine.
    pub(crate) fn check_alive(&self) -> Result<(), EngineError> {
        match &self.dead {
            Some(reason) => Err(EngineError::Dead { reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Ends the engine: every request finishes with an error. The state of its parts is unknown after a panic, so all
    /// of it is replaced.
    pub(crate) fn mark_dead(&mut self, reason: String) {
        let finish = FinishReason::Dead { reason: reason.clone() };
        let output = |sequence: &Sequence| StepOutput { finish: Some(finish.clone()), ..StepOutput::empty(sequence) };
        self.final_outputs = self.scheduler.sequences().filter(|one| one.is_primary()).map(output).collect();
        self.searches = BeamSearches::default();
        self.metrics.requests_finished.error += self.final_outputs.len() as u64;
        let scheduler = new_scheduler(&self.model, &self.config);
        let old = std::mem::replace(&mut self.scheduler, scheduler);
        self.speculator.release(|_| true);
        // Closing the disk cache takes time, and callers should learn of the failure first.
        self.scheduler.kv_cache.take_disk_from(old.kv_cache);
        self.dead = Some(reason);
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
