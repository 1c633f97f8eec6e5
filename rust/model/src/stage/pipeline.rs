//! [`Pipeline`]: a model whose stages run in other processes.

use ferrule_kernels::Cancel;
use ferrule_kernels::kv::{KvFormat, PageId};

use super::link::{LinkError, StageInfo, StageLink};
use super::{LastOutput, PageCopy, StageStep};
use crate::batch::{Batch, Capabilities, ForwardError, KvGroup, LanguageModel, SequenceChunk};
use crate::memory::MemoryLayout;
use crate::spec::ModelSpec;

/// Stages cannot form a model.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    /// A stage failed.
    #[error("pipeline stage {stage}: {error}")]
    Link {
        /// Index of the stage.
        stage: usize,
        /// Cause.
        error: LinkError,
    },
    /// The stages do not fit together.
    #[error("pipeline stage {stage}: {field} must be {expected}, got {found}")]
    Mismatch {
        /// Index of the stage.
        stage: usize,
        /// Field of its [`StageInfo`].
        field: &'static str,
        /// Value found.
        found: String,
        /// Value that is allowed.
        expected: String,
    },
    /// The model cannot run in stages.
    #[error("pipeline parallelism does not support {what}")]
    Unsupported {
        /// Unsupported part of the model.
        what: &'static str,
    },
}

/// A model whose stages run in other processes. It has no weights and no pages.
///
/// A batch is divided into micro-batches of whole sequences, on which the stages work at the same time: while the
/// second stage computes the first micro-batch, the first stage computes the second. Results do not depend on the
/// division, because a row depends on its own sequence only.
pub struct Pipeline {
    spec: ModelSpec,
    groups: Vec<KvGroup>,
    links: Vec<StageLink>,
    /// Page copies that the next step begins with.
    copies: Vec<PageCopy>,
    /// Error of the lost stage, if one is lost.
    lost: Option<ForwardError>,
}

impl Pipeline {
    /// Joins stages, first to last.
    ///
    /// # Errors
    /// [`PipelineError::Mismatch`] unless the stages have all layers in order and compute alike;
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
        let mut end = 0;
        for (stage, info) in infos.iter().enumerate() {
            let same = |field, found: &dyn ToString, expected: &dyn ToString| {
                let (found, expected) = (found.to_string(), expected.to_string());
                if found == expected { Ok(()) } else { Err(PipelineError::Mismatch { stage, field, found, expected }) }
            };
            same("version", &info.version, &env!("CARGO_PKG_VERSION"))?;
            same("arithmetic", &info.arithmetic, &ferrule_kernels::ARITHMETIC_VERSION)?;
            same("isa", &info.isa, &infos[0].isa)?;
            same("quantization", &info.quantization, &infos[0].quantization)?;
            same("kv_format", &info.kv_format, &infos[0].kv_format)?;
            same("first", &info.first, &end)?;
            same("page_bytes (their number)", &info.page_bytes.len(), &layout.groups.len())?;
            end = info.end;
        }
        if end != layers {
            let (stage, found, expected) = (links.len().saturating_sub(1), end.to_string(), layers.to_string());
            return Err(PipelineError::Mismatch { stage, field: "end", found, expected });
        }
        Ok(Self { spec, groups: layout.groups, links, copies: Vec::new(), lost: None })
    }

    /// Returns the descriptions of the stages.
    pub fn stages(&self) -> impl Iterator<Item = &StageInfo> {
        self.links.iter().map(StageLink::info)
    }

    /// Returns the bytes of pages that a model in one process would have, if each stage uses at most its own budget.
    #[must_use]
    pub fn kv_budget(&self) -> u64 {
        let of_stage = |info: &StageInfo| {
            let shares =
                info.page_bytes.iter().zip(&self.groups).map(|(part, group)| {
                    if group.page_bytes == 0 { 0.0 } else { *part as f64 / group.page_bytes as f64 }
                });
            let share = shares.fold(0.0, f64::max);
            if share == 0.0 { u64::MAX } else { (info.kv_budget as f64 / share) as u64 }
        };
        self.stages().map(of_stage).min().unwrap_or(0)
    }

    /// Allocates `pages[i]` empty pages for group `i` in all stages.
    ///
    /// # Errors
    /// [`PipelineError::Link`].
    pub fn allocate_kv(&mut self, pages: &[usize], cancel: &Cancel) -> Result<(), PipelineError> {
        for (stage, link) in self.links.iter_mut().enumerate() {
            link.allocate_kv(pages, cancel).map_err(|error| PipelineError::Link { stage, error })?;
        }
        Ok(())
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
        let steps: Vec<Vec<u8>> = micro_batches(batch.sequences, self.links.len())
            .map(|sequences| {
                let copies = std::mem::take(&mut self.copies);
                StageStep::new(Batch { sequences }, copies, last).to_bytes()
            })
            .collect();
        out.clear();
        self.exchange(&steps, cancel, out).map_err(|(stage, error)| {
            let reason = PipelineError::Link { stage, error }.to_string();
            self.lost.insert(ForwardError::StageLost { stage, reason }).clone()
        })
    }

    /// Sends each step through all stages; appends what the last one returns to `out`. An error has the index of its
    /// stage.
    fn exchange(&mut self, steps: &[Vec<u8>], cancel: &Cancel, out: &mut Vec<f32>) -> Result<(), (usize, LinkError)> {
        let lost = |stage: usize| move |error: LinkError| (stage, error);
        for step in steps {
            self.links[0].send_step(step, &[]).map_err(lost(0))?;
        }
        // At each time, stage s returns step time - s, which is sent on before the next stage is waited for.
        for time in 0..steps.len() + self.links.len() - 1 {
            for stage in 0..self.links.len() {
                let Some(step) = time.checked_sub(stage).and_then(|index| steps.get(index)) else { continue };
                let result = self.links[stage].receive(cancel).map_err(lost(stage))?;
                match self.links.get_mut(stage + 1) {
                    Some(next) => next.send_step(step, &result).map_err(lost(stage + 1))?,
                    None => out.extend_from_slice(&result),
                }
            }
        }
        Ok(())
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
