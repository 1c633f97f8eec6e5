//! Keeps the smallest set of tokens with total probability `typical_p` whose surprisal is nearest to the entropy
//! (locally typical sampling, <https://arxiv.org/abs/2202.00666>; Hugging Face's `typical_p`), and all that tie with
//! the last one kept.

use super::nucleus::last_to_reach;
use super::{Candidates, Context, SampleError, Stage};

pub(super) struct TypicalP;

impl Stage for TypicalP {
    fn name(&self) -> &'static str {
        "typical_p"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.typical_p < 1.0
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        let weighted = candidates.weigh();
        let (total, highest) = (weighted.total(), weighted.highest);
        // The common offset, the surprisal of the most likely token, cancels out.
        let expected = weighted.entropy() - total.ln();
        let distance = move |logit: f32| (f64::from(highest) - f64::from(logit) - expected).abs();
        let mut left: Vec<(f64, f64)> =
            weighted.remaining_with_logits().map(|(_, logit, weight)| (distance(logit), weight)).collect();
        let farthest = last_to_reach(&mut left, 0.0, context.params.typical_p * total, f64::total_cmp);
        if let Some(farthest) = farthest {
            candidates.retain(|candidate| distance(candidate.logit) <= farthest);
        }
        Ok(())
    }
}
