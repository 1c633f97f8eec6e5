//! A span that reads one stream and is added to the others (the per-layer embedding of Gemma 3n).

use ferrule_kernels::PoolError;
use serde::{Deserialize, Serialize};

use super::{add_times, copy_stream};
use crate::layer::for_rows;
use crate::limits::{SpecError, require};
use crate::mixers::MixerPass;
use crate::weights::{LoadError, Loader, Tensors};

/// One stream is read; what the blocks make of it is added to all streams but the first.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SideSpec {
    /// Stream that is read.
    pub from_stream: usize,
    /// Whether it is multiplied by a stored vector.
    pub scaled: bool,
}

/// Weights of a span beside the streams.
pub(crate) struct Side {
    /// Factors of the stream that is read, one per element.
    scale: Option<Vec<f32>>,
}

impl SideSpec {
    pub(super) fn check(&self, path: &str, count: usize) -> Result<(), SpecError> {
        require(&format!("{path}.from_stream"), self.from_stream, self.from_stream < count, || format!("below {count}"))
    }

    pub(super) fn load(&self, loader: &Loader<'_>, at: &str) -> Result<Side, LoadError> {
        let scale = match self.scaled {
            true => Some(loader.vector(&format!("{at}scale.weight"), loader.hidden_size())?),
            false => None,
        };
        Ok(Side { scale })
    }

    /// Copies the stream to `x`, scaled.
    pub(super) fn enter(
        &self,
        weights: &Side,
        pass: &MixerPass<'_>,
        streams: &[f32],
        x: &mut [f32],
    ) -> Result<(), PoolError> {
        copy_stream(streams, self.from_stream, x, pass.width);
        let Some(scale) = &weights.scale else { return Ok(()) };
        for_rows(&pass.exec, pass.rows.count, x, pass.width, |_, row| {
            row.iter_mut().zip(scale).for_each(|(x, scale)| *x *= scale);
        })
    }

    /// Adds `x` to all streams but the first.
    pub(super) fn leave(&self, pass: &MixerPass<'_>, streams: &mut [f32], x: &[f32]) -> Result<(), PoolError> {
        let (width, count) = (pass.width, streams.len() / x.len());
        for_rows(&pass.exec, pass.rows.count, streams, count * width, |row, streams| {
            for stream in streams.chunks_exact_mut(width).skip(1) {
                add_times(stream, &x[row * width..][..width], 1.0);
            }
        })
    }
}

impl Side {
    pub(super) fn list<'a, M>(&'a self, tensors: &mut Tensors<'a, M>) {
        tensors.vectors.extend(&self.scale);
    }
}
