//! Beginning of several streams before the first layer, and their end after the last.

use ferrule_kernels::{Exec, PackedMatrix, PoolError, Scratch};
use serde::{Deserialize, Serialize};

use super::copy_stream;
use crate::layer::{AdapterRows, adapted, for_rows};
use crate::limits::{SpecError, finite};
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
}

/// Weights of the ends of streams: the projections of all streams but the first.
pub(crate) struct StreamEnds<M = PackedMatrix> {
    begin: Vec<Linear<M>>,
    end: Vec<Linear<M>>,
}

/// Buffers of the ends of streams: `[rows, hidden_size]`.
#[derive(Default)]
pub(crate) struct Buffers {
    stream: Scratch<f32>,
    projected: Scratch<f32>,
}

impl StreamEndsSpec {
    pub(super) fn check(&self, path: &str) -> Result<(), SpecError> {
        let Self::Projected { min_square } = *self;
        finite(&format!("{path}.min_square"), min_square)
    }

    /// Loads the projections: the roles `streams.begin.<stream>` and `streams.end.<stream>`.
    pub(crate) fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        count: usize,
    ) -> Result<StreamEnds<P::Matrix>, LoadError> {
        let hidden = loader.hidden_size();
        let mut projections = |at: &str| {
            let streams = (1..count).map(|stream| {
                let role = stream.to_string();
                loader.linear(packer, at, &[(role.as_str(), hidden, loader.usual())], hidden, false)
            });
            streams.collect::<Result<Vec<_>, _>>()
        };
        Ok(StreamEnds { begin: projections("streams.begin.")?, end: projections("streams.end.")? })
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
        let Self::Projected { min_square } = *self;
        let (rows, stride) = (hidden.len() / width, streams.len() / hidden.len() * width);
        for (row, from) in streams.chunks_exact_mut(stride).zip(hidden.chunks_exact(width)) {
            row[..width].copy_from_slice(from);
        }
        for (stream, projection) in (1..).zip(&weights.begin) {
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

    /// Makes `out: [rows, width]` of `streams: [rows, count * width]`.
    pub(crate) fn end(
        &self,
        exec: &Exec<'_>,
        weights: &StreamEnds,
        adapters: AdapterRows<'_>,
        (streams, width): (&[f32], usize),
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let Self::Projected { min_square } = *self;
        if out.is_empty() {
            return Ok(());
        }
        let (rows, count) = (out.len() / width, streams.len() / out.len());
        let Buffers { stream: buffer, projected } = buffers;
        copy_stream(streams, 0, out, width);
        for (stream, projection) in (1..).zip(&weights.end) {
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
        self.begin.iter().chain(&self.end).for_each(|linear| tensors.linear(linear));
    }
}
