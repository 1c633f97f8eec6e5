//! [`Pipeline`]: a model whose stages run in other processes.

use std::fmt;

use ferrule_kernels::Cancel;
use ferrule_kernels::kv::{KvFormat, PageId};

use super::link::{LinkError, StageInfo, StageLink};
use super::{LastOutput, PageCopy, StageStep};
use crate::batch::{Batch, Capabilities, ForwardError, KvGroup, LanguageModel, SequenceChunk};
use crate::memory::MemoryLayout;
use crate::spec::ModelSpec;

/// A worker of a model over several processes: a pipeline stage, or one of the workers that divide its matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Worker {
    /// Index of the stage.
    pub stage: usize,
    /// Rank among the workers of the stage; `None` for the only one.
    pub rank: Option<usize>,
}

impl Worker {
    /// Returns worker `index` of all, stage by stage, of stages with `ranks` workers each.
    #[must_use]
    pub fn new(index: usize, ranks: usize) -> Self {
        Self { stage: index / ranks, rank: (ranks > 1).then_some(index % ranks) }
    }
}

impl fmt::Display for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pipeline stage {}", self.stage)?;
        self.rank.map_or(Ok(()), |rank| write!(f, ", tensor-parallel rank {rank}"))
    }
}

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
/// A batch is divided into micro-batches of whole sequences, on which the stages work at the same time: while the
/// second stage computes the first micro-batch, the first stage computes the second. Results do not depend on the
/// division, because a row depends on its own sequence only.
///
/// If the lm_head is tied to the embedding, only the last stage has the matrix. It looks up the rows of a batch's tokens
/// before the batch begins, and the first stage gets them as input.
pub struct Pipeline {
    spec: ModelSpec,
    groups: Vec<KvGroup>,
    /// Connections to the workers, stage by stage and in the order of ranks.
    links: Vec<StageLink>,
    /// Number of workers of a stage.
    ranks: usize,
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
        Ok(Self { spec, groups: layout.groups, links, ranks, copies: Vec::new(), lost: None })
    }

    /// Returns the descriptions of the workers, stage by stage and in the order of ranks.
    pub fn workers(&self) -> impl Iterator<Item = &StageInfo> {
        self.links.iter().map(StageLink::info)
    }

    /// Returns the number of stages.
    fn stages(&self) -> usize {
        self.links.len() / self.ranks
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
        let ranks = self.ranks;
        self.links.iter_mut().enumerate().try_for_each(|(index, link)| {
            let worker = Worker::new(index, ranks);
            link.allocate_kv(pages, cancel).map_err(|error| PipelineError::Link { worker, error })
        })
    }

    /// Runs a batch through all stages and writes what the last one returns.
    fn run(
        &mut self,
        batch: Batch<'_>,
        last: LastOutput,
        cancel: &Cancel,
        out: &mut Vec<f32>,
    ) -> Result<(), ForwardError> {
        if let Some(error) = &self.lost {
            return Err(error.clone());
        }
        // Once a micro-batch is sent, all are completed, so that the stages stay alike.
        if cancel.poll() {
            return Err(ForwardError::Cancelled);
        }
        let steps: Vec<Vec<u8>> = micro_batches(batch.sequences, self.stages())
            .map(|sequences| {
                let copies = std::mem::take(&mut self.copies);
                StageStep::new(Batch { sequences }, copies, last).to_bytes()
            })
            .collect();
        out.clear();
        let done = self.look_up(batch, cancel).and_then(|inputs| self.exchange(&steps, &inputs, cancel, out));
        done.map_err(|(worker, error)| {
            let (stage, reason) = (worker.stage, PipelineError::Link { worker, error }.to_string());
            self.lost.insert(ForwardError::StageLost { stage, reason }).clone()
        })
    }

    /// Returns what the first stage reads in each micro-batch of a batch: the rows of the tokens in the embedding if the
    /// last stage looks them up, else nothing.
    fn look_up(&mut self, batch: Batch<'_>, cancel: &Cancel) -> Result<Vec<Vec<f32>>, (Worker, LinkError)> {
        let (stages, ranks, width) = (self.stages(), self.ranks, self.spec.embedding_width());
        let counts = micro_batches(batch.sequences, stages).map(|sequences| Batch { sequences }.tokens().count());
        if stages == 1 || !self.spec.has_tied_lm_head() {
            return Ok(counts.map(|_| Vec::new()).collect());
        }
        let last = stages - 1;
        let tokens: Vec<u32> = batch.tokens().collect();
        for rank in 0..ranks {
            let index = last * ranks + rank;
            self.links[index].send_look_up(&tokens).map_err(|error| (Worker::new(index, ranks), error))?;
        }
        let mut rows = self.receive(last, cancel)?.into_iter();
        if rows.len() != tokens.len() * width {
            let what = format!("{} numbers for {} tokens, not {width} each", rows.len(), tokens.len());
            return Err((Worker::new(last * ranks, ranks), LinkError::Protocol(what)));
        }
        Ok(counts.map(|count| rows.by_ref().take(count * width).collect()).collect())
    }

    /// Sends each step with its input through all stages; appends what the last one returns to `out`.
    fn exchange(
        &mut self,
        steps: &[Vec<u8>],
        inputs: &[Vec<f32>],
        cancel: &Cancel,
        out: &mut Vec<f32>,
    ) -> Result<(), (Worker, LinkError)> {
        for (step, input) in steps.iter().zip(inputs) {
            self.send(0, step, input)?;
        }
        let stages = self.stages();
        // At each time, stage s returns step time - s, which is sent on before the next stage is waited for.
        for time in 0..steps.len() + stages - 1 {
            for stage in 0..stages {
                let Some(step) = time.checked_sub(stage).and_then(|index| steps.get(index)) else { continue };
                let result = self.receive(stage, cancel)?;
                if stage + 1 < stages {
                    self.send(stage + 1, step, &result)?;
                } else {
                    out.extend_from_slice(&result);
                }
            }
        }
        Ok(())
    }

    /// Sends a step and its input to all workers of a stage.
    fn send(&mut self, stage: usize, step: &[u8], input: &[f32]) -> Result<(), (Worker, LinkError)> {
        let ranks = self.ranks;
        let mut links = self.links[stage * ranks..][..ranks].iter_mut().enumerate();
        links.try_for_each(|(rank, link)| {
            link.send_step(step, input).map_err(|error| (Worker::new(stage * ranks + rank, ranks), error))
        })
    }

    /// Receives the answers of all workers of a stage, and returns what that of rank 0 has computed.
    fn receive(&mut self, stage: usize, cancel: &Cancel) -> Result<Vec<f32>, (Worker, LinkError)> {
        let mut output = Vec::new();
        for rank in 0..self.ranks {
            let result = self.links[stage * self.ranks + rank].receive(cancel);
            let result = result.map_err(|error| self.first_loss((stage, rank), error, cancel))?;
            if rank == 0 {
                output = result;
            }
        }
        Ok(output)
    }

    /// Returns the worker of a stage whose failure is the cause of another's `error`, and the failure. A worker that has
    /// lost another names it, and ends.
    fn first_loss(
        &mut self,
        (stage, mut rank): (usize, usize),
        mut error: LinkError,
        cancel: &Cancel,
    ) -> (Worker, LinkError) {
        for _ in 1..self.ranks {
            let LinkError::RankLost { rank: lost } = error else { break };
            let Some(link) = self.links[stage * self.ranks..][..self.ranks].get_mut(lost) else { break };
            rank = lost;
            error = loop {
                if let Err(error) = link.receive(cancel) {
                    break error;
                }
            };
        }
        (Worker::new(stage * self.ranks + rank, self.ranks), error)
    }
}

/// Divides sequences into at most `count` neighbouring parts with about the same number of tokens.
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
        self.spec.capabilities()
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

    fn embeddings(&self, pooled: &[f32], _: &Cancel) -> Result<Vec<f32>, ForwardError> {
        Ok(pooled.to_vec())
    }

    /// # Panics
    /// Always: a model with a classifier is refused.
    fn scores(&self, _: &[f32], _: &Cancel) -> Result<Vec<f32>, ForwardError> {
        unreachable!("a pipeline has no classifier")
    }
}

/// Message of the panic for an engine that reads pages although [`LanguageModel::has_local_pages`] is false.
const REMOTE_PAGES: &str = "the pages of a pipeline are in other processes";
