//! Limits the prompt tokens of a step that also decodes, so that decoding sequences keep their inter-token latency.
//!
//! The cost of a prompt token depends on the machine, the model, other load, and the context length, so it is measured
//! step by step. Outputs do not depend on it: prompts may be cut anywhere.
//!
//! A model may compute several batches at the same time. A decoding sequence then gets a token per [`Cycle`], in which
//! each batch is finished once, so the target holds for the steps of a cycle together. A step lasts from the end of the
//! batch before to the end of this one. If the stages of a pipeline are not equal, a part of a neighbour's time may be in
//! it; the sum over a cycle is right.
//!
//! While no sequence decodes, there is no target. Then prompts are divided into batches that are small enough to keep all
//! stages of a pipeline busy ([`Cycle::share_of_prompts`]).

use std::time::Duration;

/// Minimum number of prompt tokens per step: one page, so that prompts always progress.
const MIN_TOKENS: usize = 16;

/// Target duration in seconds of a cycle whose outputs are not streamed: long enough for matmuls of a few hundred rows,
/// which are the most efficient per row, and short enough for decoding sequences to progress.
const UNSTREAMED_TARGET: f64 = 0.4;

/// Weight of a new measurement that is lower than the average. A higher one replaces the average at once.
const SMOOTHING: f64 = 0.3;

/// Number of batches, for each batch in flight, into which the prompt tokens that are left are divided while no sequence
/// decodes. A pipeline of P stages is not full while its first and its last batches pass: N batches of the same size take
/// (N + P - 1) / N of the time of a full one.
const BATCHES_PER_STAGE: usize = 4;

/// Minimum number of prompt tokens in a batch of a model that computes several, where no client waits for each token: fewer
/// rows take more time each.
const MIN_BATCH_TOKENS: usize = 128;

/// The batches that a model computes at the same time, each of which is finished once in a cycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cycle {
    /// Number of batches.
    pub batches: usize,
    /// Number of batches among them that can have prompt tokens.
    pub prefill_batches: usize,
}

impl Cycle {
    /// Returns the maximum number of prompt tokens in a batch while no sequence decodes, if `tokens` prompt tokens are left:
    /// `usize::MAX` if only one batch at a time can have prompt tokens. The scheduler limits batches to
    /// `max_num_batched_tokens` too.
    pub fn share_of_prompts(self, tokens: usize) -> usize {
        if self.prefill_batches < 2 {
            return usize::MAX;
        }
        let batches = (tokens / MIN_BATCH_TOKENS).clamp(1, BATCHES_PER_STAGE * self.prefill_batches);
        tokens.div_ceil(batches).max(1)
    }
}

/// Recent step times.
#[derive(Debug)]
pub(crate) struct PrefillBudget {
    /// Target duration of a cycle in seconds.
    target: f64,
    /// Duration of a decode-only step in seconds.
    decode: f64,
    /// Additional seconds per prompt token; `None` until measured.
    token: Option<f64>,
}

impl PrefillBudget {
    pub fn new(target: Duration) -> Self {
        Self { target: target.as_secs_f64(), decode: 0.0, token: None }
    }

    /// Returns the number of prompt tokens that the next step may compute beside decoding sequences: its share of those
    /// in the cycle. `streamed` if a client waits for each token; otherwise batches in flight may have as many prompt tokens
    /// as their matmuls need, even if the cycle then takes longer than its target.
    pub fn tokens(&self, streamed: bool, cycle: Cycle) -> usize {
        let least = if streamed || cycle.batches < 2 { MIN_TOKENS } else { MIN_BATCH_TOKENS };
        let Some(token) = self.token else { return least };
        let target = if streamed { self.target } else { self.target.max(UNSTREAMED_TARGET) };
        let prefill = (target - self.decode * cycle.batches as f64).max(0.0);
        let tokens = prefill / token.max(f64::MIN_POSITIVE) / cycle.prefill_batches.max(1) as f64;
        (tokens as usize).max(least)
    }

    /// Records the duration of a step with its number of decode rows and prompt tokens.
    pub fn record(&mut self, seconds: f64, decode_rows: usize, prompt_tokens: usize) {
        if prompt_tokens == 0 {
            self.decode += SMOOTHING * (seconds - self.decode);
            return;
        }
        // Even a step faster than a decode-only step attributes some of its time to the prompt.
        let decode = if decode_rows > 0 { self.decode.min(seconds / 2.0) } else { 0.0 };
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

    /// One batch at a time.
    const ONE: Cycle = Cycle { batches: 1, prefill_batches: 1 };

    /// Simulates a machine with 20 ms per decode step and 2 ms per prompt token, growing to 6 ms.
    #[test]
    fn steps_keep_to_the_target_as_the_context_grows() {
        let mut prefill_budget = PrefillBudget::new(Duration::from_millis(150));
        assert_eq!(prefill_budget.tokens(true, ONE), MIN_TOKENS);
        (0..20).for_each(|_| prefill_budget.record(0.02, 4, 0));
        let mut longest: f64 = 0.0;
        for step in 0..200 {
            let tokens = prefill_budget.tokens(true, ONE);
            let seconds = 0.02 + tokens as f64 * (0.002 + 0.004 * f64::from(step) / 200.0);
            longest = longest.max(seconds);
            prefill_budget.record(seconds, 4, tokens);
        }
        assert!((0.15..0.16).contains(&longest), "{longest}");
        assert!(prefill_budget.tokens(false, ONE) > 2 * prefill_budget.tokens(true, ONE));
        assert!((18..=24).contains(&prefill_budget.tokens(true, ONE)), "{}", prefill_budget.tokens(true, ONE));
        // An outlier is forgotten within some steps.
        prefill_budget.record(3.0, 4, 20);
        assert_eq!(prefill_budget.tokens(true, ONE), MIN_TOKENS);
        for _ in 0..20 {
            prefill_budget.record(
                0.02 + prefill_budget.tokens(true, ONE) as f64 * 0.006,
                4,
                prefill_budget.tokens(true, ONE),
            );
        }
        assert!((18..=24).contains(&prefill_budget.tokens(true, ONE)), "{}", prefill_budget.tokens(true, ONE));
    }

    /// Simulates two batches in turn on a machine with 10 ms per batch that decodes and 1 ms per prompt token. Returns the
    /// longest cycle after the first ones, and the prompt tokens of its batches.
    fn cycle_of_two_batches(streamed: bool, prefill_batches: usize) -> (f64, [usize; 2]) {
        let mut prefill_budget = PrefillBudget::new(Duration::from_millis(100));
        let mut cycle = || {
            [0, 1].map(|batch| {
                let cycle = Cycle { batches: 2, prefill_batches };
                let tokens = if batch < prefill_batches { prefill_budget.tokens(streamed, cycle) } else { 0 };
                let seconds = 0.01 + tokens as f64 * 0.001;
                prefill_budget.record(seconds, 3, tokens);
                (seconds, tokens)
            })
        };
        (0..20).for_each(|_| {
            cycle();
        });
        let cycles = (0..100).map(|_| {
            let [first, second] = cycle();
            (first.0 + second.0, [first.1, second.1])
        });
        cycles.max_by(|one, other| one.0.total_cmp(&other.0)).expect("a hundred cycles")
    }

    #[test]
    fn the_batches_of_a_cycle_share_the_target() {
        // Prompts in one batch have what the other one leaves.
        let (seconds, tokens) = cycle_of_two_batches(true, 1);
        assert!((0.095..0.101).contains(&seconds) && tokens[0] >= 75 && tokens[1] == 0, "{seconds} {tokens:?}");
        let (seconds, tokens) = cycle_of_two_batches(true, 2);
        assert!((0.095..0.101).contains(&seconds) && tokens.iter().all(|count| *count >= 37), "{seconds} {tokens:?}");
        let (seconds, _) = cycle_of_two_batches(false, 2);
        assert!((0.39..0.401).contains(&seconds), "{seconds}");
    }

    #[test]
    fn batches_without_streams_have_enough_rows_for_matmuls_where_a_cycle_takes_longer_than_its_target() {
        let two = Cycle { batches: 2, prefill_batches: 2 };
        let mut prefill_budget = PrefillBudget::new(Duration::from_millis(150));
        assert_eq!(prefill_budget.tokens(false, two), MIN_BATCH_TOKENS);
        prefill_budget.record(1.0, 4, 50);
        assert_eq!([false, true].map(|streamed| prefill_budget.tokens(streamed, two)), [MIN_BATCH_TOKENS, MIN_TOKENS]);
        assert!(prefill_budget.tokens(false, ONE) < 25);
    }

    #[test]
    fn prompts_are_divided_into_batches_that_fill_the_stages_and_have_enough_rows() {
        let share = |prefill_batches, tokens| Cycle { batches: 2, prefill_batches }.share_of_prompts(tokens);
        assert_eq!([0, 1, 255, 256, 512, 1000].map(|tokens| share(2, tokens)), [1, 1, 255, 128, 128, 143]);
        // Eight batches of two stages, and sixteen of four.
        assert_eq!([share(2, 8000), share(4, 8000)], [1000, 500]);
        assert_eq!([share(1, 8000), share(0, 0)], [usize::MAX; 2]);
    }

    #[test]
    fn prompts_advance_where_decoding_alone_takes_longer_than_the_target() {
        let mut prefill_budget = PrefillBudget::new(Duration::from_millis(150));
        (0..50).for_each(|_| prefill_budget.record(0.5, 4, 0));
        prefill_budget.record(0.6, 4, 16);
        assert_eq!(prefill_budget.tokens(true, ONE), MIN_TOKENS);
    }

    #[test]
    fn zero_durations_do_not_limit_the_budget() {
        let mut prefill_budget = PrefillBudget::new(Duration::from_millis(150));
        prefill_budget.record(0.0, 0, 100);
        assert!(prefill_budget.tokens(true, ONE) > 1 << 40);
    }
}
