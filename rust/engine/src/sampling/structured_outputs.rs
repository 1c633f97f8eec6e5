//! Only the tokens that the request's grammar allows: before anything else, so that no stage counts on another one.

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
