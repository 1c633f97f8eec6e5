//! The model of a built engine: in this process, or in the stages of a pipeline.

use ferrule_kernels::Cancel;
use ferrule_kernels::kv::PageId;
use ferrule_model::{
    AdapterLoader, Batch, BatchQueue, Capabilities, ForwardError, KvGroup, LanguageModel, Pipeline, Quantization,
    StageInfo, Transformer, WeightSizes,
};

use super::BuildError;

/// Model of an [`crate::Engine`] that [`crate::EngineBuilder`] builds.
pub struct EngineModel(Place);

enum Place {
    /// The model is in this process.
    Local(Box<Transformer>),
    /// The layers are in other processes.
    Stages(Box<Stages>),
}

struct Stages {
    pipeline: Pipeline,
    /// Sizes of the weights of the whole model.
    sizes: WeightSizes,
    quantization: Quantization,
}

impl EngineModel {
    pub(super) fn local(model: Transformer) -> Self {
        Self(Place::Local(Box::new(model)))
    }

    /// `sizes` are those of the whole model.
    pub(super) fn stages(pipeline: Pipeline, sizes: WeightSizes, quantization: Quantization) -> Self {
        Self(Place::Stages(Box::new(Stages { pipeline, sizes, quantization })))
    }

    /// Returns a loader of adapters for this model; `None` for pipeline stages, which do not support adapters.
    #[must_use]
    pub fn adapters(&self) -> Option<AdapterLoader> {
        match &self.0 {
            Place::Local(model) => Some(model.adapters()),
            Place::Stages(_) => None,
        }
    }

    /// Returns the pipeline; `None` for a model in this process.
    pub(super) fn pipeline(&self) -> Option<&Pipeline> {
        match &self.0 {
            Place::Local(_) => None,
            Place::Stages(stages) => Some(&stages.pipeline),
        }
    }

    /// Returns the descriptions of the workers, stage by stage; empty for a model in this process.
    pub fn stage_infos(&self) -> impl Iterator<Item = &StageInfo> {
        self.pipeline().into_iter().flat_map(Pipeline::workers)
    }

    /// Returns the sizes of the weights of the whole model.
    #[must_use]
    pub fn weight_sizes(&self) -> WeightSizes {
        match &self.0 {
            Place::Local(model) => model.weight_sizes(),
            Place::Stages(stages) => stages.sizes,
        }
    }

    pub(super) fn quantization(&self) -> Quantization {
        match &self.0 {
            Place::Local(model) => model.quantization(),
            Place::Stages(stages) => stages.quantization,
        }
    }

    /// Returns the bytes of weights in a mapped file of this process.
    pub(super) fn mapped_bytes(&self) -> u64 {
        match &self.0 {
            Place::Local(model) => model.mapped_bytes(),
            Place::Stages(_) => 0,
        }
    }

    /// Allocates `pages[i]` empty pages for group `i`.
    pub(super) fn allocate_kv(&mut self, pages: &[usize], cancel: &Cancel) -> Result<(), BuildError> {
        match &mut self.0 {
            Place::Local(model) => Ok(model.allocate_kv(pages)?),
            Place::Stages(stages) => Ok(stages.pipeline.allocate_kv(pages, cancel)?),
        }
    }

    fn model(&self) -> &dyn LanguageModel {
        match &self.0 {
            Place::Local(model) => model.as_ref(),
            Place::Stages(stages) => &stages.pipeline,
        }
    }

    fn model_mut(&mut self) -> &mut dyn LanguageModel {
        match &mut self.0 {
            Place::Local(model) => model.as_mut(),
            Place::Stages(stages) => &mut stages.pipeline,
        }
    }
}

impl LanguageModel for EngineModel {
    fn vocab_size(&self) -> usize {
        self.model().vocab_size()
    }

    fn capabilities(&self) -> Capabilities {
        self.model().capabilities()
    }

    fn kv_groups(&self) -> &[KvGroup] {
        self.model().kv_groups()
    }

    fn shareable_tokens(&self, prompt_len: usize) -> usize {
        self.model().shareable_tokens(prompt_len)
    }

    fn copy_page(&mut self, group: usize, from: PageId, to: PageId) {
        self.model_mut().copy_page(group, from, to);
    }

    fn page(&self, group: usize, page: PageId) -> &[u8] {
        self.model().page(group, page)
    }

    fn set_page(&mut self, group: usize, page: PageId, bytes: &[u8]) {
        self.model_mut().set_page(group, page, bytes);
    }

    fn has_local_pages(&self) -> bool {
        self.model().has_local_pages()
    }

    fn fingerprint(&self) -> [u8; 32] {
        self.model().fingerprint()
    }

    fn forward(&mut self, batch: Batch<'_>, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), ForwardError> {
        self.model_mut().forward(batch, cancel, logits)
    }

    fn hidden_states(&mut self, batch: Batch<'_>, cancel: &Cancel, hidden: &mut Vec<f32>) -> Result<(), ForwardError> {
        self.model_mut().hidden_states(batch, cancel, hidden)
    }

    fn batch_queue(&mut self) -> Option<&mut dyn BatchQueue> {
        self.model_mut().batch_queue()
    }

    fn embeddings(&self, pooled: &[f32], cancel: &Cancel) -> Result<Vec<f32>, ForwardError> {
        self.model().embeddings(pooled, cancel)
    }

    fn scores(&self, pooled: &[f32], cancel: &Cancel) -> Result<Vec<f32>, ForwardError> {
        self.model().scores(pooled, cancel)
    }
}
