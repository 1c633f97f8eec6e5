//! Drops tokens below min(eta, sqrt(eta) * exp(-entropy)), except the most likely one
//! (<https://arxiv.org/abs/2210.15191>; Hugging Face's `eta_cutoff`).

use super::epsilon_cutoff::drop_below;
use super::{Candidates, Context, SampleError, Stage};

pub(super) struct EtaCutoff;

impl Stage for EtaCutoff {
    fn name(&self) -> &'static str {
        "eta_cutoff"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.eta_cutoff > 0.0
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        let eta = context.params.eta_cutoff;
        let cutoff = eta.min(eta.sqrt() * (-candidates.weigh().entropy()).exp());
        drop_below(candidates, cutoff);
        Ok(())
    }
}
