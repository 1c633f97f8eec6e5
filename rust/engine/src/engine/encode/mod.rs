//! Encodes texts between steps: embeddings, classifier scores, label logits, top log-probabilities.
//!
//! Texts are batched in order. The result of a text depends on that text alone, not on the batch or on chunking. A
//! bidirectional model computes each text in one forward pass, however long; a causal model is limited to the tokens of
//! one step and shares cached prefixes.

mod gather;
mod task;

use std::ops::Range;

use ferrule_kernels::Cancel;
use ferrule_model::{Batch, Capabilities, ClassifierInfo, ForwardError, LanguageModel, Pooling, SequenceChunk};

use super::Engine;
use crate::EngineError;
use crate::pages::{Namespace, PageTables};
use gather::{Gather, Gathered, normalize, truncate};
pub use task::{EncodeError, EncodeTask, Text};

/// Progress of one text.
struct EncodeProgress<'a> {
    text: &'a Text,
    tables: PageTables,
    computed: usize,
}

/// The part of a text that one forward pass computes.
struct TextChunk {
    /// Index of the text.
    index: usize,
    tokens: Range<usize>,
}

impl<M: LanguageModel> Engine<M> {
    /// Runs a task on each text and returns the results one after another. Running requests are not affected, except
    /// that the lowest-ranked may be preempted to free pages.
    ///
    /// # Errors
    /// Returns [`EngineError::Encode`] if the model does not support the task, or a text is empty, too long or contains
    /// an invalid id; [`EngineError::OutOfMemory`] if the result does not fit into memory; [`EngineError::Cancelled`];
    /// [`EngineError::Dead`].
    pub fn encode(&mut self, texts: &[Text], task: &EncodeTask, cancel: &Cancel) -> Result<Vec<f32>, EngineError> {
        self.check_alive()?;
        let (capabilities, vocab_size) = (self.model.capabilities(), self.model.vocab_size());
        task.check(vocab_size, &capabilities)?;
        let limits = self.limits;
        texts.iter().enumerate().try_for_each(|(i, text)| text.check(i, vocab_size, &capabilities, limits))?;
        let classified = capabilities.classifier.map_or(Pooling::Cls, |ClassifierInfo { pooling, .. }| pooling);
        let gather = Gather::of(task, classified);
        let width = if gather.reads_logits() { vocab_size } else { capabilities.hidden_size };
        let tokens: usize = texts.iter().map(|text| text.tokens.len()).sum();
        let numbers = texts.iter().map(|text| gather.numbers(text.tokens.len(), width)).sum();
        let mut gathered = Gathered::new(gather, self.allocate_result(tokens, numbers)?);

        let texts_in_progress =
            |text| EncodeProgress { text, tables: self.tables_of(text, &capabilities, gather), computed: 0 };
        let mut texts_in_progress: Vec<EncodeProgress<'_>> = texts.iter().map(texts_in_progress).collect();
        let result = self.run_between_steps(cancel, |engine| {
            let outcome = engine.gather(&mut texts_in_progress, &capabilities, &mut gathered, cancel);
            texts_in_progress.iter_mut().for_each(|one| engine.scheduler.kv_cache.release(&mut one.tables));
            match outcome? {
                Err(not_finite) => Ok(Err(not_finite)),
                Ok(()) => engine.finish(task, &capabilities, gathered.numbers, cancel).map(Ok),
            }
        });
        Ok(result??)
    }

    /// Returns page tables that share cached prefixes if only the last row of the text is read, and private tables
    /// otherwise. Cached pages are looked up by token ids, not by token types or features.
    fn tables_of(&self, text: &Text, capabilities: &Capabilities, gather: Gather<'_>) -> PageTables {
        if !capabilities.causal || !gather.is_last() || !text.token_types.is_empty() || !text.features.is_empty() {
            return self.scheduler.kv_cache.private_tables();
        }
        let namespace = Namespace::new(text.cache_salt.clone(), None);
        self.scheduler.kv_cache.tables(namespace, self.model.shareable_tokens(text.tokens.len()))
    }

    /// Computes the texts and gathers the rows that the task needs.
    fn gather(
        &mut self,
        texts_in_progress: &mut [EncodeProgress<'_>],
        capabilities: &Capabilities,
        gathered: &mut Gathered<'_>,
        cancel: &Cancel,
    ) -> Result<Result<(), EncodeError>, ForwardError> {
        let mut first = 0;
        while first < texts_in_progress.len() {
            let chunks = self.plan_texts(texts_in_progress, first, capabilities.causal);
            self.compute_texts(texts_in_progress, &chunks, gathered.gather, cancel)?;
            for TextChunk { index, tokens } in &chunks {
                if tokens.end == texts_in_progress[*index].text.tokens.len() {
                    first = index + 1;
                }
            }
            if let Err(not_finite) = self.take_rows(texts_in_progress, &chunks, gathered) {
                return Ok(Err(not_finite));
            }
        }
        Ok(Ok(()))
    }

    /// Selects the chunks of the next forward pass, from text `first` on, and allocates their pages. All chunks except
    /// the last reach the end of their text.
    fn plan_texts(
        &mut self,
        texts_in_progress: &mut [EncodeProgress<'_>],
        first: usize,
        causal: bool,
    ) -> Vec<TextChunk> {
        let mut chunks = Vec::new();
        let mut left = self.config.max_num_batched_tokens;
        let max_chunks = self.config.max_num_seqs.min(left);
        for (index, EncodeProgress { text, tables, computed }) in texts_in_progress.iter_mut().enumerate().skip(first) {
            let pages = &mut self.scheduler.kv_cache;
            *computed = pages.reuse(tables, &text.tokens, *computed, text.tokens.len() - 1);
            pages.release_out_of_window(tables, *computed);
            let pending = text.tokens.len() - *computed;
            if !causal && pending > left && !chunks.is_empty() {
                break;
            }
            let wanted = if causal { pending.min(left) } else { pending };
            let is_enough = |count| if causal { count > 0 } else { count == wanted };
            let mut count = pages.allocatable_slots(tables, *computed, wanted);
            while !is_enough(count) && chunks.is_empty() {
                assert!(self.scheduler.preempt_last(), "an admitted text does not fit into the empty KV cache");
                count = self.scheduler.kv_cache.allocatable_slots(tables, *computed, wanted);
            }
            if !is_enough(count) {
                break;
            }
            let mut moves = Vec::new();
            self.scheduler.kv_cache.allocate_slots(tables, *computed, count, &mut moves);
            assert!(moves.is_empty(), "a page that is not full is never shared");
            chunks.push(TextChunk { index, tokens: *computed..*computed + count });
            left = left.saturating_sub(count);
            if count < pending || left == 0 || chunks.len() == max_chunks {
                break;
            }
        }
        let reserved = self.scheduler.reserved(self.scheduler.running.iter());
        for TextChunk { index, tokens } in &chunks {
            let tables = &mut texts_in_progress[*index].tables;
            self.scheduler.kv_cache.allocate_snapshots(tables, tokens.start, tokens.end, &reserved);
        }
        chunks
    }

    /// Runs one forward pass; the rows are left in `self.logits`.
    fn compute_texts(
        &mut self,
        texts_in_progress: &[EncodeProgress<'_>],
        chunks: &[TextChunk],
        gather: Gather<'_>,
        cancel: &Cancel,
    ) -> Result<(), ForwardError> {
        let chunk = |TextChunk { index, tokens }: &TextChunk| {
            let EncodeProgress { text, tables, .. } = &texts_in_progress[*index];
            SequenceChunk {
                tokens: &text.tokens[tokens.clone()],
                first_position: tokens.start,
                prompt_len: text.tokens.len(),
                pages: tables.tables(),
                features: &text.features,
                token_types: if text.token_types.is_empty() { &[] } else { &text.token_types[tokens.clone()] },
                logits: gather.rows(tokens.start == 0, tokens.end == text.tokens.len()),
                adapter: None,
            }
        };
        let sequences: Vec<SequenceChunk<'_>> = chunks.iter().map(chunk).collect();
        let batch = Batch { sequences: &sequences };
        if gather.reads_logits() {
            self.model.forward(batch, cancel, &mut self.logits)
        } else {
            self.model.hidden_states(batch, cancel, &mut self.logits)
        }
    }

    /// Gathers the computed rows, caches full pages, and releases the pages of finished texts.
    fn take_rows(
        &mut self,
        texts_in_progress: &mut [EncodeProgress<'_>],
        chunks: &[TextChunk],
        gathered: &mut Gathered<'_>,
    ) -> Result<(), EncodeError> {
        let gather = gathered.gather;
        let width = if gather.reads_logits() { self.model.vocab_size() } else { self.model.capabilities().hidden_size };
        let mut rest = self.logits.as_slice();
        for TextChunk { index, tokens } in chunks {
            let EncodeProgress { text, tables, computed } = &mut texts_in_progress[*index];
            let ends = tokens.end == text.tokens.len();
            let wanted = gather.rows(tokens.start == 0, ends).of(tokens.len());
            let (rows, after) = rest.split_at_checked(wanted.len() * width).expect("one row per requested position");
            rest = after;
            *computed = tokens.end;
            self.metrics.computed_tokens += tokens.len() as u64;
            let pages = &mut self.scheduler.kv_cache;
            pages.keep_states(tables, tokens.start, tokens.end, tokens.end);
            for new_pages in pages.cache_full_pages(tables, &text.tokens, text.tokens.len(), tokens.end) {
                pages.write_to_disk(tables, &new_pages, &self.model);
            }
            let made = gathered.take(rows, width, text.tokens.len(), ends);
            if made.is_some_and(|made| !gather.is_valid(made)) {
                // The cause of the invalid values may be in the pages: they must not be reused.
                pages.invalidate(tables);
                return Err(EncodeError::NotFinite { text: *index });
            }
            if ends {
                pages.release(tables);
            }
        }
        Ok(())
    }

    /// Converts the gathered rows into the task's result.
    fn finish(
        &mut self,
        task: &EncodeTask,
        capabilities: &Capabilities,
        gathered: Vec<f32>,
        cancel: &Cancel,
    ) -> Result<Vec<f32>, ForwardError> {
        match task {
            EncodeTask::Embedding { normalize: normal, dimensions, .. } => {
                let width = capabilities.embedding_size;
                let kept = dimensions.unwrap_or(width);
                let mut rows = truncate(self.model.embeddings(&gathered, cancel)?, width, kept);
                if *normal {
                    normalize(&mut rows, kept);
                }
                Ok(rows)
            }
            EncodeTask::TokenEmbeddings { normalize: normal } => {
                let mut rows = gathered;
                if *normal {
                    normalize(&mut rows, capabilities.hidden_size);
                }
                Ok(rows)
            }
            EncodeTask::Features {} => self.model.embeddings(&gathered, cancel),
            EncodeTask::Scores {} => self.model.scores(&gathered, cancel),
            EncodeTask::Logits { .. } | EncodeTask::TopLogprobs { .. } => Ok(gathered),
        }
    }
}
