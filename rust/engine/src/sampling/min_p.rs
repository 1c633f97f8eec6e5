//! Drops tokens less than `min_p` times as likely as the most likely one (<https://arxiv.org/abs/2407.01082>).

use ferrule_kernels::logits::weight;

use super::{Candidates, Context, SampleError, Stage};

pub(super) struct MinP;

impl Stage for MinP {
    fn name(&self) -> &'static str {
        "min_p"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.min_p > 0.0
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        let highest = candidates.highest_logit();
        candidates.keep_down_to(|logit| weight(logit, highest) >= context.params.min_p);
        Ok(())
    }
}
