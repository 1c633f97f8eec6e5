//! Weights of the causal convolution that several mixers run over their projections.

use ferrule_kernels::activation::Activation;
use ferrule_kernels::scan::{CausalConvolution, InputOutputGates};

use crate::limits::{SpecError, require};
use crate::weights::{LoadError, Loader, Tensors};

/// Upper limit for the number of taps, above that of any known model.
const MAX_TAPS: usize = 64;

/// Kernel and bias of a causal depthwise convolution.
pub(super) struct Convolution {
    /// `[taps, channels]`
    weights: Vec<f32>,
    bias: Option<Vec<f32>>,
    channels: usize,
}

impl Convolution {
    /// Checks the number of taps of the spec at `path`.
    pub fn check(path: &str, taps: usize) -> Result<(), SpecError> {
        require(&format!("{path}.taps"), taps, (1..=MAX_TAPS).contains(&taps), || format!("in 1..={MAX_TAPS}"))
    }

    /// Loads `<at>kernel.weight: [channels, taps]` and, if `bias`, `<at>kernel.bias`.
    pub fn load(loader: &Loader<'_>, at: &str, channels: usize, taps: usize, bias: bool) -> Result<Self, LoadError> {
        let stored = loader.table("a convolution", &format!("{at}kernel.weight"), [channels, taps])?;
        let mut weights = stored.clone();
        for (tap, row) in weights.chunks_exact_mut(channels).enumerate() {
            row.iter_mut().zip(stored.chunks_exact(taps)).for_each(|(weight, channel)| *weight = channel[tap]);
        }
        let bias = match bias {
            true => Some(loader.vector(&format!("{at}kernel.bias"), channels)?),
            false => None,
        };
        Ok(Self { weights, bias, channels })
    }

    /// Returns the number of taps of a convolution of `taps` taps with `dilation` rows from one to the next.
    pub fn spread_taps(taps: usize, dilation: usize) -> usize {
        (taps - 1) * dilation + 1
    }

    /// Returns the convolution with `dilation` rows from one tap to the next: those between have taps of zero.
    pub fn spread(self, dilation: usize) -> Self {
        let Self { weights, bias, channels } = self;
        let taps = Self::spread_taps(weights.len() / channels, dilation);
        let mut spread = vec![0.0; taps * channels];
        for (row, tap) in spread.chunks_exact_mut(channels).step_by(dilation).zip(weights.chunks_exact(channels)) {
            row.copy_from_slice(tap);
        }
        Self { weights: spread, bias, channels }
    }

    pub fn list<'a, M>(&'a self, tensors: &mut Tensors<'a, M>) {
        tensors.vectors.push(&self.weights);
        tensors.vectors.extend(&self.bias);
    }

    /// Returns the floats of a state: the inputs that the next row reads.
    pub fn state_len(channels: usize, taps: usize) -> usize {
        (taps - 1) * channels
    }

    /// Returns the arguments of the kernel.
    pub fn kernel<'a>(
        &'a self,
        activation: Option<Activation>,
        gates: Option<InputOutputGates<'a>>,
    ) -> CausalConvolution<'a> {
        let Self { weights, bias, channels } = self;
        CausalConvolution { channels: *channels, weights, bias: bias.as_deref(), activation, gates }
    }
}
