//! Keeps the `top_k` most likely tokens, and all that are as likely as the last of them: so do Hugging Face and vLLM.

use super::candidates::by_likelihood;
use super::{Candidates, Context, Stage};

pub(super) struct TopK;

impl Stage for TopK {
    fn name(&self) -> &'static str {
        "top_k"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.top_k > 0
    }

    fn apply(&self, candidates: &mut Candidates, context: Context<'_>) {
        let k = context.params.top_k;
        if k >= candidates.entries().len() {
            return;
        }
        let (_, last, _) = candidates.shuffled().select_nth_unstable_by(k - 1, by_likelihood);
        let lowest_kept = last.logit;
        candidates.retain(|entry| entry.logit >= lowest_kept);
    }
}
