//! Structured output: restricts sampling to tokens that match a JSON schema, a regular expression, a grammar or a list
//! of choices.
//!
//! A [`Vocabulary`] holds the bytes of the model's tokens, the only text at this level. It compiles a constraint once
//! into a [`Grammar`]; each sequence has its own matcher, a `Constraint`, which yields the mask of allowed tokens
//! (`TokenMask`) before each token is sampled and then consumes the token. Grammars and masks are computed by the
//! `llguidance` crate (<https://github.com/guidance-ai/llguidance>); the limits and their errors are implemented here.
//!
//! # Determinism
//! A mask depends on the grammar and the tokens so far. All limits count work instead of time, and each sequence has
//! its own lexer tables, so that other sequences do not use up their capacity. A preempted sequence keeps its matcher,
//! since its tokens stay the same.
//!
//! # Stop tokens
//! The grammar decides where the output may end: a stop token can be sampled there and nowhere else. If nothing else
//! can follow, the request finishes at once, without a stop token.

mod constraint;
mod error;
mod grammar;
mod lark;
mod limits;
mod mask;
mod prepare;
mod schema;
mod size;
mod vocabulary;

#[cfg(test)]
mod tests;

pub(crate) use constraint::{Constraint, Next};
pub use error::{ConstraintError, GrammarError, VocabularyError};
pub use grammar::{Grammar, StructuredOutputs, Whitespace};
pub use mask::TokenMask;
pub(crate) use prepare::prepare_masks_during;
pub use vocabulary::{Token, Vocabulary};
