//! [`Pipeline`]: a model whose stages run in other processes.

use ferrule_kernels::Cancel;
use ferrule_kernels::kv::{KvFormat, PageId};

use super::link::{LinkError, StageInfo, StageLink};
use super::logit_words::needed_per_row;
use super::queues::StageQueues;
use super::workers::{Failure, Worker, Workers};
use super::{LastOutput, PageCopy, StageStep, VocabularyPart};
use crate::batch::{Batch, BatchQueue, Capabilities, ForwardError, KvGroup, LanguageModel, SequenceChunk};
use crate::memory::MemoryLayout;
use crate::spec::ModelSpec;

/// Stages cannot form a model.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    /// A worker failed.
    #[error("{worker}: {error}")]
    Link {
        /// The worker.
        worker: Worker,
        /// Cause.
        error: LinkError,
    },
    /// The workers do not fit together.
    #[error("{worker}: {field} must be {expected}, got {found}")]
    Mismatch {
        /// The worker.
        worker: Worker,
        /// Field of its [`StageInfo`].
        field: &'static str,
        /// Value found.
        found: String,
        /// Value that is allowed.
        expected: String,
    },
    /// The model cannot run in stages.
    #[error("pipeline and tensor parallelism do not support {what}")]
    Unsupported {
        /// Unsupported part of the model.
        what: &'static str,
    },
}

/// A model whose stages run in other processes, each in one or in several that divide the rows of its matrices. It has
/// no weights and no pages.
///
/// The stages work on several batches at the same time: while the second stage computes the first batch, the first stage
/// computes the second. The engine keeps a batch for each stage in flight ([`BatchQueue`]); a single forward pass is
/// divided into micro-batches of whole sequences. Results do not depend on the division, because a row depends on its own
/// sequence only. Every stage computes the batches in order, so a batch may have the next chunk of a prompt in flight.
///
/// The rows of the embedding and the lm_head are divided among the workers of several stages. Each looks up its rows of a
/// batch's tokens before the batch begins, and the first stage gets them as input. After the last stage, each computes
/// the logits of its tokens.
pub struct Pipeline {
    spec: ModelSpec,
    groups: Vec<KvGroup>,
    /// Workers, and the batches in flight.
    queues: StageQueues,
    /// Page copies that the next step begins with.
    copies: Vec<PageCopy>,
    /// Error of the lost stage, if one is lost.
    lost: Option<ForwardError>,
}

impl Pipeline {
    /// Joins stages, first to last, and the workers of each in the order of their ranks.
    ///
    /// # Errors
    /// [`PipelineError::Mismatch`] unless the workers have all layers and ranks in order and compute alike;
    /// [`PipelineError::Unsupported`] for encoders, classifiers and projections of embeddings.
    pub fn new(spec: ModelSpec, links: Vec<StageLink>) -> Result<Self, PipelineError> {
        let unsupported = [
            (!spec.causal, "bidirectional attention"),
            (spec.classifier.is_some(), "classifiers"),
            (!spec.text_projections.is_empty(), "projections of embeddings"),
        ];
        if let Some((_, what)) = unsupported.into_iter().find(|(is_so, _)| *is_so) {
            return Err(PipelineError::Unsupported { what });
        }
        let infos: Vec<&StageInfo> = links.iter().map(StageLink::info).collect();
        let kv_format =
            infos.first().and_then(|info| KvFormat::ALL.iter().find(|format| format.name() == info.kv_format));
        let layers = spec.layers.len();
        let layout = MemoryLayout::new(&spec.layers, 0..layers, spec.causal, *kv_format.unwrap_or(&KvFormat::F16));
        let ranks = infos.first().map_or(1, |info| info.ranks.max(1));
        let (mut first, mut end) = (0, 0);
        for (index, info) in infos.iter().enumerate() {
            let same = |field, found: &dyn ToString, expected: &dyn ToString| {
                let (found, expected, worker) = (found.to_string(), expected.to_string(), Worker::new(index, ranks));
                if found == expected { Ok(()) } else { Err(PipelineError::Mismatch { worker, field, found, expected }) }
            };
            same("version", &info.version, &env!("CARGO_PKG_VERSION"))?;
            same("arithmetic", &info.arithmetic, &ferrule_kernels::ARITHMETIC_VERSION)?;
            same("isa", &info.isa, &infos[0].isa)?;
            same("quantization", &info.quantization, &infos[0].quantization)?;
            same("kv_format", &info.kv_format, &infos[0].kv_format)?;
            same("ranks", &info.ranks, &ranks)?;
            same("rank", &info.rank, &(index % ranks))?;
            if info.rank == 0 {
                (first, end) = (end, info.end);
            }
            same("first", &info.first, &first)?;
            same("end", &info.end, &end)?;
            let tokens = match links.len() > ranks {
                true => VocabularyPart::new(index, ranks, links.len() / ranks).rows(spec.vocab_size),
                false => 0..0,
            };
            same("first_token", &info.first_token, &tokens.start)?;
            same("end_token", &info.end_token, &tokens.end)?;
            same("math_fingerprint", &info.math_fingerprint, &infos[0].math_fingerprint)?;
            same("shared_fingerprint", &info.shared_fingerprint, &infos[index - info.rank].shared_fingerprint)?;
            same("page_bytes (their number)", &info.page_bytes.len(), &layout.groups.len())?;
        }
        if end != layers || !links.len().is_multiple_of(ranks) {
            let worker = Worker::new(links.len().saturating_sub(1), ranks);
            let (field, found, expected) = match end == layers {
                false => ("end", end, layers),
                true => ("rank", (links.len() - 1) % ranks, ranks - 1),
            };
            let (found, expected) = (found.to_string(), expected.to_string());
            return Err(PipelineError::Mismatch { worker, field, found, expected });
        }
        let queues = StageQueues::new(Workers::new(links, ranks), &spec);
        Ok(Self { spec, groups: layout.groups, queues, copies: Vec::new(), lost: None })
    }

    /// Returns the descriptions of the workers, stage by stage and in the order of ranks.
    pub fn workers(&self) -> impl Iterator<Item = &StageInfo> {
        self.queues.workers().infos()
    }

    /// Returns the bytes of pages that a model in one process would have, if each worker uses at most its own budget.
    #[must_use]
    pub fn kv_budget(&self) -> u64 {
        let of_worker = |info: &StageInfo| {
            let shares =
                info.page_bytes.iter().zip(&self.groups).map(|(part, group)| {
                    if group.page_bytes == 0 { 0.0 } else { *part as f64 / group.page_bytes as f64 }
                });
            let share = shares.fold(0.0, f64::max);
            if share == 0.0 { u64::MAX } else { (info.kv_budget as f64 / share) as u64 }
        };
        self.workers().map(of_worker).min().unwrap_or(0)
    }

    /// Allocates `pages[i]` empty pages for group `i` in all workers.
    ///
    /// # Errors
    /// [`PipelineError::Link`].
    pub fn allocate_kv(&mut self, pages: &[usize], cancel: &Cancel) -> Result<(), PipelineError> {
        let allocated = self.queues.workers_mut().allocate_kv(pages, cancel);
        allocated.map_err(|(worker, error)| PipelineError::Link { worker, error })
    }

    /// Begins a batch, which the last stage answers with `last`, behind those in flight.
    fn begin_batch(&mut self, batch: Batch<'_>, last: LastOutput) -> Result<(), ForwardError> {
        if let Some(error) = &self.lost {
            return Err(error.clone());
        }
        let step = StageStep::new(batch, std::mem::take(&mut self.copies), last);
        let needed = if last == LastOutput::Logits { needed_per_row(batch.sequences) } else { Vec::new() };
        let begun = self.queues.begin(step.to_bytes(), batch.tokens().collect(), needed);
        begun.map_err(|failure| self.lose(failure))
    }

    /// Waits for the oldest batch in flight and overwrites `out` with the answer of the last stage.
    fn finish_batch(&mut self, cancel: &Cancel, out: &mut Vec<f32>) -> Result<(), ForwardError> {
        if let Some(error) = &self.lost {
            return Err(error.clone());
        }
        self.queues.finish(cancel, out).map_err(|failure| self.lose(failure))
    }

    /// Runs a batch through all stages in micro-batches, and writes what the last stage returns.
    fn run(
        &mut self,
        batch: Batch<'_>,
        last: LastOutput,
        cancel: &Cancel,
        out: &mut Vec<f32>,
    ) -> Result<(), ForwardError> {
        assert!(self.queues.is_empty(), "a forward pass beside batches in flight");
        if let Some(error) = &self.lost {
            return Err(error.clone());
        }
        // Once a micro-batch is sent, all are completed, so that the stages stay alike.
        if cancel.poll() {
            return Err(ForwardError::Cancelled);
        }
        out.clear();
        for sequences in micro_batches(batch.sequences, self.queues.stages()) {
            self.begin_batch(Batch { sequences }, last)?;
        }
        let mut part = Vec::new();
        while !self.queues.is_empty() {
            self.finish_batch(cancel, &mut part)?;
            out.extend_from_slice(&part);
        }
        Ok(())
    }

    /// Records that a worker is lost. Returns the error of this call and of all later ones.
    fn lose(&mut self, (worker, error): Failure) -> ForwardError {
        let (stage, reason) = (worker.stage, PipelineError::Link { worker, error }.to_string());
        self.lost.insert(ForwardError::StageLost { stage, reason }).clone()
    }
}

/// Divides sequences into at most `count` neighbouring parts that have about the same number of tokens.
fn micro_batches<'a, 'b>(
    sequences: &'a [SequenceChunk<'b>],
    count: usize,
) -> impl Iterator<Item = &'a [SequenceChunk<'b>]> {
    let total: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
    let mut before = 0;
    let parts: Vec<usize> = sequences
        .iter()
        .map(|sequence| {
            // The part that the middle of the sequence is in.
            let middle = 2 * before + sequence.tokens.len();
            before += sequence.tokens.len();
            middle * count / (2 * total).max(1)
        })
        .collect();
    let mut first = 0;
    std::iter::from_fn(move || {
        let part = parts.get(first)?;
        let length = parts[first..].iter().take_while(|other| *other == part).count();
        let sequences = &sequences[first..first + length];
        first += length;
        Some(sequences)
    })
}

impl LanguageModel for Pipeline {
    fn vocab_size(&self) -> usize {
        self.spec.vocab_size
    }

    fn capabilities(&self) -> Capabilities {
        // Steps have token ids alone.
        Capabilities { feature_width: None, ..self.spec.capabilities() }
    }

    fn kv_groups(&self) -> &[KvGroup] {
        &self.groups
    }

    fn shareable_tokens(&self, prompt_len: usize) -> usize {
        self.spec.shareable_tokens(prompt_len)
    }

    fn copy_page(&mut self, group: usize, from: PageId, to: PageId) {
        self.copies.push(PageCopy { group, from, to });
    }

    /// # Panics
    /// Always: the pages are in other processes.
    fn page(&self, _: usize, _: PageId) -> &[u8] {
        unreachable!("{REMOTE_PAGES}")
    }

    /// # Panics
    /// Always: the pages are in other processes.
    fn set_page(&mut self, _: usize, _: PageId, _: &[u8]) {
        unreachable!("{REMOTE_PAGES}")
    }

    fn has_local_pages(&self) -> bool {
        false
    }

    /// # Panics
    /// Always: the pages are in other processes.
    fn fingerprint(&self) -> [u8; 32] {
        unreachable!("{REMOTE_PAGES}")
    }

    fn forward(&mut self, batch: Batch<'_>, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), ForwardError> {
        self.run(batch, LastOutput::Logits, cancel, logits)
    }

    fn hidden_states(&mut self, batch: Batch<'_>, cancel: &Cancel, hidden: &mut Vec<f32>) -> Result<(), ForwardError> {
        self.run(batch, LastOutput::HiddenStates, cancel, hidden)
    }

    fn batch_queue(&mut self) -> Option<&mut dyn BatchQueue> {
        if self.queues.stages() > 1 { Some(self) } else { None }
    }

    fn embeddings(&self, pooled: &[f32], _: &Cancel) -> Result<Vec<f32>, ForwardError> {
        Ok(pooled.to_vec())
    }

    /// # Panics
    /// Always: a model with a classifier is refused.
    fn scores(&self, _: &[f32], _: &Cancel) -> Result<Vec<f32>, ForwardError> {
        unreachable!("a pipeline has no classifier")
    }
}

impl BatchQueue for Pipeline {
    fn capacity(&self) -> usize {
        self.queues.stages()
    }

    fn begin(&mut self, batch: Batch<'_>) -> Result<(), ForwardError> {
        self.begin_batch(batch, LastOutput::Logits)
    }

    fn finish(&mut self, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), ForwardError> {
        self.finish_batch(cancel, logits)
    }
}

/// Message of the panic for an engine that reads pages although [`LanguageModel::has_local_pages`] is false.
const REMOTE_PAGES: &str = "the pages of a pipeline are in other processes";
