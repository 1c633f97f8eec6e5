//! [`TokenRows`]: rows of the embedding that a worker looks up for the first stage.

use std::ops::Range;
use std::sync::Arc;

use super::step::{StepError, number};
use crate::layer::read_rows;
use crate::weights::Weights;

/// A worker's rows of the embedding's matrix, which a thread reads while the worker computes: a look-up must not wait for a
/// batch, since the first stage would be idle meanwhile, and then the others.
pub(super) struct TokenRows {
    weights: Arc<Weights>,
    /// Tokens whose rows these are.
    own: Range<usize>,
    /// Numbers of a row.
    width: usize,
}

impl TokenRows {
    /// Takes the rows of tokens `own` from the matrix of the embedding, which has no others.
    pub fn new(weights: Arc<Weights>, own: Range<usize>, width: usize) -> Self {
        Self { weights, own, width }
    }

    /// Returns the rows of tokens, `[tokens, embedding_width]`.
    ///
    /// # Errors
    /// [`StepError::Number`] for a token whose row is not here.
    pub fn read(&self, tokens: &[u32]) -> Result<Vec<f32>, StepError> {
        let Self { weights, own, width } = self;
        if let Some((i, token)) = tokens.iter().enumerate().find(|(_, token)| !own.contains(&(**token as usize))) {
            let limit = format!("in {}..{}, the rows of this worker", own.start, own.end);
            return Err(number(&format!("tokens[{i}]"), *token as usize, &limit));
        }
        let mut rows = vec![0.0; tokens.len() * width];
        if !tokens.is_empty() {
            let table = weights.embedding.as_ref().and_then(|embedding| embedding.tokens.as_ref());
            let table = table.expect("a worker that owns tokens has their rows");
            read_rows(table, tokens.iter().map(|token| token - own.start as u32), &mut rows);
        }
        Ok(rows)
    }
}
