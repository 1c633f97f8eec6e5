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

    /// Divides the distance from the highest logit, which becomes 0: the same distribution, and no temperature is so
    /// small that different logits overflow to the same infinity.
    fn apply(&self, candidates: &mut Candidates, context: Context<'_>) {
        let highest = candidates.highest_logit();
        for entry in candidates.entries_mut() {
            entry.logit = if entry.logit == highest {
                0.0
            } else {
                ((f64::from(entry.logit) - f64::from(highest)) / context.params.temperature) as f32
            };
        }
    }
}
