//! DRY: penalizes tokens that would extend a repetition ("Don't Repeat Yourself", by p-e-w,
//! <https://github.com/oobabooga/text-generation-webui/pull/5677>; parameters as in llama.cpp).
//!
//! If the last n tokens also occur earlier, the token that followed them there loses `dry_multiplier * dry_base ^ (n -
//! dry_allowed_length)`. Repetitions do not cross a sequence breaker, and a breaker itself is not penalized. As in the
//! original, at most [`LONGEST`] tokens of a repetition count. With an index of all repetitions, the cost per token
//! does not grow with the text.

use crate::SamplingParams;

use super::repeats::Repeats;
use super::{Candidates, Context, SampleError, Stage};

/// Maximum length of a repetition in tokens.
const LONGEST: usize = 50;

pub(super) struct Dry;

/// Index of the repetitions in a text.
#[derive(Debug, Clone)]
pub(super) struct DryIndex {
    repeats: Repeats,
    /// Sequence breaker token ids, ascending.
    breakers: Vec<u32>,
    /// Number of tokens since the last breaker.
    unbroken: usize,
}

impl DryIndex {
    /// Creates the index of an empty text; `None` if the stage is off.
    pub fn new(params: &SamplingParams) -> Option<Self> {
        let breakers = || params.dry_sequence_breaker_ids.clone();
        is_on(params).then(|| Self { repeats: Repeats::new(LONGEST), breakers: breakers(), unbroken: 0 })
    }

    /// Appends a token to the text.
    pub fn push(&mut self, token: u32) {
        self.unbroken = if self.is_breaker(token) { 0 } else { self.unbroken + 1 };
        self.repeats.push(token);
    }

    fn is_breaker(&self, token: u32) -> bool {
        self.breakers.binary_search(&token).is_ok()
    }

    /// Returns the tokens (ascending) that would extend a repetition of at least `shortest` tokens within the last
    /// `window` tokens, with the repetition's length.
    fn repeated(&self, shortest: usize, window: usize) -> Vec<(u32, usize)> {
        let begin = self.repeats.len().saturating_sub(window);
        // If the earlier occurrence lies in the window, so does the later one.
        let repeats = self.repeats.followers(shortest, self.unbroken).filter_map(|follower| {
            let len = follower.len.min(follower.latest.saturating_sub(begin));
            (len >= shortest && !self.is_breaker(follower.token)).then_some((follower.token, len))
        });
        let mut repeats: Vec<(u32, usize)> = repeats.collect();
        repeats.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
        repeats.dedup_by_key(|repeat| repeat.0);
        repeats
    }
}

fn is_on(params: &SamplingParams) -> bool {
    params.dry_multiplier > 0.0 && params.dry_penalty_last_n != Some(0)
}

impl Stage for Dry {
    fn name(&self) -> &'static str {
        "dry"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        is_on(context.params)
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        let SamplingParams { dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, .. } = *context.params;
        let Some(index) = &context.history.dry else { return Ok(()) };
        for (token, len) in index.repeated(dry_allowed_length, dry_penalty_last_n.unwrap_or(usize::MAX)) {
            let penalty = dry_multiplier * dry_base.powi((len - dry_allowed_length) as i32);
            // Clamped to finite logits, because infinite ones would be equal.
            candidates.change(token, |logit| (f64::from(logit) - penalty).max(f64::from(-f32::MAX)) as f32);
        }
        Ok(())
    }
}
