//! History of a sequence's tokens, as far as the sampling stages need it.
//!
//! It grows token by token and depends on the tokens, the parameters, and for mirostat on their logits. It survives
//! preemption.

use std::collections::BTreeMap;

use crate::SamplingParams;

use super::dry::DryIndex;
use super::repeats::Repeats;
use super::{mirostat, no_repeat_ngram, penalties};

/// The tokens before the one to sample, as far as the active stages need them.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// Count of each prompt or output token in the output; empty if no penalty is active.
    tokens: BTreeMap<u32, u32>,
    counts: bool,
    /// Prompt and output tokens; empty if no stage compares tokens.
    text: Vec<u32>,
    keeps_text: bool,
    prompt_len: usize,
    output_len: usize,
    /// Index for `no_repeat_ngram_size`.
    pub(super) ngrams: Option<Repeats>,
    pub(super) dry: Option<DryIndex>,
    /// Mirostat's surprisal bound mu, in bits.
    pub(super) mirostat_mu: f64,
}

impl History {
    /// Creates the history of a prompt and its output so far.
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

    /// Appends a sampled token.
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

    /// Returns the number of output tokens.
    pub fn output_len(&self) -> usize {
        self.output_len
    }

    /// Returns each token of prompt or output, ids ascending, with its count in the output.
    pub fn tokens(&self) -> impl Iterator<Item = (u32, u32)> {
        self.tokens.iter().map(|(&id, &times)| (id, times))
    }

    /// Returns prompt and output, if bad words or a logits processor need them.
    pub(super) fn text(&self) -> &[u32] {
        &self.text
    }

    /// Returns the output, if bad words or a logits processor need it.
    pub(super) fn output(&self) -> &[u32] {
        self.text.get(self.prompt_len..).unwrap_or_default()
    }
}
