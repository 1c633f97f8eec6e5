//! The beam search algorithm, without model or pages.

use crate::sampling::Continuation;
use crate::{EarlyStopping, Hypothesis, SamplingParams};

/// An expanded beam.
#[derive(Debug, Clone, Copy)]
pub(super) struct Beam<'a> {
    /// Output tokens.
    pub output: &'a [u32],
    /// Sum of their log-probabilities.
    pub score: f64,
    /// Candidate continuations: at least [`Search::candidates_per_beam`], unless fewer tokens are allowed.
    pub continuations: &'a [Continuation],
}

/// A beam of the next step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Child {
    /// Index of its parent beam.
    pub parent: usize,
    /// Token appended to the parent.
    pub token: u32,
    /// Sum of the log-probabilities of its output tokens.
    pub score: f64,
}

/// State of a beam search.
#[derive(Debug)]
pub(super) struct Search {
    width: usize,
    /// Number of sequences to return.
    n: usize,
    length_penalty: f64,
    early_stopping: EarlyStopping,
    stop_token_ids: Vec<u32>,
    /// Maximum number of output tokens.
    max_output_tokens: usize,
    /// Finished sequences, best first; at most `width`.
    finished: Vec<Hypothesis>,
}

impl Search {
    /// Starts a search with at most `max_output_tokens` output tokens; `None` if the request is not a beam search.
    pub fn new(params: &SamplingParams, max_output_tokens: usize) -> Option<Self> {
        let search = params.beam_search.as_ref()?;
        Some(Self {
            width: search.beam_width,
            n: search.n,
            length_penalty: search.length_penalty,
            early_stopping: search.early_stopping,
            stop_token_ids: params.stop_token_ids.clone(),
            max_output_tokens,
            finished: Vec::new(),
        })
    }

    /// Returns the number of candidates needed per beam: even if the most likely ones are all stop tokens, `width`
    /// others remain.
    pub fn candidates_per_beam(params: &SamplingParams) -> usize {
        let width = params.beam_search.as_ref().map_or(1, |search| search.beam_width);
        width * (1 + params.stop_token_ids.len().max(1))
    }

    /// Returns the best finished sequences, best first.
    pub fn into_hypotheses(mut self) -> Vec<Hypothesis> {
        self.finished.truncate(self.n);
        self.finished
    }

    /// Advances by one token. Returns the next beams, best first; empty if the search is over.
    ///
    /// Candidates of all beams compete together. Of the `width` most likely ones, those that end become finished
    /// sequences; the most likely that do not end become the next beams.
    pub fn advance(&mut self, beams: &[Beam<'_>]) -> Vec<Child> {
        let output_len = 1 + beams.first().map_or(0, |beam| beam.output.len());
        let mut all: Vec<Child> = Vec::new();
        for (parent, beam) in beams.iter().enumerate() {
            let child = |next: &Continuation| Child { parent, token: next.token, score: beam.score + next.logprob };
            all.extend(beam.continuations.iter().map(child));
        }
        // A stable sort keeps the better beam and its more likely token first among equals.
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        let is_last = output_len >= self.max_output_tokens;
        let (ending, mut next): (Vec<_>, Vec<_>) =
            all.iter().enumerate().partition(|(_, child)| is_last || self.stop_token_ids.contains(&child.token));
        for (_, child) in ending.into_iter().filter(|&(place, _)| place < self.width) {
            let token_ids = beams[child.parent].output.iter().copied().chain([child.token]).collect();
            self.finished.push(Hypothesis {
                token_ids,
                cumulative_logprob: child.score,
                score: self.normalized_score(child.score, output_len),
                stop_token: self.stop_token_ids.contains(&child.token).then_some(child.token),
            });
        }
        self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.finished.truncate(self.width);
        next.truncate(self.width);
        if next.first().is_none_or(|(_, best)| self.is_finished(best.score, output_len)) {
            return Vec::new();
        }
        next.into_iter().map(|(_, child)| *child).collect()
    }

    /// Returns whether no future sequence can beat the finished ones, given the best running beam's score.
    fn is_finished(&self, best: f64, output_len: usize) -> bool {
        let Some(worst) = self.finished.get(self.width - 1) else { return false };
        let length = match self.early_stopping {
            EarlyStopping::Always => return true,
            EarlyStopping::Never if self.length_penalty > 0.0 => self.max_output_tokens,
            EarlyStopping::Never | EarlyStopping::Heuristic => output_len,
        };
        self.normalized_score(best, length) <= worst.score
    }

    /// Returns the length-normalized score.
    fn normalized_score(&self, sum: f64, output_len: usize) -> f64 {
        sum / (output_len as f64).powf(self.length_penalty)
    }
}

#[cfg(test)]
mod tests;
