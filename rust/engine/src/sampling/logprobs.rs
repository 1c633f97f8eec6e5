//! Log-probabilities of the raw logits, before any sampling stage, or of what remains after all stages.

use ferrule_kernels::arch::Isa;
use ferrule_kernels::logits::{count_at_least, total_weight, weight};

use super::candidates::{Weighted, highest, most_likely};

/// A token's log-probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f64,
    /// Rank among all tokens, starting at 1 for the most likely; the lower id first among equals.
    pub rank: usize,
}

/// Requested log-probabilities at one position.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The sampled (or prompt) token.
    pub sampled: TokenLogprob,
    /// The most likely tokens, most likely first; may include the sampled one.
    pub top: Vec<TokenLogprob>,
}

/// Softmax of a row of raw logits, evaluated per token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Softmax {
    highest: f32,
    sum: f64,
}

impl Softmax {
    /// Computes the normalization of a row.
    pub fn of(isa: Isa, logits: &[f32]) -> Self {
        let highest = highest(logits);
        Self { highest, sum: total_weight(isa, logits, highest) }
    }

    /// Returns the probability of a logit.
    pub fn probability(self, logit: f32) -> f64 {
        weight(logit, self.highest) / self.sum
    }

    /// Returns the log-probability of a logit.
    pub fn logprob(self, logit: f32) -> f64 {
        f64::from(logit) - f64::from(self.highest) - self.sum.ln()
    }
}

/// Returns the rank of a token, starting at 1.
pub(super) fn rank(isa: Isa, logits: &[f32], id: u32) -> usize {
    let (before, from) = logits.split_at(id as usize);
    1 + count_at_least(isa, before, from[0]) + count_at_least(isa, from, from[0].next_up())
}

/// Returns the log-probabilities of a sampled token and of the `count` most likely ones.
pub(super) fn logprobs(isa: Isa, logits: &[f32], sampled: u32, count: usize) -> TokenLogprobs {
    let softmax = Softmax::of(isa, logits);
    let logprob = softmax.logprob(logits[sampled as usize]);
    let sampled = TokenLogprob { id: sampled, logprob, rank: rank(isa, logits, sampled) };
    TokenLogprobs { sampled, top: top_of(softmax, isa, logits, count) }
}

/// Returns the log-probabilities, after all stages, of a sampled token and of the `count` most likely ones; a token that
/// a stage dropped is not among them, nor one whose probability is 0.
pub(super) fn processed_logprobs(weighted: Weighted<'_>, sampled: u32, count: usize) -> TokenLogprobs {
    let normalizer = weighted.total().ln();
    let likelier = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let of = |(id, weight): (u32, f64), rank| TokenLogprob { id, logprob: weight.ln() - normalizer, rank };
    let sampled = (sampled, weighted.weight_of(sampled));
    let mut top: Vec<(u32, f64)> = weighted.remaining().filter(|&(_, weight)| weight > 0.0).collect();
    let rank = 1 + top.iter().filter(|other| likelier(other, &sampled).is_lt()).count();
    if count < top.len() {
        top.select_nth_unstable_by(count, likelier);
        top.truncate(count);
    }
    top.sort_unstable_by(likelier);
    TokenLogprobs {
        sampled: of(sampled, rank),
        top: top.into_iter().zip(1..).map(|(each, rank)| of(each, rank)).collect(),
    }
}

/// Returns the log-probabilities of the `count` most likely tokens, most likely first.
pub(super) fn top_logprobs(isa: Isa, logits: &[f32], count: usize) -> Vec<TokenLogprob> {
    top_of(Softmax::of(isa, logits), isa, logits, count)
}

fn top_of(softmax: Softmax, isa: Isa, logits: &[f32], count: usize) -> Vec<TokenLogprob> {
    let of = |(id, rank): (u32, usize)| TokenLogprob { id, logprob: softmax.logprob(logits[id as usize]), rank };
    most_likely(isa, logits, count).into_iter().zip(1..).map(of).collect()
}
