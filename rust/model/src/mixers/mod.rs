//! Mixers: what a residual block computes from its normed input.
//!
//! Each mixer is a folder or file with everything about it: the spec with its limits, the weights with their roles,
//! the sequence memory and buffers that it needs, and the forward pass. [`mixers!`] registers them, one line each.

mod attention;
mod compressed_attention;
mod convolution;
mod delta_net;
mod feed_forward;
mod laurel;
mod lightning_attention;
mod mamba;
mod mamba2;
mod ngram_embedding;
mod per_layer_embedding;
mod projection;
mod rg_lru;
mod rwkv_channel_mix;
mod rwkv_time_mix;
mod short_convolution;
mod token_shift;

use std::ops::Range;

use ferrule_kernels::scan::Segment;
use ferrule_kernels::{Exec, PackedMatrix, PoolError, RowsMut};
use serde::{Deserialize, Serialize};

pub use attention::{
    AttentionSpec, HeadProjections, IndexerChoice, IndexerKeys, IndexerSpec, LatentProjections, OutputGate,
    ProjectionsSpec, QueryGrowth,
};
pub use compressed_attention::{CompressedAttentionSpec, CompressionSpec, EntryIndexerSpec};
pub use delta_net::{DecaySpec, DeltaNetSpec};
pub use feed_forward::{ClampSpec, DenseSpec, ExpertsSpec, GroupScore, LatentSpec, RouterSpec, Scoring, XieluSpec};
pub use laurel::LaurelSpec;
pub use lightning_attention::LightningAttentionSpec;
pub use mamba::MambaSpec;
pub use mamba2::Mamba2Spec;
pub use ngram_embedding::NgramEmbeddingSpec;
pub use per_layer_embedding::PerLayerEmbeddingSpec;
pub use projection::ProjectionSpec;
pub use rg_lru::RgLruSpec;
pub use rwkv_channel_mix::RwkvChannelMixSpec;
pub use rwkv_time_mix::RwkvTimeMixSpec;
pub use short_convolution::ShortConvolutionSpec;

use crate::layer::{AdapterRows, RaggedRows};
use crate::limits::SpecError;
use crate::memory::{Memory, MemoryNeed, Place};
use crate::rope::RopeSpec;
use crate::stage::TensorParallelGroup;
use crate::weights::{LoadError, Loader, Packer, Tensors, TokenTable};

/// A mixer, as its spec describes it. `M` is the matrix type; see [`crate::weights`].
pub(crate) trait Mixer {
    /// Weights of the mixer.
    type Weights<M>;
    /// Buffers of the forward pass, reused from block to block and from step to step.
    type Buffers: Default;

    /// Checks the numbers of the spec at `path`.
    fn check(&self, path: &str, ropes: &[RopeSpec], hidden_size: usize) -> Result<(), SpecError>;

    /// Loads the weights.
    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        at: At<'_>,
    ) -> Result<Self::Weights<P::Matrix>, LoadError>;

    /// Adds all matrices and vectors to `tensors`, in a fixed order.
    fn list<'a, M>(weights: &'a Self::Weights<M>, tensors: &mut Tensors<'a, M>);

    /// Returns whether the input may be wider than the residual stream.
    fn reads_any_width(&self) -> bool {
        false
    }

    /// Returns the matrices that a single token does not read.
    fn idle<'a, M>(&self, _weights: &'a Self::Weights<M>) -> Vec<&'a M> {
        Vec::new()
    }

    /// Returns the sequence memory that the mixer needs, if it reads anything of earlier tokens.
    fn memory(&self) -> Vec<MemoryNeed> {
        Vec::new()
    }

    /// Returns the number of residual streams that the mixer reads side by side, in a joined span if there are several.
    fn streams(&self) -> usize {
        1
    }

    /// Returns the columns that the mixer reads of tables, if it looks up tokens.
    fn columns(&self) -> Option<TableColumns> {
        None
    }

    /// Returns whether the mixer reads the embeddings of the tokens.
    fn reads_embedding(&self) -> bool {
        false
    }

    /// Returns the floats in buffers for a step of `rows` rows of `hidden_size`.
    fn buffer_floats(&self, hidden_size: usize, rows: usize) -> usize;

    /// Returns the length of the longest row that is multiplied with a matrix, counted for each row of a step.
    fn longest_input(&self, hidden_size: usize) -> usize;

    /// Returns the bytes of buffers in which each of `rows` rows of sequences of up to `tokens` tokens finds what it
    /// attends to.
    fn choice_bytes(&self, _rows: usize, _tokens: usize) -> u64 {
        0
    }

    /// Computes `out: [rows, hidden_size]` from `x`, which is as wide unless the mixer [reads any
    /// width](Self::reads_any_width).
    fn run(
        &self,
        weights: &Self::Weights<PackedMatrix>,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        x: &[f32],
        buffers: &mut Self::Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError>;
}

/// Columns of some of [`crate::ModelSpec::tables`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TableColumns {
    /// Indices of the tables.
    pub tables: Range<usize>,
    pub first: usize,
    pub count: usize,
    /// Number of rows that hashes select from, in all tables together; `None` if tokens select the rows of one table.
    pub hashed_rows: Option<usize>,
}

/// Place of a mixer's tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct At<'a> {
    /// Prefix of the roles: `layers.3.attention.`.
    pub prefix: &'a str,
    /// Index of the layer.
    pub layer: usize,
    /// Columns of the input.
    pub columns: usize,
}

/// A forward pass of one mixer over a batch.
#[derive(Clone, Copy)]
pub(crate) struct MixerPass<'a> {
    pub exec: Exec<'a>,
    /// The workers that divide the heads of keys and values, if several do.
    pub group: Option<&'a TensorParallelGroup>,
    /// Width of the residual stream that blocks run on.
    pub width: usize,
    /// Whether a row depends only on itself and the rows before it.
    pub causal: bool,
    pub ropes: &'a [RopeSpec],
    pub rows: &'a RaggedRows<'a>,
    /// Hidden states before the first layer, `[rows, hidden_size]`; empty if no mixer reads them.
    pub embedding: &'a [f32],
    pub tables: &'a [TokenTable],
    pub adapters: AdapterRows<'a>,
    /// Places of the mixer's sequence memory, in the order of its needs.
    pub places: &'a [Place],
}

impl MixerPass<'_> {
    /// Returns the place of the sequence memory of a mixer with one need.
    ///
    /// # Panics
    /// If the mixer has another number of needs.
    fn place(&self) -> Place {
        let &[place] = self.places else { panic!("a mixer with one need has one place, got {:?}", self.places) };
        place
    }

    /// Returns the segments of the batch in the group of the mixer's state.
    fn segments(&self) -> &[Segment] {
        &self.rows.segments[self.place().group]
    }

    /// Returns the segments of the batch, and the states of the mixer from their float `offset` on, one per row.
    fn states<'m>(&self, memory: &'m mut Memory, offset: usize) -> (&[Segment], RowsMut<'m>) {
        let Place { group, index } = self.place();
        (&self.rows.segments[group], memory.floats_mut(Place { group, index: index + offset }))
    }
}

/// Defines the enums over all mixers and calls each by its [`Mixer`] implementation.
macro_rules! mixers {
    ($($(#[$doc:meta])* $buffers:ident: $name:ident($spec:ty),)*) => {
        /// Function of a residual block from its normed input to what it adds to the stream.
        #[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
        #[serde(tag = "type", rename_all = "snake_case")]
        pub enum MixerSpec {
            $($(#[$doc])* $name($spec),)*
        }

        /// Weights of a mixer.
        pub(crate) enum MixerWeights<M = PackedMatrix> {
            $($name(<$spec as Mixer>::Weights<M>),)*
        }

        /// Buffers of all mixers.
        #[derive(Default)]
        pub(crate) struct MixerBuffers {
            $($buffers: <$spec as Mixer>::Buffers,)*
        }

        impl MixerSpec {
            /// Returns the name of the kind of mixer.
            pub(crate) fn name(&self) -> &'static str {
                match self { $(Self::$name(_) => stringify!($buffers),)* }
            }

            pub(crate) fn check(&self, path: &str, ropes: &[RopeSpec], hidden_size: usize) -> Result<(), SpecError> {
                match self { $(Self::$name(spec) => spec.check(path, ropes, hidden_size),)* }
            }

            pub(crate) fn load<P: Packer>(
                &self,
                loader: &Loader<'_>,
                packer: &mut P,
                at: At<'_>,
            ) -> Result<MixerWeights<P::Matrix>, LoadError> {
                Ok(match self { $(Self::$name(spec) => MixerWeights::$name(spec.load(loader, packer, at)?),)* })
            }

            /// Returns whether the input may be wider than the residual stream.
            pub(crate) fn reads_any_width(&self) -> bool {
                match self { $(Self::$name(spec) => spec.reads_any_width(),)* }
            }

            /// Returns the matrices that a single token does not read.
            pub(crate) fn idle<'a, M>(&self, weights: &'a MixerWeights<M>) -> Vec<&'a M> {
                match (self, weights) {
                    $((Self::$name(spec), MixerWeights::$name(weights)) => spec.idle(weights),)*
                    _ => unreachable!("weights are loaded as the spec says"),
                }
            }

            /// Returns the sequence memory that the mixer needs.
            pub(crate) fn memory(&self) -> Vec<MemoryNeed> {
                match self { $(Self::$name(spec) => spec.memory(),)* }
            }

            /// Returns the number of residual streams that the mixer reads side by side.
            pub(crate) fn streams(&self) -> usize {
                match self { $(Self::$name(spec) => spec.streams(),)* }
            }

            /// Returns the columns that the mixer reads of tables.
            pub(crate) fn columns(&self) -> Option<TableColumns> {
                match self { $(Self::$name(spec) => spec.columns(),)* }
            }

            /// Returns whether the mixer reads the embeddings of the tokens.
            pub(crate) fn reads_embedding(&self) -> bool {
                match self { $(Self::$name(spec) => spec.reads_embedding(),)* }
            }

            /// Returns the bytes of buffers in which each of `rows` rows of sequences of up to `tokens` tokens chooses
            /// what it attends to.
            pub(crate) fn choice_bytes(&self, rows: usize, tokens: usize) -> u64 {
                match self { $(Self::$name(spec) => spec.choice_bytes(rows, tokens),)* }
            }

            /// Returns the floats in buffers for a step of `rows` rows.
            pub(crate) fn buffer_floats(&self, hidden_size: usize, rows: usize) -> usize {
                match self { $(Self::$name(spec) => spec.buffer_floats(hidden_size, rows),)* }
            }

            /// Returns the length of the longest row that is multiplied with a matrix, counted for each row of a step.
            pub(crate) fn longest_input(&self, hidden_size: usize) -> usize {
                match self { $(Self::$name(spec) => spec.longest_input(hidden_size),)* }
            }

            /// Computes `out: [rows, hidden_size]` from `x`.
            pub(crate) fn run(
                &self,
                weights: &MixerWeights,
                pass: &MixerPass<'_>,
                memory: &mut Memory,
                x: &[f32],
                buffers: &mut MixerBuffers,
                out: &mut [f32],
            ) -> Result<(), PoolError> {
                match (self, weights) {
                    $((Self::$name(spec), MixerWeights::$name(weights)) => {
                        spec.run(weights, pass, memory, x, &mut buffers.$buffers, out)
                    })*
                    _ => unreachable!("weights are loaded as the spec says"),
                }
            }
        }

        impl<M> MixerWeights<M> {
            /// Adds all matrices and vectors to `tensors`, in a fixed order.
            pub(crate) fn list<'a>(&'a self, tensors: &mut Tensors<'a, M>) {
                match self { $(Self::$name(weights) => <$spec>::list(weights, tensors),)* }
            }
        }
    };
}

mixers! {
    /// Softmax attention.
    attention: Attention(AttentionSpec),
    /// Softmax attention to a window of tokens and to compressed entries.
    compressed_attention: CompressedAttention(CompressedAttentionSpec),
    /// Feed-forward network, the same for every token.
    dense: Dense(DenseSpec),
    /// Mixture of experts: a router chooses a few networks for each token.
    experts: Experts(ExpertsSpec),
    /// Learned augmented residual.
    laurel: Laurel(LaurelSpec),
    /// Linear attention with a delta rule and a decay.
    delta_net: DeltaNet(DeltaNetSpec),
    /// Linear attention with a constant decay.
    lightning_attention: LightningAttention(LightningAttentionSpec),
    /// Mamba.
    mamba: Mamba(MambaSpec),
    /// Mamba 2.
    mamba2: Mamba2(Mamba2Spec),
    /// Embedding of hashed n-grams.
    ngram_embedding: NgramEmbedding(NgramEmbeddingSpec),
    /// Vector of the token for the layer, behind a gate.
    per_layer_embedding: PerLayerEmbedding(PerLayerEmbeddingSpec),
    /// One matrix.
    projection: Projection(ProjectionSpec),
    /// Real-gated linear recurrent unit.
    rg_lru: RgLru(RgLruSpec),
    /// Channel mixing of RWKV 4.
    rwkv_channel_mix: RwkvChannelMix(RwkvChannelMixSpec),
    /// Time mixing of RWKV 4.
    rwkv_time_mix: RwkvTimeMix(RwkvTimeMixSpec),
    /// Gated short convolution.
    short_convolution: ShortConvolution(ShortConvolutionSpec),
}
