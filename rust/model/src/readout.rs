//! Embeddings and scores of texts, from their pooled hidden states.

use ferrule_kernels::activation::activate;
use ferrule_kernels::{Exec, PoolError};

use crate::layer::{linear, norm_in_place};
use crate::spec::{ActivationSpec, ModelSpec};
use crate::weights::{Linear, Weights};

/// Computes embeddings `[texts, embedding_size]` from `pooled: [texts, hidden_size]`.
pub(crate) fn embeddings(
    exec: &Exec<'_>,
    spec: &ModelSpec,
    weights: &Weights,
    pooled: &[f32],
) -> Result<Vec<f32>, PoolError> {
    let mut rows = pooled.to_vec();
    for (projection, weights) in spec.text_projections.iter().zip(&weights.text_projections) {
        rows = project(exec, weights, projection.activation, &rows)?;
    }
    Ok(rows)
}

/// Computes scores `[texts, labels]` from `pooled: [texts, hidden_size]`.
///
/// # Panics
/// If the model has no classifier.
pub(crate) fn scores(
    exec: &Exec<'_>,
    spec: &ModelSpec,
    weights: &Weights,
    pooled: &[f32],
) -> Result<Vec<f32>, PoolError> {
    let (Some(spec), Some(weights), width) = (spec.classifier, &weights.classifier, spec.hidden_size) else {
        panic!("the model has no classifier")
    };
    let mut rows = match &weights.dense {
        Some(dense) => project(exec, dense, spec.activation, pooled)?,
        None => pooled.to_vec(),
    };
    norm_in_place(exec, weights.norm.as_ref(), &mut rows, width)?;
    project(exec, &weights.labels, None, &rows)
}

/// Computes `activation(W x + b)` for each row.
fn project(
    exec: &Exec<'_>,
    weights: &Linear,
    activation: Option<ActivationSpec>,
    rows: &[f32],
) -> Result<Vec<f32>, PoolError> {
    let mut out = vec![0.0; rows.len() / weights.weight.cols() * weights.outputs];
    linear(exec, weights, rows, &mut out)?;
    activation.map_or(Ok(()), |activation| activate(exec, &mut out, activation.into()))?;
    Ok(out)
}
