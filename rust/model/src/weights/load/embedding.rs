//! The roles of the embedding.

use super::Loader;
use super::roles::zeros;
use crate::spec::PositionsSpec;
use crate::weights::error::LoadError;
use crate::weights::plan::Packer;
use crate::weights::{Embedding, TokenTable};

impl Loader<'_> {
    /// Returns whether the stage has rows of the matrix of the embedding: its part of them, or all of them in a stage that
    /// looks up tokens or multiplies with the matrix.
    pub(super) fn has_token_rows(&self) -> bool {
        if !self.spec.embedding.tokens {
            return false;
        }
        let (vocabulary, stage) = (self.part.vocabulary, &self.part.layers);
        match vocabulary.is_divided() {
            true => !vocabulary.panels(self.spec.vocab_size).is_empty(),
            false => stage.is_first() || stage.is_last() && self.spec.has_tied_lm_head(),
        }
    }

    /// Loads what the stage has of the embedding: its rows of the matrix of the tokens; the projection, positions, token
    /// types and norm in the first stage.
    pub fn embedding<P: Packer>(&self, packer: &mut P) -> Result<Embedding<P::Matrix>, LoadError> {
        let Self { spec, quantization, .. } = self;
        let (hidden, width, multiplied) =
            (spec.hidden_size, spec.embedding_width(), quantization.embedding_and_lm_head());
        let embedding = &spec.embedding;
        let tokens = if self.has_token_rows() {
            let format = match spec.has_tied_lm_head() {
                true => multiplied,
                false => self.source.lookup_format("embedding", [spec.vocab_size, width], *quantization)?,
            };
            self.vocabulary_rows(packer, ("embedding", spec.vocab_size, format), false)?
        } else {
            None
        };
        if !self.part.layers.is_first() {
            return Ok(Embedding { tokens, projection: None, positions: None, token_types: None, norm: None });
        }
        let projection = match embedding.width {
            Some(width) => {
                let part = [("embedding_projection", hidden, multiplied)];
                Some(self.linear(packer, "", &part, width, embedding.projection_bias)?)
            }
            None => None,
        };
        let positions = match embedding.positions {
            Some(PositionsSpec::Learned { rows, .. }) => {
                Some(self.table("positions.weight", "positions.weight", [rows, hidden])?)
            }
            Some(PositionsSpec::Sinusoidal { offset }) => {
                let rows = offset + spec.max_position_embeddings;
                let mut table = zeros("the table of positions", rows.saturating_mul(hidden))?;
                if self.reads {
                    fill_sinusoids(&mut table, hidden);
                }
                Some(table)
            }
            None => None,
        };
        let token_types = match embedding.token_types {
            0 => None,
            rows => Some(self.table("token_types.weight", "token_types.weight", [rows, hidden])?),
        };
        Ok(Embedding {
            tokens,
            projection,
            positions,
            token_types,
            norm: self.optional_norm("embedding_norm", embedding.norm, hidden)?,
        })
    }
}

impl Loader<'_> {
    /// Finds the tables of the spec, which are looked up by token id or by hashes of tokens.
    pub fn tables<P: Packer>(&self, packer: &mut P) -> Result<Vec<TokenTable>, LoadError> {
        let tables = self.spec.tables.iter().enumerate().map(|(index, spec)| {
            let name = format!("tables.{index}");
            let table = TokenTable { spec: *spec, rows: self.source.table(&name, *spec)? };
            packer.table(&name, &table)?;
            Ok(table)
        });
        tables.collect()
    }
}

/// Fills a table of sinusoidal position embeddings: each row of `width` has sines, then cosines. Angles are products of
/// two f32, as in the reference implementation.
fn fill_sinusoids(table: &mut [f32], width: usize) {
    let half = width / 2;
    let step = 10_000f64.ln() / (half.max(2) - 1) as f64;
    let frequencies: Vec<f32> = (0..half).map(|i| (-(i as f64) * step).exp() as f32).collect();
    for (position, row) in table.chunks_exact_mut(width).enumerate() {
        for (i, frequency) in frequencies.iter().enumerate() {
            let angle = f64::from(position as f32 * frequency);
            (row[i], row[half + i]) = (angle.sin() as f32, angle.cos() as f32);
        }
    }
}
