//! Sampling traces: how each token was chosen.
//!
//! Tracing does not change results: it reads the candidates after each stage and computes probabilities separately.

use ferrule_kernels::arch::Isa;
use ferrule_kernels::logits::weight;

use super::Candidates;
use super::candidates::{Candidate, Weighted, most_likely};
use super::logprobs::Softmax;

/// A candidate token in a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceCandidate {
    /// The token.
    pub id: u32,
    /// Raw logit.
    pub logit: f32,
    /// Probability from the raw logits.
    pub probability: f64,
    /// Probability after each stage of the trace.
    pub stage_probabilities: Vec<f64>,
    /// Probability after all stages, used for sampling.
    pub final_probability: f64,
    /// Stage that dropped it; `model` if its raw logit is negative infinity.
    pub dropped_by: Option<&'static str>,
}

/// Effect of an active stage.
#[derive(Debug, Clone, PartialEq)]
pub struct StageEffect {
    /// Name of the stage.
    pub name: &'static str,
    /// Number of remaining tokens.
    pub left: usize,
    /// Entropy of their probabilities, in nats.
    pub entropy: f64,
}

/// Trace of one sampled token.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleTrace {
    /// The most likely tokens by raw logit, most likely first, then the sampled token if it is not among them.
    pub candidates: Vec<TraceCandidate>,
    /// Active stages in order.
    pub stages: Vec<StageEffect>,
    /// Uniform random number in [0, 1) that selected it; `None` for greedy sampling.
    pub draw: Option<f64>,
    /// The sampled token.
    pub chosen: u32,
}

/// Records candidates through the stages.
#[derive(Debug)]
pub(super) struct Recorder {
    tracked: Vec<(u32, Option<&'static str>)>,
    /// Active stages so far, with the candidates that remained.
    stages: Vec<(&'static str, Remaining)>,
}

/// Candidates that remained after a stage.
#[derive(Debug)]
struct Remaining {
    /// Candidates, ids ascending.
    candidates: Vec<Candidate>,
    highest: f32,
    /// Sum of all weights.
    total: f64,
}

impl Remaining {
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
    /// Records the `count` most likely tokens of a row.
    pub fn new(isa: Isa, logits: &[f32], count: usize) -> Self {
        let dropped_by = |id: u32| (logits[id as usize] == f32::NEG_INFINITY).then_some(super::MODEL);
        let tracked = most_likely(isa, logits, count).into_iter().map(|id| (id, dropped_by(id))).collect();
        Self { tracked, stages: Vec::new() }
    }

    /// Records the candidates that remained after a stage.
    pub fn record(&mut self, stage: &'static str, candidates: &Candidates<'_>) {
        for (id, dropped_by) in &mut self.tracked {
            if dropped_by.is_none() && candidates.logit(*id).is_none() {
                *dropped_by = Some(stage);
            }
        }
        let highest = candidates.highest_logit();
        let left: Vec<Candidate> = candidates.remaining().collect();
        let total = left.iter().map(|candidate| weight(candidate.logit, highest)).sum();
        self.stages.push((stage, Remaining { candidates: left, highest, total }));
    }

    /// Returns the trace of the sampled token.
    pub fn finish(mut self, logits: &[f32], weighted: Weighted<'_>, chosen: u32, draw: Option<f64>) -> SampleTrace {
        if self.tracked.iter().all(|&(id, _)| id != chosen) {
            self.tracked.push((chosen, None));
        }
        let raw = Softmax::of(weighted.isa, logits);
        let total = weighted.total();
        let describe = |&(id, dropped_by): &(u32, Option<&'static str>)| TraceCandidate {
            id,
            logit: logits[id as usize],
            probability: raw.probability(logits[id as usize]),
            stage_probabilities: self.stages.iter().map(|(_, left)| left.probability(id)).collect(),
            final_probability: weighted.weight_of(id) / total,
            dropped_by,
        };
        let effect = |(name, left): &(&'static str, Remaining)| StageEffect {
            name,
            left: left.candidates.len(),
            entropy: left.entropy(),
        };
        SampleTrace {
            candidates: self.tracked.iter().map(describe).collect(),
            stages: self.stages.iter().map(effect).collect(),
            draw,
            chosen,
        }
    }
}
