//! Drops tokens below a constant probability, except the most likely one (<https://arxiv.org/abs/2210.15191>; Hugging
//! Face's `epsilon_cutoff`).

use ferrule_kernels::logits::weight;

use super::{Candidates, Context, SampleError, Stage};

pub(super) struct EpsilonCutoff;

impl Stage for EpsilonCutoff {
    fn name(&self) -> &'static str {
        "epsilon_cutoff"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.epsilon_cutoff > 0.0
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        drop_below(candidates, context.params.epsilon_cutoff);
        Ok(())
    }
}

/// Drops tokens with a probability below `cutoff`, except the most likely one.
pub(super) fn drop_below(candidates: &mut Candidates<'_>, cutoff: f64) {
    let weighted = candidates.weigh();
    let (total, highest) = (weighted.total(), weighted.highest);
    candidates.keep_down_to(|logit| logit == highest || weight(logit, highest) / total >= cutoff);
}
