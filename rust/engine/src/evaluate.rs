//! The logits of every token of a sequence, for evaluation: outside the queue, in the pages that the others leave.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ferrule_kernels::{Cancel, machine};
use ferrule_model::{Batch, ForwardError, LanguageModel, LogitRows, SequenceChunk};

use crate::engine::{Engine, panic_message};
use crate::pages::PageTables;
use crate::request::prompt_from_ids;
use crate::{EngineError, RequestError};

impl<M: LanguageModel> Engine<M> {
    /// The logits `[tokens, vocab]` that follow each token of a sequence. The requests under way lose nothing by it;
    /// the youngest of them are computed again if it needs their pages.
    ///
    /// # Errors
    /// [`EngineError::Request`] if the sequence is empty, too long or not of the model's tokens;
    /// [`EngineError::OutOfMemory`] if the result does not fit; [`EngineError::Cancelled`], [`EngineError::Dead`].
    pub fn logits(&mut self, token_ids: &[i64], cancel: &Cancel) -> Result<Vec<f32>, EngineError> {
        self.check_alive()?;
        let tokens = self.tokens_to_evaluate(token_ids)?;
        let mut result = self.room_for_logits(tokens.len())?;
        let mut tables = self.scheduler.pages.private_tables();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.evaluate(&tokens, &mut tables, cancel, &mut result)))
            .unwrap_or_else(|panic| Err(ForwardError::Panicked(panic_message(panic.as_ref()))));
        match outcome {
            Err(ForwardError::Panicked(reason)) => {
                self.die(reason.clone());
                Err(EngineError::Dead { reason })
            }
            Ok(()) => {
                self.scheduler.pages.release(&mut tables);
                Ok(result)
            }
            Err(ForwardError::Cancelled) => {
                self.scheduler.pages.release(&mut tables);
                Err(EngineError::Cancelled)
            }
        }
    }

    fn tokens_to_evaluate(&self, token_ids: &[i64]) -> Result<Vec<u32>, RequestError> {
        self.limits.check(token_ids.len(), 0)?;
        prompt_from_ids(token_ids, self.model.vocab_size())
    }

    fn room_for_logits(&self, tokens: usize) -> Result<Vec<f32>, EngineError> {
        let mut result = Vec::new();
        let numbers = tokens.saturating_mul(self.model.vocab_size());
        let bytes = (numbers as u64).saturating_mul(4);
        // Systems promise more memory than they have; ask before the promise is called in.
        if bytes > machine::available_memory() || result.try_reserve_exact(numbers).is_err() {
            return Err(EngineError::OutOfMemory { tokens, bytes });
        }
        Ok(result)
    }

    fn evaluate(
        &mut self,
        tokens: &[u32],
        tables: &mut PageTables,
        cancel: &Cancel,
        result: &mut Vec<f32>,
    ) -> Result<(), ForwardError> {
        let mut logits = Vec::new();
        let mut computed = 0;
        while computed < tokens.len() {
            let wanted = (tokens.len() - computed).min(self.config.max_num_batched_tokens);
            let pages = &mut self.scheduler.pages;
            pages.release_passed(tables, computed);
            let count = pages.fits(tables, computed, wanted);
            if count == 0 {
                assert!(self.scheduler.preempt_last(), "all pages together do not hold a sequence that they should");
                continue;
            }
            pages.extend(tables, computed, count, &mut Vec::new());
            let chunk = SequenceChunk {
                tokens: &tokens[computed..][..count],
                first_position: computed,
                prompt_len: tokens.len(),
                pages: tables.tables(),
                logits: LogitRows::All,
            };
            self.model.forward(Batch { sequences: &[chunk] }, cancel, &mut logits)?;
            result.extend_from_slice(&logits);
            computed += count;
        }
        Ok(())
    }
}
