//! Logits of rows after the final norm.

use std::ops::Range;

use ferrule_kernels::elementwise::{add_bias, softcap};
use ferrule_kernels::{Exec, PoolError, Scratch};

use crate::layer::{AdapterRows, adapted, linear, scale_unless_one};
use crate::spec::ModelSpec;
use crate::weights::{Linear, Weights};

/// Weights between the final norm and the logits.
#[derive(Clone, Copy)]
pub(crate) struct LmHeadWeights<'a> {
    /// Projection to the width of the lm_head's rows.
    pub projection: Option<&'a Linear>,
    /// The lm_head, unless it is tied to the embedding.
    pub lm_head: Option<&'a Linear>,
    /// Matrix of the embedding, which a tied lm_head uses.
    pub tied: Option<&'a Linear>,
    /// Bias that is not part of `lm_head`.
    pub bias: Option<&'a [f32]>,
}

impl<'a> LmHeadWeights<'a> {
    /// Takes the weights for the logits of `tokens`, whose rows of the lm_head are in `weights`.
    pub fn new(weights: &'a Weights, tokens: Range<usize>) -> Self {
        Self {
            projection: weights.lm_head_projection.as_ref(),
            lm_head: weights.lm_head.as_ref(),
            tied: weights.embedding.as_ref().and_then(|embedding| embedding.tokens.as_ref()),
            bias: weights.lm_head_bias.as_deref().map(|bias| &bias[tokens]),
        }
    }
}

/// Computes the logits of rows after the final norm.
///
/// # Panics
/// If the lm_head is tied, and the matrix of the embedding is missing.
pub(crate) fn apply_lm_head(
    exec: &Exec<'_>,
    spec: &ModelSpec,
    weights: LmHeadWeights<'_>,
    rows: &[f32],
    adapters: AdapterRows<'_>,
    narrow: &mut Scratch<f32>,
    logits: &mut [f32],
) -> Result<(), PoolError> {
    if spec.lm_head.is_none() {
        return Ok(());
    }
    let rows = project(exec, spec, weights.projection, rows, adapters, narrow)?;
    multiply_lm_head(exec, spec, weights, rows, adapters, logits)
}

/// Projects rows after the final norm to the width of the lm_head's rows.
pub(crate) fn project<'a>(
    exec: &Exec<'_>,
    spec: &ModelSpec,
    projection: Option<&Linear>,
    rows: &'a [f32],
    adapters: AdapterRows<'_>,
    narrow: &'a mut Scratch<f32>,
) -> Result<&'a [f32], PoolError> {
    let Some(projection) = projection else { return Ok(rows) };
    let out = narrow.take(rows.len() / spec.hidden_size * spec.embedding_width());
    adapted(exec, projection, adapters, rows, out)?;
    Ok(out)
}

/// Computes the logits of rows of the lm_head's width, for the tokens whose rows are in `weights`.
pub(crate) fn multiply_lm_head(
    exec: &Exec<'_>,
    spec: &ModelSpec,
    weights: LmHeadWeights<'_>,
    rows: &[f32],
    adapters: AdapterRows<'_>,
    logits: &mut [f32],
) -> Result<(), PoolError> {
    let head = spec.lm_head.expect("a model with an lm_head");
    match weights.lm_head {
        Some(head) => adapted(exec, head, adapters, rows, logits)?,
        None => linear(exec, weights.tied.expect("the matrix of a tied lm_head"), rows, logits)?,
    }
    weights.bias.iter().try_for_each(|bias| add_bias(exec, logits, bias))?;
    scale_unless_one(exec, logits, head.scale)?;
    head.softcap.map_or(Ok(()), |cap| softcap(exec, logits, cap))
}
