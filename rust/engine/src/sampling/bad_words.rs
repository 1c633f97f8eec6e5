//! Drops tokens that would complete a forbidden token sequence (Hugging Face's `bad_words_ids`), considering prompt and
//! output. A sequence of one token is always forbidden.

use super::{Candidates, Context, SampleError, Stage};

pub(super) struct BadWords;

impl Stage for BadWords {
    fn name(&self) -> &'static str {
        "bad_words"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        !context.params.bad_words.is_empty()
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        for word in &context.params.bad_words {
            if let Some((&last, before)) = word.split_last()
                && context.history.text().ends_with(before)
            {
                candidates.change(last, |_| f32::NEG_INFINITY);
            }
        }
        Ok(())
    }
}
