//! Alternating updates (AltUp; Baykal et al. 2023): the blocks run on one stream, and predictions stand in for their
//! effect on the others.
//!
//! Before the blocks, every stream is predicted from all of them: `p_i = s_i + sum over j of c_ij s_j`. The blocks run on
//! `p_active` and make `x` of it. After them, every stream is corrected by what was not predicted:
//! `s_i = p_i + (k_i + 1) (x - p_active)`. The coefficients c and k are linear in `r = tanh(router(norm(y)) / width)`,
//! where `y` is the active stream before the blocks for c, and after them for k.

use ferrule_kernels::activation::{Activation, activate};
use ferrule_kernels::elementwise::scale;
use ferrule_kernels::{Format, PackedMatrix, PoolError, Scratch};
use serde::{Deserialize, Serialize};

use super::{add_times, copy_stream};
use crate::layer::{adapted, for_rows, normed_or_same};
use crate::limits::{SpecError, positive, require};
use crate::mixers::MixerPass;
use crate::spec::{NormSpec, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};

/// Alternating updates.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AlternatingSpec {
    /// Stream that the blocks run on.
    pub active: usize,
    /// Norm of the router's input.
    pub norm: NormSpec,
    /// Largest magnitude of the weights that the correction's coefficients are computed with.
    pub clip: Option<f32>,
}

/// Weights of alternating updates.
pub(crate) struct Alternating<M = PackedMatrix> {
    norm: Norm,
    /// One row per stream, in f32.
    router: Linear<M>,
    /// Coefficients c: `[streams, streams, streams]`, for stream i, from stream j, by the router's outputs.
    prediction: Vec<f32>,
    /// Coefficients k: `[streams, streams]`, for stream i, by the router's outputs.
    correction: Vec<f32>,
}

/// Buffers of alternating updates. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    normed: Scratch<f32>,
    /// Outputs of the router.
    routed: Scratch<f32>,
}

impl AlternatingSpec {
    pub(super) fn check(&self, path: &str, count: usize) -> Result<(), SpecError> {
        require(&format!("{path}.active"), self.active, self.active < count, || format!("below {count}"))?;
        check_norm(&format!("{path}.norm"), Some(self.norm))?;
        positive(&format!("{path}.clip"), self.clip)
    }

    pub(super) fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        at: &str,
        count: usize,
    ) -> Result<Alternating<P::Matrix>, LoadError> {
        let hidden = loader.hidden_size();
        let table =
            |role: &str, rows| loader.table("coefficients of streams", &format!("{at}{role}.weight"), [rows, count]);
        let mut correction = table("correction", count)?;
        if let Some(limit) = self.clip {
            correction.iter_mut().for_each(|weight| *weight = weight.clamp(-limit, limit));
        }
        Ok(Alternating {
            norm: loader.norm(&format!("{at}router_norm"), self.norm, hidden)?,
            router: loader.linear(packer, at, &[("router", count, Format::F32)], hidden, false)?,
            prediction: table("prediction", count * count)?,
            correction,
        })
    }

    /// Returns the outputs of the router for `y`: `[rows, streams]`.
    fn route<'b>(
        weights: &Alternating,
        pass: &MixerPass<'_>,
        y: &[f32],
        buffers: &'b mut Buffers,
    ) -> Result<&'b [f32], PoolError> {
        let Buffers { normed, routed } = buffers;
        let normed = normed_or_same(&pass.exec, Some(&weights.norm), y, pass.width, normed)?;
        let routed = routed.take(pass.rows.count * weights.router.outputs);
        adapted(&pass.exec, &weights.router, pass.adapters, normed, routed)?;
        scale(&pass.exec, routed, 1.0 / pass.width as f32)?;
        activate(&pass.exec, routed, Activation::Tanh)?;
        Ok(routed)
    }

    /// Predicts all streams; `x` becomes the prediction of the active one.
    pub(super) fn enter(
        &self,
        weights: &Alternating,
        pass: &MixerPass<'_>,
        streams: &mut [f32],
        x: &mut [f32],
        buffers: &mut Buffers,
    ) -> Result<(), PoolError> {
        let (width, count) = (pass.width, streams.len() / x.len());
        copy_stream(streams, self.active, x, width);
        let routed = Self::route(weights, pass, x, buffers)?;
        for_rows(&pass.exec, pass.rows.count, streams, count * width, |row, streams| {
            let before = streams.to_vec();
            let mut coefficients = coefficients(&weights.prediction, &routed[row * count..][..count]);
            for stream in streams.chunks_exact_mut(width) {
                for from in before.chunks_exact(width) {
                    add_times(stream, from, coefficients.next().unwrap_or(0.0));
                }
            }
        })?;
        copy_stream(streams, self.active, x, width);
        Ok(())
    }

    /// Corrects all streams by what the active one has become.
    pub(super) fn leave(
        &self,
        weights: &Alternating,
        pass: &MixerPass<'_>,
        streams: &mut [f32],
        x: &[f32],
        buffers: &mut Buffers,
    ) -> Result<(), PoolError> {
        let (width, count) = (pass.width, streams.len() / x.len());
        let routed = Self::route(weights, pass, x, buffers)?;
        for_rows(&pass.exec, pass.rows.count, streams, count * width, |row, streams| {
            let mut surprise = x[row * width..][..width].to_vec();
            add_times(&mut surprise, &streams[self.active * width..][..width], -1.0);
            let coefficients = coefficients(&weights.correction, &routed[row * count..][..count]);
            for (stream, coefficient) in streams.chunks_exact_mut(width).zip(coefficients) {
                add_times(stream, &surprise, coefficient + 1.0);
            }
        })
    }
}

/// Returns the products of the rows of `weights` with the outputs of the router.
fn coefficients<'a>(weights: &'a [f32], routed: &'a [f32]) -> impl Iterator<Item = f32> + 'a {
    let rows = weights.chunks_exact(routed.len());
    rows.map(move |row| row.iter().zip(routed).map(|(weight, routed)| weight * routed).sum())
}

impl<M> Alternating<M> {
    pub(super) fn list<'a>(&'a self, tensors: &mut Tensors<'a, M>) {
        tensors.norm(&self.norm);
        tensors.linear(&self.router);
        tensors.vectors.extend([&self.prediction, &self.correction]);
    }
}
