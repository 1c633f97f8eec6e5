//! What the engine has done and how long it took: counted always, read at any time without waiting for a step.

use std::time::Duration;

use serde::Serialize;

use crate::pages::PageStatistics;
use crate::{FinishReason, RequestTiming};

/// Upper bounds of a histogram's buckets, in seconds: from a step of a small model to a prompt that fills a long
/// context.
pub const BOUNDS: [f64; 17] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0];

/// How often something took how long.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Histogram {
    /// Upper bounds of the buckets, in seconds, each inside.
    pub bounds: &'static [f64],
    /// Of each bucket, and of all that took longer.
    pub counts: [u64; BOUNDS.len() + 1],
    /// Seconds in all.
    pub sum: f64,
    /// Times in all.
    pub count: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { bounds: &BOUNDS, counts: [0; BOUNDS.len() + 1], sum: 0.0, count: 0 }
    }
}

impl Histogram {
    pub(crate) fn record(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.counts[BOUNDS.partition_point(|&bound| bound < seconds)] += 1;
        self.sum += seconds;
        self.count += 1;
    }
}

/// Requests that ended, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Finished {
    /// By a stop id.
    pub stop: u64,
    /// By a limit of tokens.
    pub length: u64,
    /// By the caller; also where the caller found a stop string.
    pub abort: u64,
    /// By an error.
    pub error: u64,
}

impl Finished {
    pub(crate) fn record(&mut self, reason: &FinishReason) {
        match reason {
            FinishReason::Stop { .. } | FinishReason::Complete => self.stop += 1,
            FinishReason::Length => self.length += 1,
            FinishReason::Sampling(_) | FinishReason::Constraint(_) | FinishReason::Dead { .. } => self.error += 1,
        }
    }
}

/// The engine in numbers, since it began and as it is.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Metrics {
    /// Requests that ended.
    pub requests_finished: Finished,
    /// Requests that were refused.
    pub requests_refused: u64,
    /// Tokens of the prompts that came to their end.
    pub prompt_tokens: u64,
    /// Those of them that were not computed: they came from the prefix cache, or from a sequence with the same prompt.
    pub cached_prompt_tokens: u64,
    /// Tokens that were computed, those of preempted sequences again, and drafts whether accepted or not.
    pub computed_tokens: u64,
    /// Tokens that were sampled.
    pub generated_tokens: u64,
    /// Tokens that were computed as drafts.
    pub drafted_tokens: u64,
    /// Those of them that were sampled indeed.
    pub accepted_tokens: u64,
    /// Forward passes that came to their end.
    pub steps: u64,
    /// How often a sequence gave its pages up.
    pub preemptions: u64,

    /// Requests that hold pages.
    pub running: usize,
    /// Requests that wait, new ones and those that gave their pages up.
    pub waiting: usize,
    /// Pages of all groups.
    pub pages_total: usize,
    /// Pages that nobody holds.
    pub pages_free: usize,
    /// Those of the free pages that are kept for requests that begin with the same tokens.
    pub pages_cached: usize,

    /// Tokens that were looked for in the prefix cache.
    pub prefix_queries_tokens: u64,
    /// Tokens that were found there.
    pub prefix_hits_tokens: u64,
    /// Tokens that were read from the disk.
    pub disk_hits_tokens: u64,
    /// Bytes on the disk, as far as is known: other processes may use it too.
    pub disk_stored_bytes: u64,

    /// From a request's arrival until it was first part of a batch.
    pub queue_seconds: Histogram,
    /// From there until its first token.
    pub prefill_seconds: Histogram,
    /// From its arrival until its first token.
    pub time_to_first_token_seconds: Histogram,
    /// Between neighbouring tokens of a request.
    pub inter_token_seconds: Histogram,
    /// From its first token to its last.
    pub decode_seconds: Histogram,
    /// A forward pass and its samples.
    pub step_seconds: Histogram,
}

impl Metrics {
    /// Takes note of a prompt that is computed.
    pub(crate) fn record_prompt(&mut self, tokens: usize, timing: &RequestTiming) {
        self.prompt_tokens += tokens as u64;
        self.cached_prompt_tokens += timing.cached_tokens as u64;
    }

    /// Takes note of a token that came so long after the one before it, and was the last of its request or not.
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
    fn a_time_falls_into_the_bucket_whose_bound_it_does_not_exceed() {
        let mut histogram = Histogram::default();
        for millis in [0, 1, 2, 250_000, 250_001] {
            histogram.record(Duration::from_millis(millis));
        }
        assert_eq!(
            (histogram.counts[0], histogram.counts[1], histogram.counts[16], histogram.counts[17]),
            (2, 1, 1, 1)
        );
        assert_eq!((histogram.count, histogram.sum), (5, 500.004));
    }
}
