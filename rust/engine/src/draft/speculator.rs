//! Asks the sources of all sequences for drafts, and takes those that are worth it.

use super::config::SpeculativeConfig;
use super::cost::StepCosts;
use super::gain::{Offer, lengths};
use crate::sequence::Sequence;

/// See the module.
#[derive(Debug)]
pub(crate) struct Speculator {
    config: SpeculativeConfig,
    costs: StepCosts,
}

impl Speculator {
    pub fn new(config: SpeculativeConfig) -> Self {
        Self { config, costs: StepCosts::new() }
    }

    /// Gives the sequences that decode their drafts for the next step. None has more than `most_tokens` with them and the
    /// token that follows.
    pub fn propose(&mut self, running: &mut [Sequence], most_tokens: usize) {
        let mut rows = 0;
        let mut offers = Vec::new();
        let mut offered = Vec::new();
        for sequence in running {
            sequence.drafts.clear();
            if sequence.pending() != 1 || sequence.tells_prompt() {
                continue;
            }
            rows += 1;
            let most = sequence.room_for_drafts(most_tokens).min(self.config.num_speculative_tokens);
            if most == 0 {
                continue;
            }
            sequence.drafts.look_up(&sequence.tokens, most);
            let count = sequence.drafts.tokens().len();
            if let Some(acceptance) = sequence.drafts.acceptance().filter(|_| count > 0) {
                offers.push(Offer { count, rate: acceptance.rate(), seconds: 0.0 });
                offered.push(&mut sequence.drafts);
            }
        }
        if !self.config.adaptive {
            return;
        }
        for (drafts, length) in offered.into_iter().zip(lengths(&self.costs, rows, &offers)) {
            let probes = length == 0 && drafts.acceptance().is_some_and(super::Acceptance::rest);
            drafts.truncate(if probes { 1 } else { length });
        }
    }

    /// Takes note of a step that decoded so many rows and nothing else.
    pub fn note(&mut self, rows: usize, seconds: f64) {
        self.costs.note(rows, seconds);
    }
}
