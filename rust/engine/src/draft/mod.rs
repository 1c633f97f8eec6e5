//! Speculative decoding: draft tokens are proposed and verified by the forward pass that computes the next token.
//!
//! A decoding sequence has one pending token. Its drafts are computed behind it in the same pass, which costs little
//! more than one row because the weights are read once. Each row is then sampled in order, with the sampling stages and
//! the random number of its position, as without drafts. A draft is accepted if and only if it equals the sampled
//! token; the first rejected draft ends the step and the token sampled in its place is kept. So the output is the same
//! as without speculation, bit for bit, at any temperature and with any drafts. Keys and values of rejected drafts are
//! overwritten later.
//!
//! # Sources
//! Each source has its own file. A [`Drafter`] belongs to one sequence and reads its tokens. The first of a sequence's
//! drafters that has a proposal is used. A draft model ([`model`]) runs for all sequences without a proposal.
//!
//! | file | drafts |
//! |---|---|
//! | `structured/` | tokens forced by a grammar (fast-forward) |
//! | `prediction.rs` | the caller's predicted output |
//! | `ngram.rs` | tokens that followed the same n-gram before |
//! | `model.rs` | the tokens of a smaller model |
//!
//! # Number of drafts
//! An additional row is worth its time only for likely drafts: [`length`] compares the acceptance rate of a source
//! ([`acceptance`]) with the measured time of a step ([`cost`]).
//!
//! # Adding a source
//! Add one file with a [`Drafter`], one line in the table above, and its construction in [`Drafts::new`].

mod acceptance;
mod config;
mod cost;
mod length;
mod model;
mod ngram;
mod prediction;
mod speculator;

pub use config::{SpeculativeConfig, SpeculativeMethod};
pub use model::DraftModel;
pub(crate) use speculator::{DraftLimits, Speculator};

use std::fmt::Debug;

use crate::structured::Constraint;
use acceptance::Acceptance;
use ngram::Ngram;
use prediction::Prediction;

/// Expected acceptance rate of a draft model.
const MODEL_ACCEPTANCE: f64 = 0.7;
/// Expected acceptance rate of tokens forced by a grammar: the bytes are certain, their tokenization is not.
const GRAMMAR_ACCEPTANCE: f64 = 0.8;

/// A source of drafts for one sequence.
pub(crate) trait Drafter: Debug + Send {
    /// Appends up to `limit` drafts that may follow `tokens` (prompt and output), or none. Between calls `tokens` only
    /// grows; a cancelled step calls again with the same tokens.
    fn draft(&mut self, tokens: &[u32], limit: usize, drafts: &mut Vec<u32>);

    /// Returns the expected acceptance rate before any draft was verified.
    fn expected_acceptance(&self) -> f64;
}

/// A draft source and its acceptance rate.
#[derive(Debug)]
struct Source {
    origin: Origin,
    acceptance: Acceptance,
}

/// Producer of drafts.
#[derive(Debug)]
enum Origin {
    /// The sequence's grammar.
    Grammar,
    /// A drafter of the sequence.
    Own(Box<dyn Drafter>),
    /// The draft model.
    Model,
}

/// Draft sources of a sequence and its drafts for the next step.
#[derive(Debug, Default)]
pub(crate) struct Drafts {
    /// Sources, preferred first.
    sources: Vec<Source>,
    /// Index of the source of `tokens`.
    from: usize,
    tokens: Vec<u32>,
}

impl Drafts {
    /// Creates the sources of a sequence.
    fn new(
        method: Option<SpeculativeMethod>,
        model: bool,
        prompt_len: usize,
        prediction: Vec<u32>,
        grammar: bool,
    ) -> Self {
        let mut drafters: Vec<Box<dyn Drafter>> = Vec::new();
        if !prediction.is_empty() {
            drafters.push(Box::new(Prediction::new(prediction, prompt_len)));
        }
        if let Some(SpeculativeMethod::Ngram { shortest, longest }) = method {
            drafters.push(Box::new(Ngram::new(shortest, longest)));
        }
        let source = |drafter: Box<dyn Drafter>| Source {
            acceptance: Acceptance::new(drafter.expected_acceptance()),
            origin: Origin::Own(drafter),
        };
        let grammar =
            grammar.then(|| Source { origin: Origin::Grammar, acceptance: Acceptance::new(GRAMMAR_ACCEPTANCE) });
        let model = model.then(|| Source { origin: Origin::Model, acceptance: Acceptance::new(MODEL_ACCEPTANCE) });
        let sources = grammar.into_iter().chain(drafters.into_iter().map(source)).chain(model);
        Self { sources: sources.collect(), ..Self::default() }
    }

    /// Returns the drafts for the next step.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Removes all drafts.
    pub fn clear(&mut self) {
        self.tokens.clear();
    }

    /// Keeps the first `count` drafts.
    pub fn truncate(&mut self, count: usize) {
        self.tokens.truncate(count);
    }

    /// Appends a draft.
    fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Fills the drafts with up to `limit` tokens from the first source that has any; the grammar, if there is one,
    /// must allow them. If only the draft model is left, it runs later.
    fn propose(&mut self, tokens: &[u32], limit: usize, mut constraint: Option<&mut Constraint>) {
        for (from, source) in self.sources.iter_mut().enumerate() {
            self.from = from;
            match (&mut source.origin, &mut constraint) {
                (Origin::Grammar, Some(constraint)) => self.tokens = constraint.forced(limit),
                (Origin::Own(drafter), _) => drafter.draft(tokens, limit, &mut self.tokens),
                (Origin::Grammar | Origin::Model, _) => {}
            }
            self.tokens.truncate(limit);
            if let (Origin::Own(_), Some(constraint)) = (&source.origin, &mut constraint) {
                self.tokens.truncate(constraint.allowed_prefix(&self.tokens));
            }
            if !self.tokens.is_empty() {
                return;
            }
        }
    }

    /// Returns whether the current source is the draft model.
    fn are_from_model(&self) -> bool {
        self.sources.get(self.from).is_some_and(|source| matches!(source.origin, Origin::Model))
    }

    /// Returns the acceptance rate of the current source.
    fn acceptance(&mut self) -> Option<&mut Acceptance> {
        self.sources.get_mut(self.from).map(|source| &mut source.acceptance)
    }

    /// Records that the first `accepted` drafts were accepted, and removes all drafts.
    pub fn record_verified(&mut self, accepted: usize) {
        let drafted = self.tokens.len();
        if let Some(acceptance) = self.acceptance().filter(|_| drafted > 0) {
            acceptance.record(drafted, accepted);
        }
        self.clear();
    }
}
