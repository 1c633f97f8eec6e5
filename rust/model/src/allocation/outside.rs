//! Computing what a model does before its first and after its last layer.

use std::cell::RefCell;

use ferrule_kernels::{Exec, Scratch};

use super::noise::Noisy;
use crate::calibrate::Pass;
use crate::layer::{AdapterBuffers, AdapterRows, norm_in_place};
use crate::lm_head::{LmHeadWeights, apply_lm_head};
use crate::spec::ModelSpec;
use crate::streams::StreamEnds;
use crate::weights::{Embedding, Linear, LoadError, Loader, Norm, TokenTable};

/// Parts of a model before its first and after its last layer.
pub(super) struct OutsideLayers<'a, 's> {
    pub spec: &'a ModelSpec,
    pub sequences: &'a [Vec<u32>],
    pub exec: Exec<'a>,
    pub loader: &'a Loader<'s>,
    pub tables: &'a [TokenTable],
}

/// Weights after the last layer.
pub(super) struct LastWeights {
    streams: Option<StreamEnds>,
    norm: Option<Norm>,
    projection: Option<Linear>,
    lm_head: Option<Linear>,
    tied_bias: Option<Vec<f32>>,
    /// Embedding of a tied lm_head.
    embedding: Option<Embedding>,
}

impl LastWeights {
    /// Returns the matrix that computes the logits, unless the model has no lm_head.
    pub fn lm_head(&self) -> Option<&Linear> {
        self.tied().or(self.lm_head.as_ref())
    }

    /// Returns the matrix of the embedding that is tied to the lm_head.
    fn tied(&self) -> Option<&Linear> {
        self.embedding.as_ref().and_then(|embedding| embedding.tokens.as_ref())
    }
}

impl<'a> OutsideLayers<'a, '_> {
    /// Returns all sequences before the first layer.
    pub fn begin(&self, mut noisy: Noisy<'_>) -> Result<Pass<'a>, LoadError> {
        let embedding = self.loader.embedding(&mut noisy)?;
        let streams = self.loader.streams(&mut noisy)?;
        Pass::new(self.exec, self.spec, self.sequences, &embedding, self.tables, streams.as_ref())
    }

    /// Loads what follows the last layer.
    pub fn load(&self, mut noisy: Noisy<'_>) -> Result<LastWeights, LoadError> {
        let Self { spec, loader, .. } = self;
        let embedding = if spec.has_tied_lm_head() { Some(loader.embedding(&mut noisy)?) } else { None };
        let (streams, norm) = (loader.streams(&mut noisy)?, loader.final_norm()?);
        let projection = loader.lm_head_projection(&mut noisy)?;
        let (lm_head, tied_bias) = loader.lm_head(&mut noisy)?;
        Ok(LastWeights { streams, norm, projection, lm_head, tied_bias, embedding })
    }

    /// Returns the hidden states of the scored tokens after the last layer and the norm: `[tokens, hidden_size]`. The second
    /// half of each sequence is scored.
    pub fn scored(&self, pass: &mut Pass<'_>, weights: &LastWeights) -> Result<Vec<f32>, LoadError> {
        let Self { spec, exec, .. } = self;
        let width = spec.hidden_size;
        let hidden = pass.take_hidden(weights.streams.as_ref())?;
        let (mut rows, mut first) = (Vec::new(), 0);
        for tokens in self.sequences {
            let scored = first + tokens.len() / 2..first + tokens.len();
            rows.extend_from_slice(&hidden[scored.start * width..scored.end * width]);
            first = scored.end;
        }
        norm_in_place(exec, weights.norm.as_ref(), &mut rows, width)?;
        Ok(rows)
    }

    /// Returns the logits of some hidden states after the norm: `[tokens, vocab_size]`.
    pub fn logits(&self, rows: &[f32], weights: &LastWeights) -> Result<Vec<f32>, LoadError> {
        let Self { spec, exec, .. } = self;
        let mut logits = vec![0.0; rows.len() / spec.hidden_size * spec.vocab_size];
        let weights = LmHeadWeights {
            projection: weights.projection.as_ref(),
            lm_head: weights.lm_head.as_ref(),
            tied: weights.tied(),
            bias: weights.tied_bias.as_deref(),
        };
        let buffers = RefCell::<AdapterBuffers>::default();
        let (adapters, mut narrow) = (AdapterRows::new(&[], &buffers), Scratch::default());
        apply_lm_head(exec, spec, weights, rows, adapters, &mut narrow, &mut logits)?;
        Ok(logits)
    }
}
