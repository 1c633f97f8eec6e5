//! Divides the logits by the temperature: below 1 sharpens the distribution, above 1 flattens it.

use super::{Candidates, Context, SampleError, Stage, dynamic_temperature};

pub(super) struct Temperature;

impl Stage for Temperature {
    fn name(&self) -> &'static str {
        "temperature"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        let params = context.params;
        !params.is_greedy() && !dynamic_temperature::is_on(params) && params.temperature != 1.0
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        candidates.divide(context.params.temperature);
        Ok(())
    }
}
