//! The complete description of an architecture, as data. Python's `archs/` writes it, [`crate::Transformer`] runs it.
//!
//! Everything that distinguishes model families is a field here. An unknown field or value is refused by name, so that
//! an unsupported option is never ignored silently.

mod activation;
mod layer;
mod norm;
mod readout;
mod table;
mod tensors;

use std::collections::{BTreeMap, BTreeSet};

use ferrule_formats::StoredAs;
use serde::{Deserialize, Serialize};

pub use activation::ActivationSpec;
pub use layer::{BlockInput, BlockSpec, LayerSpec, LowRankSpec};
pub(crate) use norm::check_norm;
pub use norm::{HeadNormSpec, NormSpec, NormedOver};
pub use readout::{ClassifierSpec, Pooling, TextProjectionSpec};
pub use table::TableSpec;
pub use tensors::{Exponential, PartSpec, StackSpec, TensorSpec};

use crate::batch::{Capabilities, ClassifierInfo};
use crate::limits::{SpecError, finite, positive, require, size};
use crate::rope::RopeSpec;
use crate::streams::StreamsSpec;

/// Complete description of a model.
///
/// # Examples
/// A model of Llama's architecture with one layer; `tensors` stays empty because its weights are random.
/// ```
/// use ferrule_model::ModelSpec;
///
/// let json = r#"{
///     "architecture": "llama", "vocab_size": 96, "hidden_size": 64, "max_position_embeddings": 256,
///     "embedding": {"scale": 1.0, "width": null, "positions": null, "token_types": 0, "norm": null},
///     "ropes": [{"theta": 1e4, "rotary_dim": 16, "interleaved": false, "scaling": {"type": "none"}}],
///     "layers": [{
///         "scalar": false, "blocks": [{
///             "name": "attention",
///             "mixer": {
///                 "type": "attention", "heads": 4, "scale": 0.25, "output_bias": false, "rope": 0, "window": null,
///                 "softcap": null, "alibi_slopes": null, "sinks": false,
///                 "projections": {
///                     "type": "heads", "kv_heads": 2, "key_dim": 16, "value_dim": 16, "bias": false, "qk_norm": null,
///                     "values_are_keys": false, "clip": null
///                 }
///             },
///             "norm": {"type": "rms", "eps": 1e-5, "weight_offset": 0.0, "weight": true},
///             "post_norm": null, "sum_norm": null, "parallel": false, "residual_scale": 1.0,
///             "residual_after_norm": false
///         }, {
///             "name": "ffn",
///             "mixer": {
///                 "type": "dense", "intermediate_size": 96, "activation": "silu", "gated": true, "bias": false,
///                 "clamp": null, "gate_scale": 1.0
///             },
///             "norm": {"type": "rms", "eps": 1e-5, "weight_offset": 0.0, "weight": true},
///             "post_norm": null, "sum_norm": null, "parallel": false, "residual_scale": 1.0,
///             "residual_after_norm": false
///         }]
///     }],
///     "final_norm": {"type": "rms", "eps": 1e-5, "weight_offset": 0.0, "weight": true},
///     "lm_head": {"tied": true, "bias": false, "scale": 1.0, "softcap": null},
///     "causal": true, "classifier": null, "text_projections": [], "tensors": {}, "prefixes": []
/// }"#;
/// let spec = ModelSpec::from_json(json)?;
/// assert_eq!(spec.layers.len(), 1);
///
/// let error = ModelSpec::from_json(&json.replace("\"vocab_size\": 96", "\"vocab_size\": 0")).unwrap_err();
/// assert_eq!(error.to_string(), "model spec: vocab_size must be in 1..=268435456, got 0");
/// # Ok::<(), ferrule_model::SpecError>(())
/// ```
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Architecture name, for messages.
    pub architecture: String,
    /// Vocabulary size: rows of the embedding, and logits per row.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of positions that the model was trained for.
    pub max_position_embeddings: usize,
    /// Embedding of token ids.
    pub embedding: EmbeddingSpec,
    /// Rotary embeddings; layers refer to them by index.
    pub ropes: Vec<RopeSpec>,
    /// Tables that are looked up by token id or by hashes of tokens; mixers refer to them by index.
    #[serde(default)]
    pub tables: Vec<TableSpec>,
    /// Residual streams, if there are several.
    pub streams: Option<StreamsSpec>,
    /// Layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// Norm after the last layer.
    pub final_norm: Option<NormSpec>,
    /// Projection from hidden states to logits; `None` for models that have only hidden states.
    pub lm_head: Option<LmHeadSpec>,
    /// Whether a token attends only to itself and the tokens before it.
    pub causal: bool,
    /// Classifier of texts.
    pub classifier: Option<ClassifierSpec>,
    /// Projections from the pooled hidden state of a text to its embedding, applied in order; empty if the hidden state
    /// is the embedding.
    pub text_projections: Vec<TextProjectionSpec>,
    /// Number of consecutive hidden states that are joined to one input of the projections, such as those of neighbouring
    /// patches of an image.
    #[serde(default = "one_row")]
    pub merged_rows: usize,
    /// Stored tensor of each role.
    pub tensors: BTreeMap<String, TensorSpec>,
    /// Pairs of name prefixes: a tensor that is missing under the first prefix is looked up under the second.
    pub prefixes: Vec<(String, String)>,
    /// Quantization method of the checkpoint; `None` if no weight is quantized.
    pub stored_as: Option<StoredAs>,
}

/// Embedding of token ids, positions and token types.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EmbeddingSpec {
    /// Whether there is a table of token embeddings; if not, every token gets a row of features.
    #[serde(default = "has_tokens")]
    pub tokens: bool,
    /// Factor on token embeddings.
    pub scale: f32,
    /// Width of token embeddings, if it differs from `hidden_size`: projections lead from there to `hidden_size`, and
    /// back before the lm_head.
    pub width: Option<usize>,
    /// Whether the projection from there adds a bias.
    #[serde(default)]
    pub projection_bias: bool,
    /// Position embeddings.
    pub positions: Option<PositionsSpec>,
    /// Number of token types with an embedding that is added to each token; 0 if there are none.
    pub token_types: usize,
    /// Norm of the sum.
    pub norm: Option<NormSpec>,
}

/// Position embedding: a vector that is added for each position.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum PositionsSpec {
    /// Learned table: row `position + offset`.
    Learned {
        /// Number of rows.
        rows: usize,
        /// Number of rows before position 0.
        offset: usize,
    },
    /// Sines, then cosines, of `position + offset` (Vaswani et al. 2017).
    Sinusoidal {
        /// Constant added to the position.
        offset: usize,
    },
}

/// Projection to the vocabulary (lm_head).
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LmHeadSpec {
    /// Whether its matrix is the embedding's.
    pub tied: bool,
    /// Whether it adds a bias.
    pub bias: bool,
    /// Factor on the logits.
    pub scale: f32,
    /// Soft cap on logits: `l` becomes `softcap * tanh(l / softcap)`.
    pub softcap: Option<f32>,
}

/// Upper limit for the number of layers, above that of any known model.
const MAX_LAYERS: usize = 4096;

/// Upper limit for the number of hidden states that are joined, above that of any known model.
const MAX_MERGED_ROWS: usize = 256;

/// Returns the default of factors that specs may leave out.
pub(crate) fn one() -> f32 {
    1.0
}

/// Returns the default of [`ModelSpec::merged_rows`].
fn one_row() -> usize {
    1
}

/// Returns the default of [`EmbeddingSpec::tokens`].
fn has_tokens() -> bool {
    true
}

impl ModelSpec {
    /// Reads and checks a spec.
    ///
    /// # Errors
    /// [`SpecError`] for an unknown field or a number outside its limits.
    pub fn from_json(json: &str) -> Result<Self, SpecError> {
        let spec: Self = serde_json::from_str(json).map_err(|error| SpecError::Json(error.to_string()))?;
        spec.check()?;
        Ok(spec)
    }

    /// Returns the tensor of a role.
    ///
    /// # Errors
    /// [`SpecError::Role`] if the spec has none.
    pub fn tensor(&self, role: &str) -> Result<&TensorSpec, SpecError> {
        self.tensors.get(role).ok_or_else(|| SpecError::Role { role: role.to_owned() })
    }

    /// Returns the subfolders of the checkpoint that have tensors: the part before `/` in tensor names.
    #[must_use]
    pub fn folders(&self) -> BTreeSet<&str> {
        let names = self.tensors.values().flat_map(|tensor| &tensor.names);
        names.filter_map(|name| Some(name.split_once('/')?.0)).collect()
    }

    /// Returns the width of the rows of embedding and lm_head.
    #[must_use]
    pub fn embedding_width(&self) -> usize {
        self.embedding.width.unwrap_or(self.hidden_size)
    }

    /// Returns whether the model has an lm_head that multiplies with the matrix of the embedding.
    pub(crate) fn has_tied_lm_head(&self) -> bool {
        self.lm_head.is_some_and(|lm_head| lm_head.tied)
    }

    /// Returns the width of all residual streams together.
    pub(crate) fn streams_width(&self) -> usize {
        self.streams.as_ref().map_or(1, |streams| streams.count) * self.hidden_size
    }

    /// Returns whether a block or its mixer, in layer `first` or a later one, reads the embeddings of the tokens.
    pub(crate) fn reads_embedding(&self, first: usize) -> bool {
        let reads = |block: &BlockSpec| block.input == BlockInput::StreamAndEmbedding || block.mixer.reads_embedding();
        self.layers[first..].iter().flat_map(|layer| &layer.blocks).any(reads)
    }

    /// Returns the numbers per token that enter layer `layer`: all residual streams, and the embedding if this layer or
    /// a later one reads it.
    pub(crate) fn boundary_width(&self, layer: usize) -> usize {
        self.streams_width() + if self.reads_embedding(layer) { self.hidden_size } else { 0 }
    }

    /// Returns what a model of this architecture supports.
    pub(crate) fn capabilities(&self) -> Capabilities {
        let info = |spec: ClassifierSpec| ClassifierInfo { pooling: spec.pooling, labels: spec.labels };
        Capabilities {
            causal: self.causal,
            logits: self.causal && self.lm_head.is_some(),
            hidden_size: self.hidden_size,
            embedding_size: self.embedding_size(),
            token_types: self.embedding.token_types.max(1),
            feature_width: self.takes_features().then(|| self.embedding_width()),
            embeds_tokens: self.embedding.tokens,
            merged_rows: self.merged_rows,
            classifier: self.classifier.map(info),
        }
    }

    /// Returns whether features can take the place of token embeddings: not if layers look up the ids of the tokens too.
    fn takes_features(&self) -> bool {
        self.tables.is_empty()
    }

    /// Returns the number of leading positions whose keys and values do not depend on later tokens; see
    /// [`crate::LanguageModel::shareable_tokens`].
    pub(crate) fn shareable_tokens(&self, prompt_len: usize) -> usize {
        self.ropes.iter().map(|rope| rope.shareable_tokens(prompt_len)).min().unwrap_or(usize::MAX)
    }

    /// Returns the length of a text's embedding.
    #[must_use]
    pub fn embedding_size(&self) -> usize {
        self.text_projections.last().map_or(self.hidden_size, |last| last.width)
    }

    fn check(&self) -> Result<(), SpecError> {
        size("vocab_size", self.vocab_size)?;
        size("hidden_size", self.hidden_size)?;
        size("max_position_embeddings", self.max_position_embeddings)?;
        require("layers (their number)", self.layers.len(), (1..=MAX_LAYERS).contains(&self.layers.len()), || {
            format!("in 1..={MAX_LAYERS}")
        })?;
        self.embedding.check(self.max_position_embeddings)?;
        check_norm("final_norm", self.final_norm)?;
        if let Some(lm_head) = &self.lm_head {
            finite("lm_head.scale", lm_head.scale)?;
            positive("lm_head.softcap", lm_head.softcap)?;
        }
        self.streams.as_ref().map_or(Ok(()), |streams| streams.check("streams"))?;
        self.classifier.map_or(Ok(()), |classifier| classifier.check())?;
        readout::check_projections(&self.text_projections)?;
        require("merged_rows", self.merged_rows, (1..=MAX_MERGED_ROWS).contains(&self.merged_rows), || {
            format!("in 1..={MAX_MERGED_ROWS}")
        })?;
        require("merged_rows", self.merged_rows, self.merged_rows == 1 || !self.text_projections.is_empty(), || {
            "1 without text_projections".to_owned()
        })?;
        require("embedding.tokens", false, self.embedding.tokens || self.lm_head.is_none(), || {
            "true for a model with an lm_head".to_owned()
        })?;
        for (i, rope) in self.ropes.iter().enumerate() {
            rope.check(&format!("ropes[{i}]"))?;
        }
        for (i, table) in self.tables.iter().enumerate() {
            table.check(&format!("tables[{i}]"))?;
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let path = format!("layers[{i}]");
            layer.check(&path, &self.ropes, self.hidden_size)?;
            layer.check_shared(&path, &self.layers[..i])?;
            layer.check_choices(&path, &self.layers[..i], self.causal)?;
            layer.check_columns(&path, &self.tables)?;
            layer.check_weights_of(&path, &self.layers[..i])?;
            layer.check_spans(&path, self.streams.as_ref())?;
        }
        self.tensors.iter().try_for_each(|(role, tensor)| tensor.check(&format!("tensors[{role:?}]")))
    }
}

impl EmbeddingSpec {
    fn check(&self, positions: usize) -> Result<(), SpecError> {
        finite("embedding.scale", self.scale)?;
        self.width.map_or(Ok(()), |width| size("embedding.width", width))?;
        require("embedding.token_types", self.token_types, self.token_types <= 1 << 16, || "at most 65536".to_owned())?;
        check_norm("embedding.norm", self.norm)?;
        match self.positions {
            Some(PositionsSpec::Learned { rows, offset }) => {
                size("embedding.positions.rows", rows)?;
                require("embedding.positions.offset", offset, offset <= rows && rows - offset >= positions, || {
                    format!("such that {rows} rows hold max_position_embeddings ({positions}) positions after it")
                })
            }
            Some(PositionsSpec::Sinusoidal { offset }) => {
                require("embedding.positions.offset", offset, offset <= 1 << 16, || "at most 65536".to_owned())
            }
            None => Ok(()),
        }
    }
}
