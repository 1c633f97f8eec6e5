//! Quantizing a matrix with the Hessian of its inputs, and writing it to the packed file.

use ferrule_kernels::{CalibrationError, Exec, PackedMatrix};

use super::inputs::Inputs;
use crate::weights::{LoadError, MatrixPlan, PackedOutput, Packer, Progress, Site, TokenTable};

/// Packed file that matrices are written to, with the progress.
pub(super) struct Output<'a> {
    pub exec: Exec<'a>,
    /// Work that is done, in bytes of packed matrices.
    pub done: f64,
    pub file: PackedOutput,
    pub progress: Progress<'a>,
}

impl Output<'_> {
    /// Reports work that was done.
    pub fn advance(&mut self, bytes: f64) {
        self.done += bytes;
        (self.progress)((self.done as u64).min(self.file.total), self.file.total);
    }
}

/// Quantizes each matrix with the Hessian of its inputs and writes it.
pub(super) struct Calibrated<'a, 'o> {
    output: &'a mut Output<'o>,
    inputs: &'a mut dyn Inputs,
    /// Work that a byte of a packed matrix stands for.
    pub share: f64,
    sites: Vec<Site>,
}

impl<'a, 'o> Calibrated<'a, 'o> {
    pub fn new(output: &'a mut Output<'o>, inputs: &'a mut dyn Inputs) -> Self {
        Self { output, inputs, share: 1.0, sites: Vec::new() }
    }
}

/// Returns the linear layer of a plan, if its matrix is quantized with the Hessian of its inputs. A matrix that several
/// layers use is quantized for the inputs of the first.
pub(super) fn calibrated_site(plan: &MatrixPlan<'_>) -> Option<usize> {
    plan.site.filter(|_| !plan.is_again && plan.is_quantized())
}

impl Packer for Calibrated<'_, '_> {
    type Matrix = PackedMatrix;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<PackedMatrix, LoadError> {
        let Self { output, inputs, .. } = self;
        let exec = output.exec;
        let hessian = match calibrated_site(&plan) {
            Some(site) => inputs.take(site, &mut |bytes| output.advance(bytes))?,
            None => None,
        };
        let statistics = hessian.map_or(Ok(None), |hessian| hessian.statistics(&exec));
        let statistics = statistics.map_err(|error| match error {
            CalibrationError::NotFinite => LoadError::NotFinite { role: plan.name.clone() },
            CalibrationError::Pool(error) => error.into(),
        })?;
        let matrix = match &statistics {
            Some(statistics) => plan.pack_calibrated(&exec, statistics)?,
            None => plan.pack(&exec)?,
        };
        plan.release();
        if !plan.is_again {
            output.file.write(&plan, &matrix)?;
        }
        output.advance(self.share * matrix.bytes() as f64);
        Ok(matrix)
    }

    fn table(&mut self, name: &str, table: &TokenTable) -> Result<(), LoadError> {
        self.output.file.write_table(name, table)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}
