//! Structured output: only tokens that keep to a JSON schema, a regular expression, a grammar or a list of choices.
//!
//! A [`Vocabulary`] knows the bytes of the model's tokens, which is all that is known of text down here. It compiles
//! what a request asks for, once, into a [`Grammar`]; each sequence that has one walks through it with a matcher of its
//! own, its `Constraint`. Before a token is sampled that gives the mask of those that may come next (`TokenMask`), and
//! afterwards it is told which one did. Grammars and masks are the work of the `llguidance` crate
//! (<https://github.com/guidance-ai/llguidance>); the limits, and what happens when one is hit, are ours.
//!
//! # What a request gets depends on the request alone
//! A mask depends on the grammar and the tokens so far. Every limit counts work, never time, and each sequence has
//! lexer tables of its own, so that no neighbour uses up what they may hold. A sequence that is computed again keeps
//! its matcher: the tokens are the same.
//!
//! # Which tokens end it
//! The grammar alone says where the output may end: a stop id may be sampled there and nowhere else. Where nothing
//! else could follow, the request ends at once, without one.

mod beside;
mod constraint;
mod error;
mod grammar;
mod lark;
mod limits;
mod mask;
mod schema;
mod size;
mod vocabulary;

#[cfg(test)]
mod tests;

pub(crate) use beside::beside;
pub(crate) use constraint::{Constraint, Next};
pub use error::{ConstraintError, GrammarError, VocabularyError};
pub use grammar::{Grammar, StructuredOutputs, Whitespace};
pub use mask::TokenMask;
pub use vocabulary::{Token, Vocabulary};
