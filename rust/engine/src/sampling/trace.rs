//! How a token was picked, for those who want to see it.

use ferrule_kernels::arch::Isa;

use super::Candidates;
use super::candidates::{Weighed, most_likely};
use super::logprobs::Softmax;

/// A token that could have been picked.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceCandidate {
    /// The token.
    pub id: u32,
    /// Its raw logit.
    pub logit: f32,
    /// Its probability by the raw logits.
    pub probability: f64,
    /// Its probability after all stages: what it was drawn with.
    pub final_probability: f64,
    /// The stage that dropped it, if one did; `model` if its raw logit already was negative infinity.
    pub dropped_by: Option<&'static str>,
}

/// How a token was picked.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleTrace {
    /// The most likely tokens by the raw logits, most likely first, as many as asked for; then the one that was
    /// picked, if it is not among them.
    pub candidates: Vec<TraceCandidate>,
    /// The uniform number in [0, 1) that picked it; none when greedy.
    pub draw: Option<f64>,
    /// The token that was picked.
    pub chosen: u32,
}

/// Watches some candidates go through the stages.
#[derive(Debug)]
pub(super) struct Recorder {
    watched: Vec<(u32, Option<&'static str>)>,
}

impl Recorder {
    /// Watches the `count` most likely tokens of a row.
    pub fn new(isa: Isa, logits: &[f32], count: usize) -> Self {
        let dropped_by = |id: u32| (logits[id as usize] == f32::NEG_INFINITY).then_some(super::MODEL);
        Self { watched: most_likely(isa, logits, count).into_iter().map(|id| (id, dropped_by(id))).collect() }
    }

    /// Takes note of what a stage has dropped.
    pub fn note(&mut self, stage: &'static str, candidates: &Candidates<'_>) {
        for (id, dropped_by) in &mut self.watched {
            if dropped_by.is_none() && candidates.logit(*id).is_none() {
                *dropped_by = Some(stage);
            }
        }
    }

    /// The trace of the token that was picked.
    pub fn finish(mut self, logits: &[f32], weighed: Weighed<'_>, chosen: u32, draw: Option<f64>) -> SampleTrace {
        if self.watched.iter().all(|&(id, _)| id != chosen) {
            self.watched.push((chosen, None));
        }
        let raw = Softmax::of(weighed.isa, logits);
        let total = weighed.total();
        let describe = |(id, dropped_by): (u32, Option<&'static str>)| TraceCandidate {
            id,
            logit: logits[id as usize],
            probability: raw.probability(logits[id as usize]),
            final_probability: weighed.weight_of(id) / total,
            dropped_by,
        };
        SampleTrace { candidates: self.watched.into_iter().map(describe).collect(), draw, chosen }
    }
}
