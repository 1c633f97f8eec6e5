//! Measuring the errors of each matrix in each format, on a sample of its rows.

use std::ops::Range;

use ferrule_kernels::{Exec, Format, InputStatistics, PackedMatrix, RowSource};

use super::kinds::{bands, is_of_tokens};
use super::tensors::{Errors, Tensors};
use crate::calibrate::Target;
use crate::spec::ModelSpec;
use crate::weights::{LoadError, MatrixPlan, MatrixSize, Packer, Site};

/// Maximum number of rows of a matrix that are quantized to measure its error. Errors of a hundred thousand weights or
/// more average out: those of all rows differ by a few percent.
const SAMPLE_ROWS: usize = 64;

/// Maximum number of rows of a band of tokens: a panel.
const SAMPLE_ROWS_OF_BAND: usize = 16;

/// Measures the errors of each matrix that is quantized.
pub(super) struct Survey<'a, 's> {
    pub spec: &'s ModelSpec,
    pub exec: Exec<'a>,
    pub tensors: &'a mut Tensors<'s>,
    /// Receives the work that was done, in bytes of packed matrices.
    pub advance: &'a mut dyn FnMut(f64),
    pub sites: Vec<Site>,
}

impl Packer for Survey<'_, '_> {
    type Matrix = MatrixSize;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<MatrixSize, LoadError> {
        let size = plan.size();
        self.survey(&plan, None)?;
        plan.release();
        (self.advance)(size.bytes as f64);
        Ok(size)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

impl Target for Survey<'_, '_> {
    fn pack(
        &mut self,
        exec: &Exec<'_>,
        plan: &MatrixPlan<'_>,
        statistics: Option<&InputStatistics>,
    ) -> Result<PackedMatrix, LoadError> {
        self.survey(plan, statistics)?;
        // The format of the matrix is not known yet. In int8, later layers get almost the inputs of the exact model.
        plan.pack(exec)
    }

    fn advance(&mut self, bytes: f64) {
        (self.advance)(bytes);
    }
}

impl Survey<'_, '_> {
    /// Measures a matrix, unless it was measured before or is not quantized.
    fn survey(&mut self, plan: &MatrixPlan<'_>, statistics: Option<&InputStatistics>) -> Result<(), LoadError> {
        if plan.is_again || !plan.is_quantized() {
            return Ok(());
        }
        let mut first = 0;
        for (role, rows) in &plan.roles {
            for band in bands(role, *rows) {
                self.measure(plan, role, (first, band), statistics)?;
            }
            first += rows;
        }
        Ok(())
    }

    /// Measures a band of the rows of a role, which begin at row `first` of the matrix.
    fn measure(
        &mut self,
        plan: &MatrixPlan<'_>,
        role: &str,
        (first, band): (usize, Range<usize>),
        statistics: Option<&InputStatistics>,
    ) -> Result<(), LoadError> {
        let rows = band.len();
        let count = rows.min(if is_of_tokens(role) { SAMPLE_ROWS_OF_BAND } else { SAMPLE_ROWS });
        let sampled = (0..count).map(|row| first + band.start + row * rows / count).collect();
        let sample = Sample { source: plan, rows: sampled };
        let formats = self.tensors.formats;
        let (tensor, kinds) = self.tensors.of_band(role, band.start)?;
        // Rows that are read as inputs are not weighed by the inputs of the lm_head.
        for (kind, statistics) in kinds.into_iter().zip([statistics, None]) {
            let errors =
                sample.errors(&self.exec, (plan.columns, formats), statistics)?.scaled(rows as f64 / count as f64);
            if !errors.are_finite() {
                return Err(LoadError::NotQuantizable { tensor: self.spec.tensor(role)?.names[0].clone() });
            }
            tensor.kinds.entry(kind).or_default().add(&errors);
        }
        Ok(())
    }
}

/// Some rows of a matrix.
struct Sample<'a> {
    source: &'a dyn RowSource,
    rows: Vec<usize>,
}

impl RowSource for Sample<'_> {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        self.source.read_row(self.rows[row], out);
    }
}

impl Sample<'_> {
    /// Measures the errors of the rows in each format; with statistics of their inputs, those of calibrated rows.
    fn errors(
        &self,
        exec: &Exec<'_>,
        (columns, formats): (usize, &[Format]),
        statistics: Option<&InputStatistics>,
    ) -> Result<Errors, LoadError> {
        let mut exact = vec![0.0; self.rows.len() * columns];
        self.read_rows(0, columns, &mut exact);
        let squares = exact.iter().map(|weight| f64::from(*weight).powi(2)).sum();
        let mut all = Errors { squares, errors: vec![0.0; formats.len()] };
        for (format, error) in formats.iter().zip(&mut all.errors) {
            let rows = (*format, self.rows.len());
            let calibrated = match statistics {
                Some(statistics) => PackedMatrix::calibrated_error(exec, rows, columns, self, statistics)?,
                None => None,
            };
            *error = match calibrated {
                Some(error) => error,
                None => squared_error(&PackedMatrix::pack(exec, &[rows], columns, self)?, &exact),
            };
        }
        Ok(all)
    }
}

/// Returns the squared error of the weights of a matrix.
fn squared_error(packed: &PackedMatrix, exact: &[f32]) -> f64 {
    let mut found = vec![0.0; packed.cols()];
    let rows = exact.chunks_exact(packed.cols()).enumerate().map(|(row, exact)| {
        packed.read_row(row, &mut found);
        exact.iter().zip(&found).map(|(exact, found)| f64::from(exact - found).powi(2)).sum::<f64>()
    });
    rows.sum()
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use ferrule_kernels::arch::Isa;
    use ferrule_kernels::{Cancel, Pool};

    use super::*;
    use crate::recipe::Recipe;

    /// Rows of one number.
    struct Constant(f32);

    impl RowSource for Constant {
        fn read_row(&self, _row: usize, out: &mut [f32]) {
            out.fill(self.0);
        }
    }

    #[test]
    fn errors_of_numbers_that_are_not_finite_are_not_finite() {
        let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
        let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
        for (number, finite) in [(0.0, true), (0.5, true), (f32::NAN, false), (f32::NEG_INFINITY, false)] {
            let errors = Sample { source: &Constant(number), rows: vec![0, 3] }
                .errors(&exec, (100, Recipe::FORMATS), None)
                .unwrap();
            assert_eq!(errors.are_finite(), finite, "{number}");
            assert!(!finite || errors.relative(0) < 1e-1, "{errors:?}");
        }
    }
}
