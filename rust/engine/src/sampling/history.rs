//! What stages need to know of the tokens so far.
//!
//! It grows token by token and is a function of these tokens, of the parameters, and for mirostat of the logits that
//! they were drawn from: a sequence carries it from step to step, also when it is computed again.

use std::collections::BTreeMap;

use crate::SamplingParams;

use super::dry::DryIndex;
use super::repeats::Repeats;
use super::{mirostat, no_repeat_ngram, penalties};

/// The tokens before the one to sample, as far as the active stages ask for them.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// Every token of prompt and continuation, and how often the continuation has it. Empty where no penalty asks.
    tokens: BTreeMap<u32, u32>,
    counts: bool,
    /// Prompt and continuation. Empty where no stage compares tokens.
    text: Vec<u32>,
    keeps_text: bool,
    prompt_len: usize,
    output_len: usize,
    /// What has followed the n-grams of `no_repeat_ngram_size`, without their last token.
    pub(super) ngrams: Option<Repeats>,
    pub(super) dry: Option<DryIndex>,
    /// Mirostat's mu, in bits.
    pub(super) mirostat_mu: f64,
}

impl History {
    /// The history of a prompt and what follows it.
    #[must_use]
    pub fn new(params: &SamplingParams, prompt: &[u32], output: &[u32]) -> Self {
        let mut history = Self {
            counts: penalties::are_on(params),
            keeps_text: !params.bad_words.is_empty() || params.logits_processor.is_some(),
            prompt_len: prompt.len(),
            ngrams: no_repeat_ngram::index(params),
            dry: DryIndex::new(params),
            mirostat_mu: mirostat::initial_mu(params),
            ..Self::default()
        };
        for &token in prompt {
            history.index(token);
            if history.counts {
                history.tokens.entry(token).or_default();
            }
        }
        for &token in output {
            history.push(token);
        }
        history
    }

    /// Takes note of a sampled token.
    pub fn push(&mut self, token: u32) {
        self.output_len += 1;
        self.index(token);
        if self.counts {
            *self.tokens.entry(token).or_default() += 1;
        }
    }

    fn index(&mut self, token: u32) {
        if self.keeps_text {
            self.text.push(token);
        }
        if let Some(ngrams) = &mut self.ngrams {
            ngrams.push(token);
        }
        if let Some(dry) = &mut self.dry {
            dry.push(token);
        }
    }

    /// Tokens of the continuation.
    pub fn output_len(&self) -> usize {
        self.output_len
    }

    /// Every token of prompt and continuation, ids ascending, and how often the continuation has it.
    pub fn tokens(&self) -> impl Iterator<Item = (u32, u32)> {
        self.tokens.iter().map(|(&id, &times)| (id, times))
    }

    /// Prompt and continuation, where bad words or a logits processor read them.
    pub(super) fn text(&self) -> &[u32] {
        &self.text
    }

    /// The continuation, likewise.
    pub(super) fn output(&self) -> &[u32] {
        self.text.get(self.prompt_len..).unwrap_or_default()
    }
}
