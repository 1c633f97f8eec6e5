//! Work that runs between steps and does not enter the request queue: evaluation, encoding, saved states.
//!
//! Batches in flight are finished first; the next step returns their outputs. The work allocates its own pages. If no
//! page is free, the lowest-ranked running request is preempted.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ferrule_kernels::{Cancel, machine};
use ferrule_model::{Adapter, Batch, ForwardError, LanguageModel, LogitRows, SequenceChunk};

use super::Engine;
use super::failure::panic_message;
use crate::pages::PageTables;
use crate::{EngineError, EngineFailure};

impl<M: LanguageModel> Engine<M> {
    /// Allocates the result of an operation on `tokens` tokens: room for `numbers` floats.
    pub(crate) fn allocate_result(&self, tokens: usize, numbers: usize) -> Result<Vec<f32>, EngineError> {
        let mut result = Vec::new();
        let bytes = (numbers as u64).saturating_mul(4);
        // Overcommit grants more memory than there is, so compare with the available memory first.
        if bytes > machine::available_memory() || result.try_reserve_exact(numbers).is_err() {
            return Err(EngineError::OutOfMemory { tokens, bytes });
        }
        Ok(result)
    }

    /// Runs `work` between steps with the given page tables, and releases their pages.
    pub(crate) fn with_tables<T>(
        &mut self,
        mut tables: PageTables,
        cancel: &Cancel,
        work: impl FnOnce(&mut Self, &mut PageTables) -> Result<T, ForwardError>,
    ) -> Result<T, EngineError> {
        self.run_between_steps(cancel, |engine| {
            let outcome = work(engine, &mut tables);
            engine.scheduler.kv_cache.release(&mut tables);
            outcome
        })
    }

    /// Runs `work` between steps. A panic or a lost pipeline stage ends the engine.
    pub(crate) fn run_between_steps<T>(
        &mut self,
        cancel: &Cancel,
        work: impl FnOnce(&mut Self) -> Result<T, ForwardError>,
    ) -> Result<T, EngineError> {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.finish_all(cancel).and_then(|()| work(self))))
            .unwrap_or_else(|panic| Err(ForwardError::Panicked(panic_message(panic.as_ref()))));
        match outcome.map_err(EngineFailure::of) {
            Err(Some(failure)) => {
                self.mark_dead(failure.clone());
                Err(EngineError::Dead(failure))
            }
            other => {
                self.publish();
                other.map_err(|_| EngineError::Cancelled)
            }
        }
    }

    /// Computes as many of the first tokens of `range` as one step allows and returns how many. The logits are left in
    /// `self.logits`.
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
        self.scheduler.kv_cache.release_out_of_window(tables, range.start);
        let count = loop {
            match self.scheduler.kv_cache.allocatable_slots(tables, range.start, wanted) {
                0 => {
                    assert!(self.scheduler.preempt_last(), "an admitted sequence does not fit into the empty KV cache")
                }
                count => break count,
            }
        };
        let mut moves = Vec::new();
        self.scheduler.kv_cache.allocate_slots(tables, range.start, count, &mut moves);
        assert!(moves.is_empty(), "a page that is not full is never shared");
        let reserved = self.scheduler.reserved(self.scheduler.running.iter());
        self.scheduler.kv_cache.allocate_snapshots(tables, range.start, range.start + count, &reserved);
        let chunk = SequenceChunk {
            tokens: &tokens[range.start..][..count],
            first_position: range.start,
            prompt_len: tokens.len(),
            pages: tables.tables(),
            token_types: &[],
            features: &[],
            logits,
            adapter,
        };
        self.model.forward(Batch { sequences: &[chunk] }, cancel, &mut self.logits)?;
        let end = range.start + count;
        self.scheduler.kv_cache.keep_states(tables, range.start, end, end);
        Ok(count)
    }
}
