//! Mirostat: keeps the surprisal of sampled tokens near a target by truncating unlikely tokens
//! (<https://arxiv.org/abs/2007.14966>).
//!
//! Version 2 drops tokens with a surprisal above mu; version 1 estimates from Zipf's law how many tokens that keeps.
//! After each token mu moves by `mirostat_eta` times the difference between its surprisal and the target
//! `mirostat_tau`, in bits. The surprisal is measured before this stage drops tokens, as in the authors' code;
//! llama.cpp measures it afterwards, which is biased by what was dropped.

use ferrule_kernels::logits::weight;

use crate::SamplingParams;

use super::candidates::{Candidate, Weighted};
use super::{Candidates, Context, History, SampleError, Stage};

/// Number of most likely tokens from which version 1 estimates the exponent of Zipf's law, as in the paper.
const ESTIMATED_FROM: usize = 100;

pub(super) struct Mirostat;

/// Returns the initial surprisal bound, in bits.
pub(super) fn initial_mu(params: &SamplingParams) -> f64 {
    2.0 * params.mirostat_tau
}

fn is_on(params: &SamplingParams) -> bool {
    params.mirostat > 0 && !params.is_greedy()
}

impl Stage for Mirostat {
    fn name(&self) -> &'static str {
        "mirostat"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        is_on(context.params)
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        let mu = context.history.mirostat_mu;
        let weighted = candidates.weigh();
        let (total, highest) = (weighted.total(), weighted.highest);
        candidates.record_total(total);
        if context.params.mirostat == 2 {
            let least = (-mu).exp2() * total;
            candidates.keep_down_to(|logit| logit == highest || weight(logit, highest) >= least);
        } else {
            let first = candidates.first(ESTIMATED_FROM);
            candidates.keep_most_likely(count_within(mu, &first, candidates.vocab_size()));
        }
        Ok(())
    }
}

/// Returns how many of the most likely tokens have a mean surprisal of at most `mu` bits by Zipf's law.
fn count_within(mu: f64, first: &[Candidate], vocab_size: usize) -> usize {
    let (mut products, mut squares) = (0.0, 0.0);
    for (pair, rank) in first.windows(2).zip(1_u32..) {
        let step = (f64::from(rank + 1) / f64::from(rank)).ln();
        products += step * (f64::from(pair[0].logit) - f64::from(pair[1].logit));
        squares += step * step;
    }
    let exponent = products / squares;
    let excess = exponent - 1.0;
    // At an exponent of 1 this is 0/0, whose limit is the logarithm.
    let size = vocab_size as f64;
    let normalizer = if excess.abs() < 1e-9 { size.ln() } else { (1.0 - size.powf(-excess)) / excess };
    let count = (mu.exp2() / normalizer).powf(exponent.recip());
    // Equal logits give exponent 0, and then all tokens are kept, or one. The cast saturates.
    if count.is_nan() { usize::MAX } else { (count as usize).max(1) }
}

/// Updates mu after a token was drawn.
pub(super) fn observe(history: &mut History, params: &SamplingParams, weighted: Weighted<'_>, token: u32) {
    if let Some(total) = weighted.recorded_total.filter(|_| is_on(params)) {
        let surprisal = (total / weighted.weight_of(token)).log2();
        history.mirostat_mu -= params.mirostat_eta * (surprisal - params.mirostat_tau);
    }
}
