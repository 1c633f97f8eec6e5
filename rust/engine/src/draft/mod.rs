//! Speculation: tokens that may come next are guessed, and verified by the forward pass that would compute the next
//! one.
//!
//! A sequence that decodes has one pending token. Its drafts are computed behind it in the same pass, which costs
//! little more than the one row: the weights are read once. Then each row is sampled in order, with the stages and the
//! random number of its position, as if there had been no drafts. A draft is accepted if and only if it equals what is
//! sampled in its place; the first that does not ends the step, and the token sampled there is kept. So the output is
//! the one without speculation, bit for bit, at any temperature, whatever the drafts were. What was computed behind the
//! first mismatch is written over later.
//!
//! # Sources
//! One file each. A [`Drafter`] belongs to one sequence and knows its tokens; the first of a sequence's drafters that
//! has something to offer is taken. A draft model ([`model`]) works for all sequences at once, and for those to which
//! no drafter offers anything.
//!
//! | file | drafts are |
//! |---|---|
//! | `structured/` | what a grammar leaves no choice of ("fast-forward") |
//! | `prediction.rs` | what the caller expects to come |
//! | `ngram.rs` | what came before after the same tokens |
//! | `model.rs` | what a smaller model would say |
//!
//! # Length
//! A draft that is likely to be accepted is worth a row, others are not: [`length`] weighs how often the drafts of a
//! sequence were accepted lately ([`acceptance`]) against what steps of so many rows took ([`cost`]).
//!
//! # A new source
//! One file with a [`Drafter`], one line in the table above, and the place in [`Drafts::new`] that gives it to a
//! sequence.

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

/// The share of a draft model's tokens that is accepted, before any was tried.
const MODEL_EXPECTED: f64 = 0.7;
/// Likewise of what a grammar forces: the bytes are sure, which tokens the model writes them with is not.
const GRAMMAR_EXPECTED: f64 = 0.8;

/// A source of drafts for one sequence.
pub(crate) trait Drafter: Debug + Send {
    /// Appends up to `most` tokens to `drafts` that may follow `tokens`, prompt and continuation; none if it has no
    /// idea. The tokens only ever grow from call to call; a step that is cancelled asks twice.
    fn draft(&mut self, tokens: &[u32], most: usize, drafts: &mut Vec<u32>);

    /// The share of its tokens that is accepted, as far as can be said before any was tried.
    fn expected(&self) -> f64;
}

/// A source and how it fares.
#[derive(Debug)]
struct Source {
    origin: Origin,
    acceptance: Acceptance,
}

/// Who makes the drafts of a source.
#[derive(Debug)]
enum Origin {
    /// The sequence's grammar.
    Grammar,
    /// A source of its own.
    Own(Box<dyn Drafter>),
    /// The draft model.
    Model,
}

/// A sequence's sources, and its drafts for the next step.
#[derive(Debug, Default)]
pub(crate) struct Drafts {
    /// By preference.
    sources: Vec<Source>,
    /// The source of `tokens`.
    from: usize,
    tokens: Vec<u32>,
}

impl Drafts {
    /// The sources of a sequence with such a prompt and prediction, and with or without a grammar.
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
            acceptance: Acceptance::new(drafter.expected()),
            origin: Origin::Own(drafter),
        };
        let grammar =
            grammar.then(|| Source { origin: Origin::Grammar, acceptance: Acceptance::new(GRAMMAR_EXPECTED) });
        let model = model.then(|| Source { origin: Origin::Model, acceptance: Acceptance::new(MODEL_EXPECTED) });
        let sources = grammar.into_iter().chain(drafters.into_iter().map(source)).chain(model);
        Self { sources: sources.collect(), ..Self::default() }
    }

    /// Drafts of the next step.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Forgets them.
    pub fn clear(&mut self) {
        self.tokens.clear();
    }

    /// Keeps the first ones.
    pub fn truncate(&mut self, count: usize) {
        self.tokens.truncate(count);
    }

    /// Adds one.
    fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Asks the sources for up to `most` tokens after these that the grammar allows, where there is one. Where none but
    /// the model is left, it is to be asked.
    fn look_up(&mut self, tokens: &[u32], most: usize, mut constraint: Option<&mut Constraint>) {
        for (from, source) in self.sources.iter_mut().enumerate() {
            self.from = from;
            match (&mut source.origin, &mut constraint) {
                (Origin::Grammar, Some(constraint)) => self.tokens = constraint.forced(most),
                (Origin::Own(drafter), _) => drafter.draft(tokens, most, &mut self.tokens),
                (Origin::Grammar | Origin::Model, _) => {}
            }
            self.tokens.truncate(most);
            if let (Origin::Own(_), Some(constraint)) = (&source.origin, &mut constraint) {
                self.tokens.truncate(constraint.admitted(&self.tokens));
            }
            if !self.tokens.is_empty() {
                return;
            }
        }
    }

    /// Whether they are the draft model's, those there are or are to be.
    fn are_from_model(&self) -> bool {
        self.sources.get(self.from).is_some_and(|source| matches!(source.origin, Origin::Model))
    }

    /// How the source of the drafts fares.
    fn acceptance(&mut self) -> Option<&mut Acceptance> {
        self.sources.get_mut(self.from).map(|source| &mut source.acceptance)
    }

    /// Takes note that the first so many were accepted; they are done with.
    pub fn verified(&mut self, accepted: usize) {
        let drafted = self.tokens.len();
        if let Some(acceptance) = self.acceptance().filter(|_| drafted > 0) {
            acceptance.record(drafted, accepted);
        }
        self.clear();
    }
}
