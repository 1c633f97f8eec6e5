//! Several residual streams in place of one: how they begin and end, and how the parts of a layer read and write them.
//!
//! A row holds its streams side by side: `[rows, count * hidden_size]`. A layer of such a model is divided into spans of
//! blocks. A span gets one stream, `[rows, hidden_size]`, which its [`StreamMixSpec`] makes from all of them; its blocks
//! run on it as in any layer; the mix then changes the streams by the result. The blocks of a joined span run on all
//! streams side by side instead.

mod alternating;
mod ends;
mod gated;
mod side;
mod sinkhorn;

use ferrule_kernels::{PackedMatrix, PoolError, Scratch};
use serde::{Deserialize, Serialize};

pub use alternating::AlternatingSpec;
pub use ends::StreamEndsSpec;
pub(crate) use ends::{Buffers as StreamEndBuffers, StreamEnds};
pub use gated::GatedSpec;
pub use side::SideSpec;
pub use sinkhorn::{SinkhornSpec, WeightedSpec};

use crate::layer::for_rows;
use crate::limits::{SpecError, require};
use crate::mixers::MixerPass;
use crate::weights::{LoadError, Loader, Packer, Tensors};
use alternating::Alternating;
use gated::GatedMix;
use side::Side;
use sinkhorn::Weighted;

/// Upper limit for the number of streams, above that of any known model.
const MAX_STREAMS: usize = 16;

/// Message of the panic for a mix that makes no stream, or whose weights are not those of its spec.
const NO_STREAM: &str = "a mix has the weights of its spec, and joined streams are not mixed";

/// Residual streams of a model that has several.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StreamsSpec {
    /// Number of streams.
    pub count: usize,
    /// Beginning and end of the streams.
    pub ends: StreamEndsSpec,
}

/// Consecutive blocks of a layer that run on one stream.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SpanSpec {
    /// Name in the roles of its tensors: span `altup` of layer 3 has `layers.3.altup.router.weight`.
    pub name: String,
    /// Number of blocks.
    pub blocks: usize,
    /// Function that reads and writes the streams.
    pub mix: StreamMixSpec,
}

/// Function by which a span reads and writes the streams.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum StreamMixSpec {
    /// Alternating updates.
    Alternating(AlternatingSpec),
    /// One stream is read, the others are written.
    Side(SideSpec),
    /// A gated mean of all streams is read, and the output of the blocks is added to each of them with its own factor.
    Gated(GatedSpec),
    /// A weighted sum of all streams is read; the streams are mixed by a doubly stochastic matrix, and the output of the
    /// blocks is added to each of them with its own factor.
    Sinkhorn(SinkhornSpec),
    /// The blocks run on all streams side by side.
    Joined,
}

/// Weights of a mix.
pub(crate) enum StreamMix<M = PackedMatrix> {
    Alternating(Alternating<M>),
    Side(Side),
    Gated(GatedMix<M>),
    Sinkhorn(Weighted<M>),
    Joined,
}

/// Buffers of streams. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct StreamBuffers {
    /// The stream that a span's blocks run on.
    pub span: Scratch<f32>,
    alternating: alternating::Buffers,
    gated: gated::Buffers,
    sinkhorn: sinkhorn::Buffers,
}

impl StreamsSpec {
    pub(crate) fn check(&self, path: &str) -> Result<(), SpecError> {
        require(&format!("{path}.count"), self.count, (2..=MAX_STREAMS).contains(&self.count), || {
            format!("in 2..={MAX_STREAMS}")
        })?;
        self.ends.check(&format!("{path}.ends"))
    }
}

impl StreamMixSpec {
    pub(crate) fn check(&self, path: &str, count: usize) -> Result<(), SpecError> {
        match self {
            Self::Alternating(spec) => spec.check(path, count),
            Self::Side(spec) => spec.check(path, count),
            Self::Gated(spec) => spec.check(path),
            Self::Sinkhorn(spec) => spec.check(path),
            Self::Joined => Ok(()),
        }
    }

    /// Loads the weights; roles start with `at`.
    pub(crate) fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        at: &str,
        count: usize,
    ) -> Result<StreamMix<P::Matrix>, LoadError> {
        Ok(match self {
            Self::Alternating(spec) => StreamMix::Alternating(spec.load(loader, packer, at, count)?),
            Self::Side(spec) => StreamMix::Side(spec.load(loader, at)?),
            Self::Gated(spec) => StreamMix::Gated(spec.load_mix(loader, packer, at, count)?),
            Self::Sinkhorn(spec) => StreamMix::Sinkhorn(spec.load(loader, packer, at, count)?),
            Self::Joined => StreamMix::Joined,
        })
    }

    /// Returns the floats per row in buffers, for `count` streams of `width`.
    pub(crate) fn floats(&self, count: usize, width: usize) -> usize {
        match self {
            Self::Alternating(_) => width + count,
            Self::Gated(spec) => spec.floats(count, width),
            Self::Sinkhorn(spec) => spec.floats(count, width),
            Self::Side(_) | Self::Joined => 0,
        }
    }

    /// Returns the length of the longest row that is multiplied with a matrix.
    pub(crate) fn longest_input(&self, count: usize, width: usize) -> usize {
        match self {
            Self::Alternating(_) => width,
            Self::Gated(_) | Self::Sinkhorn(_) => count * width,
            Self::Side(_) | Self::Joined => 0,
        }
    }

    /// Makes the stream `x` that the blocks run on; may change the streams.
    ///
    /// # Panics
    /// If the streams are joined, so that the blocks run on all of them, or the weights are not those of this mix.
    pub(crate) fn enter(
        &self,
        weights: &StreamMix,
        pass: &MixerPass<'_>,
        streams: &mut [f32],
        x: &mut [f32],
        buffers: &mut StreamBuffers,
    ) -> Result<(), PoolError> {
        match (self, weights) {
            (Self::Alternating(spec), StreamMix::Alternating(weights)) => {
                spec.enter(weights, pass, streams, x, &mut buffers.alternating)
            }
            (Self::Side(spec), StreamMix::Side(weights)) => spec.enter(weights, pass, streams, x),
            (Self::Gated(spec), StreamMix::Gated(weights)) => spec.enter(weights, pass, streams, x, &mut buffers.gated),
            (Self::Sinkhorn(spec), StreamMix::Sinkhorn(weights)) => {
                spec.enter(weights, pass, streams, x, &mut buffers.sinkhorn)
            }
            _ => unreachable!("{NO_STREAM}"),
        }
    }

    /// Changes the streams by the stream `x` that the blocks ran on.
    ///
    /// # Panics
    /// As [`StreamMixSpec::enter`].
    pub(crate) fn leave(
        &self,
        weights: &StreamMix,
        pass: &MixerPass<'_>,
        streams: &mut [f32],
        x: &[f32],
        buffers: &mut StreamBuffers,
    ) -> Result<(), PoolError> {
        match (self, weights) {
            (Self::Alternating(spec), StreamMix::Alternating(weights)) => {
                spec.leave(weights, pass, streams, x, &mut buffers.alternating)
            }
            (Self::Side(spec), StreamMix::Side(_)) => spec.leave(pass, streams, x),
            (Self::Gated(spec), StreamMix::Gated(_)) => spec.leave(pass, streams, x, &buffers.gated),
            (Self::Sinkhorn(spec), StreamMix::Sinkhorn(_)) => spec.leave(pass, streams, x, &buffers.sinkhorn),
            _ => unreachable!("{NO_STREAM}"),
        }
    }
}

impl<M> StreamMix<M> {
    /// Adds all matrices and vectors to `tensors`, in a fixed order.
    pub(crate) fn list<'a>(&'a self, tensors: &mut Tensors<'a, M>) {
        match self {
            Self::Alternating(weights) => weights.list(tensors),
            Self::Side(weights) => weights.list(tensors),
            Self::Gated(weights) => weights.list(tensors),
            Self::Sinkhorn(weights) => weights.list(tensors),
            Self::Joined => {}
        }
    }
}

/// Copies stream `index` of each row of `streams` to `out: [rows, width]`.
pub(crate) fn copy_stream(streams: &[f32], index: usize, out: &mut [f32], width: usize) {
    let count = streams.len() / out.len();
    for (out, streams) in out.chunks_exact_mut(width).zip(streams.chunks_exact(count * width)) {
        out.copy_from_slice(&streams[index * width..][..width]);
    }
}

/// Adds the output `x: [rows, width]` of a span's blocks to all of its streams, times the factors of a row.
fn add_to_all<'f>(
    pass: &MixerPass<'_>,
    streams: &mut [f32],
    x: &[f32],
    factors: impl Fn(usize) -> &'f [f32] + Sync,
) -> Result<(), PoolError> {
    let (width, all_width) = (pass.width, streams.len() / x.len() * pass.width);
    for_rows(&pass.exec, pass.rows.count, streams, all_width, |row, streams| {
        for (stream, factor) in streams.chunks_exact_mut(width).zip(factors(row)) {
            add_times(stream, &x[row * width..][..width], *factor);
        }
    })
}

/// `out += factor * x`
fn add_times(out: &mut [f32], x: &[f32], factor: f32) {
    out.iter_mut().zip(x).for_each(|(out, x)| *out += factor * x);
}
