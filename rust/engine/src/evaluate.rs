//! Work on one sequence outside the queue, in the pages that the others leave: the logits of every token, for evaluation.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ferrule_kernels::{Cancel, machine};
use ferrule_model::{Adapter, Batch, ForwardError, LanguageModel, LogitRows, SequenceChunk};

use crate::engine::{Engine, panic_message};
use crate::pages::PageTables;
use crate::request::prompt_from_ids;
use crate::{EngineError, RequestError};

impl<M: LanguageModel> Engine<M> {
    /// The logits `[tokens - first, vocab]` that follow each token of a sequence from the one at `first` on, with an
    /// adapter or without. The requests under way lose nothing by it; the last of them in rank are computed again if it
    /// needs their pages.
    ///
    /// # Errors
    /// [`EngineError::Request`] if the sequence is empty, too long, not of the model's tokens, or has no token at `first`;
    /// [`EngineError::OutOfMemory`] if the result does not fit; [`EngineError::Cancelled`], [`EngineError::Dead`].
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
        let mut result = self.room_for(rows, rows.saturating_mul(self.model.vocab_size()))?;
        let tables = self.scheduler.pages.private_tables();
        self.with_tables(tables, |engine, tables| {
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

    /// Room for so many numbers, which are asked for of so many tokens.
    pub(crate) fn room_for(&self, tokens: usize, numbers: usize) -> Result<Vec<f32>, EngineError> {
        let mut result = Vec::new();
        let bytes = (numbers as u64).saturating_mul(4);
        // Systems promise more memory than they have; ask before the promise is called in.
        if bytes > machine::available_memory() || result.try_reserve_exact(numbers).is_err() {
            return Err(EngineError::OutOfMemory { tokens, bytes });
        }
        Ok(result)
    }

    /// Does something with a sequence of its own, and gives its pages back.
    pub(crate) fn with_tables<T>(
        &mut self,
        mut tables: PageTables,
        work: impl FnOnce(&mut Self, &mut PageTables) -> Result<T, ForwardError>,
    ) -> Result<T, EngineError> {
        self.outside_the_queue(|engine| {
            let outcome = work(engine, &mut tables);
            engine.scheduler.pages.release(&mut tables);
            outcome
        })
    }

    /// Does something that no request waits for. A panic ends the engine.
    pub(crate) fn outside_the_queue<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, ForwardError>,
    ) -> Result<T, EngineError> {
        let outcome = catch_unwind(AssertUnwindSafe(|| work(self)))
            .unwrap_or_else(|panic| Err(ForwardError::Panicked(panic_message(panic.as_ref()))));
        if let Err(ForwardError::Panicked(reason)) = outcome {
            self.die(reason.clone());
            return Err(EngineError::Dead { reason });
        }
        self.publish();
        outcome.map_err(|_| EngineError::Cancelled)
    }

    /// Computes the first tokens of a range, as many as a step allows; how many. Their logits are the latest ones.
    pub(crate) fn compute_chunk(
        &mut self,
        tables: &mut PageTables,
        tokens: &[u32],
        range: Range<usize>,
        logits: LogitRows,
        adapter: Option<&Adapter>,
        cancel: &Cancel,
    ) -> Result<usize, ForwardError> {
        let wanted = range.len().min(self.config.max_num_batched_tokens);
        self.scheduler.pages.release_passed(tables, range.start);
        let count = loop {
            match self.scheduler.pages.fits(tables, range.start, wanted) {
                0 => {
                    assert!(self.scheduler.preempt_last(), "all pages together do not hold a sequence that they should")
                }
                count => break count,
            }
        };
        let mut moves = Vec::new();
        self.scheduler.pages.extend(tables, range.start, count, &mut moves);
        assert!(moves.is_empty(), "nobody shares a page that is still to be filled");
        let chunk = SequenceChunk {
            tokens: &tokens[range.start..][..count],
            first_position: range.start,
            prompt_len: tokens.len(),
            pages: tables.tables(),
            token_types: &[],
            logits,
            adapter,
        };
        self.model.forward(Batch { sequences: &[chunk] }, cancel, &mut self.logits)?;
        Ok(count)
    }
}
