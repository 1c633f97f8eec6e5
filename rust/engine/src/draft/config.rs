//! Options of speculative decoding.

/// Options of speculative decoding: the source of drafts and their number.
///
/// # Examples
/// ```
/// use ferrule_engine::{SpeculativeConfig, SpeculativeMethod};
///
/// // Prompt lookup with n-grams of 2 to 4 tokens, at most 7 drafts per step.
/// let config = SpeculativeConfig {
///     method: Some(SpeculativeMethod::Ngram { shortest: 2, longest: 4 }),
///     num_speculative_tokens: 7,
///     ..SpeculativeConfig::default()
/// };
/// assert!(config.adaptive);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpeculativeConfig {
    /// Source of drafts, besides the predicted outputs of requests.
    pub method: Option<SpeculativeMethod>,
    /// Maximum number of draft tokens per sequence and step. 0 disables speculative decoding, including predicted
    /// outputs.
    pub num_speculative_tokens: usize,
    /// Whether the number adapts to the acceptance rate and the cost of a step. Outputs do not depend on it.
    pub adaptive: bool,
}

/// Source of drafts for every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpeculativeMethod {
    /// Prompt lookup: drafts the tokens that followed an earlier occurrence of the latest n-gram.
    Ngram {
        /// Minimum n-gram length.
        shortest: usize,
        /// Maximum n-gram length.
        longest: usize,
    },
}

/// One row plus 15 drafts are 16 rows, the most that the small-batch matmul kernels take.
const MAX_DRAFTS: usize = 15;

impl Default for SpeculativeConfig {
    /// Drafts from predicted outputs only.
    fn default() -> Self {
        Self { method: None, num_speculative_tokens: MAX_DRAFTS, adaptive: true }
    }
}
