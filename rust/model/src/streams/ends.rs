//! Beginning of several streams before the first layer, and their end after the last.

use ferrule_kernels::{Exec, PackedMatrix, PoolError, Scratch};
use serde::{Deserialize, Serialize};

use super::copy_stream;
use super::gated::{self, Gated, GatedSpec};
use super::sinkhorn::{self, Weighted, WeightedSpec};
use crate::layer::{AdapterRows, adapted, for_rows};
use crate::limits::{SpecError, finite};
use crate::stage::StageLayers;
use crate::weights::{Linear, LoadError, Loader, Packer, Tensors};

/// Beginning and end of streams.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum StreamEndsSpec {
    /// The first stream is the embedding, and the others are projections of it, scaled to its magnitude (root mean
    /// square). At the end the others are projected once more and scaled to the magnitude of the first; the result is the
    /// mean of all (Gemma 3n).
    Projected {
        /// Smallest mean square of a projection that is scaled.
        min_square: f32,
    },
    /// All streams begin as the embedding, and end as their gated mean (Qwen4).
    Gated(GatedSpec),
    /// All streams begin as the embedding, and end as their weighted sum (DeepSeek-V4).
    Weighted(WeightedSpec),
}

/// Weights of the ends of streams. The first stage has those of the beginning, and the last stage those of the end.
pub(crate) enum StreamEnds<M = PackedMatrix> {
    Projected(Projections<M>),
    /// The gated mean at the end, in the last stage.
    Gated(Option<Gated<M>>),
    /// The weighted sum at the end, in the last stage.
    Weighted(Option<Weighted<M>>),
}

/// Projections of all streams but the first.
pub(crate) struct Projections<M> {
    /// Projections at the beginning; empty in later stages.
    begin: Vec<Linear<M>>,
    /// Projections at the end; empty in earlier stages.
    end: Vec<Linear<M>>,
}

/// Buffers of the ends of streams: `[rows, hidden_size]`.
#[derive(Default)]
pub(crate) struct Buffers {
    stream: Scratch<f32>,
    projected: Scratch<f32>,
    gated: gated::Buffers,
    weighted: sinkhorn::Buffers,
}

impl StreamEndsSpec {
    pub(super) fn check(&self, path: &str) -> Result<(), SpecError> {
        match self {
            Self::Projected { min_square } => finite(&format!("{path}.min_square"), *min_square),
            Self::Gated(spec) => spec.check(path),
            Self::Weighted(spec) => spec.check(path),
        }
    }

    /// Returns the floats per row in buffers at the beginning, for streams of `width`.
    pub(crate) fn begin_floats(&self, width: usize) -> usize {
        match self {
            Self::Projected { .. } => 2 * width,
            Self::Gated(_) | Self::Weighted(_) => 0,
        }
    }

    /// Returns the floats per row in buffers at the end, for `count` streams of `width`.
    pub(crate) fn end_floats(&self, count: usize, width: usize) -> usize {
        match self {
            Self::Projected { .. } => 2 * width,
            Self::Gated(spec) => spec.floats(count, width),
            Self::Weighted(spec) => spec.floats(count, width),
        }
    }

    /// Returns the length of the longest row that is multiplied with a matrix.
    pub(crate) fn longest_input(&self, count: usize, width: usize) -> usize {
        match self {
            Self::Projected { .. } => width,
            Self::Gated(_) | Self::Weighted(_) => count * width,
        }
    }

    /// Loads the weights of `stage`: the roles `streams.begin.<stream>` and `streams.end.<stream>` of projections, and
    /// those of a gated mean or weighted sum after `streams.end.`.
    pub(crate) fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        stage: &StageLayers,
        count: usize,
    ) -> Result<StreamEnds<P::Matrix>, LoadError> {
        let end = "streams.end.";
        match self {
            Self::Gated(spec) => {
                let mean = if stage.is_last() { Some(spec.load(loader, packer, end, count)?) } else { None };
                return Ok(StreamEnds::Gated(mean));
            }
            Self::Weighted(spec) => {
                let sum = if stage.is_last() { Some(spec.load(loader, packer, end, count)?) } else { None };
                return Ok(StreamEnds::Weighted(sum));
            }
            Self::Projected { .. } => {}
        }
        let hidden = loader.hidden_size();
        let mut projections = |at: &str| {
            let streams = (1..count).map(|stream| {
                let role = stream.to_string();
                loader.linear(packer, at, &[(role.as_str(), hidden, loader.usual())], hidden, false)
            });
            streams.collect::<Result<Vec<_>, _>>()
        };
        let begin = if stage.is_first() { projections("streams.begin.")? } else { Vec::new() };
        let end = if stage.is_last() { projections(end)? } else { Vec::new() };
        Ok(StreamEnds::Projected(Projections { begin, end }))
    }

    /// Makes `streams: [rows, count * width]` of `hidden: [rows, width]`.
    pub(crate) fn begin(
        &self,
        exec: &Exec<'_>,
        weights: &StreamEnds,
        adapters: AdapterRows<'_>,
        (hidden, width): (&[f32], usize),
        buffers: &mut Buffers,
        streams: &mut [f32],
    ) -> Result<(), PoolError> {
        if hidden.is_empty() {
            return Ok(());
        }
        let stride = streams.len() / hidden.len() * width;
        for (row, from) in streams.chunks_exact_mut(stride).zip(hidden.chunks_exact(width)) {
            row.chunks_exact_mut(width).for_each(|stream| stream.copy_from_slice(from));
        }
        match (self, weights) {
            (Self::Projected { min_square }, StreamEnds::Projected(weights)) => {
                weights.begin(exec, *min_square, adapters, (hidden, width), buffers, streams)
            }
            (Self::Gated(_), StreamEnds::Gated(_)) | (Self::Weighted(_), StreamEnds::Weighted(_)) => Ok(()),
            _ => unreachable!("weights are loaded as the spec says"),
        }
    }

    /// Makes `out: [rows, width]` of `streams: [rows, count * width]`.
    pub(crate) fn end(
        &self,
        exec: &Exec<'_>,
        weights: &StreamEnds,
        adapters: AdapterRows<'_>,
        streams: (&[f32], usize),
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        if out.is_empty() {
            return Ok(());
        }
        match (self, weights) {
            (Self::Projected { min_square }, StreamEnds::Projected(weights)) => {
                weights.end(exec, *min_square, adapters, streams, buffers, out)
            }
            (Self::Gated(spec), StreamEnds::Gated(Some(weights))) => {
                spec.mean((exec, adapters), weights, streams, out, &mut buffers.gated)
            }
            (Self::Weighted(spec), StreamEnds::Weighted(Some(weights))) => {
                spec.sum((exec, adapters), weights, streams, out, &mut buffers.weighted)
            }
            _ => unreachable!("weights are loaded as the spec says"),
        }
    }
}

impl Projections<PackedMatrix> {
    /// Overwrites all streams but the first.
    fn begin(
        &self,
        exec: &Exec<'_>,
        min_square: f32,
        adapters: AdapterRows<'_>,
        (hidden, width): (&[f32], usize),
        buffers: &mut Buffers,
        streams: &mut [f32],
    ) -> Result<(), PoolError> {
        let (rows, stride) = (hidden.len() / width, streams.len() / hidden.len() * width);
        for (stream, projection) in (1..).zip(&self.begin) {
            let projected = buffers.projected.take(hidden.len());
            adapted(exec, projection, adapters, hidden, projected)?;
            for_rows(exec, rows, streams, stride, |row, streams| {
                let (from, first) = (&projected[row * width..][..width], &hidden[row * width..][..width]);
                let factor = to_magnitude(from, first, min_square);
                streams[stream * width..].iter_mut().zip(from).for_each(|(to, from)| *to = from * factor);
            })?;
        }
        Ok(())
    }

    fn end(
        &self,
        exec: &Exec<'_>,
        min_square: f32,
        adapters: AdapterRows<'_>,
        (streams, width): (&[f32], usize),
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let (rows, count) = (out.len() / width, streams.len() / out.len());
        let Buffers { stream: buffer, projected, .. } = buffers;
        copy_stream(streams, 0, out, width);
        for (stream, projection) in (1..).zip(&self.end) {
            let (from, projected) = (buffer.take(out.len()), projected.take(out.len()));
            copy_stream(streams, stream, from, width);
            adapted(exec, projection, adapters, from, projected)?;
            for_rows(exec, rows, out, width, |row, out| {
                let (from, first) = (&projected[row * width..][..width], &streams[row * count * width..][..width]);
                let factor = to_magnitude(from, first, min_square);
                out.iter_mut().zip(from).for_each(|(out, from)| *out += from * factor);
            })?;
        }
        for_rows(exec, rows, out, width, |_, out| out.iter_mut().for_each(|x| *x /= count as f32))
    }
}

/// Returns the factor that gives `x` the root mean square of `like`.
fn to_magnitude(x: &[f32], like: &[f32], min_square: f32) -> f32 {
    let mean_square = |x: &[f32]| x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / x.len() as f64;
    (mean_square(like) / mean_square(x).max(f64::from(min_square))).sqrt() as f32
}

impl<M> StreamEnds<M> {
    pub(crate) fn list<'a>(&'a self, tensors: &mut Tensors<'a, M>) {
        self.list_beginning(tensors);
        match self {
            Self::Projected(Projections { end, .. }) => end.iter().for_each(|linear| tensors.linear(linear)),
            Self::Gated(mean) => mean.iter().for_each(|mean| mean.list(tensors)),
            Self::Weighted(sum) => sum.iter().for_each(|sum| sum.list(tensors)),
        }
    }

    /// Lists the weights of the beginning.
    pub(crate) fn list_beginning<'a>(&'a self, tensors: &mut Tensors<'a, M>) {
        if let Self::Projected(Projections { begin, .. }) = self {
            begin.iter().for_each(|linear| tensors.linear(linear));
        }
    }
}
