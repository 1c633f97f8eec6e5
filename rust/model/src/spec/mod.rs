//! The complete description of an architecture, as data. Python's `archs/` write it, [`crate::Transformer`] runs it.
//!
//! Everything that tells one family of models from another is a field here. A field or a value that this build does
//! not know is refused by its name, so that an unsupported switch can never be passed over in silence.

mod attention;
mod ffn;
mod norm;
mod readout;
mod tensors;

use std::collections::{BTreeMap, BTreeSet};

use ferrule_formats::StoredAs;
use serde::{Deserialize, Serialize};

pub use attention::{AttentionSpec, HeadProjections, LatentProjections, ProjectionsSpec};
pub use ffn::{ActivationSpec, ClampSpec, DenseSpec, ExpertsSpec, FfnSpec, GroupScore, RouterSpec, Scoring};
pub use norm::{HeadNormSpec, NormSpec, NormedOver};
pub use readout::{ClassifierSpec, Pooling, TextProjectionSpec};
pub use tensors::{PartSpec, StackSpec, TensorSpec};

use crate::limits::{SpecError, finite, require, size};
use crate::rope::RopeSpec;

/// A model, completely.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Its family, for messages.
    pub architecture: String,
    /// Tokens of the vocabulary: rows of the embedding and logits of a row.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Positions that the model was made for.
    pub max_position_embeddings: usize,
    /// From token ids to hidden states.
    pub embedding: EmbeddingSpec,
    /// The rotations that layers name by index.
    pub ropes: Vec<RopeSpec>,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// After the last layer.
    pub final_norm: Option<NormSpec>,
    /// From hidden states to logits; none where the model gives hidden states only.
    #[serde(rename = "head")]
    pub lm_head: Option<LmHeadSpec>,
    /// Whether a token sees only those before it and itself.
    pub causal: bool,
    /// From a text's pooled hidden state to a score for each label.
    pub classifier: Option<ClassifierSpec>,
    /// From a text's pooled hidden state to its embedding, one after the other; none where it is that itself.
    pub text_projections: Vec<TextProjectionSpec>,
    /// Which stored tensor plays which role.
    pub tensors: BTreeMap<String, TensorSpec>,
    /// A tensor that is not there under its name may have the second of a pair in place of the first before it.
    pub prefixes: Vec<(String, String)>,
    /// How the checkpoint stores what it has quantized; none where every weight is plain.
    pub stored_as: Option<StoredAs>,
}

/// One transformer layer: x = sum_norm(x + post_norm(attention(norm(x)))), then the same with the feed-forward network.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSpec {
    /// Attention over the sequence.
    pub attention: AttentionSpec,
    /// The feed-forward network.
    pub ffn: FfnSpec,
    /// Before attention.
    pub attention_norm: Option<NormSpec>,
    /// After attention.
    pub attention_post_norm: Option<NormSpec>,
    /// After attention was added.
    pub attention_sum_norm: Option<NormSpec>,
    /// Before the feed-forward network.
    pub ffn_norm: Option<NormSpec>,
    /// After the feed-forward network.
    pub ffn_post_norm: Option<NormSpec>,
    /// After the feed-forward network was added.
    pub ffn_sum_norm: Option<NormSpec>,
    /// Both blocks read the layer's input. A network without a norm of its own reads what attention reads.
    pub parallel: bool,
    /// Factor on what a block adds.
    pub residual_scale: f32,
    /// What is added to is the normed input, not the input.
    pub residual_after_norm: bool,
}

/// From token ids to hidden states.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EmbeddingSpec {
    /// Factor on the tokens' rows.
    pub scale: f32,
    /// Of a row, where a projection leads from there to `hidden_size`, and back before the head.
    pub width: Option<usize>,
    /// What is added for a token's position.
    pub positions: Option<PositionsSpec>,
    /// Rows of a table for kinds of tokens, of which one is added for each; 0 where there is none.
    pub token_types: usize,
    /// Of the sum.
    pub norm: Option<NormSpec>,
}

/// A vector that is added for each position.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum PositionsSpec {
    /// A learned one: row position + offset of a table.
    Learned {
        /// Of the table.
        rows: usize,
        /// Rows of the table before position 0.
        offset: usize,
    },
    /// Sines, then cosines, of position + offset (Vaswani et al. 2017).
    Sinusoidal {
        /// Added to the position.
        offset: usize,
    },
}

/// The projection to the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LmHeadSpec {
    /// Whether it is the embedding's matrix.
    pub tied: bool,
    /// Whether it adds a bias.
    pub bias: bool,
    /// Factor on the logits.
    pub scale: f32,
    /// Logits l become softcap * tanh(l / softcap).
    pub softcap: Option<f32>,
}

/// More layers than any model has; a spec beyond it is a damaged file.
const MAX_LAYERS: usize = 4096;

impl ModelSpec {
    /// Reads and checks a spec.
    ///
    /// # Errors
    /// [`SpecError`] for an unknown switch or a number outside its limits.
    pub fn from_json(json: &str) -> Result<Self, SpecError> {
        let spec: Self = serde_json::from_str(json).map_err(|error| SpecError::Json(error.to_string()))?;
        spec.check()?;
        Ok(spec)
    }

    /// The tensor that plays `role`.
    ///
    /// # Errors
    /// [`SpecError::Role`] if none is named.
    pub fn tensor(&self, role: &str) -> Result<&TensorSpec, SpecError> {
        self.tensors.get(role).ok_or_else(|| SpecError::Role { role: role.to_owned() })
    }

    /// Folders within the checkpoint's that hold tensors: what comes before a stroke in their names.
    #[must_use]
    pub fn folders(&self) -> BTreeSet<&str> {
        let names = self.tensors.values().flat_map(|tensor| &tensor.names);
        names.filter_map(|name| Some(name.split_once('/')?.0)).collect()
    }

    /// Width of the embedding's and the head's rows.
    #[must_use]
    pub fn embedding_width(&self) -> usize {
        self.embedding.width.unwrap_or(self.hidden_size)
    }

    /// Numbers of a text's embedding.
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
        norm::check("final_norm", self.final_norm)?;
        if let Some(lm_head) = &self.lm_head {
            finite("head.scale", lm_head.scale)?;
            positive("head.softcap", lm_head.softcap)?;
        }
        self.classifier.map_or(Ok(()), |classifier| classifier.check())?;
        readout::check_projections(&self.text_projections)?;
        for (i, rope) in self.ropes.iter().enumerate() {
            rope.check(&format!("ropes[{i}]"))?;
        }
        for (i, layer) in self.layers.iter().enumerate() {
            layer.check(&format!("layers[{i}]"), &self.ropes)?;
        }
        self.tensors.iter().try_for_each(|(role, tensor)| tensor.check(&format!("tensors[{role:?}]")))
    }
}

impl LayerSpec {
    fn check(&self, path: &str, ropes: &[RopeSpec]) -> Result<(), SpecError> {
        for (name, norm) in [
            ("attention_norm", self.attention_norm),
            ("attention_post_norm", self.attention_post_norm),
            ("attention_sum_norm", self.attention_sum_norm),
            ("ffn_norm", self.ffn_norm),
            ("ffn_post_norm", self.ffn_post_norm),
            ("ffn_sum_norm", self.ffn_sum_norm),
        ] {
            norm::check(&format!("{path}.{name}"), norm)?;
        }
        finite(&format!("{path}.residual_scale"), self.residual_scale)?;
        self.attention.check(&format!("{path}.attention"), ropes)?;
        self.ffn.check(&format!("{path}.ffn"))
    }
}

impl EmbeddingSpec {
    fn check(&self, positions: usize) -> Result<(), SpecError> {
        finite("embedding.scale", self.scale)?;
        self.width.map_or(Ok(()), |width| size("embedding.width", width))?;
        require("embedding.token_types", self.token_types, self.token_types <= 1 << 16, || "at most 65536".to_owned())?;
        norm::check("embedding.norm", self.norm)?;
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

/// A number above 0, if there is one.
fn positive(field: &str, value: Option<f32>) -> Result<(), SpecError> {
    value
        .map_or(Ok(()), |value| require(field, value, value.is_finite() && value > 0.0, || "finite and > 0".to_owned()))
}
