//! Engine metrics: counters and histograms that can be read at any time without waiting for a step.

use std::marker::PhantomData;
use std::time::Duration;

use serde::Serialize;

use crate::pages::PageStatistics;
use crate::{FinishReason, RequestTiming};

/// Number of bounds of a histogram.
pub const BOUNDS: usize = 17;

/// Quantity that a histogram counts.
pub trait Measure {
    /// Inclusive upper bounds of the buckets.
    const BOUNDS: [f64; BOUNDS];
}

/// Durations in seconds, from a step of a small model to a prompt that fills a long context.
#[derive(Debug, Clone, PartialEq)]
pub struct Seconds;

impl Measure for Seconds {
    const BOUNDS: [f64; BOUNDS] =
        [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0];
}

/// Numbers of tokens: powers of two, which include the bounds of vLLM's `iteration_tokens_total`.
#[derive(Debug, Clone, PartialEq)]
pub struct Tokens;

impl Measure for Tokens {
    const BOUNDS: [f64; BOUNDS] = {
        let mut bounds = [1.0; BOUNDS];
        let mut index = 1;
        while index < BOUNDS {
            bounds[index] = 2.0 * bounds[index - 1];
            index += 1;
        }
        bounds
    };
}

/// Histogram of observations.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(bound = "")]
pub struct Histogram<M: Measure> {
    /// Inclusive upper bounds of the buckets.
    pub bounds: [f64; BOUNDS],
    /// Count of each bucket; the last holds all larger observations.
    pub counts: [u64; BOUNDS + 1],
    /// Sum of all observations.
    pub sum: f64,
    /// Number of observations.
    pub count: u64,
    #[serde(skip)]
    measure: PhantomData<M>,
}

impl<M: Measure> Default for Histogram<M> {
    fn default() -> Self {
        Self { bounds: M::BOUNDS, counts: [0; BOUNDS + 1], sum: 0.0, count: 0, measure: PhantomData }
    }
}

impl<M: Measure> Histogram<M> {
    fn observe(&mut self, value: f64) {
        self.counts[M::BOUNDS.partition_point(|&bound| bound < value)] += 1;
        self.sum += value;
        self.count += 1;
    }
}

impl Histogram<Seconds> {
    /// Counts a duration.
    pub(crate) fn record(&mut self, time: Duration) {
        self.observe(time.as_secs_f64());
    }
}

impl Histogram<Tokens> {
    /// Counts a number of tokens.
    pub(crate) fn record(&mut self, tokens: usize) {
        self.observe(tokens as f64);
    }
}

/// Number of finished requests by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Finished {
    /// Finished by a stop token or a complete grammar.
    pub stop: u64,
    /// Finished by a length limit.
    pub length: u64,
    /// Aborted by the caller, including stop strings that the caller found.
    pub abort: u64,
    /// Finished by an error.
    pub error: u64,
}

impl Finished {
    /// Counts a finished request.
    pub(crate) fn record(&mut self, reason: &FinishReason) {
        match reason {
            FinishReason::Stop { .. } | FinishReason::Complete => self.stop += 1,
            FinishReason::Length => self.length += 1,
            FinishReason::Sampling(_) | FinishReason::Constraint(_) | FinishReason::Dead(_) => self.error += 1,
        }
    }
}

/// Counters since the engine started, and gauges of its current state.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Metrics {
    /// Finished requests.
    pub requests_finished: Finished,
    /// Rejected requests.
    pub requests_refused: u64,
    /// Tokens of the prompts that were fully processed.
    pub prompt_tokens: u64,
    /// Prompt tokens that came from the prefix cache or a forked request.
    pub cached_prompt_tokens: u64,
    /// Tokens computed, including recomputation after preemption and rejected drafts.
    pub computed_tokens: u64,
    /// Tokens sampled.
    pub generated_tokens: u64,
    /// Draft tokens computed.
    pub drafted_tokens: u64,
    /// Draft tokens accepted.
    pub accepted_tokens: u64,
    /// Completed forward passes.
    pub steps: u64,
    /// Preemptions.
    pub preemptions: u64,

    /// Running requests.
    pub running: usize,
    /// Waiting requests, including preempted ones.
    pub waiting: usize,
    /// KV pages of all groups of layers.
    pub pages_total: usize,
    /// Free pages.
    pub pages_free: usize,
    /// Free pages that are cached for later requests.
    pub pages_cached: usize,

    /// Tokens looked up in the prefix cache.
    pub prefix_queries_tokens: u64,
    /// Tokens found in the prefix cache.
    pub prefix_hits_tokens: u64,
    /// Tokens found in the prefix cache because their pages, or the states after them, were read from the disk tier.
    pub disk_hits_tokens: u64,
    /// Bytes in the disk tier's directory at the last scan; other processes may use it too.
    pub disk_stored_bytes: u64,

    /// Time from a request's arrival until it is first scheduled.
    pub queue_seconds: Histogram<Seconds>,
    /// Time from first being scheduled until the first token.
    pub prefill_seconds: Histogram<Seconds>,
    /// Time to first token.
    pub time_to_first_token_seconds: Histogram<Seconds>,
    /// Time between consecutive tokens of a request.
    pub inter_token_seconds: Histogram<Seconds>,
    /// Time from the first token to the last.
    pub decode_seconds: Histogram<Seconds>,
    /// Duration of a step: of batches that are computed at the same time, the time since the end of the one before.
    pub step_seconds: Histogram<Seconds>,
    /// Tokens computed in a step, prompts, drafts and recomputation included.
    pub step_tokens: Histogram<Tokens>,
}

impl Metrics {
    /// Records a fully processed prompt.
    pub(crate) fn record_prompt(&mut self, tokens: usize, timing: &RequestTiming) {
        self.prompt_tokens += tokens as u64;
        self.cached_prompt_tokens += timing.cached_tokens as u64;
    }

    /// Records a sampled token, `since_last` after the previous one.
    pub(crate) fn record_token(&mut self, since_last: Duration, timing: &RequestTiming, is_last: bool) {
        self.generated_tokens += 1;
        let RequestTiming {
            first_scheduled: Some(scheduled), first_token: Some(first), last_token: Some(last), ..
        } = *timing
        else {
            return;
        };
        if first == last {
            self.queue_seconds.record(scheduled);
            self.prefill_seconds.record(first.saturating_sub(scheduled));
            self.time_to_first_token_seconds.record(first);
        } else {
            self.inter_token_seconds.record(since_last);
        }
        if is_last {
            self.decode_seconds.record(last.saturating_sub(first));
        }
    }

    /// Sets the page gauges.
    pub(crate) fn record_pages(&mut self, pages: &[PageStatistics]) {
        self.pages_total = pages.iter().map(|pages| pages.total).sum();
        self.pages_free = pages.iter().map(|pages| pages.free).sum();
        self.pages_cached = pages.iter().map(|pages| pages.cached).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_bounds_are_inclusive() {
        let mut histogram = Histogram::<Seconds>::default();
        for millis in [0, 1, 2, 250_000, 250_001] {
            histogram.record(Duration::from_millis(millis));
        }
        assert_eq!(
            (histogram.counts[0], histogram.counts[1], histogram.counts[16], histogram.counts[17]),
            (2, 1, 1, 1)
        );
        assert_eq!((histogram.count, histogram.sum), (5, 500.004));
    }

    #[test]
    fn token_buckets_are_powers_of_two() {
        let mut histogram = Histogram::<Tokens>::default();
        for tokens in [1, 2, 3, 512, 65_537] {
            histogram.record(tokens);
        }
        assert_eq!(histogram.bounds[9..11], [512.0, 1024.0]);
        let filled: Vec<usize> = (0..=BOUNDS).filter(|&bucket| histogram.counts[bucket] == 1).collect();
        assert_eq!(filled, [0, 1, 2, 9, 17]);
    }
}
