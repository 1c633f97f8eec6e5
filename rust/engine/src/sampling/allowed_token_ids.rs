//! Keeps only the tokens that the caller allows (vLLM's `allowed_token_ids`).

use super::{Candidates, Context, SampleError, Stage};

pub(super) struct AllowedTokenIds;

impl Stage for AllowedTokenIds {
    fn name(&self) -> &'static str {
        "allowed_token_ids"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.allowed_token_ids.is_some()
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        if let Some(allowed) = &context.params.allowed_token_ids {
            candidates.keep_only(allowed);
        }
        Ok(())
    }
}
