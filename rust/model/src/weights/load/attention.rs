//! The roles of attention: multi-head with grouped keys and values, or multi-head latent attention.

use super::Loader;
use crate::spec::{AttentionSpec, HeadNormSpec, HeadProjections, LatentProjections, NormedOver, ProjectionsSpec};
use crate::weights::error::LoadError;
use crate::weights::plan::Packer;
use crate::weights::sites::{HeadSplit, Site};
use crate::weights::source::{MatrixPart, Slice};
use crate::weights::{Attention, Heads, Latent, Projections};

impl Loader<'_> {
    pub(super) fn attention<P: Packer>(
        &self,
        packer: &mut P,
        at: &str,
        spec: &AttentionSpec,
    ) -> Result<Attention<P::Matrix>, LoadError> {
        let (hidden, usual) = (self.spec.hidden_size, self.quantization.usual());
        let projections = match &spec.projections {
            ProjectionsSpec::Heads(heads) => Projections::Heads(self.heads(packer, at, spec.heads, heads)?),
            ProjectionsSpec::Latent(latent) => Projections::Latent(self.latent(packer, at, spec.heads, latent)?),
        };
        let output = self.linear(packer, at, &[("output", hidden, usual)], spec.output_columns(), spec.output_bias)?;
        let sinks = match spec.sinks {
            true => Some(self.vector(&format!("{at}sinks.weight"), spec.heads)?),
            false => None,
        };
        Ok(Attention { projections, output, sinks })
    }

    fn heads<P: Packer>(
        &self,
        packer: &mut P,
        at: &str,
        heads: usize,
        spec: &HeadProjections,
    ) -> Result<Heads<P::Matrix>, LoadError> {
        let HeadProjections { kv_heads, key_dim, value_dim, bias, qk_norm, .. } = *spec;
        let usual = self.quantization.usual();
        let parts = [
            ("q", heads * key_dim, usual),
            ("k", kv_heads * key_dim, usual),
            ("v", kv_heads * value_dim, self.quantization.values()),
        ];
        let qkv = self.linear(packer, at, &parts, self.spec.hidden_size, bias)?;
        let norms = match qk_norm {
            None => None,
            Some(HeadNormSpec { norm, over, .. }) => {
                let width = |heads| if over == NormedOver::Head { key_dim } else { heads * key_dim };
                let queries = self.norm(&format!("{at}q_norm"), norm, width(heads))?;
                Some([queries, self.norm(&format!("{at}k_norm"), norm, width(kv_heads))?])
            }
        };
        Ok(Heads { qkv, norms })
    }

    fn latent<P: Packer>(
        &self,
        packer: &mut P,
        at: &str,
        heads: usize,
        spec: &LatentProjections,
    ) -> Result<Latent<P::Matrix>, LoadError> {
        let LatentProjections { query_rank, kv_rank, nope_dim, rope_dim, value_dim, norm, bias, .. } = *spec;
        let (hidden, usual) = (self.spec.hidden_size, self.quantization.usual());
        let query_columns = heads * (nope_dim + rope_dim);
        let first = query_rank.map_or(("q", query_columns, usual), |rank| ("q_a", rank, usual));
        let second = ("kv_a", kv_rank + rope_dim, usual);
        let mut input = self.linear(packer, at, &[first, second], hidden, false)?;
        if bias {
            // Queries without a low-rank projection have no bias.
            let first = match query_rank {
                Some(rank) => (Some(format!("{at}q_a.bias")), rank),
                None => (None, query_columns),
            };
            input.bias = Some(self.vectors(&[first, (Some(format!("{at}kv_a.bias")), kv_rank + rope_dim)])?);
        }
        let queries = match query_rank {
            Some(rank) => Some((
                self.norm(&format!("{at}q_a_norm"), norm, rank)?,
                self.linear(packer, at, &[("q_b", query_columns, usual)], rank, false)?,
            )),
            None => None,
        };
        let (mut key_up, mut value_up) = (Vec::with_capacity(heads), Vec::with_capacity(heads));
        for head in 0..heads {
            let [keys, values] = up_projections(at, heads, spec, head);
            let keys = MatrixPart { role: &keys.0, rows: kv_rank, format: usual, slice: Some(keys.1) };
            let format = self.quantization.values();
            let values = MatrixPart { role: &values.0, rows: value_dim, format, slice: Some(values.1) };
            let keys = self.matrix(format!("{at}kv_b.{head}.keys"), &[keys], nope_dim)?;
            let values = self.matrix(format!("{at}kv_b.{head}.values"), &[values], kv_rank)?;
            key_up.push(packer.pack(keys)?);
            value_up.push(packer.pack(values)?);
        }
        let norm = self.norm(&format!("{at}kv_a_norm"), norm, kv_rank)?;
        let split = HeadSplit { heads, nope_dim, value_dim };
        let parts = vec![(format!("{at}kv_b"), heads * split.rows())];
        let up_site = packer.add_site(Site { parts, columns: kv_rank, heads: Some(split) });
        Ok(Latent { input, queries, norm, key_up, value_up, up_site })
    }
}

/// Returns where head `head` has its projections from the latent: to keys `[kv_rank, nope_dim]`, transposed because
/// queries are multiplied with it, and to values `[value_dim, kv_rank]`.
///
/// A checkpoint stores them as two matrices, or as one with the rows of each head's keys before those of its values.
fn up_projections(at: &str, heads: usize, spec: &LatentProjections, head: usize) -> [(String, Slice); 2] {
    let LatentProjections { kv_rank, nope_dim, value_dim, split, .. } = *spec;
    if split {
        let slice = |rows: usize, columns| Slice {
            whole: [heads * rows, columns],
            first: head * rows,
            rows,
            transposed: false,
        };
        return [
            (format!("{at}k_b.weight"), slice(kv_rank, nope_dim)),
            (format!("{at}v_b.weight"), slice(value_dim, kv_rank)),
        ];
    }
    let head_dim = nope_dim + value_dim;
    let (role, whole, first) = (format!("{at}kv_b.weight"), [heads * head_dim, kv_rank], head * head_dim);
    [
        (role.clone(), Slice { whole, first, rows: nope_dim, transposed: true }),
        (role, Slice { whole, first: first + nope_dim, rows: value_dim, transposed: false }),
    ]
}
