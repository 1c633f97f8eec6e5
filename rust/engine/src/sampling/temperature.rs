//! Divides the logits: below 1 the likely become likelier, above 1 the unlikely do.

use super::{Candidates, Context, Stage};

pub(super) struct Temperature;

impl Stage for Temperature {
    fn name(&self) -> &'static str {
        "temperature"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        !context.params.is_greedy() && context.params.temperature != 1.0
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) {
        candidates.divide(context.params.temperature);
    }
}
