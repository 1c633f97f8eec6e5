//! Keeps only the tokens that the grammar allows. Runs first, so that no other stage counts forbidden tokens.

use super::{Candidates, Context, SampleError, Stage};

pub(super) struct StructuredOutputs;

impl Stage for StructuredOutputs {
    fn name(&self) -> &'static str {
        "structured_outputs"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.mask.is_some()
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        if let Some(mask) = context.mask {
            candidates.keep_allowed(mask);
        }
        Ok(())
    }
}
