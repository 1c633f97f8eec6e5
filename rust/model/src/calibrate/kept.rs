//! Layers that an interrupted calibration has finished: the matrices of each are in a packed file, and the same
//! calibration continues after them. They compute the hidden states of the next layer again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ferrule_formats::PackedFile;
use ferrule_kernels::{Exec, PackedMatrix};

use super::output::Target;
use crate::quantization::Quantization;
use crate::spec::LayerSpec;
use crate::weights::{LoadError, Loader, MatrixPlan, PackedOutput, Packer, Site, TokenTable, open_packed};

/// Folder of the files of finished layers, and the file of the layer that is being packed.
pub(crate) struct KeptLayers {
    folder: PathBuf,
    quantization: Quantization,
    file: Option<PackedOutput>,
}

impl KeptLayers {
    /// Keeps layers in `folder`, which is that of one calibration: of the same model, text and formats.
    pub fn new(folder: &Path, quantization: Quantization) -> Self {
        Self { folder: folder.to_owned(), quantization, file: None }
    }

    /// Opens the file of a layer. `None` if there is none, or a damaged one.
    pub fn open(&self, index: usize) -> Option<PackedFile> {
        let file = open_packed(&self.path(index), true).ok()?;
        (0..file.names().len()).all(|tensor| file.verify(tensor).is_ok()).then_some(file)
    }

    /// Begins the file of a layer. A layer whose file cannot be written, as on a full disk, is not kept.
    pub fn begin(&mut self, loader: &Loader<'_>, index: usize, layer: &LayerSpec) {
        let walk = |loader: &Loader<'_>, tensors: &mut _| loader.layer(tensors, index, layer, &[]).map(drop);
        self.file = PackedOutput::create(&self.path(index), loader, self.quantization, &BTreeMap::new(), walk).ok();
    }

    /// Writes a matrix, if it is in a layer.
    pub fn write(&mut self, plan: &MatrixPlan<'_>, matrix: &PackedMatrix) {
        if let Some(file) = &mut self.file
            && file.write(plan, matrix).is_err()
        {
            self.file = None;
        }
    }

    /// Finishes the file of the layer.
    pub fn finish(&mut self) {
        self.file.take().and_then(|file| file.finish().ok());
    }

    fn path(&self, index: usize) -> PathBuf {
        self.folder.join(format!("{index}.safetensors"))
    }
}

/// Gives the matrices of a finished layer to a target.
pub(super) struct Finished<'a, T> {
    pub exec: Exec<'a>,
    pub target: &'a mut T,
    pub file: &'a PackedFile,
    /// Work that a byte of a packed matrix stands for.
    pub share: f64,
    pub sites: Vec<Site>,
}

impl<T: Target> Packer for Finished<'_, T> {
    type Matrix = PackedMatrix;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<PackedMatrix, LoadError> {
        let matrix = if plan.is_again {
            self.target.pack(&self.exec, &plan, None)?
        } else {
            let stored = MatrixPlan::packed(self.file, plan.name.clone(), plan.bands.clone(), plan.columns);
            self.target.pack(&self.exec, &stored, None)?
        };
        plan.release();
        self.target.advance(self.share * matrix.bytes() as f64);
        Ok(matrix)
    }

    fn table(&mut self, name: &str, table: &TokenTable) -> Result<(), LoadError> {
        self.target.table(name, table)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}
