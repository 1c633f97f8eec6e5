//! Texts in, embeddings or scores out: work outside the queue, in the pages that the others leave.
//!
//! Many texts are computed side by side, in their order. What is made of one depends on it alone: not on the texts
//! beside it, nor on where it was cut. A model that reads in both directions takes a text whole, however long; any other
//! takes as much of it as a step allows, and what it keeps of texts that begin alike is computed once.

mod gather;
mod task;

use std::ops::Range;

use ferrule_kernels::Cancel;
use ferrule_model::{Abilities, Batch, Classifies, ForwardError, LanguageModel, Pooling, SequenceChunk};

use super::Engine;
use crate::EngineError;
use crate::pages::{Namespace, PageTables};
use gather::{Gather, Gathered, normalize, truncate};
pub use task::{EncodeError, EncodeTask, Text};

/// A text on its way.
struct EncodeProgress<'a> {
    text: &'a Text,
    tables: PageTables,
    computed: usize,
}

/// A part of a text that a forward pass computes.
struct Part {
    /// Which text.
    index: usize,
    tokens: Range<usize>,
}

impl<M: LanguageModel> Engine<M> {
    /// What the task makes of each text, one after the other. The requests under way lose nothing by it; the last of them
    /// in rank are computed again if it needs their pages.
    ///
    /// # Errors
    /// [`EngineError::Encode`] for a task that the model is not made for and texts that are empty, too long or not of its
    /// tokens; [`EngineError::OutOfMemory`] if the result does not fit; [`EngineError::Cancelled`], [`EngineError::Dead`].
    pub fn encode(&mut self, texts: &[Text], task: &EncodeTask, cancel: &Cancel) -> Result<Vec<f32>, EngineError> {
        self.check_alive()?;
        let (abilities, vocab_size) = (self.model.abilities(), self.model.vocab_size());
        task.check(vocab_size, &abilities)?;
        let limits = self.limits;
        texts.iter().enumerate().try_for_each(|(i, text)| text.check(i, vocab_size, &abilities, limits))?;
        let classified = abilities.classifier.map_or(Pooling::Cls, |Classifies { pooling, .. }| pooling);
        let gather = Gather::of(task, classified);
        let width = if gather.reads_logits() { vocab_size } else { abilities.hidden_size };
        let tokens: usize = texts.iter().map(|text| text.tokens.len()).sum();
        let numbers = texts.iter().map(|text| gather.numbers(text.tokens.len(), width)).sum();
        let mut gathered = Gathered::new(gather, self.allocate_result(tokens, numbers)?);

        let underway = |text| EncodeProgress { text, tables: self.tables_of(text, &abilities, gather), computed: 0 };
        let mut underway: Vec<EncodeProgress<'_>> = texts.iter().map(underway).collect();
        let result = self.run_between_steps(|engine| {
            let outcome = engine.gather(&mut underway, &abilities, &mut gathered, cancel);
            underway.iter_mut().for_each(|one| engine.scheduler.pages.release(&mut one.tables));
            match outcome? {
                Err(not_finite) => Ok(Err(not_finite)),
                Ok(()) => engine.finish(task, &abilities, gathered.numbers, cancel).map(Ok),
            }
        });
        Ok(result??)
    }

    /// Tables that share what is kept where nothing but a text's last row is read, and nothing otherwise. What is kept
    /// is known by its tokens, not by their kinds.
    fn tables_of(&self, text: &Text, abilities: &Abilities, gather: Gather<'_>) -> PageTables {
        if !abilities.causal || !gather.is_last() || !text.token_types.is_empty() {
            return self.scheduler.pages.private_tables();
        }
        let namespace = Namespace::new(text.cache_salt.clone(), None);
        self.scheduler.pages.tables(namespace, self.model.shareable_tokens(text.tokens.len()))
    }

    /// Computes the texts and gathers what is wanted of them.
    fn gather(
        &mut self,
        underway: &mut [EncodeProgress<'_>],
        abilities: &Abilities,
        gathered: &mut Gathered<'_>,
        cancel: &Cancel,
    ) -> Result<Result<(), EncodeError>, ForwardError> {
        let mut first = 0;
        while first < underway.len() {
            let parts = self.plan_texts(underway, first, abilities.causal);
            self.compute_texts(underway, &parts, gathered.gather, cancel)?;
            for Part { index, tokens } in &parts {
                if tokens.end == underway[*index].text.tokens.len() {
                    first = index + 1;
                }
            }
            if let Err(not_finite) = self.take_rows(underway, &parts, gathered) {
                return Ok(Err(not_finite));
            }
        }
        Ok(Ok(()))
    }

    /// Picks what the next forward pass computes, from the text number `first` on, and gives out the pages for it. All
    /// parts but the last go to the end of their texts.
    fn plan_texts(&mut self, underway: &mut [EncodeProgress<'_>], first: usize, causal: bool) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut left = self.config.max_num_batched_tokens;
        let most_parts = self.config.max_num_seqs.min(left);
        for (index, EncodeProgress { text, tables, computed }) in underway.iter_mut().enumerate().skip(first) {
            let pages = &mut self.scheduler.pages;
            *computed = pages.reuse(tables, &text.tokens, *computed, text.tokens.len() - 1);
            pages.release_out_of_window(tables, *computed);
            let pending = text.tokens.len() - *computed;
            if !causal && pending > left && !parts.is_empty() {
                break;
            }
            let wanted = if causal { pending.min(left) } else { pending };
            let is_enough = |count| if causal { count > 0 } else { count == wanted };
            let mut count = pages.allocatable_slots(tables, *computed, wanted);
            while !is_enough(count) && parts.is_empty() {
                assert!(self.scheduler.preempt_last(), "all pages together do not hold a text that they should");
                count = self.scheduler.pages.allocatable_slots(tables, *computed, wanted);
            }
            if !is_enough(count) {
                break;
            }
            let mut moves = Vec::new();
            self.scheduler.pages.allocate_slots(tables, *computed, count, &mut moves);
            assert!(moves.is_empty(), "nobody shares a page that is still to be filled");
            parts.push(Part { index, tokens: *computed..*computed + count });
            left = left.saturating_sub(count);
            if count < pending || left == 0 || parts.len() == most_parts {
                break;
            }
        }
        parts
    }

    /// One forward pass; what is wanted of its rows is in the engine's buffer then.
    fn compute_texts(
        &mut self,
        underway: &[EncodeProgress<'_>],
        parts: &[Part],
        gather: Gather<'_>,
        cancel: &Cancel,
    ) -> Result<(), ForwardError> {
        let chunk = |Part { index, tokens }: &Part| {
            let EncodeProgress { text, tables, .. } = &underway[*index];
            SequenceChunk {
                tokens: &text.tokens[tokens.clone()],
                first_position: tokens.start,
                prompt_len: text.tokens.len(),
                pages: tables.tables(),
                token_types: if text.token_types.is_empty() { &[] } else { &text.token_types[tokens.clone()] },
                logits: gather.rows(tokens.start == 0, tokens.end == text.tokens.len()),
                adapter: None,
            }
        };
        let sequences: Vec<SequenceChunk<'_>> = parts.iter().map(chunk).collect();
        let batch = Batch { sequences: &sequences };
        if gather.reads_logits() {
            self.model.forward(batch, cancel, &mut self.logits)
        } else {
            self.model.hidden_states(batch, cancel, &mut self.logits)
        }
    }

    /// Takes note of what is computed, and gathers it; texts that are done give their pages back.
    fn take_rows(
        &mut self,
        underway: &mut [EncodeProgress<'_>],
        parts: &[Part],
        gathered: &mut Gathered<'_>,
    ) -> Result<(), EncodeError> {
        let gather = gathered.gather;
        let width = if gather.reads_logits() { self.model.vocab_size() } else { self.model.abilities().hidden_size };
        let mut rest = self.logits.as_slice();
        for Part { index, tokens } in parts {
            let EncodeProgress { text, tables, computed } = &mut underway[*index];
            let ends = tokens.end == text.tokens.len();
            let wanted = gather.rows(tokens.start == 0, ends).of(tokens.len());
            let (rows, after) = rest.split_at_checked(wanted.len() * width).expect("a row for each asked for");
            rest = after;
            *computed = tokens.end;
            self.metrics.computed_tokens += tokens.len() as u64;
            let pages = &mut self.scheduler.pages;
            for fresh in pages.cache_full_pages(tables, &text.tokens, tokens.end) {
                pages.write_to_disk(tables, &fresh, &self.model);
            }
            let made = gathered.take(rows, width, text.tokens.len(), ends);
            if made.is_some_and(|made| !gather.is_sound(made)) {
                // Whatever made these numbers may be in the pages.
                pages.invalidate(tables);
                return Err(EncodeError::NotFinite { text: *index });
            }
            if ends {
                pages.release(tables);
            }
        }
        Ok(())
    }

    /// From what was gathered to what was asked for.
    fn finish(
        &mut self,
        task: &EncodeTask,
        abilities: &Abilities,
        gathered: Vec<f32>,
        cancel: &Cancel,
    ) -> Result<Vec<f32>, ForwardError> {
        match task {
            EncodeTask::Embedding { normalize: normal, dimensions, .. } => {
                let width = abilities.embedding_size;
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
                    normalize(&mut rows, abilities.hidden_size);
                }
                Ok(rows)
            }
            EncodeTask::Scores {} => self.model.scores(&gathered, cancel),
            EncodeTask::Logits { .. } | EncodeTask::TopLogprobs { .. } => Ok(gathered),
        }
    }
}
