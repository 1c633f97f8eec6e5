//! What the penalties and minimum lengths need to know of the tokens so far.

use std::collections::BTreeMap;

use crate::SamplingParams;

use super::penalties;

/// Counts of the tokens before the one to sample, kept up as tokens are added.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// Every token of prompt and continuation, and how often the continuation has it. Empty where no penalty asks.
    tokens: BTreeMap<u32, u32>,
    output_len: usize,
    counts: bool,
}

impl History {
    /// The history of a prompt and what follows it.
    #[must_use]
    pub fn new(params: &SamplingParams, prompt: &[u32], output: &[u32]) -> Self {
        let mut history = Self { counts: penalties::are_on(params), ..Self::default() };
        if history.counts {
            for &token in prompt {
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
        if self.counts {
            *self.tokens.entry(token).or_default() += 1;
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
}
