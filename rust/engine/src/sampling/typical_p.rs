//! Keeps the smallest set of tokens of that mass whose surprise is nearest to the one expected, the entropy (locally
//! typical sampling, <https://arxiv.org/abs/2202.00666>; Hugging Face's `typical_p`). All that are as near as the last
//! one kept are kept.

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
        let weighed = candidates.weigh();
        let (total, highest) = (weighed.total(), weighed.highest);
        // What both are measured from cancels out: the surprise of the most likely token.
        let expected = weighed.entropy() - total.ln();
        let distance = move |logit: f32| (f64::from(highest) - f64::from(logit) - expected).abs();
        let mut left: Vec<(f64, f64)> = weighed.left_at().map(|(_, logit, weight)| (distance(logit), weight)).collect();
        let farthest = last_to_reach(&mut left, 0.0, context.params.typical_p * total, f64::total_cmp);
        if let Some(farthest) = farthest {
            candidates.retain(|candidate| distance(candidate.logit) <= farthest);
        }
        Ok(())
    }
}
