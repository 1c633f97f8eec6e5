//! What the caller does to logits itself (vLLM's `logits_processors`).

use std::fmt;
use std::sync::Arc;

use super::{Candidates, Context, SampleError, Stage};

/// Changes logits in a way of the caller's own.
pub trait LogitsProcessor: Send + Sync + fmt::Debug {
    /// Changes `logits [vocab]` of the token after prompt and `output`, where what stages have dropped is negative
    /// infinity; so is what it drops.
    ///
    /// # Errors
    /// What went wrong: the request ends with it, its neighbours go on.
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), String>;
}

/// A processor as a parameter, equal to itself alone.
#[derive(Debug, Clone)]
pub struct SharedProcessor(pub Arc<dyn LogitsProcessor>);

impl PartialEq for SharedProcessor {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

pub(super) struct LogitsProcessors;

impl Stage for LogitsProcessors {
    fn name(&self) -> &'static str {
        "logits_processors"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.logits_processor.is_some()
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        let Some(SharedProcessor(processor)) = &context.params.logits_processor else { return Ok(()) };
        let position = context.position;
        candidates
            .rewrite(|logits| processor.process(context.history.output(), logits))
            .map_err(|message| SampleError::Processor { position, message })?;
        candidates.check_sound().map_err(|token| SampleError::Processor {
            position,
            message: format!("the logits processors gave token {token} a logit that is NaN or infinite"),
        })?;
        // They can bring back what stages have dropped, but the grammar has to follow what is sampled.
        if let Some(mask) = context.mask {
            candidates.keep_allowed(mask);
        }
        Ok(())
    }
}
