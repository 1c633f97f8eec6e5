//! The caller's own functions on logits (vLLM's `logits_processors`).

use std::fmt;
use std::sync::Arc;

use super::{Candidates, Context, SampleError, Stage};

/// A function of the caller that changes logits.
pub trait LogitsProcessor: Send + Sync + fmt::Debug {
    /// Changes the `logits [vocab]` of the token after prompt and `output`. Tokens dropped by earlier stages are
    /// negative infinity; set a logit to negative infinity to drop its token.
    ///
    /// # Errors
    /// Returns an error message, with which the request ends. Other requests are not affected.
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), String>;
}

/// A shared processor, compared by identity.
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
        candidates.check_valid().map_err(|token| SampleError::Processor {
            position,
            message: format!("the logits processors gave token {token} a logit that is NaN or infinite"),
        })?;
        // Processors can restore dropped tokens, but the output must still follow the grammar.
        if let Some(mask) = context.mask {
            candidates.keep_allowed(mask);
        }
        Ok(())
    }
}
