//! Keeps the most likely tokens that hold at most the given share of the entropy of the [`MAX_TOKENS`] most likely tokens
//! (<https://arxiv.org/abs/2509.02510>; Hugging Face's `top_h`).

use ferrule_kernels::logits::weight;

use super::{Candidates, Context, SampleError, Stage};

/// Maximum number of tokens considered.
const MAX_TOKENS: usize = 100;

pub(super) struct TopH;

impl Stage for TopH {
    fn name(&self) -> &'static str {
        "top_h"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.top_h > 0.0
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        candidates.apply_pending_temperature();
        let first = candidates.first(MAX_TOKENS);
        let highest = first[0].logit;
        let weights: Vec<f64> = first.iter().map(|candidate| weight(candidate.logit, highest)).collect();
        let total: f64 = weights.iter().sum();
        let part = |weight: &f64| {
            let probability = weight / total;
            if probability > 0.0 { -probability * probability.ln() } else { 0.0 }
        };
        let most = context.params.top_h * weights.iter().map(part).sum::<f64>();
        let mut sum = 0.0;
        let within = |weight: &&f64| {
            sum += part(weight);
            sum <= most
        };
        let kept = weights.iter().take_while(within).count().max(1);
        candidates.keep_through(first[kept - 1]);
        Ok(())
    }
}
