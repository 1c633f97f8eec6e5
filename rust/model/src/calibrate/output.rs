//! Packing a matrix with statistics of its inputs, for a packed file or to measure its error.

use ferrule_kernels::{CalibrationError, Exec, InputStatistics, PackedMatrix};

use super::inputs::{CalibratedSite, Inputs};
use super::kept::KeptLayers;
use crate::weights::{LoadError, MatrixPlan, PackedOutput, Packer, Progress, Site, TokenTable};

/// Receives each matrix of a model that runs over calibration data.
pub(crate) trait Target {
    /// Packs a matrix, with the statistics of its inputs where they are known. Layers compute the inputs of the next one
    /// with the packed matrices.
    fn pack(
        &mut self,
        exec: &Exec<'_>,
        plan: &MatrixPlan<'_>,
        statistics: Option<&InputStatistics>,
    ) -> Result<PackedMatrix, LoadError>;

    /// Returns where finished layers are kept, if they are.
    fn kept(&mut self) -> Option<&mut KeptLayers> {
        None
    }

    /// Receives a table, which stays where it is.
    fn table(&mut self, _name: &str, _table: &TokenTable) -> Result<(), LoadError> {
        Ok(())
    }

    /// Reports work that was done, in bytes of packed matrices.
    fn advance(&mut self, bytes: f64);
}

/// Packed file that matrices are written to, with the progress.
pub(super) struct Output<'a> {
    /// Work that is done, in bytes of packed matrices.
    pub done: f64,
    pub file: PackedOutput,
    pub kept: Option<KeptLayers>,
    pub progress: Progress<'a>,
}

impl Target for Output<'_> {
    fn pack(
        &mut self,
        exec: &Exec<'_>,
        plan: &MatrixPlan<'_>,
        statistics: Option<&InputStatistics>,
    ) -> Result<PackedMatrix, LoadError> {
        let matrix = match statistics {
            Some(statistics) => plan.pack_calibrated(exec, statistics)?,
            None => plan.pack(exec)?,
        };
        if !plan.is_again {
            self.file.write(plan, &matrix)?;
            if let Some(kept) = &mut self.kept {
                kept.write(plan, &matrix);
            }
        }
        Ok(matrix)
    }

    fn kept(&mut self) -> Option<&mut KeptLayers> {
        self.kept.as_mut()
    }

    fn table(&mut self, name: &str, table: &TokenTable) -> Result<(), LoadError> {
        self.file.write_table(name, table)
    }

    fn advance(&mut self, bytes: f64) {
        self.done += bytes;
        (self.progress)((self.done as u64).min(self.file.total), self.file.total);
    }
}

/// Gives each matrix to a target, with the statistics of its inputs.
pub(super) struct Calibrated<'a, T> {
    exec: Exec<'a>,
    target: &'a mut T,
    inputs: &'a mut dyn Inputs,
    /// Work that a byte of a packed matrix stands for.
    pub share: f64,
    sites: Vec<Site>,
}

impl<'a, T: Target> Calibrated<'a, T> {
    pub fn new(exec: Exec<'a>, target: &'a mut T, inputs: &'a mut dyn Inputs) -> Self {
        Self { exec, target, inputs, share: 1.0, sites: Vec::new() }
    }
}

impl<T: Target> Packer for Calibrated<'_, T> {
    type Matrix = PackedMatrix;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<PackedMatrix, LoadError> {
        let Self { exec, target, inputs, .. } = self;
        let site = CalibratedSite::of(&plan, None).map(|it| it.site);
        let recorded = match site {
            Some(site) => inputs.take(site, &mut |bytes| target.advance(bytes))?,
            None => None,
        };
        let statistics = recorded.map_or(Ok(None), |recorded| recorded.statistics(exec));
        let statistics = statistics.map_err(|error| match error {
            CalibrationError::NotFinite => LoadError::NotFinite { role: plan.name.clone() },
            CalibrationError::Pool(error) => error.into(),
        })?;
        let matrix = target.pack(exec, &plan, statistics.as_ref())?;
        drop(statistics);
        if let Some(site) = site {
            inputs.packed(site, &matrix)?;
        }
        plan.release();
        target.advance(self.share * matrix.bytes() as f64);
        Ok(matrix)
    }

    fn table(&mut self, name: &str, table: &TokenTable) -> Result<(), LoadError> {
        self.target.table(name, table)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}
