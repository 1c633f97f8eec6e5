//! What can go wrong with the engine as a whole; what is wrong with one request is a [`crate::RequestError`].

/// Why an engine could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A limit of zero: nothing could ever be computed.
    #[error("{field} must be at least 1, got 0")]
    Zero {
        /// The option's name.
        field: &'static str,
    },
    /// The model has other groups of layers than pages were given for.
    #[error("the model has {expected} groups of layers with KV pages, but sizes for {given} pools were given")]
    PoolCount {
        /// Groups of the model.
        expected: usize,
        /// Pools in the configuration.
        given: usize,
    },
    /// A page's number is 32 bits wide and the last one stands for "no page".
    #[error("a KV pool of {pages} pages is larger than the limit of {limit}")]
    PoolTooLarge {
        /// Pages asked for.
        pages: usize,
        /// The most there can be.
        limit: usize,
    },
    /// The memory for KV pages does not hold one sequence of any use.
    #[error("kv_cache_memory of {budget} bytes is too small: one sequence needs at least {needed} bytes")]
    KvBudget {
        /// Bytes that were granted.
        budget: u64,
        /// Bytes of the smallest useful pools.
        needed: u64,
    },
    /// Its tokens would mean something else.
    #[error(
        "speculative_config: the draft model has a vocabulary of {given} tokens, the model one of {expected}; they must \
         have the same"
    )]
    DraftVocab {
        /// Tokens of the model.
        expected: usize,
        /// Tokens of the draft model.
        given: usize,
    },
    /// It has nothing to say.
    #[error("speculative_config: the draft model gives no logits that a text could be continued by")]
    DraftNoLogits,
    /// Pages would be kept that nobody could share.
    #[error("prefix_cache_dir: the model reads in both directions, so that no text shares what is kept of another")]
    NoPrefixes,
    /// The directory for pages cannot be used.
    #[error("prefix_cache_dir: {0}")]
    PrefixCacheDir(#[from] crate::DiskCacheError),
}

/// Why a call of the engine gave nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The cancel flag was up. Nothing is lost: the next step computes the same again.
    #[error("cancelled")]
    Cancelled,
    /// A defect of ferrule ended the engine in an earlier call; every request of it was told.
    #[error("the engine is dead: {reason}")]
    Dead {
        /// What happened.
        reason: String,
    },
    /// A sequence given for evaluation is at fault.
    #[error(transparent)]
    Request(#[from] crate::RequestError),
    /// A text to be encoded, or what was asked of it, is at fault.
    #[error(transparent)]
    Encode(#[from] crate::EncodeError),
    /// A saved state cannot be restored.
    #[error(transparent)]
    State(#[from] crate::StateError),
    /// There is nothing that a state could be restored into.
    #[error("a state is restored into the prefix cache, which is off (enable_prefix_caching)")]
    NoPrefixCache,
    /// What was asked for does not fit into memory.
    #[error("what was asked for of {tokens} tokens needs {bytes} bytes, which could not be allocated")]
    OutOfMemory {
        /// Tokens given.
        tokens: usize,
        /// Bytes of the result.
        bytes: u64,
    },
}
