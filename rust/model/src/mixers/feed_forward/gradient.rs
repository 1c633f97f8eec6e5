//! Gradients through a dense feed-forward network.

use ferrule_kernels::activation::{Activation, activate};
use ferrule_kernels::{Exec, PoolError};

use super::dense::{Dense, DenseSpec};
use crate::layer::{SeeGradients, linear, linear_gradient};
use crate::weights::LoadError;

/// Distance of the inputs between which the slope of an activation is measured, relative to those above 1.
const STEP: f32 = 0.01;

impl DenseSpec {
    /// Returns whether [`DenseSpec::gradient_of`] can compute the gradients.
    pub(super) fn is_plain(&self) -> bool {
        self.clamp.is_none() && self.xielu.is_none() && self.inner_norm.is_none() && self.gate_cutoff.is_none()
    }

    /// Returns the gradient with respect to `x`; see [`Mixer::gradient`](crate::mixers::Mixer::gradient).
    pub(super) fn gradient_of(
        &self,
        exec: &Exec<'_>,
        weights: &Dense,
        x: &[f32],
        gradient: &[f32],
        see: &mut SeeGradients<'_>,
    ) -> Result<Vec<f32>, LoadError> {
        let (width, columns) = (self.intermediate_size, self.inner_rows());
        let count = x.len() / weights.inner.weight.cols();
        let mut inner = vec![0.0; count * columns];
        linear(exec, &weights.inner, x, &mut inner)?;
        see(exec, &weights.down, gradient)?;
        let of_product = linear_gradient(exec, &weights.down, gradient)?;
        let gates: Vec<f32> =
            inner.chunks_exact(columns).flat_map(|row| &row[..width]).map(|gate| self.gate_scale * gate).collect();
        let (values, slopes) = values_and_slopes(exec, self.activation.into(), &gates)?;
        for (row, inner) in inner.chunks_exact_mut(columns).enumerate() {
            let (gates, ups) = inner.split_at_mut(width);
            for (column, gate) in gates.iter_mut().enumerate() {
                let at = row * width + column;
                let slope = of_product[at] * slopes[at] * self.gate_scale;
                *gate = ups.get(column).map_or(slope, |up| slope * up);
                if let Some(up) = ups.get_mut(column) {
                    *up = of_product[at] * values[at];
                }
            }
        }
        see(exec, &weights.inner, &inner)?;
        linear_gradient(exec, &weights.inner, &inner)
    }
}

/// Returns the values and the slopes of an activation.
fn values_and_slopes(exec: &Exec<'_>, activation: Activation, x: &[f32]) -> Result<(Vec<f32>, Vec<f32>), PoolError> {
    let at = |direction: f32| {
        let inputs: Vec<f32> = x.iter().map(|x| x + direction * STEP * x.abs().max(1.0)).collect();
        let mut values = inputs.clone();
        activate(exec, &mut values, activation)?;
        Ok::<_, PoolError>((inputs, values))
    };
    let ((first, below), (last, above)) = (at(-1.0)?, at(1.0)?);
    let changes = below.iter().zip(above).map(|(below, above)| above - below);
    // The distances after rounding.
    let distances = first.iter().zip(last).map(|(first, last)| last - first);
    let slopes = changes.zip(distances).map(|(change, distance)| change / distance);
    Ok((at(0.0)?.1, slopes.collect()))
}
