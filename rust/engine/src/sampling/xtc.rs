//! XTC: with some probability drops the most likely tokens, all but the least likely one above a threshold ("Exclude
//! Top Choices", by p-e-w, <https://github.com/oobabooga/text-generation-webui/pull/6335>; as in llama.cpp).
//!
//! Each position draws its own random number to decide whether it applies.

use super::candidates::{Candidate, by_likelihood};
use super::rng::{Purpose, uniform_for};
use super::{Candidates, Context, SampleError, Stage};

pub(super) struct Xtc;

impl Stage for Xtc {
    fn name(&self) -> &'static str {
        "xtc"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        let params = context.params;
        !params.is_greedy()
            && params.xtc_probability > 0.0
            // At most one token can have more than half of the probability.
            && params.xtc_threshold <= 0.5
            && uniform_for(Purpose::Xtc, params.seed, context.position as u64) < params.xtc_probability
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        let weighted = candidates.weigh();
        let enough = context.params.xtc_threshold * weighted.total();
        let likely = weighted.remaining_with_logits().filter(|&(_, _, weight)| weight >= enough);
        let least = likely.map(|(id, logit, _)| Candidate { id, logit }).max_by(by_likelihood);
        if let Some(least) = least {
            candidates.retain(|candidate| by_likelihood(&candidate, &least).is_ge());
        }
        Ok(())
    }
}
