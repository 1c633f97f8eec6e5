//! Why a grammar was refused, and why a request with one ended.

/// Why what a request asked for gives no grammar. It was never queued.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// Longer than anyone means.
    #[error("{field} has {bytes} bytes; the limit is {limit}")]
    TooLong {
        /// The parameter's name.
        field: &'static str,
        /// What was given.
        bytes: usize,
        /// What is allowed.
        limit: usize,
    },
    /// Brackets within brackets: whatever reads these calls itself for each.
    #[error("{field} is nested more than {limit} levels deep: the limit is {limit}")]
    TooDeep {
        /// The parameter's name.
        field: &'static str,
        /// Levels allowed.
        limit: usize,
    },
    /// A list that is empty or too long.
    #[error("{field} has {count} items; there must be 1 to {limit}")]
    Count {
        /// The parameter's name.
        field: &'static str,
        /// Items given.
        count: usize,
        /// Items allowed.
        limit: usize,
    },
    /// It took too long to compile.
    #[error("{field} is too complex: it was not compiled within the limit of {limit_seconds} seconds")]
    TimeLimit {
        /// The parameter's name.
        field: &'static str,
        /// The limit.
        limit_seconds: u64,
    },
    /// As many as may are being compiled, none of them within its time.
    #[error("{field} was not compiled: {limit} others that are too complex still are; try again later")]
    Busy {
        /// The parameter's name.
        field: &'static str,
        /// How many may be.
        limit: usize,
    },
    /// It is malformed, nothing satisfies it, it has a keyword that is not supported, or it is larger than the
    /// compiler's limits.
    #[error("{field} cannot be followed: {reason} (given: {given})")]
    Refused {
        /// The parameter's name.
        field: &'static str,
        /// What was given, shortened.
        given: String,
        /// What the compiler said.
        reason: String,
    },
    /// Not a description of a structure.
    #[error("structured_outputs: {0}")]
    Malformed(String),
}

/// Why tokens give no vocabulary.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VocabularyError {
    /// Masks could not name the last ones.
    #[error("a vocabulary of {tokens} tokens is larger than structured output allows: the limit is {limit}")]
    TooLarge {
        /// Tokens given.
        tokens: usize,
        /// Tokens allowed.
        limit: usize,
    },
    /// Their bytes cannot be made a tree of.
    #[error("the tokenizer's tokens cannot be used for structured output: {0}")]
    Unusable(String),
}

/// Why a sequence cannot go on within its grammar. Only its request is concerned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// The mask took more work than it may, or the matcher has a defect.
    #[error("structured_outputs: after {tokens} tokens of output, {reason}")]
    Matcher {
        /// Tokens sampled before.
        tokens: usize,
        /// What the matcher said.
        reason: String,
    },
    /// No token of the model goes on where the grammar must.
    #[error("structured_outputs: after {tokens} tokens of output, no token of the model continues as the grammar must")]
    NothingAllowed {
        /// Tokens sampled before.
        tokens: usize,
    },
}
