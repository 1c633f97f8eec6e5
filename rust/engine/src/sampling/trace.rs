//! How a token was picked, for those who want to see it.
//!
//! Watching changes nothing: what is left after a stage is read, and probabilities are computed beside.

use ferrule_kernels::arch::Isa;
use ferrule_kernels::logits::weight;

use super::Candidates;
use super::candidates::{Candidate, Weighed, most_likely};
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
    /// Its probability after each stage of the trace.
    pub stage_probabilities: Vec<f64>,
    /// Its probability after all stages: what it was drawn with.
    pub final_probability: f64,
    /// The stage that dropped it, if one did; `model` if its raw logit already was negative infinity.
    pub dropped_by: Option<&'static str>,
}

/// What an active stage left.
#[derive(Debug, Clone, PartialEq)]
pub struct StageEffect {
    /// The stage.
    pub name: &'static str,
    /// Tokens that have not been dropped.
    pub left: usize,
    /// The entropy of their probabilities, in nats.
    pub entropy: f64,
}

/// How a token was picked.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleTrace {
    /// The most likely tokens by the raw logits, most likely first, as many as asked for; then the one that was
    /// picked, if it is not among them.
    pub candidates: Vec<TraceCandidate>,
    /// The active stages, in their order.
    pub stages: Vec<StageEffect>,
    /// The uniform number in [0, 1) that picked it; none when greedy.
    pub draw: Option<f64>,
    /// The token that was picked.
    pub chosen: u32,
}

/// Watches some candidates go through the stages.
#[derive(Debug)]
pub(super) struct Recorder {
    watched: Vec<(u32, Option<&'static str>)>,
    /// The active stages so far, and what each has left.
    stages: Vec<(&'static str, Left)>,
}

/// What a stage has left.
#[derive(Debug)]
struct Left {
    /// Ids ascending.
    candidates: Vec<Candidate>,
    highest: f32,
    /// The sum of all weights.
    total: f64,
}

impl Left {
    fn probability(&self, id: u32) -> f64 {
        let place = self.candidates.binary_search_by_key(&id, |candidate| candidate.id);
        place.map_or(0.0, |place| weight(self.candidates[place].logit, self.highest) / self.total)
    }

    fn entropy(&self) -> f64 {
        let parts = self.candidates.iter().map(|candidate| {
            let weight = weight(candidate.logit, self.highest);
            if weight > 0.0 { weight * (f64::from(self.highest) - f64::from(candidate.logit)) } else { 0.0 }
        });
        self.total.ln() + parts.sum::<f64>() / self.total
    }
}

impl Recorder {
    /// Watches the `count` most likely tokens of a row.
    pub fn new(isa: Isa, logits: &[f32], count: usize) -> Self {
        let dropped_by = |id: u32| (logits[id as usize] == f32::NEG_INFINITY).then_some(super::MODEL);
        let watched = most_likely(isa, logits, count).into_iter().map(|id| (id, dropped_by(id))).collect();
        Self { watched, stages: Vec::new() }
    }

    /// Takes note of what a stage has left.
    pub fn record(&mut self, stage: &'static str, candidates: &Candidates<'_>) {
        for (id, dropped_by) in &mut self.watched {
            if dropped_by.is_none() && candidates.logit(*id).is_none() {
                *dropped_by = Some(stage);
            }
        }
        let highest = candidates.highest_logit();
        let left: Vec<Candidate> = candidates.left().collect();
        let total = left.iter().map(|candidate| weight(candidate.logit, highest)).sum();
        self.stages.push((stage, Left { candidates: left, highest, total }));
    }

    /// The trace of the token that was picked.
    pub fn finish(mut self, logits: &[f32], weighed: Weighed<'_>, chosen: u32, draw: Option<f64>) -> SampleTrace {
        if self.watched.iter().all(|&(id, _)| id != chosen) {
            self.watched.push((chosen, None));
        }
        let raw = Softmax::of(weighed.isa, logits);
        let total = weighed.total();
        let describe = |&(id, dropped_by): &(u32, Option<&'static str>)| TraceCandidate {
            id,
            logit: logits[id as usize],
            probability: raw.probability(logits[id as usize]),
            stage_probabilities: self.stages.iter().map(|(_, left)| left.probability(id)).collect(),
            final_probability: weighed.weight_of(id) / total,
            dropped_by,
        };
        let effect = |(name, left): &(&'static str, Left)| StageEffect {
            name,
            left: left.candidates.len(),
            entropy: left.entropy(),
        };
        SampleTrace {
            candidates: self.watched.iter().map(describe).collect(),
            stages: self.stages.iter().map(effect).collect(),
            draw,
            chosen,
        }
    }
}
