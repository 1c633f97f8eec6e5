//! Manifold-constrained hyper-connections (Xie et al. 2025; DeepSeek-V4, 2026): the blocks run on a weighted sum of all
//! streams, which are then mixed by a matrix whose rows and columns sum to one.
//!
//! With `n` all streams of a row side by side, normed together, and `m = mix(n)`: the blocks read the sum over i of
//! `(sigmoid(scale_0 m_i + base_i) + eps) * stream_i`. Stream k becomes the sum over j of `c_jk * stream_j`, plus the output
//! of the blocks times `2 sigmoid(scale_1 m + base)`. The matrix c is the softmax of each row of `scale_2 m + base`, plus
//! eps, whose columns and rows are divided by their sums in turn (Sinkhorn and Knopp 1967).

use ferrule_kernels::{Exec, Format, PackedMatrix, PoolError, RowsMut, Scratch};
use serde::{Deserialize, Serialize};

use super::{MAX_STREAMS, add_times, add_to_all};
use crate::layer::{AdapterRows, adapted, for_rows, norm_heads};
use crate::limits::{SpecError, positive, require};
use crate::mixers::MixerPass;
use crate::spec::{NormSpec, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};

/// Upper limit for the number of iterations, above that of any known model.
const MAX_ITERATIONS: usize = 100;

/// Weighted sum of all streams.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WeightedSpec {
    /// Norm of all streams of a row together.
    pub norm: NormSpec,
    /// Number added to each weight.
    pub eps: f32,
}

/// Weighted sum of all streams, and their mix by a doubly stochastic matrix.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SinkhornSpec {
    /// Norm of all streams of a row together.
    pub norm: NormSpec,
    /// Number added to each weight of the sum, to the elements of the matrix and to their sums.
    pub eps: f32,
    /// Number of times that the columns of the matrix are divided by their sums.
    pub iterations: usize,
}

/// Weights of streams: a projection of all streams of a row, with factors and biases.
pub(crate) struct Weighted<M = PackedMatrix> {
    norm: Norm,
    /// One row per weight, in f32.
    mix: Linear<M>,
    /// One per weight.
    base: Vec<f32>,
    /// One for each kind of weight.
    scale: Vec<f32>,
}

/// Buffers of weighted sums.
#[derive(Default)]
pub(super) struct Buffers {
    /// `[rows, streams * hidden_size]`
    normed: Scratch<f32>,
    /// Outputs of the projection, then weights of a span's output: `[rows, weights]`.
    weights: Vec<f32>,
}

impl WeightedSpec {
    pub(super) fn check(&self, path: &str) -> Result<(), SpecError> {
        positive(&format!("{path}.eps"), Some(self.eps))?;
        check_norm(&format!("{path}.norm"), Some(self.norm))
    }

    /// Returns the floats per row in buffers, for a sum without a mix.
    pub(super) fn floats(&self, count: usize, width: usize) -> usize {
        count * width + count
    }

    /// Loads the weights of a sum without a mix.
    pub(super) fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        at: &str,
        count: usize,
    ) -> Result<Weighted<P::Matrix>, LoadError> {
        self.load_weights(loader, packer, at, count, [count, 1])
    }

    /// Loads the projection to `outputs` weights of `kinds` kinds.
    fn load_weights<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        at: &str,
        count: usize,
        [outputs, kinds]: [usize; 2],
    ) -> Result<Weighted<P::Matrix>, LoadError> {
        let all = count * loader.hidden_size();
        Ok(Weighted {
            norm: loader.norm(&format!("{at}norm"), self.norm, all)?,
            mix: loader.linear(packer, at, &[("mix", outputs, Format::F32)], all, false)?,
            base: loader.vector(&format!("{at}base.weight"), outputs)?,
            scale: loader.vector(&format!("{at}scale.weight"), kinds)?,
        })
    }

    /// Writes the weighted sum of `streams: [rows, count * width]` to `x: [rows, width]`, and leaves the outputs of the
    /// projection in the buffers.
    pub(super) fn sum(
        self,
        (exec, adapters): (&Exec<'_>, AdapterRows<'_>),
        weights: &Weighted,
        (streams, width): (&[f32], usize),
        x: &mut [f32],
        buffers: &mut Buffers,
    ) -> Result<(), PoolError> {
        let (rows, all, outputs) = (x.len() / width, streams.len() / x.len() * width, weights.base.len());
        let normed = buffers.normed.take(streams.len());
        normed.copy_from_slice(streams);
        norm_heads(exec, &weights.norm, RowsMut::new(normed, all, 0), 1, all)?;
        buffers.weights.resize(rows * outputs, 0.0);
        adapted(exec, &weights.mix, adapters, normed, &mut buffers.weights)?;
        let mixed = &buffers.weights;
        for_rows(exec, rows, x, width, |row, x| {
            x.fill(0.0);
            let factors = mixed[row * outputs..][..outputs].iter().zip(&weights.base);
            for (stream, (mixed, base)) in streams[row * all..][..all].chunks_exact(width).zip(factors) {
                add_times(x, stream, sigmoid(mixed * weights.scale[0] + base) + self.eps);
            }
        })
    }
}

impl SinkhornSpec {
    /// Returns the weighted sum.
    fn sum(&self) -> WeightedSpec {
        WeightedSpec { norm: self.norm, eps: self.eps }
    }

    pub(super) fn check(&self, path: &str) -> Result<(), SpecError> {
        self.sum().check(path)?;
        let iterations = self.iterations;
        require(&format!("{path}.iterations"), iterations, (1..=MAX_ITERATIONS).contains(&iterations), || {
            format!("in 1..={MAX_ITERATIONS}")
        })
    }

    /// Returns the floats per row in buffers.
    pub(super) fn floats(&self, count: usize, width: usize) -> usize {
        count * width + outputs(count)
    }

    pub(super) fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        at: &str,
        count: usize,
    ) -> Result<Weighted<P::Matrix>, LoadError> {
        self.sum().load_weights(loader, packer, at, count, [outputs(count), 3])
    }

    /// Makes the sum that the blocks run on, and mixes the streams.
    pub(super) fn enter(
        self,
        weights: &Weighted,
        pass: &MixerPass<'_>,
        streams: &mut [f32],
        x: &mut [f32],
        buffers: &mut Buffers,
    ) -> Result<(), PoolError> {
        let (width, count) = (pass.width, streams.len() / x.len());
        self.sum().sum((&pass.exec, pass.adapters), weights, (streams, width), x, buffers)?;
        let outputs = outputs(count);
        for_rows(&pass.exec, pass.rows.count, &mut buffers.weights, outputs, |_, mixed| {
            for (index, (x, base)) in mixed.iter_mut().zip(&weights.base).enumerate() {
                *x = *x * weights.scale[(index / count).min(2)] + base;
            }
            let (sums, matrix) = mixed.split_at_mut(2 * count);
            sums[count..].iter_mut().for_each(|x| *x = 2.0 * sigmoid(*x));
            self.balance(matrix, count);
        })?;
        let mixed = &buffers.weights;
        for_rows(&pass.exec, pass.rows.count, streams, count * width, |row, streams| {
            let matrix = &mixed[row * outputs + 2 * count..][..count * count];
            let mut column = [0.0; MAX_STREAMS];
            for index in 0..width {
                for (j, x) in column[..count].iter_mut().enumerate() {
                    *x = streams[j * width + index];
                }
                for k in 0..count {
                    let products = column[..count].iter().enumerate().map(|(j, x)| matrix[j * count + k] * x);
                    streams[k * width + index] = products.sum();
                }
            }
        })
    }

    /// Makes `matrix: [count, count]` doubly stochastic.
    fn balance(self, matrix: &mut [f32], count: usize) {
        let eps = self.eps;
        for row in matrix.chunks_exact_mut(count) {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            row.iter_mut().for_each(|x| *x = (*x - max).exp());
            let sum: f32 = row.iter().sum();
            row.iter_mut().for_each(|x| *x = *x / sum + eps);
        }
        for iteration in 0..self.iterations {
            if iteration > 0 {
                for row in matrix.chunks_exact_mut(count) {
                    let sum = row.iter().sum::<f32>() + eps;
                    row.iter_mut().for_each(|x| *x /= sum);
                }
            }
            for column in 0..count {
                let sum = matrix[column..].iter().step_by(count).sum::<f32>() + eps;
                matrix[column..].iter_mut().step_by(count).for_each(|x| *x /= sum);
            }
        }
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
        add_to_all(pass, streams, x, |row| &buffers.weights[row * outputs(count) + count..][..count])
    }
}

impl<M> Weighted<M> {
    pub(super) fn list<'a>(&'a self, tensors: &mut Tensors<'a, M>) {
        tensors.norm(&self.norm);
        tensors.linear(&self.mix);
        tensors.vectors.extend([&self.base, &self.scale]);
    }
}

/// Returns the number of weights of a mix of `count` streams: of the sum, of the output, and of the matrix.
fn outputs(count: usize) -> usize {
    (2 + count) * count
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(iterations: usize) -> SinkhornSpec {
        let norm = NormSpec::Rms { eps: 1e-6, weight_offset: 0.0, weight: false };
        SinkhornSpec { norm, eps: 1e-6, iterations }
    }

    /// Returns the sums of the rows, then those of the columns.
    fn sums(matrix: &[f32]) -> [Vec<f32>; 2] {
        let rows = matrix.chunks_exact(3).map(|row| row.iter().sum());
        let columns = (0..3).map(|column| matrix[column..].iter().step_by(3).sum());
        [rows.collect(), columns.collect()]
    }

    #[test]
    fn rows_and_columns_sum_to_one() {
        let logits = [0.5, -1.0, 2.0, 0.0, 3.0, -2.0, 1.0, 1.0, -4.0];
        let mut once = logits;
        spec(1).balance(&mut once, 3);
        let [rows, columns] = sums(&once);
        assert!(columns.iter().all(|sum| (sum - 1.0).abs() < 1e-5), "{columns:?}");
        assert!(rows.iter().any(|sum| (sum - 1.0).abs() > 1e-2), "{rows:?}");
        let mut often = logits;
        spec(50).balance(&mut often, 3);
        for sums in sums(&often) {
            assert!(sums.iter().all(|sum| (sum - 1.0).abs() < 1e-4), "{sums:?}");
        }
    }
}
