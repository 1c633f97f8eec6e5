//! Work that runs between steps and does not enter the request queue: evaluation, encoding, saved states.
//!
//! It uses pages of its own. If none are free, the lowest-ranked running request is preempted.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ferrule_kernels::{Cancel, machine};
use ferrule_model::{Adapter, Batch, ForwardError, LanguageModel, LogitRows, SequenceChunk};

use super::Engine;
use super::failure::panic_message;
use crate::EngineError;
use crate::pages::PageTables;

impl<M: LanguageModel> Engine<M> {
    /// Room for so many numbers, which are asked for of so many tokens.
    pub(crate) fn allocate_result(&self, tokens: usize, numbers: usize) -> Result<Vec<f32>, EngineError> {
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
        self.run_between_steps(|engine| {
            let outcome = work(engine, &mut tables);
            engine.scheduler.pages.release(&mut tables);
            outcome
        })
    }

    /// Does something that no request waits for. A panic ends the engine.
    pub(crate) fn run_between_steps<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, ForwardError>,
    ) -> Result<T, EngineError> {
        let outcome = catch_unwind(AssertUnwindSafe(|| work(self)))
            .unwrap_or_else(|panic| Err(ForwardError::Panicked(panic_message(panic.as_ref()))));
        if let Err(ForwardError::Panicked(reason)) = outcome {
            self.mark_dead(reason.clone());
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
        self.scheduler.pages.release_out_of_window(tables, range.start);
        let count = loop {
            match self.scheduler.pages.allocatable_slots(tables, range.start, wanted) {
                0 => {
                    assert!(self.scheduler.preempt_last(), "all pages together do not hold a sequence that they should")
                }
                count => break count,
            }
        };
        let mut moves = Vec::new();
        self.scheduler.pages.allocate_slots(tables, range.start, count, &mut moves);
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
