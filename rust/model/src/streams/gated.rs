//! Gated hyper-connections (Qwen4, Qwen Team 2026; after Zhu et al. 2024): the blocks run on a gated mean of all streams,
//! and their output is added to each stream with its own factor.
//!
//! With `n_i` the norm of stream i of `count`, and `n` all of them side by side, the gates are `g = sigmoid(up(silu(down(n)
//! / count)))` and the blocks read the mean over i of `g_i * n_i`. Their output is added to stream i times `2 *
//! sigmoid(inject(n)_i / count)`.

use ferrule_kernels::activation::{Activation, activate};
use ferrule_kernels::elementwise::scale;
use ferrule_kernels::{Exec, Format, PackedMatrix, PoolError, RowsMut, Scratch};
use serde::{Deserialize, Serialize};

use super::add_to_all;
use crate::layer::{AdapterRows, adapted, for_rows, norm_heads};
use crate::limits::{SpecError, size};
use crate::mixers::MixerPass;
use crate::spec::{NormSpec, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};

/// Gated mean of all streams.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct GatedSpec {
    /// Norm of each stream, which has its own weight.
    pub norm: NormSpec,
    /// Rank of the projection to the gates.
    pub rank: usize,
}

/// Weights of a gated mean.
pub(crate) struct Gated<M = PackedMatrix> {
    /// `[streams, hidden_size]`
    norm: Norm,
    down: Linear<M>,
    up: Linear<M>,
}

/// Weights of gated hyper-connections.
pub(crate) struct GatedMix<M = PackedMatrix> {
    mean: Gated<M>,
    /// One row per stream, in f32.
    inject: Linear<M>,
}

/// Buffers of a gated mean.
#[derive(Default)]
pub(crate) struct Buffers {
    /// `[rows, streams * hidden_size]`
    normed: Scratch<f32>,
    /// `[rows, rank]`
    low: Scratch<f32>,
    /// `[rows, streams * hidden_size]`
    gates: Scratch<f32>,
    /// Factors of the output for each stream, `[rows, streams]`: those of the span that runs.
    factors: Vec<f32>,
}

impl GatedSpec {
    pub(super) fn check(&self, path: &str) -> Result<(), SpecError> {
        size(&format!("{path}.rank"), self.rank)?;
        check_norm(&format!("{path}.norm"), Some(self.norm))
    }

    /// Returns the floats per row in buffers.
    pub(super) fn floats(&self, count: usize, width: usize) -> usize {
        2 * count * width + self.rank + count
    }

    /// Loads the weights of a mean.
    pub(super) fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        at: &str,
        count: usize,
    ) -> Result<Gated<P::Matrix>, LoadError> {
        let (all, usual) = (count * loader.hidden_size(), loader.usual());
        Ok(Gated {
            norm: loader.norm(&format!("{at}norm"), self.norm, all)?,
            down: loader.linear(packer, at, &[("down", self.rank, usual)], all, false)?,
            up: loader.linear(packer, at, &[("up", all, usual)], self.rank, false)?,
        })
    }

    /// Loads the weights of a mix.
    pub(super) fn load_mix<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        at: &str,
        count: usize,
    ) -> Result<GatedMix<P::Matrix>, LoadError> {
        let all = count * loader.hidden_size();
        Ok(GatedMix {
            mean: self.load(loader, packer, at, count)?,
            inject: loader.linear(packer, at, &[("inject", count, Format::F32)], all, false)?,
        })
    }

    /// Writes the gated mean of `streams: [rows, count * width]` to `x: [rows, width]`, and leaves the normed streams in
    /// the buffers.
    pub(super) fn mean(
        self,
        (exec, adapters): (&Exec<'_>, AdapterRows<'_>),
        weights: &Gated,
        (streams, width): (&[f32], usize),
        x: &mut [f32],
        buffers: &mut Buffers,
    ) -> Result<(), PoolError> {
        let (rows, count) = (x.len() / width, streams.len() / x.len());
        let Buffers { normed, low, gates, .. } = buffers;
        let normed = normed.take(streams.len());
        normed.copy_from_slice(streams);
        norm_heads(exec, &weights.norm, RowsMut::new(normed, count * width, 0), count, width)?;
        let low = low.take(rows * self.rank);
        adapted(exec, &weights.down, adapters, normed, low)?;
        scale(exec, low, 1.0 / count as f32)?;
        activate(exec, low, Activation::Silu)?;
        let gates = gates.take(streams.len());
        adapted(exec, &weights.up, adapters, low, gates)?;
        activate(exec, gates, Activation::Sigmoid)?;
        let (normed, gates) = (&*normed, &*gates);
        for_rows(exec, rows, x, width, |row, x| {
            let of_row = row * count * width..(row + 1) * count * width;
            x.fill(0.0);
            let pairs = normed[of_row.clone()].chunks_exact(width).zip(gates[of_row].chunks_exact(width));
            for (stream, gates) in pairs {
                x.iter_mut().zip(stream.iter().zip(gates)).for_each(|(x, (stream, gate))| *x += gate * stream);
            }
            x.iter_mut().for_each(|x| *x /= count as f32);
        })
    }

    /// Makes the mean that the blocks run on, and the factors of their output.
    pub(super) fn enter(
        self,
        weights: &GatedMix,
        pass: &MixerPass<'_>,
        streams: &[f32],
        x: &mut [f32],
        buffers: &mut Buffers,
    ) -> Result<(), PoolError> {
        let (exec, count) = (&pass.exec, streams.len() / x.len());
        self.mean((exec, pass.adapters), &weights.mean, (streams, pass.width), x, buffers)?;
        let Buffers { normed, factors, .. } = buffers;
        factors.resize(pass.rows.count * count, 0.0);
        adapted(exec, &weights.inject, pass.adapters, normed.take(streams.len()), factors)?;
        scale(exec, factors, 1.0 / count as f32)?;
        activate(exec, factors, Activation::Sigmoid)?;
        scale(exec, factors, 2.0)
    }

    /// Adds the output `x` of the blocks to all streams.
    pub(super) fn leave(
        self,
        pass: &MixerPass<'_>,
        streams: &mut [f32],
        x: &[f32],
        buffers: &Buffers,
    ) -> Result<(), PoolError> {
        let count = streams.len() / x.len();
        add_to_all(pass, streams, x, |row| &buffers.factors[row * count..][..count])
    }
}

impl<M> Gated<M> {
    pub(super) fn list<'a>(&'a self, tensors: &mut Tensors<'a, M>) {
        tensors.norm(&self.norm);
        tensors.linear(&self.down);
        tensors.linear(&self.up);
    }
}

impl<M> GatedMix<M> {
    pub(super) fn list<'a>(&'a self, tensors: &mut Tensors<'a, M>) {
        self.mean.list(tensors);
        tensors.linear(&self.inject);
    }
}
