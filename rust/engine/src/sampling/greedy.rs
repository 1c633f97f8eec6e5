//! Temperature 0: the most likely token, the lowest id among equals. The filters after it have nothing left to do.

use super::{Candidates, Context, Stage};

pub(super) struct Greedy;

impl Stage for Greedy {
    fn name(&self) -> &'static str {
        "greedy"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.is_greedy()
    }

    fn apply(&self, candidates: &mut Candidates, _context: Context<'_>) {
        let highest = candidates.highest_logit();
        // Ids ascend, so that the first of equals is the one that counts as the most likely.
        if let Some(best) = candidates.entries().iter().find(|entry| entry.logit == highest).map(|entry| entry.id) {
            candidates.retain(|entry| entry.id == best);
        }
    }
}
