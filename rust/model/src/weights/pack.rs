//! Packing weights into a file, from which a later load needs no checkpoint.
//!
//! Vectors are stored as f32 under their roles; see [`buffers`] for the names of matrices. Tables are stored as their
//! source stores them: `tables.0.BF16`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use ferrule_formats::{Dtype, PackedFile, PackedTensor, PackedWriter, StoredTable};
use ferrule_kernels::{Exec, LAYOUT_VERSION, PackedMatrix};

use super::buffers::buffers;
use super::error::LoadError;
use super::load::Loader;
use super::plan::{MatrixPlan, Packer, Progress};
use super::sites::Site;
use super::sizes::MatrixSize;
use super::source::Source;
use super::table::TokenTable;
use crate::quantization::Quantization;
use crate::recipe::MatrixFormats;
use crate::spec::ModelSpec;

/// Metadata key of the quantization's name.
pub(crate) const QUANTIZATION: &str = "quantization";

/// Opens a packed file of the layout that this build reads; maps it if `mapped`, else reads tensors on demand.
///
/// # Errors
/// [`LoadError::Packed`].
pub fn open_packed(path: &Path, mapped: bool) -> Result<PackedFile, LoadError> {
    Ok(PackedFile::open(path, LAYOUT_VERSION, mapped)?)
}

/// Checks that a file is packed in the requested quantization.
pub(crate) fn check_quantization(file: &PackedFile, asked: Quantization) -> Result<(), LoadError> {
    let packed = file.metadata(QUANTIZATION).unwrap_or("none");
    if packed == asked.name() {
        return Ok(());
    }
    Err(LoadError::PackedAs { file: file.path().to_owned(), packed: packed.to_owned(), asked: asked.name() })
}

/// Refuses a packed source: another format must be made from the weights of the checkpoint, not from quantized ones.
pub(crate) fn refuse_packed(source: Source<'_>) -> Result<(), LoadError> {
    match source {
        Source::Packed { file, .. } => Err(LoadError::PackedAlready { file: file.path().to_owned() }),
        Source::Checkpoint(_) | Source::Random => Ok(()),
    }
}

/// Checks that the recipe can be used with the quantization, and that each of its patterns matches a matrix that the
/// loader quantizes.
pub(crate) fn check_recipe(
    spec: &ModelSpec,
    loader: &Loader<'_>,
    MatrixFormats { quantization, recipe, .. }: MatrixFormats<'_>,
) -> Result<(), LoadError> {
    let Some(recipe) = recipe else { return Ok(()) };
    recipe.check_base(quantization)?;
    let mut list = QuantizedRoles::default();
    loader.without_vectors().weights(&mut list)?;
    let tensors = list.roles.iter().map(|role| spec.tensor(role)).collect::<Result<Vec<_>, _>>()?;
    Ok(recipe.check(&tensors)?)
}

/// Lists the roles of all matrices that are quantized.
#[derive(Default)]
pub(crate) struct QuantizedRoles {
    pub roles: Vec<String>,
    sites: Vec<Site>,
}

impl Packer for QuantizedRoles {
    type Matrix = MatrixSize;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<MatrixSize, LoadError> {
        let size = plan.size();
        if plan.is_quantized() {
            self.roles.extend(plan.roles.into_iter().map(|(role, _)| role));
        }
        Ok(size)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

/// Packs the weights of a source into a file, with `metadata` added to the file's own. Memory holds the vectors and one
/// matrix at a time.
///
/// # Errors
/// [`LoadError`], also if the source is packed already; a file that was at `path` is then left as it was.
pub fn pack_into<'a>(
    path: &Path,
    spec: &'a ModelSpec,
    source: Source<'a>,
    formats: impl Into<MatrixFormats<'a>>,
    metadata: &BTreeMap<String, String>,
    exec: Exec<'_>,
    progress: Progress<'_>,
) -> Result<(), LoadError> {
    refuse_packed(source)?;
    let formats = formats.into();
    let loader = Loader::new(spec, source, formats);
    check_recipe(spec, &loader, formats)?;
    let walk = |loader: &Loader<'_>, tensors: &mut TensorList| loader.weights(tensors).map(drop);
    let mut file = PackedOutput::create(path, &loader, formats.quantization, metadata, walk)?;
    let mut packing = PackToFile { exec, file: &mut file, done: 0, progress, sites: Vec::new() };
    loader.without_vectors().weights(&mut packing)?;
    file.finish()
}

/// A packed file that is being written: the vectors are in it, the matrices follow.
pub(crate) struct PackedOutput {
    writer: PackedWriter,
    /// Bytes of all matrices together.
    pub total: u64,
}

impl PackedOutput {
    /// Creates a file for everything that `walk` loads, in that order, and writes the vectors.
    pub fn create(
        path: &Path,
        loader: &Loader<'_>,
        quantization: Quantization,
        metadata: &BTreeMap<String, String>,
        walk: impl FnOnce(&Loader<'_>, &mut TensorList) -> Result<(), LoadError>,
    ) -> Result<Self, LoadError> {
        let vectors = Rc::<RefCell<_>>::default();
        let mut list = TensorList::default();
        walk(&loader.recording(&vectors), &mut list)?;
        let vectors = vectors.take();
        let vector_tensors = vectors.iter().map(|(role, vector)| PackedTensor {
            name: role.clone(),
            dtype: Dtype::F32,
            bytes: size_of_val(vector.as_slice()) as u64,
        });
        let tensors = vector_tensors.chain(list.tensors).collect();
        let mut metadata = metadata.clone();
        metadata.insert(QUANTIZATION.to_owned(), quantization.name().to_owned());
        let mut writer = PackedWriter::create(path, LAYOUT_VERSION, &metadata, tensors)?;
        for (role, vector) in &vectors {
            let bytes: Vec<u8> = vector.iter().flat_map(|float| float.to_le_bytes()).collect();
            writer.write(role, &bytes)?;
        }
        Ok(Self { writer, total: list.bytes })
    }

    /// Writes the next matrix.
    pub fn write(&mut self, plan: &MatrixPlan<'_>, matrix: &PackedMatrix) -> Result<(), LoadError> {
        for ((name, _), bytes) in buffers(&plan.name, &plan.bands, plan.columns)?.into_iter().zip(matrix.buffers()) {
            if !bytes.is_empty() {
                self.writer.write(&name, bytes)?;
            }
        }
        Ok(())
    }

    /// Writes the next tensor, a table in the format of its source.
    pub fn write_table(&mut self, name: &str, table: &TokenTable) -> Result<(), LoadError> {
        if let Some(stored) = table.stored() {
            self.writer.write_table(&table_name(name, stored), stored)?;
        }
        Ok(())
    }

    /// Moves the finished file to its path.
    pub fn finish(self) -> Result<(), LoadError> {
        Ok(self.writer.finish()?)
    }
}

/// Returns the name of a table in a packed file.
fn table_name(name: &str, table: &StoredTable) -> String {
    format!("{name}.{}", table.format().name())
}

/// Lists the tensors that a packed file will have.
#[derive(Default)]
pub(crate) struct TensorList {
    tensors: Vec<PackedTensor>,
    /// Bytes of all matrices together.
    bytes: u64,
    sites: Vec<Site>,
}

impl Packer for TensorList {
    type Matrix = MatrixSize;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<MatrixSize, LoadError> {
        let size = plan.size();
        if plan.is_again {
            return Ok(size);
        }
        self.bytes = self.bytes.saturating_add(size.bytes);
        for (name, bytes) in buffers(&plan.name, &plan.bands, plan.columns)? {
            // Floating-point bands have no scales.
            if bytes > 0 {
                self.tensors.push(PackedTensor { name, dtype: Dtype::U8, bytes: bytes as u64 });
            }
        }
        Ok(size)
    }

    fn table(&mut self, name: &str, table: &TokenTable) -> Result<(), LoadError> {
        let stored = table.stored();
        self.tensors.extend(stored.map(|stored| PackedTensor {
            name: table_name(name, stored),
            dtype: Dtype::U8,
            bytes: stored.bytes().len() as u64,
        }));
        Ok(())
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

/// Writes each matrix as soon as it is packed, then frees it.
struct PackToFile<'a> {
    exec: Exec<'a>,
    file: &'a mut PackedOutput,
    done: u64,
    progress: Progress<'a>,
    sites: Vec<Site>,
}

impl Packer for PackToFile<'_> {
    type Matrix = MatrixSize;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<MatrixSize, LoadError> {
        let matrix = plan.pack(&self.exec)?;
        plan.release();
        self.file.write(&plan, &matrix)?;
        self.done += matrix.bytes() as u64;
        (self.progress)(self.done, self.file.total);
        Ok(MatrixSize::from(&matrix))
    }

    fn table(&mut self, name: &str, table: &TokenTable) -> Result<(), LoadError> {
        self.file.write_table(name, table)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use ferrule_kernels::arch::Isa;
    use ferrule_kernels::{Cancel, Pool};

    use super::*;
    use crate::specs;

    /// A packed file of random weights.
    struct Model {
        spec: ModelSpec,
        path: std::path::PathBuf,
        pool: Pool,
    }

    const INT4: &str = "int4";

    impl Model {
        fn new(name: &str) -> Self {
            let spec = ModelSpec::from_json(&specs::llama(96, 1).to_string()).unwrap();
            let path = std::env::temp_dir().join(format!("ferrule-{name}-{}.safetensors", std::process::id()));
            let model = Self { spec, path, pool: Pool::new(NonZeroUsize::MIN) };
            model.pack(&model.path, Source::Random).unwrap();
            model
        }

        fn exec<'a>(&'a self, cancel: &'a Cancel) -> Exec<'a> {
            Exec { isa: Isa::best(), pool: &self.pool, cancel }
        }

        fn pack(&self, path: &Path, source: Source<'_>) -> Result<(), LoadError> {
            let (quantization, cancel) = (Quantization::named(INT4).unwrap(), Cancel::new());
            pack_into(path, &self.spec, source, quantization, &BTreeMap::new(), self.exec(&cancel), &mut |_, _| ())
        }
    }

    impl Drop for Model {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.path);
        }
    }

    #[test]
    fn loading_into_memory_can_be_cancelled() {
        let model = Model::new("cancelled");
        let file = open_packed(&model.path, false).unwrap();
        let source = Source::Packed { file: &file, may_page: false };
        let cancel = Cancel::with_poll(|| true);
        // The hook is asked now and then: not at once.
        std::thread::sleep(std::time::Duration::from_millis(50));
        let loader = Loader::new(&model.spec, source, Quantization::named(INT4).unwrap());
        assert!(matches!(loader.load(model.exec(&cancel), &mut |_, _| ()), Err(LoadError::Cancelled)));
        assert!(loader.load(model.exec(&Cancel::new()), &mut |_, _| ()).is_ok());
    }

    #[test]
    fn packed_sources_are_refused() {
        let model = Model::new("twice");
        let before = std::fs::read(&model.path).unwrap();
        let file = open_packed(&model.path, true).unwrap();
        let source = Source::Packed { file: &file, may_page: false };
        let out = model.path.with_extension("again.safetensors");
        assert!(matches!(model.pack(&out, source), Err(LoadError::PackedAlready { file }) if file == model.path));
        let (int4, cancel, sequences) = (Quantization::named(INT4).unwrap(), Cancel::new(), [vec![1, 2, 3]]);
        let calibration = crate::Calibration { sequences: &sequences, kept_layers: None };
        let (what, exec) = ((int4, calibration), model.exec(&cancel));
        let calibrated = crate::calibrate_into(&out, &model.spec, source, what, &BTreeMap::new(), exec, &mut |_, _| ());
        assert!(matches!(calibrated, Err(LoadError::PackedAlready { .. })));
        assert!(!out.exists() && std::fs::read(&model.path).unwrap() == before);
    }
}
