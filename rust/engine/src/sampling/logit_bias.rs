//! Adds the caller's bias to the logits of given tokens (OpenAI's `logit_bias`).

use super::{Candidates, Context, SampleError, Stage};

pub(super) struct LogitBias;

impl Stage for LogitBias {
    fn name(&self) -> &'static str {
        "logit_bias"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        !context.params.logit_bias.is_empty()
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        for &(id, bias) in &context.params.logit_bias {
            candidates.change(id, |logit| logit + bias as f32);
        }
        Ok(())
    }
}
