//! Now and then drops the most likely tokens, all but the last of those that are likely enough to make sense ("Exclude
//! Top Choices", by p-e-w, <https://github.com/oobabooga/text-generation-webui/pull/6335>; as in llama.cpp).
//!
//! Whether it acts is drawn for each position by a random number of its own.

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
            // Two tokens cannot both have more than half of the probability.
            && params.xtc_threshold <= 0.5
            && uniform_for(Purpose::Xtc, params.seed, context.position as u64) < params.xtc_probability
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        let weighed = candidates.weigh();
        let enough = context.params.xtc_threshold * weighed.total();
        let likely = weighed.left_at().filter(|&(_, _, weight)| weight >= enough);
        let least = likely.map(|(id, logit, _)| Candidate { id, logit }).max_by(by_likelihood);
        if let Some(least) = least {
            candidates.retain(|candidate| by_likelihood(&candidate, &least).is_ge());
        }
        Ok(())
    }
}
