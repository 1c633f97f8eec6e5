//! Token shift of RWKV: mixes of each row with the row before it, in shares that differ by channel.
//!
//! The row before is that of the sequence, and zeros at its start. It is the state.

use ferrule_kernels::scan::{CausalConvolution, causal_convolution};
use ferrule_kernels::{Exec, PoolError, Rows};

use super::MixerPass;
use crate::layer::for_rows;
use crate::memory::Memory;
use crate::weights::{LoadError, Loader, Tensors};

/// Several mixes of the same rows.
pub(super) struct TokenShift {
    channels: usize,
    /// For each mix, the share of a row, where the rest is the row before: `[mixes, channels]`.
    shares: Vec<f32>,
    /// Taps of a convolution that returns the row before: `[2, channels]`.
    taps: Vec<f32>,
}

impl TokenShift {
    /// Loads `<at><role>_mix.weight: [channels]` of each role.
    pub fn load(loader: &Loader<'_>, at: &str, roles: &[&str], channels: usize) -> Result<Self, LoadError> {
        let parts: Vec<_> = roles.iter().map(|role| (Some(format!("{at}{role}_mix.weight")), channels)).collect();
        let taps = [1.0, 0.0].iter().flat_map(|tap| std::iter::repeat_n(*tap, channels)).collect();
        Ok(Self { channels, shares: loader.vectors(&parts)?, taps })
    }

    pub fn list<'a, M>(&'a self, tensors: &mut Tensors<'a, M>) {
        tensors.vectors.push(&self.shares);
    }

    /// Writes the row before each row of `x`, both `[rows, channels]`. The state is the first floats of the mixer's.
    pub fn previous(
        &self,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let Self { channels, taps, .. } = self;
        let convolution =
            CausalConvolution { channels: *channels, weights: taps, bias: None, activation: None, gates: None };
        let (segments, states) = pass.states(memory, 0);
        causal_convolution(&pass.exec, Rows::new(x, *channels, 0), &convolution, segments, states, out)
    }

    /// Computes mix `index` of the rows of `x` and the rows before them.
    pub fn mix(
        &self,
        exec: &Exec<'_>,
        index: usize,
        (x, previous): (&[f32], &[f32]),
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let channels = self.channels;
        let shares = &self.shares[index * channels..][..channels];
        for_rows(exec, x.len() / channels, out, channels, |row, out| {
            let [x, previous] = [x, previous].map(|rows| &rows[row * channels..][..channels]);
            for ((out, share), (x, previous)) in out.iter_mut().zip(shares).zip(x.iter().zip(previous)) {
                *out = previous + share * (x - previous);
            }
        })
    }
}
