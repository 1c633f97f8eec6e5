//! What the penalties and minimum lengths need to know of the tokens so far.

use std::collections::BTreeMap;

use crate::SamplingParams;

use super::penalties;

/// How often a token occurred.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Occurrences {
    /// Whether the prompt has it.
    pub in_prompt: bool,
    /// Times in the continuation.
    pub in_output: u32,
}

/// Counts of the tokens before the one to sample, kept up as tokens are added.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    /// Empty where no penalty asks for it.
    tokens: BTreeMap<u32, Occurrences>,
    output_len: usize,
    counts: bool,
}

impl History {
    /// The history of a prompt and what follows it.
    pub fn new(params: &SamplingParams, prompt: &[u32], output: &[u32]) -> Self {
        let mut history = Self { counts: penalties::are_on(params), ..Self::default() };
        if history.counts {
            for &token in prompt {
                history.tokens.entry(token).or_default().in_prompt = true;
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
            self.tokens.entry(token).or_default().in_output += 1;
        }
    }

    /// Tokens of the continuation.
    pub fn output_len(&self) -> usize {
        self.output_len
    }

    /// Every token that occurred, ids ascending.
    pub fn tokens(&self) -> impl Iterator<Item = (u32, Occurrences)> {
        self.tokens.iter().map(|(&id, &occurrences)| (id, occurrences))
    }
}
