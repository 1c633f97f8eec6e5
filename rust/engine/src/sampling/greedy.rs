//! Greedy sampling at temperature 0: keeps the most likely token, the lowest id among equals. Later filters have no
//! effect.

use super::{Candidates, Context, SampleError, Stage};

pub(super) struct Greedy;

impl Stage for Greedy {
    fn name(&self) -> &'static str {
        "greedy"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.is_greedy()
    }

    fn apply(&self, candidates: &mut Candidates<'_>, _context: Context<'_>) -> Result<(), SampleError> {
        candidates.keep_best();
        Ok(())
    }
}
