//! Temperature 0: the most likely token, the lowest id among equals. The filters after it have nothing left to do.

use super::candidates::by_likelihood;
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
        if let Some(best) = candidates.entries().iter().min_by(|a, b| by_likelihood(a, b)).map(|entry| entry.id) {
            candidates.retain(|entry| entry.id == best);
        }
    }
}
