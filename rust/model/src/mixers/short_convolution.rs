//! Gated short convolution (LFM2, Liquid AI 2025): `output(c * convolution(b * x))`, where `b`, `c` and `x` are
//! projections of the input.
//!
//! The convolution is causal and depthwise. Its state is the last `taps - 1` rows of `b * x`.

use ferrule_kernels::convolution::causal_convolution;
use ferrule_kernels::{PackedMatrix, PoolError, Scratch};
use serde::{Deserialize, Serialize};

use super::{At, Mixer, MixerPass};
use crate::layer::{adapted, for_rows};
use crate::limits::{SpecError, require};
use crate::memory::{Memory, MemoryNeed};
use crate::rope::RopeSpec;
use crate::weights::{Linear, LoadError, Loader, Packer, Tensors};

/// Gated short convolution, as wide as the residual stream.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ShortConvolutionSpec {
    /// Number of channels, which is the width of the residual stream.
    pub channels: usize,
    /// Number of rows that an output depends on, its own included.
    pub taps: usize,
    /// Whether the projections and the convolution add a bias.
    pub bias: bool,
}

/// Upper limit for the number of taps, above that of any known model.
const MAX_TAPS: usize = 64;

/// Weights of a short convolution.
pub(crate) struct ShortConvolution<M = PackedMatrix> {
    /// Rows: b, c, x.
    input: Linear<M>,
    /// `[taps, channels]`
    kernel: Vec<f32>,
    bias: Option<Vec<f32>>,
    output: Linear<M>,
}

/// Buffers of a short convolution. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Outputs of the projection from the input.
    bcx: Scratch<f32>,
    /// Products of b and x.
    gated: Scratch<f32>,
    /// Outputs of the convolution.
    convolved: Scratch<f32>,
    state: Scratch<f32>,
}

impl Mixer for ShortConvolutionSpec {
    type Weights<M> = ShortConvolution<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, _: &[RopeSpec], hidden_size: usize) -> Result<(), SpecError> {
        require(&format!("{path}.channels"), self.channels, self.channels == hidden_size, || {
            format!("hidden_size ({hidden_size})")
        })?;
        require(&format!("{path}.taps"), self.taps, (1..=MAX_TAPS).contains(&self.taps), || {
            format!("in 1..={MAX_TAPS}")
        })
    }

    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        At { prefix: at, .. }: At<'_>,
    ) -> Result<ShortConvolution<P::Matrix>, LoadError> {
        let Self { channels, taps, bias } = *self;
        let (hidden, usual) = (loader.hidden_size(), loader.usual());
        let parts = ["b", "c", "x"].map(|role| (role, channels, usual));
        let stored = loader.table("a convolution", &format!("{at}kernel.weight"), [channels, taps])?;
        let mut kernel = stored.clone();
        for (tap, row) in kernel.chunks_exact_mut(channels).enumerate() {
            row.iter_mut().zip(stored.chunks_exact(taps)).for_each(|(weight, channel)| *weight = channel[tap]);
        }
        Ok(ShortConvolution {
            input: loader.linear(packer, at, &parts, hidden, bias)?,
            kernel,
            bias: match bias {
                true => Some(loader.vector(&format!("{at}kernel.bias"), channels)?),
                false => None,
            },
            output: loader.linear(packer, at, &[("output", hidden, usual)], channels, bias)?,
        })
    }

    fn list<'a, M>(weights: &'a ShortConvolution<M>, tensors: &mut Tensors<'a, M>) {
        tensors.linear(&weights.input);
        tensors.vectors.push(&weights.kernel);
        tensors.vectors.extend(&weights.bias);
        tensors.linear(&weights.output);
    }

    fn memory(&self) -> Option<MemoryNeed> {
        Some(MemoryNeed::State { floats: (self.taps - 1) * self.channels })
    }

    fn buffer_floats(&self, _: usize, rows: usize) -> usize {
        (5 * rows + self.taps) * self.channels
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        hidden_size
    }

    fn run(
        &self,
        weights: &ShortConvolution,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        x: &[f32],
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let Self { channels: width, taps, .. } = *self;
        let (MixerPass { exec, adapters, .. }, rows) = (pass, pass.rows.count);
        let Buffers { bcx, gated, convolved, state } = buffers;
        let bcx = bcx.take(rows * 3 * width);
        adapted(exec, &weights.input, *adapters, x, bcx)?;
        let part = |row: usize, index: usize| &bcx[(3 * row + index) * width..][..width];
        let gated = gated.take(rows * width);
        for_rows(exec, rows, gated, width, |row, out| {
            let factors = part(row, 0).iter().zip(part(row, 2));
            out.iter_mut().zip(factors).for_each(|(out, (b, x))| *out = b * x);
        })?;
        let convolved = convolved.take(rows * width);
        pass.for_states(memory, state, (taps - 1) * width, |rows, old, new| {
            let at = rows.start * width..rows.end * width;
            let gated = &gated[at.clone()];
            // The new tail is the end of the old one followed by the new rows.
            let kept = old.len().saturating_sub(gated.len());
            new[..kept].copy_from_slice(&old[old.len() - kept..]);
            let added = old.len() - kept;
            new[kept..].copy_from_slice(&gated[gated.len() - added..]);
            causal_convolution(exec, gated, old, &weights.kernel, width, &mut convolved[at])
        })?;
        for_rows(exec, rows, convolved, width, |row, out| {
            if let Some(bias) = &weights.bias {
                out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
            }
            out.iter_mut().zip(part(row, 1)).for_each(|(out, c)| *out *= c);
        })?;
        adapted(exec, &weights.output, *adapters, convolved, out)
    }
}
