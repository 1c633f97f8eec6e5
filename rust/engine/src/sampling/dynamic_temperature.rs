//! Dynamic temperature: follows the entropy of the distribution, low where the model is certain and high where it is
//! not (llama.cpp's `dynatemp_range` and `dynatemp_exponent`).
//!
//! The temperature is between `temperature - dynatemp_range` (at least 0) and `temperature + dynatemp_range`,
//! interpolated by the normalized entropy to the power of `dynatemp_exponent`. At 0 only the most likely token is kept.

use crate::SamplingParams;

use super::{Candidates, Context, SampleError, Stage};

pub(super) struct DynamicTemperature;

/// Returns whether it replaces the constant temperature.
pub(super) fn is_on(params: &SamplingParams) -> bool {
    params.dynatemp_range > 0.0 && !params.is_greedy()
}

impl Stage for DynamicTemperature {
    fn name(&self) -> &'static str {
        "dynatemp"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        is_on(context.params)
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        let SamplingParams { temperature, dynatemp_range, dynatemp_exponent, .. } = *context.params;
        let count = candidates.remaining().count();
        if count < 2 {
            return Ok(());
        }
        let entropy = candidates.weigh().entropy();
        // Rounding can put the entropy of equal logits above the maximum.
        let share = (entropy / (count as f64).ln()).clamp(0.0, 1.0);
        let (low, high) = ((temperature - dynatemp_range).max(0.0), temperature + dynatemp_range);
        let temperature = low + (high - low) * share.powf(dynatemp_exponent);
        if temperature > 0.0 {
            candidates.divide(temperature);
        } else {
            candidates.keep_best();
        }
        Ok(())
    }
}
