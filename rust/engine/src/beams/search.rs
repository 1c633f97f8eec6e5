//! Which beams go on: the algorithm by itself, without a model and without pages.

use crate::sampling::Continuation;
use crate::{EarlyStopping, Hypothesis, SamplingParams};

/// A beam whose continuations are known.
#[derive(Debug, Clone, Copy)]
pub(super) struct Beam<'a> {
    /// Its tokens behind the prompt.
    pub output: &'a [u32],
    /// The sum of their log-probabilities.
    pub score: f64,
    /// At least as many as [`Search::wanted`], unless there are no more.
    pub continuations: &'a [Continuation],
}

/// A beam of the next step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Child {
    /// Which of the beams it goes on from.
    pub parent: usize,
    /// The token that it has more.
    pub token: u32,
    /// The sum of the log-probabilities of its tokens.
    pub score: f64,
}

/// A beam search as far as it has come.
#[derive(Debug)]
pub(super) struct Search {
    width: usize,
    /// Complete sequences that are told of.
    n: usize,
    length_penalty: f64,
    early_stopping: EarlyStopping,
    stop_token_ids: Vec<u32>,
    /// Tokens of a sequence behind the prompt, at the most.
    max_total_tokens: usize,
    /// Complete sequences, the best first; no more than beams.
    complete: Vec<Hypothesis>,
}

impl Search {
    /// A search at its beginning, whose sequences have up to `max_total_tokens` behind the prompt. None if the parameters ask
    /// for none.
    pub fn new(params: &SamplingParams, max_total_tokens: usize) -> Option<Self> {
        let search = params.beam_search.as_ref()?;
        Some(Self {
            width: search.beam_width,
            n: search.n,
            length_penalty: search.length_penalty,
            early_stopping: search.early_stopping,
            stop_token_ids: params.stop_token_ids.clone(),
            max_total_tokens,
            complete: Vec::new(),
        })
    }

    /// Continuations that are wanted of each beam: if all of the likeliest ones end with one of the stop ids, there are
    /// still as many left as there are beams.
    pub fn wanted(params: &SamplingParams) -> usize {
        let width = params.beam_search.as_ref().map_or(1, |search| search.beam_width);
        width * (1 + params.stop_token_ids.len().max(1))
    }

    /// The best of the complete sequences, the best first.
    pub fn into_best(mut self) -> Vec<Hypothesis> {
        self.complete.truncate(self.n);
        self.complete
    }

    /// Goes on by a token: the next beams, the best first; none if the search is over.
    ///
    /// What comes next is looked for among the continuations of all beams together. The likeliest `width` of them are
    /// complete sequences if they end; those that do not end are the next beams.
    pub fn advance(&mut self, beams: &[Beam<'_>]) -> Vec<Child> {
        let output_len = 1 + beams.first().map_or(0, |beam| beam.output.len());
        let mut all: Vec<Child> = Vec::new();
        for (parent, beam) in beams.iter().enumerate() {
            let child = |next: &Continuation| Child { parent, token: next.token, score: beam.score + next.logprob };
            all.extend(beam.continuations.iter().map(child));
        }
        // Among equals the better beam and its likelier token come first, since this keeps the order that they have.
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        let is_last = output_len >= self.max_total_tokens;
        let (ending, mut next): (Vec<_>, Vec<_>) =
            all.iter().enumerate().partition(|(_, child)| is_last || self.stop_token_ids.contains(&child.token));
        for (_, child) in ending.into_iter().filter(|&(place, _)| place < self.width) {
            let token_ids = beams[child.parent].output.iter().copied().chain([child.token]).collect();
            self.complete.push(Hypothesis {
                token_ids,
                cumulative_logprob: child.score,
                score: self.score_at(child.score, output_len),
                stop_token: self.stop_token_ids.contains(&child.token).then_some(child.token),
            });
        }
        self.complete.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.complete.truncate(self.width);
        next.truncate(self.width);
        if next.first().is_none_or(|(_, best)| self.is_over(best.score, output_len)) {
            return Vec::new();
        }
        next.into_iter().map(|(_, child)| *child).collect()
    }

    /// Whether nothing better can come where the best beam has that score.
    fn is_over(&self, best: f64, output_len: usize) -> bool {
        let Some(worst) = self.complete.get(self.width - 1) else { return false };
        let length = match self.early_stopping {
            EarlyStopping::Always => return true,
            EarlyStopping::Never if self.length_penalty > 0.0 => self.max_total_tokens,
            EarlyStopping::Never | EarlyStopping::Heuristic => output_len,
        };
        self.score_at(best, length) <= worst.score
    }

    /// What a sum of log-probabilities is worth at a length.
    fn score_at(&self, sum: f64, output_len: usize) -> f64 {
        sum / (output_len as f64).powf(self.length_penalty)
    }
}

#[cfg(test)]
mod tests;
