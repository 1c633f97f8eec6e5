//! Keeps the smallest set of most likely tokens whose probabilities add up to `top_p` or more
//! (nucleus sampling, <https://arxiv.org/abs/1904.09751>).

use super::candidates::{Candidate, by_likelihood, weight};
use super::{Candidates, Context, Stage};

/// Candidates that are sorted first. The nucleus is usually smaller; where it is not, the next round sorts more.
const FIRST_SORTED: usize = 256;

pub(super) struct TopP;

impl Stage for TopP {
    fn name(&self) -> &'static str {
        "top_p"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.top_p < 1.0
    }

    fn apply(&self, candidates: &mut Candidates, context: Context<'_>) {
        let highest = candidates.highest_logit();
        let total: f64 = candidates.weights().map(|(_, weight)| weight).sum();
        let last = last_of_nucleus(candidates.shuffled(), highest, context.params.top_p * total);
        candidates.retain(|entry| by_likelihood(entry, &last).is_le());
    }
}

/// The least likely candidate of the nucleus of the given mass. Sorts no more than it must.
fn last_of_nucleus(candidates: &mut [Candidate], highest: f32, mass: f64) -> Candidate {
    let mut sorted = 0;
    let mut sum = 0.0;
    let mut step = FIRST_SORTED;
    loop {
        let rest = &mut candidates[sorted..];
        let count = step.min(rest.len());
        if count < rest.len() {
            rest.select_nth_unstable_by(count - 1, by_likelihood);
        }
        rest[..count].sort_unstable_by(by_likelihood);
        for candidate in &rest[..count] {
            sum += weight(candidate.logit, highest);
            if sum >= mass {
                return *candidate;
            }
        }
        sorted += count;
        if sorted == candidates.len() {
            // Rounding left the sum of all just below the mass of almost all.
            return candidates[sorted - 1];
        }
        step *= 8;
    }
}
