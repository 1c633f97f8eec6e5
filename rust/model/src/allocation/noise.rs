//! Noise in the weights of a matrix, in place of the errors of a format.

use std::collections::BTreeSet;
use std::ops::Range;

use ferrule_kernels::{Exec, PackedMatrix, RowSource};

use super::kinds::{class, kind};
use crate::random::RandomMatrix;
use crate::weights::{LoadError, MatrixPlan, Packer, Site};

/// Squared errors of noise, relative to the squared weights: those of int4 and int2 without calibration.
pub(super) const NOISES: [f64; 2] = [0.006, 0.1];

/// Number of neighbouring weights of a row whose noise has the same magnitude: those that a rotation mixes.
const NOISE_BLOCK: usize = 128;

/// Noise in the matrices of a class.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Noise {
    pub class: String,
    /// Index in [`NOISES`].
    pub level: usize,
    /// Whether the matrices are calibrated.
    is_calibrated: bool,
}

impl Noise {
    /// Returns the factors of the weights, and of numbers with the magnitude of the weights that are added.
    ///
    /// Quantized weights are smaller than the exact ones, by the squared error: errors are orthogonal to them. All outputs
    /// shrink with them, but those of calibrated weights hardly do.
    pub fn factors(&self) -> [f32; 2] {
        let error = NOISES[self.level] as f32;
        let kept = if self.is_calibrated { 1.0 } else { 1.0 - error };
        [kept, (error * kept).sqrt()]
    }
}

/// Returns all noises of some classes.
pub(super) fn noises(classes: &BTreeSet<String>, is_calibrated: bool) -> impl Iterator<Item = Noise> {
    let of_class = move |class: &String, level| Noise { class: class.clone(), level, is_calibrated };
    classes.iter().flat_map(move |class| (0..NOISES.len()).map(move |level| of_class(class, level)))
}

/// Rows of a matrix, some of them with noise.
pub(super) struct NoisyRows<'a> {
    pub exact: &'a dyn RowSource,
    /// Rows with noise, the noise, and the factors of both; see [`Noise::factors`].
    pub noise: Vec<(Range<usize>, RandomMatrix, [f32; 2])>,
}

impl RowSource for NoisyRows<'_> {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        self.exact.read_row(row, out);
        let Some((rows, noise, [kept, share])) = self.noise.iter().find(|(rows, ..)| rows.contains(&row)) else {
            return;
        };
        let mut added = vec![0.0; out.len()];
        noise.read_row(row - rows.start, &mut added);
        // The numbers have the variance 1 / columns.
        let columns = out.len() as f32;
        for (out, added) in out.chunks_mut(NOISE_BLOCK).zip(added.chunks(NOISE_BLOCK)) {
            let mean_square = out.iter().map(|weight| weight * weight).sum::<f32>() / out.len() as f32;
            let factor = share * (mean_square * columns).sqrt();
            out.iter_mut().zip(added).for_each(|(weight, added)| *weight = kept * *weight + factor * added);
        }
    }
}

/// Packs the matrices of a model in bf16, those of one class with noise.
pub(super) struct Noisy<'a> {
    exec: Exec<'a>,
    noise: Option<&'a Noise>,
    /// Number of layers of the model.
    layers: usize,
    sites: Vec<Site>,
}

impl<'a> Noisy<'a> {
    pub fn new(exec: Exec<'a>, noise: Option<&'a Noise>, layers: usize) -> Self {
        Self { exec, noise, layers, sites: Vec::new() }
    }
}

impl Packer for Noisy<'_> {
    type Matrix = PackedMatrix;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<PackedMatrix, LoadError> {
        let mut first = 0;
        let mut noise = Vec::new();
        for (role, rows) in &plan.roles {
            if let Some(found) = self.noise.filter(|noise| class(&kind(role), self.layers) == noise.class) {
                noise.push((first..first + rows, RandomMatrix::new(role, *rows), found.factors()));
            }
            first += rows;
        }
        let rows = NoisyRows { exact: &plan, noise };
        let matrix = PackedMatrix::pack(&self.exec, &plan.bands, plan.columns, &rows)?;
        plan.release();
        Ok(matrix)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_in_its_rows_and_has_its_magnitude() {
        let (exact, classes) = (RandomMatrix::new("weights", 8), BTreeSet::from(["noisy".to_owned()]));
        let squares = |numbers: &[f32]| numbers.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        for noise in noises(&classes, false).chain(noises(&classes, true)) {
            let rows = RandomMatrix::new("noise", 3);
            let noisy = NoisyRows { exact: &exact, noise: vec![(2..5, rows, noise.factors())] };
            let (mut read, mut plain) = (vec![0.0; 2000], vec![0.0; 2000]);
            for row in 0..8 {
                noisy.read_row(row, &mut read);
                exact.read_row(row, &mut plain);
                let changes: Vec<f32> = read.iter().zip(&plain).map(|(read, plain)| read - plain).collect();
                let error = squares(&changes) / squares(&plain) / NOISES[noise.level];
                assert!(if (2..5).contains(&row) { (error - 1.0).abs() < 0.1 } else { error == 0.0 }, "{row}: {error}");
            }
        }
    }
}
