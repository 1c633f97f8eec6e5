//! Gated short convolution (LFM2, Liquid AI 2025): `output(c * convolution(b * x))`, where `b`, `c` and `x` are
//! projections of the input.
//!
//! The convolution is causal and depthwise. Its state is the last `taps - 1` rows of `b * x`.

use ferrule_kernels::scan::{InputOutputGates, causal_convolution};
use ferrule_kernels::{PackedMatrix, PoolError, Rows, Scratch};
use serde::{Deserialize, Serialize};

use super::convolution::Convolution;
use super::{At, Mixer, MixerPass};
use crate::layer::{adapted, adapted_output};
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

/// Weights of a short convolution.
pub(crate) struct ShortConvolution<M = PackedMatrix> {
    /// Rows: b, c, x.
    input: Linear<M>,
    convolution: Convolution,
    output: Linear<M>,
}

/// Buffers of a short convolution. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Outputs of the projection from the input.
    bcx: Scratch<f32>,
    /// Outputs of the convolution, times c.
    gated: Scratch<f32>,
}

impl Mixer for ShortConvolutionSpec {
    type Weights<M> = ShortConvolution<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, _: &[RopeSpec], hidden_size: usize) -> Result<(), SpecError> {
        require(&format!("{path}.channels"), self.channels, self.channels == hidden_size, || {
            format!("hidden_size ({hidden_size})")
        })?;
        Convolution::check(path, self.taps)
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
        Ok(ShortConvolution {
            input: loader.linear(packer, at, &parts, hidden, bias)?,
            convolution: Convolution::load(loader, at, channels, taps, bias)?,
            output: loader.linear(packer, at, &[("output", hidden, usual)], channels, bias)?,
        })
    }

    fn list<'a, M>(weights: &'a ShortConvolution<M>, tensors: &mut Tensors<'a, M>) {
        tensors.linear(&weights.input);
        weights.convolution.list(tensors);
        tensors.linear(&weights.output);
    }

    fn memory(&self) -> Vec<MemoryNeed> {
        vec![MemoryNeed::State { floats: Convolution::state_len(self.channels, self.taps) }]
    }

    fn buffer_floats(&self, _: usize, rows: usize) -> usize {
        4 * rows * self.channels
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
        let (channels, rows) = (self.channels, pass.rows.count);
        let Buffers { bcx, gated } = buffers;
        let bcx = bcx.take(rows * 3 * channels);
        adapted(&pass.exec, &weights.input, pass.adapters, x, bcx)?;
        let [input, output, x] = [0, 1, 2].map(|part| Rows::new(bcx, 3 * channels, part * channels));
        let convolution = weights.convolution.kernel(None, Some(InputOutputGates { input, output }));
        let gated = gated.take(rows * channels);
        let (segments, states) = pass.states(memory, 0);
        causal_convolution(&pass.exec, x, &convolution, segments, states, gated)?;
        adapted_output(&pass.exec, &weights.output, pass.adapters, gated, out)
    }
}
