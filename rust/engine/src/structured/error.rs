//! Errors of structured outputs.

/// Reason why a structured output constraint cannot be compiled. The request is not queued.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The source is too long.
    #[error("{field} has {bytes} bytes; the limit is {limit}")]
    TooLong {
        /// The parameter's name.
        field: &'static str,
        /// Bytes given.
        bytes: usize,
        /// Maximum bytes.
        limit: usize,
    },
    /// The source is nested too deeply for a recursive parser.
    #[error("{field} must be nested at most {limit} levels deep")]
    TooDeep {
        /// The parameter's name.
        field: &'static str,
        /// Maximum nesting depth.
        limit: usize,
    },
    /// A list is empty or too long.
    #[error("{field} must have 1 to {limit} items, got {count}")]
    Count {
        /// The parameter's name.
        field: &'static str,
        /// Number of items given.
        count: usize,
        /// Maximum number of items.
        limit: usize,
    },
    /// Compilation took too long.
    #[error("{field} is too complex: compilation exceeded the time limit of {limit_seconds} seconds")]
    TimeLimit {
        /// The parameter's name.
        field: &'static str,
        /// Time limit in seconds.
        limit_seconds: u64,
    },
    /// Too many overdue compilations are still running.
    #[error("{field} was not compiled: {limit} overdue compilations are still running; try again later")]
    Busy {
        /// The parameter's name.
        field: &'static str,
        /// Maximum number of overdue compilations.
        limit: usize,
    },
    /// The source is malformed, unsatisfiable, uses an unsupported keyword, or exceeds the compiler's limits.
    #[error("{field} cannot be compiled: {reason} (given: {given})")]
    Refused {
        /// The parameter's name.
        field: &'static str,
        /// The source, truncated.
        given: String,
        /// The compiler's message.
        reason: String,
    },
    /// The description is not valid JSON or has unknown fields.
    #[error("structured_outputs: {0}")]
    Malformed(String),
}

/// Reason why tokens cannot form a vocabulary.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VocabularyError {
    /// The vocabulary is larger than token masks support.
    #[error("structured output supports vocabularies of at most {limit} tokens, got {tokens}")]
    TooLarge {
        /// Number of tokens.
        tokens: usize,
        /// Maximum number of tokens.
        limit: usize,
    },
    /// The tokens cannot form a trie.
    #[error("the tokenizer's vocabulary is not supported by structured output: {0}")]
    Unusable(String),
}

/// Reason why a sequence cannot continue within its grammar. Other requests are not affected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// The mask exceeded a limit of work, or the matcher failed.
    #[error("structured_outputs: after {tokens} output tokens: {reason}")]
    Matcher {
        /// Number of output tokens.
        tokens: usize,
        /// The matcher's message.
        reason: String,
    },
    /// No token of the vocabulary continues the grammar.
    #[error("structured_outputs: after {tokens} output tokens: no token of the vocabulary continues the grammar")]
    NothingAllowed {
        /// Number of output tokens.
        tokens: usize,
    },
}
