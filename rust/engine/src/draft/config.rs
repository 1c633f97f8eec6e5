//! What an engine guesses by.

/// How drafts are made, and how many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpeculativeConfig {
    /// Where drafts come from beside the predictions that requests bring along.
    pub method: Option<SpeculativeMethod>,
    /// Drafts of a sequence in a step, at the most. With 0 nothing is guessed, predictions included.
    pub num_speculative_tokens: usize,
    /// Whether there are fewer where they are not worth their rows. What a request gets does not depend on it.
    pub adaptive: bool,
}

/// A source of drafts for every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpeculativeMethod {
    /// What followed the latest tokens where they stood before: as many of them as are found, within these bounds.
    Ngram {
        /// Tokens that must be the same, at least.
        shortest: usize,
        /// Tokens that are compared, at the most.
        longest: usize,
    },
}

/// Sixteen rows are the most that the matmuls of few rows take.
const MOST_DRAFTS: usize = 15;

impl Default for SpeculativeConfig {
    /// Predictions alone.
    fn default() -> Self {
        Self { method: None, num_speculative_tokens: MOST_DRAFTS, adaptive: true }
    }
}
