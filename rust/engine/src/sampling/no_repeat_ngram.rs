//! Drops tokens that would repeat an n-gram of prompt and output (Hugging Face's `no_repeat_ngram_size`,
//! <https://arxiv.org/abs/1705.04304>).

use crate::SamplingParams;

use super::repeats::Repeats;
use super::{Candidates, Context, SampleError, Stage};

pub(super) struct NoRepeatNgram;

/// Returns the index that finds these tokens.
pub(super) fn index(params: &SamplingParams) -> Option<Repeats> {
    params.no_repeat_ngram_size.checked_sub(1).map(Repeats::of_longest)
}

impl Stage for NoRepeatNgram {
    fn name(&self) -> &'static str {
        "no_repeat_ngram_size"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.no_repeat_ngram_size > 0
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        for token in context.history.ngrams.iter().flat_map(Repeats::followers_of_longest) {
            candidates.change(token, |_| f32::NEG_INFINITY);
        }
        Ok(())
    }
}
