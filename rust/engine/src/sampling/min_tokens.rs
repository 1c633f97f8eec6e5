//! Forbids stop tokens until the output has its minimum length.

use super::{Candidates, Context, SampleError, Stage};

pub(super) struct MinTokens;

impl Stage for MinTokens {
    fn name(&self) -> &'static str {
        "min_tokens"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.history.output_len() < context.params.min_tokens && !context.params.stop_token_ids.is_empty()
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        for &id in &context.params.stop_token_ids {
            candidates.change(id, |_| f32::NEG_INFINITY);
        }
        Ok(())
    }
}
