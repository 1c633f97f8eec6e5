//! Log-probabilities of the raw logits, before any stage: what the model says, not what the sampler made of it.

use ferrule_kernels::arch::Isa;
use ferrule_kernels::logits::{count_at_least, total_weight, weight};

use super::candidates::{highest, most_likely};

/// A token's log-probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f64,
    /// Its place among all tokens, the most likely being 1; among equals the lower id comes first.
    pub rank: usize,
}

/// What was asked to be told about a sampled token.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token that was sampled.
    pub sampled: TokenLogprob,
    /// The most likely ones, most likely first, as many as asked for; the sampled one may be among them.
    pub top: Vec<TokenLogprob>,
}

/// The softmax of a row of raw logits, one token at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Softmax {
    highest: f32,
    sum: f64,
}

impl Softmax {
    /// Adds the row up.
    pub fn of(isa: Isa, logits: &[f32]) -> Self {
        let highest = highest(logits);
        Self { highest, sum: total_weight(isa, logits, highest) }
    }

    pub fn probability(self, logit: f32) -> f64 {
        weight(logit, self.highest) / self.sum
    }

    pub fn logprob(self, logit: f32) -> f64 {
        f64::from(logit) - f64::from(self.highest) - self.sum.ln()
    }
}

/// The place of a token among all of a row, from 1.
pub(super) fn rank(isa: Isa, logits: &[f32], id: u32) -> usize {
    let (before, from) = logits.split_at(id as usize);
    1 + count_at_least(isa, before, from[0]) + count_at_least(isa, from, from[0].next_up())
}

/// Log-probabilities of a sampled token and of the `count` most likely ones.
pub(super) fn logprobs(isa: Isa, logits: &[f32], sampled: u32, count: usize) -> TokenLogprobs {
    let softmax = Softmax::of(isa, logits);
    let logprob = softmax.logprob(logits[sampled as usize]);
    let sampled = TokenLogprob { id: sampled, logprob, rank: rank(isa, logits, sampled) };
    TokenLogprobs { sampled, top: top_of(softmax, isa, logits, count) }
}

/// Log-probabilities of the `count` most likely tokens, most likely first.
pub(super) fn top_logprobs(isa: Isa, logits: &[f32], count: usize) -> Vec<TokenLogprob> {
    top_of(Softmax::of(isa, logits), isa, logits, count)
}

fn top_of(softmax: Softmax, isa: Isa, logits: &[f32], count: usize) -> Vec<TokenLogprob> {
    let of = |(id, rank): (u32, usize)| TokenLogprob { id, logprob: softmax.logprob(logits[id as usize]), rank };
    most_likely(isa, logits, count).into_iter().zip(1..).map(of).collect()
}
