//! [`TokenRows`]: rows of the embedding that the last stage looks up for the first one.

use std::sync::Arc;

use super::step::{StepError, below};
use crate::layer::read_rows;
use crate::spec::ModelSpec;
use crate::weights::Weights;

/// Rows of the embedding's matrix, which a thread reads while the stage computes: a look-up must not wait for a batch,
/// since the first stage would be idle meanwhile, and then the last one.
pub(super) struct TokenRows {
    weights: Arc<Weights>,
    /// Number of rows, and of columns.
    sizes: [usize; 2],
}

impl TokenRows {
    /// Takes the matrix of the embedding from weights that have all of its rows.
    pub fn new(weights: Arc<Weights>, spec: &ModelSpec) -> Self {
        Self { weights, sizes: [spec.vocab_size, spec.embedding_width()] }
    }

    /// Returns the rows of tokens, `[tokens, embedding_width]`.
    ///
    /// # Errors
    /// [`StepError::Number`] for a token outside of the vocabulary.
    pub fn read(&self, tokens: &[u32]) -> Result<Vec<f32>, StepError> {
        let [vocab_size, width] = self.sizes;
        check_tokens(tokens, vocab_size)?;
        let table = self.weights.embedding().tokens.as_ref().expect("the stage has the matrix of the embedding");
        let mut rows = vec![0.0; tokens.len() * width];
        read_rows(table, tokens.iter().copied(), &mut rows);
        Ok(rows)
    }
}

/// Checks that tokens are below `limit`.
pub(super) fn check_tokens(tokens: &[u32], limit: usize) -> Result<(), StepError> {
    tokens.iter().enumerate().try_for_each(|(i, token)| below(&format!("tokens[{i}]"), *token as usize, limit))
}
