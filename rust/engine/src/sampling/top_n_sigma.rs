//! Keeps logits within `top_n_sigma` standard deviations of the highest (<https://arxiv.org/abs/2411.07641>, as in
//! llama.cpp). It acts before the temperature, which would not change the kept set.

use super::{Candidates, Context, SampleError, Stage};

pub(super) struct TopNSigma;

impl Stage for TopNSigma {
    fn name(&self) -> &'static str {
        "top_n_sigma"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.top_n_sigma > 0.0
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        let (mut count, mut sum) = (0.0, 0.0);
        for candidate in candidates.remaining() {
            count += 1.0;
            sum += f64::from(candidate.logit);
        }
        let mean = sum / count;
        let squares: f64 = candidates.remaining().map(|candidate| (f64::from(candidate.logit) - mean).powi(2)).sum();
        let reach = context.params.top_n_sigma * (squares / count).sqrt();
        let highest = f64::from(candidates.highest_logit());
        candidates.keep_down_to(|logit| highest - f64::from(logit) <= reach);
        Ok(())
    }
}
