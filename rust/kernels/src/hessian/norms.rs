//! [`InputNorms`]: the diagonal of a Hessian.

use super::{Basis, CalibrationError, InputStatistics, padded};

/// Norms of the inputs of a linear layer: the running sums of the squares of each input. They take far less time and memory
/// than a [`Hessian`](super::Hessian), whose diagonal they are.
pub struct InputNorms {
    sums: Vec<f64>,
}

impl InputNorms {
    /// Creates zero norms of `cols` inputs.
    #[must_use]
    pub fn zeroed(cols: usize) -> Self {
        Self { sums: vec![0.0; cols] }
    }

    /// Adds the rows of `x: [rows, cols]`.
    pub fn add(&mut self, x: &[f32]) {
        for row in x.chunks_exact(self.sums.len()) {
            self.sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x).powi(2));
        }
    }

    /// Returns statistics without correlations. `None` if no rows were added or all inputs are zero.
    ///
    /// # Errors
    /// [`CalibrationError::NotFinite`].
    pub fn statistics(&self) -> Result<Option<InputStatistics>, CalibrationError> {
        let cols = self.sums.len();
        let mean = self.sums.iter().sum::<f64>() / cols as f64;
        if !mean.is_finite() {
            return Err(CalibrationError::NotFinite);
        }
        if mean < f64::from(f32::MIN_POSITIVE) {
            return Ok(None);
        }
        let mut importance: Vec<_> = self.sums.iter().map(|sum| (sum / mean) as f32).collect();
        importance.resize(padded(cols), 0.0);
        Ok(Some(InputStatistics { cols, basis: Basis::Plain, importance, factor: None, correction: None }))
    }
}
