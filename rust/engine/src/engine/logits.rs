//! The logits of every token of a sequence, for evaluation (perplexity, log-likelihood tasks).

use ferrule_kernels::Cancel;
use ferrule_model::{Adapter, LanguageModel, LogitRows};

use super::Engine;
use crate::request::prompt_from_ids;
use crate::{EngineError, RequestError};

impl<M: LanguageModel> Engine<M> {
    /// Computes the logits `[tokens - first, vocab]` after each token of a sequence from position `first` on, with or
    /// without an adapter. Running requests are not affected, except that the lowest-ranked may be preempted to free
    /// pages.
    ///
    /// # Errors
    /// Returns [`EngineError::Request`] if the sequence is empty, too long, contains an id outside the vocabulary, or
    /// has no token at `first`; [`EngineError::OutOfMemory`] if the result does not fit into memory;
    /// [`EngineError::Cancelled`]; [`EngineError::Dead`].
    pub fn logits(
        &mut self,
        token_ids: &[i64],
        first: usize,
        adapter: Option<&Adapter>,
        cancel: &Cancel,
    ) -> Result<Vec<f32>, EngineError> {
        self.check_alive()?;
        self.check_generates()?;
        let tokens = self.tokens_to_evaluate(token_ids)?;
        let rows = tokens.len().checked_sub(first).filter(|rows| *rows > 0);
        let rows = rows.ok_or(RequestError::NoTokenAt { first, tokens: tokens.len() })?;
        let mut result = self.allocate_result(rows, rows.saturating_mul(self.model.vocab_size()))?;
        let tables = self.scheduler.kv_cache.private_tables();
        self.with_tables(tables, cancel, |engine, tables| {
            let mut computed = 0;
            while computed < tokens.len() {
                let (end, wanted) =
                    if computed < first { (first, LogitRows::None) } else { (tokens.len(), LogitRows::All) };
                computed += engine.compute_chunk(tables, &tokens, computed..end, wanted, adapter, cancel)?;
                result.extend_from_slice(&engine.logits);
            }
            Ok(result)
        })
    }

    fn tokens_to_evaluate(&self, token_ids: &[i64]) -> Result<Vec<u32>, RequestError> {
        self.limits.check(token_ids.len(), 0)?;
        prompt_from_ids(token_ids, self.model.vocab_size())
    }
}
