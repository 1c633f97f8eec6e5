//! How many tokens of prompts a step may take beside sequences that decode, so that none of these waits long for its
//! next token.
//!
//! What a token of a prompt costs depends on the machine, on the model, on who else computes there, and grows with the
//! context that it looks back upon. So it is measured, step by step. What a request gets does not depend on it: chunks
//! may be cut anywhere.

use std::time::Duration;

/// The least that a step takes of prompts: one page, so that they advance whatever the clock says.
const LEAST: usize = 16;

/// Seconds that a step may take where nobody sees tokens come: long enough for matmuls of some hundred rows, which cost
/// the least a row, and short enough that those who have read their prompts go on beside them.
const UNWATCHED: f64 = 0.4;

/// The share of a new measurement that is cheaper than the last. One that is dearer counts at once.
const SMOOTHING: f64 = 0.3;

/// What steps took lately.
#[derive(Debug)]
pub(crate) struct PrefillBudget {
    /// Seconds that a step may take.
    target: f64,
    /// Seconds of a step that only decodes.
    decode: f64,
    /// Seconds that a token of a prompt adds; none was computed yet.
    token: Option<f64>,
}

impl PrefillBudget {
    pub fn new(target: Duration) -> Self {
        Self { target: target.as_secs_f64(), decode: 0.0, token: None }
    }

    /// Tokens of prompts that the next step may take if sequences decode in it; `watched` if someone waits for each of
    /// their tokens.
    pub fn tokens(&self, watched: bool) -> usize {
        let Some(token) = self.token else { return LEAST };
        let target = if watched { self.target } else { self.target.max(UNWATCHED) };
        let tokens = (target - self.decode).max(0.0) / token.max(f64::MIN_POSITIVE);
        (tokens as usize).max(LEAST)
    }

    /// Takes note of a step: how many sequences decoded, and how many tokens of prompts were computed.
    pub fn record(&mut self, seconds: f64, decoded: usize, prompt_tokens: usize) {
        if prompt_tokens == 0 {
            self.decode += SMOOTHING * (seconds - self.decode);
            return;
        }
        // A step that was faster than its decode rows alone has a share for the prompt all the same.
        let decode = if decoded > 0 { self.decode.min(seconds / 2.0) } else { 0.0 };
        let token = (seconds - decode) / prompt_tokens as f64;
        self.token = Some(match self.token {
            Some(last) if token < last => last + SMOOTHING * (token - last),
            _ => token,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which a decode step takes 20 ms and a token of a prompt 2 ms, or 6 ms further on.
    #[test]
    fn steps_keep_to_the_target_as_the_context_grows() {
        let mut prefill_budget = PrefillBudget::new(Duration::from_millis(150));
        assert_eq!(prefill_budget.tokens(true), LEAST);
        (0..20).for_each(|_| prefill_budget.record(0.02, 4, 0));
        let mut longest: f64 = 0.0;
        for step in 0..200 {
            let tokens = prefill_budget.tokens(true);
            let seconds = 0.02 + tokens as f64 * (0.002 + 0.004 * f64::from(step) / 200.0);
            longest = longest.max(seconds);
            prefill_budget.record(seconds, 4, tokens);
        }
        assert!((0.15..0.16).contains(&longest), "{longest}");
        assert!(prefill_budget.tokens(false) > 2 * prefill_budget.tokens(true));
        assert!((18..=24).contains(&prefill_budget.tokens(true)), "{}", prefill_budget.tokens(true));
        // A hiccup of the machine is forgotten within some steps.
        prefill_budget.record(3.0, 4, 20);
        assert_eq!(prefill_budget.tokens(true), LEAST);
        for _ in 0..20 {
            prefill_budget.record(0.02 + prefill_budget.tokens(true) as f64 * 0.006, 4, prefill_budget.tokens(true));
        }
        assert!((18..=24).contains(&prefill_budget.tokens(true)), "{}", prefill_budget.tokens(true));
    }

    #[test]
    fn prompts_advance_where_decoding_alone_takes_longer_than_the_target() {
        let mut prefill_budget = PrefillBudget::new(Duration::from_millis(150));
        (0..50).for_each(|_| prefill_budget.record(0.5, 4, 0));
        prefill_budget.record(0.6, 4, 16);
        assert_eq!(prefill_budget.tokens(true), LEAST);
    }

    #[test]
    fn a_clock_that_stands_still_sets_no_limit() {
        let mut prefill_budget = PrefillBudget::new(Duration::from_millis(150));
        prefill_budget.record(0.0, 0, 100);
        assert!(prefill_budget.tokens(true) > 1 << 40);
    }
}
