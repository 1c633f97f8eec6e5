//! Errors of the engine as a whole; [`crate::RequestError`] is the error of one request.

/// Reason that an engine could not be constructed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A limit is zero, so that nothing could be computed.
    #[error("{field} must be >= 1, got 0")]
    Zero {
        /// Name of the option.
        field: &'static str,
    },
    /// The number of page pools differs from the number of the model's layer groups.
    #[error("the number of KV page pools must be {expected}, the layer groups of the model, got {given}")]
    PoolCount {
        /// Number of layer groups of the model.
        expected: usize,
        /// Number of pools in the configuration.
        given: usize,
    },
    /// A page pool is too large: page numbers have 32 bits, and the largest stands for "no page".
    #[error("a KV page pool must have at most {limit} pages, got {pages}")]
    PoolTooLarge {
        /// Number of pages in the configuration.
        pages: usize,
        /// Maximum number of pages.
        limit: usize,
    },
    /// The KV cache does not hold a single useful sequence.
    #[error("kv_cache_memory must be >= {needed}, the bytes that one sequence needs, got {budget}")]
    KvBudget {
        /// Bytes of the KV cache.
        budget: u64,
        /// Bytes of the smallest useful KV cache.
        needed: u64,
    },
    /// The draft model has another vocabulary.
    #[error(
        "speculative_config.model must be a model with the vocabulary of {expected} tokens, got one of {given} tokens"
    )]
    DraftVocab {
        /// Number of tokens of the model.
        expected: usize,
        /// Number of tokens of the draft model.
        given: usize,
    },
    /// The draft model does not generate text.
    #[error("speculative_config.model must be a model that generates text, got an encoder")]
    DraftNoLogits,
    /// The model reads in both directions, so that texts cannot share the KV cache of a prefix.
    #[error("prefix_cache_dir must be absent for a model that reads in both directions, got a directory")]
    NoPrefixes,
    /// The KV cache is in the processes of a pipeline.
    #[error("prefix_cache_dir must be absent with pipeline or tensor parallelism, got a directory")]
    RemotePages,
    /// The prefix cache directory cannot be used.
    #[error("prefix_cache_dir: {0}")]
    PrefixCacheDir(#[from] crate::DiskCacheError),
}

/// Reason that a call of the engine failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The cancel flag was set. Nothing is lost: the next step computes the same again.
    #[error("cancelled")]
    Cancelled,
    /// A failure ended the engine, in this call or in an earlier one, which reported it to every request.
    #[error("the engine is dead: {0}")]
    Dead(crate::EngineFailure),
    /// A sequence to evaluate is invalid.
    #[error(transparent)]
    Request(#[from] crate::RequestError),
    /// A text to encode, or its task, is invalid.
    #[error(transparent)]
    Encode(#[from] crate::EncodeError),
    /// A saved state cannot be restored.
    #[error(transparent)]
    State(#[from] crate::StateError),
    /// The KV cache is in the processes of a pipeline, so that states cannot be saved or restored.
    #[error("saving and restoring states is not supported with pipeline or tensor parallelism")]
    RemotePages,
    /// Prefix caching is disabled, so that a state cannot be restored.
    #[error("enable_prefix_caching must be true to restore a saved state, got false")]
    NoPrefixCache,
    /// The result does not fit into memory.
    #[error("the result for {tokens} tokens needs {bytes} bytes, which could not be allocated")]
    OutOfMemory {
        /// Number of tokens in the input.
        tokens: usize,
        /// Bytes of the result.
        bytes: u64,
    },
}
