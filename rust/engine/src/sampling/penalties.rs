//! Repetition, frequency and presence penalties.
//!
//! Repetition (CTRL, <https://arxiv.org/abs/1909.05858>, as in Hugging Face and vLLM: prompt and output) divides
//! positive logits and multiplies negative ones. Frequency and presence (as in OpenAI: output only) are subtracted, the
//! former once per occurrence.

use crate::SamplingParams;

use super::{Candidates, Context, SampleError, Stage};

pub(super) struct Penalties;

/// Returns whether any of the three has an effect.
pub(super) fn are_on(params: &SamplingParams) -> bool {
    params.repetition_penalty != 1.0 || params.frequency_penalty != 0.0 || params.presence_penalty != 0.0
}

impl Stage for Penalties {
    fn name(&self) -> &'static str {
        "penalties"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        are_on(context.params)
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        let SamplingParams { repetition_penalty, frequency_penalty, presence_penalty, .. } = *context.params;
        for (id, times) in context.history.tokens() {
            candidates.change(id, |logit| {
                let raw = f64::from(logit);
                let mut penalized = if raw > 0.0 { raw / repetition_penalty } else { raw * repetition_penalty };
                if times > 0 {
                    penalized -= frequency_penalty * f64::from(times) + presence_penalty;
                }
                // Clamped to finite logits, because infinite ones would be equal.
                penalized.min(f64::from(f32::MAX)) as f32
            });
        }
        Ok(())
    }
}
