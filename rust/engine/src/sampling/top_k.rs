//! Keeps the `top_k` most likely tokens and all that tie with the last of them, like Hugging Face and vLLM.

use super::{Candidates, Context, SampleError, Stage};

pub(super) struct TopK;

impl Stage for TopK {
    fn name(&self) -> &'static str {
        "top_k"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.top_k > 0
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        candidates.keep_most_likely(context.params.top_k);
        Ok(())
    }
}
