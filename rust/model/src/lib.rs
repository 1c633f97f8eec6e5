//! Models: from the description of an architecture and a checkpoint to a forward pass over a ragged batch.
#![forbid(unsafe_code)]

mod adapter;
mod allocation;
mod batch;
mod calibrate;
mod features;
mod fingerprint;
mod layer;
mod limits;
mod lm_head;
mod memory;
mod mixers;
mod needs;
mod pruning;
mod quantization;
mod random;
mod readout;
mod recipe;
mod rope;
mod spec;
#[cfg(test)]
#[path = "../tests/specs/mod.rs"]
mod specs;
mod stage;
mod streams;
mod transformer;
mod weights;

pub use adapter::{Adapter, AdapterConfig, AdapterError, AdapterLoader, TensorError};
pub use allocation::{AllocatedMatrix, Allocation, AllocationError, BitBudget, allocate_bits, check_bits};
pub use batch::{
    Batch, BatchQueue, Capabilities, ClassifierInfo, ForwardError, GroupKind, KvGroup, LanguageModel, LogitRows,
    SequenceChunk,
};
pub use calibrate::{Calibration, calibrate_into};
pub use features::Features;
pub use limits::SpecError;
pub use mixers::{
    AttentionSpec, ClampSpec, CompressedAttentionSpec, CompressionSpec, DecaySpec, DeltaNetSpec, DenseSpec,
    EntryIndexerSpec, ExpertsSpec, GroupScore, HeadProjections, IndexerChoice, IndexerKeys, IndexerSpec,
    LatentProjections, LatentSpec, LaurelSpec, LightningAttentionSpec, Mamba2Spec, MambaSpec, MixerSpec,
    NgramEmbeddingSpec, OutputGate, PerLayerEmbeddingSpec, ProjectionSpec, ProjectionsSpec, QueryGrowth, RgLruSpec,
    RouterSpec, RwkvChannelMixSpec, RwkvTimeMixSpec, Scoring, ShortConvolutionSpec, XieluSpec,
};
pub use needs::{Needs, buffer_bytes, check_memory, measure};
pub use pruning::{PrunedShare, Pruning, PruningMethod};
pub use quantization::Quantization;
pub use recipe::{MatrixFormats, Recipe, RecipeError};
pub use rope::{Dynamic, Linear, Llama3, LongRope, RopeScaling, RopeSpec, Yarn};
pub use spec::{
    ActivationSpec, BlockSpec, ClassifierSpec, EmbeddingSpec, Exponential, HeadNormSpec, LayerSpec, LmHeadSpec,
    ModelSpec, NormSpec, NormedOver, PartSpec, Pooling, PositionsSpec, StackSpec, TableSpec, TensorSpec,
    TextProjectionSpec,
};
pub use stage::{
    LastOutput, LinkError, PageCopy, Pipeline, PipelineError, Stage, StageError, StageInfo, StageLink, StagePart,
    StageRunError, StageSequence, StageStep, StepError, TensorParallelGroup, Worker, divide_layers, serve_stage,
};
pub use streams::{
    AlternatingSpec, GatedSpec, SideSpec, SinkhornSpec, SpanSpec, StreamEndsSpec, StreamMixSpec, StreamsSpec,
    WeightedSpec,
};
pub use transformer::{LoadOptions, Transformer};
pub use weights::{LoadError, Progress, Source, StoredTypes, WeightFiles, WeightSizes, open_packed, pack_into};
