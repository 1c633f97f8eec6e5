//! Dense feed-forward network.

use ferrule_kernels::activation::{Activation, Gating, activate, gated};
use ferrule_kernels::{Exec, Format, PackedMatrix, PoolError, Scratch};
use serde::{Deserialize, Serialize};

use crate::layer::{AdapterRows, adapted, adapted_output, for_rows, norm_in_place};
use crate::limits::{SpecError, finite, require, size};
use crate::memory::Memory;
use crate::mixers::{At, Mixer, MixerPass};
use crate::rope::RopeSpec;
use crate::spec::{ActivationSpec, NormSpec, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};

/// Dense network: `down(activation(gate(x)) * up(x))` (Shazeer 2020), or `down(activation(up(x)))` without a gate.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DenseSpec {
    /// Width of the inner layer.
    pub intermediate_size: usize,
    /// Activation of the gate, or of `up` if there is no gate.
    pub activation: ActivationSpec,
    /// Whether there is a gate projection.
    pub gated: bool,
    /// Whether the projections add a bias.
    pub bias: bool,
    /// Clamped gate used in place of the activation (gpt-oss).
    pub clamp: Option<ClampSpec>,
    /// xIELU used in place of the activation of a network without a gate (Apertus).
    pub xielu: Option<XieluSpec>,
    /// Norm of the input of `down`.
    pub inner_norm: Option<NormSpec>,
    /// Factor on the gate before its activation.
    pub gate_scale: f32,
    /// Cutoff of the gate before its activation, in standard deviations above the mean of its row: it is subtracted from
    /// the gate, and what is then below 0 becomes 0 (Gemma 3n).
    pub gate_cutoff: Option<f32>,
}

/// xIELU, whose two other parameters are learned: `softplus(alpha_p) x^2 + beta x` above 0, else
/// `(beta + softplus(alpha_n)) (e^min(x, eps) - 1 - x) + beta x` (Huang 2024).
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct XieluSpec {
    /// Slope at 0.
    pub beta: f32,
    /// Largest exponent.
    pub eps: f32,
    /// alpha_p and alpha_n, in files that do not store them as tensors.
    #[serde(default)]
    pub alphas: Option<[f32; 2]>,
}

/// Clamped gate (gpt-oss): `(u + offset) * g * sigmoid(alpha * g)` with `g = min(gate, gate_limit)` and `u = clamp(up,
/// -limit, limit)`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ClampSpec {
    /// Factor inside the sigmoid.
    pub alpha: f32,
    /// Largest magnitude of up.
    pub limit: f32,
    /// Largest gate; `None` for `limit`.
    #[serde(default)]
    pub gate_limit: Option<f32>,
    /// Number added to up.
    #[serde(default = "crate::spec::one")]
    pub offset: f32,
}

/// Weights of a dense network.
pub(crate) struct Dense<M = PackedMatrix> {
    /// Rows: gate and up, or only up.
    pub inner: Linear<M>,
    pub down: Linear<M>,
    /// Norm of the input of `down`.
    norm: Option<Norm>,
    /// Learned parameters of xIELU: alpha_p and alpha_n.
    xielu: Option<Vec<f32>>,
}

impl<M> Dense<M> {
    /// Returns the activation, with its learned parameters.
    fn activation(&self, spec: &DenseSpec) -> Activation {
        let (Some(XieluSpec { beta, eps, .. }), Some(alphas)) = (spec.xielu, &self.xielu) else {
            return spec.activation.into();
        };
        Activation::Xielu { alpha_p: softplus(alphas[0]), alpha_n: beta + softplus(alphas[1]), beta, eps }
    }
}

/// ln(1 + e^x)
fn softplus(x: f32) -> f32 {
    let x = f64::from(x);
    (x.max(0.0) + (-x.abs()).exp().ln_1p()) as f32
}

/// Rows that are processed at a time. The inner layer is several times wider than a row: this bounds its memory and
/// keeps it in the cache.
const CHUNK_ROWS: usize = 256;

/// Buffers of a dense network. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Outputs of gate and up.
    pub inner: Scratch<f32>,
    /// Outputs of the gate.
    pub activated: Scratch<f32>,
}

impl DenseSpec {
    /// Returns the number of rows of the first matrix: gate and up, or only up.
    pub(super) fn inner_rows(&self) -> usize {
        if self.gated { 2 * self.intermediate_size } else { self.intermediate_size }
    }

    /// Returns how the gate is applied to `up`.
    fn gating(&self) -> Gating {
        match self.clamp {
            Some(ClampSpec { alpha, limit, gate_limit, offset }) => {
                Gating::Clamped { alpha, gate_limit: gate_limit.unwrap_or(limit), limit, offset }
            }
            None => Gating::Plain(self.activation.into()),
        }
    }

    pub(super) fn limits(&self, path: &str) -> Result<(), SpecError> {
        size(&format!("{path}.intermediate_size"), self.intermediate_size)?;
        check_norm(&format!("{path}.inner_norm"), self.inner_norm)?;
        finite(&format!("{path}.gate_scale"), self.gate_scale)?;
        require(&format!("{path}.gate_scale"), self.gate_scale, self.gated || self.gate_scale == 1.0, || {
            "1 if there is no gate".to_owned()
        })?;
        if let Some(cutoff) = self.gate_cutoff {
            finite(&format!("{path}.gate_cutoff"), cutoff)?;
            require(&format!("{path}.gate_cutoff"), cutoff, self.gated, || "null if there is no gate".to_owned())?;
        }
        if let Some(XieluSpec { beta, eps, alphas }) = self.xielu {
            for alpha in alphas.into_iter().flatten() {
                finite(&format!("{path}.xielu.alphas"), alpha)?;
            }
            finite(&format!("{path}.xielu.beta"), beta)?;
            finite(&format!("{path}.xielu.eps"), eps)?;
            require(&format!("{path}.gated"), self.gated, !self.gated, || "false if there is xielu".to_owned())?;
        }
        let Some(ClampSpec { alpha, limit, gate_limit, offset }) = self.clamp else { return Ok(()) };
        finite(&format!("{path}.clamp.alpha"), alpha)?;
        finite(&format!("{path}.clamp.limit"), limit)?;
        finite(&format!("{path}.clamp.gate_limit"), gate_limit.unwrap_or(limit))?;
        finite(&format!("{path}.clamp.offset"), offset)?;
        require(&format!("{path}.gated"), self.gated, self.gated, || "true if there is a clamp".to_owned())
    }

    /// Returns the floats per row between input and output.
    pub(super) fn floats_within(&self) -> usize {
        self.inner_rows() + if self.gated { self.intermediate_size } else { 0 }
    }

    /// Loads the network from and to `width` columns whose roles start with `prefix`; `down` is the format of the
    /// projection back.
    pub(super) fn load_at<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        prefix: &str,
        (width, down): (usize, Format),
    ) -> Result<Dense<P::Matrix>, LoadError> {
        let (inner, usual) = (self.intermediate_size, loader.usual());
        let parts = [("gate", inner, usual), ("up", inner, usual)];
        let parts = if self.gated { &parts[..] } else { &parts[1..] };
        Ok(Dense {
            inner: loader.linear(packer, prefix, parts, width, self.bias)?,
            down: loader.linear(packer, prefix, &[("down", width, down)], inner, self.bias)?,
            norm: loader.optional_norm(&format!("{prefix}inner_norm"), self.inner_norm, inner)?,
            xielu: match self.xielu {
                Some(XieluSpec { alphas: Some(alphas), .. }) => Some(alphas.to_vec()),
                Some(_) => {
                    let alphas = ["alpha_p", "alpha_n"].map(|name| (Some(format!("{prefix}xielu.{name}")), 1));
                    Some(loader.vectors(&alphas)?)
                }
                None => None,
            },
        })
    }
}

impl Mixer for DenseSpec {
    type Weights<M> = Dense<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, _: &[RopeSpec], _: usize) -> Result<(), SpecError> {
        self.limits(path)
    }

    fn load<P: Packer>(&self, loader: &Loader<'_>, packer: &mut P, at: At<'_>) -> Result<Dense<P::Matrix>, LoadError> {
        self.load_at(loader, packer, at.prefix, (loader.hidden_size(), loader.down(at.layer)))
    }

    fn list<'a, M>(weights: &'a Dense<M>, tensors: &mut Tensors<'a, M>) {
        tensors.linear(&weights.inner);
        tensors.linear(&weights.down);
        weights.norm.iter().for_each(|norm| tensors.norm(norm));
        tensors.vectors.extend(&weights.xielu);
    }

    fn buffer_floats(&self, _: usize, rows: usize) -> usize {
        rows.min(CHUNK_ROWS) * self.floats_within()
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        self.intermediate_size.max(hidden_size)
    }

    fn run(
        &self,
        weights: &Dense,
        pass: &MixerPass<'_>,
        _: &mut Memory,
        x: &[f32],
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        run(&pass.exec, weights, self, pass.adapters, x, buffers, out)
    }
}

/// Computes `out` from `x`, both `[rows, hidden_size]`.
fn run(
    exec: &Exec<'_>,
    weights: &Dense,
    spec: &DenseSpec,
    adapters: AdapterRows<'_>,
    x: &[f32],
    buffers: &mut Buffers,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let (width, inner_rows) = (weights.inner.weight.cols(), spec.inner_rows());
    let rows = x.len() / width;
    // Chunks of equal size: a last chunk of one row would read all weights for it.
    let chunk_rows = rows.div_ceil(rows.div_ceil(CHUNK_ROWS).max(1)).max(1);
    let chunks = x.chunks(chunk_rows * width).zip(out.chunks_mut(chunk_rows * width));
    for ((x, out), first) in chunks.zip((0..).step_by(chunk_rows)) {
        let adapters = adapters.skip(first);
        let inner = buffers.inner.take(x.len() / width * inner_rows);
        adapted(exec, &weights.inner, adapters, x, inner)?;
        let activated = activate_inner(exec, weights, spec, inner, &mut buffers.activated)?;
        adapted_output(exec, &weights.down, adapters, activated, out)?;
    }
    Ok(())
}

/// Returns the input of `down: [rows, intermediate_size]` from `inner: [rows, inner_rows]`.
pub(super) fn activate_inner<'a>(
    exec: &Exec<'_>,
    weights: &Dense,
    spec: &DenseSpec,
    inner: &'a mut [f32],
    activated: &'a mut Scratch<f32>,
) -> Result<&'a [f32], PoolError> {
    let activated = apply_gate(exec, spec, weights.activation(spec), inner, activated)?;
    norm_in_place(exec, weights.norm.as_ref(), activated, spec.intermediate_size)?;
    Ok(activated)
}

/// Subtracts from each element the mean plus `deviations` (population) standard deviations, and raises those below 0 to 0.
/// Sums are in f64, because the order of additions would be visible otherwise.
fn cut_off(row: &mut [f32], deviations: f32) {
    let mean = sum(row, f64::from) / row.len() as f64;
    let variance = sum(row, |x| (f64::from(x) - mean).powi(2)) / row.len() as f64;
    let cutoff = (mean + f64::from(deviations) * variance.sqrt()) as f32;
    // NaN stays NaN.
    row.iter_mut().for_each(|x| *x = if *x < cutoff { 0.0 } else { *x - cutoff });
}

/// Returns the sum of a function of all elements, in eight accumulators to hide the latency of additions.
fn sum(row: &[f32], of: impl Fn(f32) -> f64) -> f64 {
    let mut sums = [0.0; 8];
    for chunk in row.chunks(sums.len()) {
        sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += of(*x));
    }
    sums.iter().sum()
}

/// Applies the gate to `inner: [rows, inner_rows]` and returns `[rows, intermediate_size]`.
pub(super) fn apply_gate<'a>(
    exec: &Exec<'_>,
    spec: &DenseSpec,
    activation: Activation,
    inner: &'a mut [f32],
    activated: &'a mut Scratch<f32>,
) -> Result<&'a mut [f32], PoolError> {
    if !spec.gated {
        activate(exec, inner, activation)?;
        return Ok(inner);
    }
    let (width, scale) = (spec.intermediate_size, spec.gate_scale);
    let tokens = inner.len() / (2 * width);
    if scale != 1.0 {
        for_rows(exec, tokens, inner, 2 * width, |_, row| row[..width].iter_mut().for_each(|gate| *gate *= scale))?;
    }
    if let Some(deviations) = spec.gate_cutoff {
        for_rows(exec, tokens, inner, 2 * width, |_, row| cut_off(&mut row[..width], deviations))?;
    }
    let out = activated.take(inner.len() / 2);
    gated(exec, inner, width, spec.gating(), out)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::cut_off;

    #[test]
    fn cutoff_is_the_mean_and_some_deviations() {
        // The mean is 3.
        let row = [1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 3.0, 1.0, 5.0, 3.0, 0.0, 6.0];
        let deviation = (row.iter().map(|x| (x - 3.0f64).powi(2)).sum::<f64>() / 12.0).sqrt();
        for deviations in [-1.0f32, 0.0, 0.8416, 1.6449] {
            let mut found = row.map(|x| x as f32);
            cut_off(&mut found, deviations);
            for (found, x) in found.iter().zip(row) {
                let expected = (x - 3.0 - f64::from(deviations) * deviation).max(0.0);
                assert!((f64::from(*found) - expected).abs() < 1e-6, "{found} is not {expected}");
            }
        }
        let mut row = [1.0, f32::NAN, 2.0];
        cut_off(&mut row, 0.0);
        assert!(row.iter().all(|x| x.is_nan()));
    }
}
