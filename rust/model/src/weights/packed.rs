//! Packed weights in a file: written as a checkpoint is read, and found again by their roles.
//!
//! A matrix is named by the roles whose rows it holds, one below the other, and its `band`-th format:
//! `layers.0.attention.q+k+v.0.int4` are the weights, `layers.0.attention.q+k+v.0.int4.steps` what integer formats have
//! besides. Vectors are f32 under their roles. So a load needs the file and the spec, and nothing of the checkpoint.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use ferrule_formats::{Dtype, PackedErrorKind, PackedFile, PackedTensor, PackedWriter};
use ferrule_kernels::arch::LANES;
use ferrule_kernels::{BufferError, Exec, Format, LAYOUT_VERSION, PackError, PackedMatrix, SharedBytes};

use super::load::{LoadError, Loader, Progress};
use super::plan::{MatrixPlan, Packer};
use super::sites::Site;
use super::sizes::MatrixSize;
use super::stored::Source;
use crate::quantization::Quantization;
use crate::spec::ModelSpec;

/// The key of the metadata under which the quantization's name stands.
pub(crate) const QUANTIZATION: &str = "quantization";

/// What is read at a time: a disk takes a tenth of a second for it at the most, and then Ctrl-C is seen.
const READ_BYTES: usize = 16 << 20;

/// Formats of a matrix, and how many rows each holds.
type Bands = Vec<(Format, usize)>;

/// Opens a packed file that this build can read; mapped, or to be read into memory of our own.
///
/// # Errors
/// [`LoadError::Packed`].
pub fn open_packed(path: &Path, mapped: bool) -> Result<PackedFile, LoadError> {
    Ok(PackedFile::open(path, LAYOUT_VERSION, mapped)?)
}

/// Holds what a file is packed as against what is asked for.
pub(crate) fn check_quantization(file: &PackedFile, asked: Quantization) -> Result<(), LoadError> {
    let packed = file.metadata(QUANTIZATION).unwrap_or("none");
    if packed == asked.name() {
        return Ok(());
    }
    Err(LoadError::PackedAs { file: file.path().to_owned(), packed: packed.to_owned(), asked: asked.name() })
}

/// Weights are packed once: numbers of another format are made of a checkpoint's, not of codes.
pub(crate) fn refuse_packed(source: Source<'_>) -> Result<(), LoadError> {
    match source {
        Source::Packed { file, .. } => Err(LoadError::PackedAlready { file: file.path().to_owned() }),
        Source::Checkpoint(_) | Source::Random => Ok(()),
    }
}

/// Packs the weights of a source into a file, matrix by matrix: what is in memory at a time is one of them, and the
/// vectors. `metadata` is written beside what the file itself needs.
///
/// # Errors
/// [`LoadError`], of a source that is packed too; then there is no such file, or the one that was there before.
pub fn pack_into(
    path: &Path,
    spec: &ModelSpec,
    source: Source<'_>,
    quantization: Quantization,
    metadata: &BTreeMap<String, String>,
    exec: Exec<'_>,
    progress: Progress<'_>,
) -> Result<(), LoadError> {
    refuse_packed(source)?;
    let loader = Loader::new(spec, source, quantization);
    let walk = |loader: &Loader<'_>, survey: &mut Survey| loader.weights(survey).map(drop);
    let mut file = PackedOutput::create(path, &loader, quantization, metadata, walk)?;
    let mut writing = Writing { exec, source, file: &mut file, done: 0, progress, sites: Vec::new() };
    loader.without_vectors().weights(&mut writing)?;
    file.finish()
}

/// A packed file that is being written. Its vectors are there; matrices follow.
pub(crate) struct PackedOutput {
    writer: PackedWriter,
    /// Bytes of all matrices.
    pub total: u64,
}

impl PackedOutput {
    /// Begins a file of all that `walk` has the loader load; it will have the matrices in that order.
    pub fn create(
        path: &Path,
        loader: &Loader<'_>,
        quantization: Quantization,
        metadata: &BTreeMap<String, String>,
        walk: impl FnOnce(&Loader<'_>, &mut Survey) -> Result<(), LoadError>,
    ) -> Result<Self, LoadError> {
        let vectors = RefCell::default();
        let mut survey = Survey::default();
        walk(&loader.noting(&vectors), &mut survey)?;
        let vectors = vectors.into_inner();
        let of_vectors = vectors.iter().map(|(role, vector)| PackedTensor {
            name: role.clone(),
            dtype: Dtype::F32,
            bytes: size_of_val(vector.as_slice()) as u64,
        });
        let tensors = of_vectors.chain(survey.tensors).collect();
        let mut metadata = metadata.clone();
        metadata.insert(QUANTIZATION.to_owned(), quantization.name().to_owned());
        let mut writer = PackedWriter::create(path, LAYOUT_VERSION, &metadata, tensors)?;
        for (role, vector) in &vectors {
            let bytes: Vec<u8> = vector.iter().flat_map(|float| float.to_le_bytes()).collect();
            writer.write(role, &bytes)?;
        }
        Ok(Self { writer, total: survey.bytes })
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

    /// Puts the file under its name.
    pub fn finish(self) -> Result<(), LoadError> {
        Ok(self.writer.finish()?)
    }
}

/// Says which tensors a packed file has.
#[derive(Default)]
pub(crate) struct Survey {
    tensors: Vec<PackedTensor>,
    /// Of all matrices.
    bytes: u64,
    sites: Vec<Site>,
}

impl Packer for Survey {
    type Matrix = MatrixSize;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<MatrixSize, LoadError> {
        let size = plan.size();
        self.bytes = self.bytes.saturating_add(size.bytes);
        for (name, bytes) in buffers(&plan.name, &plan.bands, plan.columns)? {
            // Bands without steps have no tensor for them.
            if bytes > 0 {
                self.tensors.push(PackedTensor { name, dtype: Dtype::U8, bytes: bytes as u64 });
            }
        }
        Ok(size)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

/// Writes each matrix as soon as it is packed, and forgets it.
struct Writing<'a> {
    exec: Exec<'a>,
    source: Source<'a>,
    file: &'a mut PackedOutput,
    done: u64,
    progress: Progress<'a>,
    sites: Vec<Site>,
}

impl Packer for Writing<'_> {
    type Matrix = MatrixSize;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<MatrixSize, LoadError> {
        let matrix = plan.pack(&self.exec)?;
        plan.release(self.source);
        self.file.write(&plan, &matrix)?;
        self.done += matrix.bytes() as u64;
        (self.progress)(self.done, self.file.total);
        Ok(MatrixSize::from(&matrix))
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

/// The names and bytes of a matrix's buffers, in the order of [`PackedMatrix::buffers`].
fn buffers(name: &str, bands: &[(Format, usize)], columns: usize) -> Result<Vec<(String, usize)>, LoadError> {
    let mut buffers = Vec::with_capacity(2 * bands.len());
    for (band, &(format, rows)) in bands.iter().enumerate() {
        let [weights, steps] = PackedMatrix::buffer_bytes(format, rows, columns).ok_or_else(LoadError::too_large)?;
        let weights_name = weights_name(name, band, format);
        let steps_name = format!("{weights_name}.steps");
        buffers.extend([(weights_name, weights), (steps_name, steps)]);
    }
    Ok(buffers)
}

fn weights_name(name: &str, band: usize, format: Format) -> String {
    format!("{name}.{band}.{}", format.name())
}

/// The format of a matrix's first rows, if a file has them.
pub(super) fn first_format(file: &PackedFile, name: &str) -> Option<Format> {
    Format::ALL.iter().copied().find(|format| file.bytes_of(&weights_name(name, 0, *format)).is_some())
}

/// The formats in which a file has a matrix, and how many rows each holds. `asked` is what the quantization says of it:
/// a floating-point format is that one; codes may be others, such as those that were stored, but codes they are.
pub(super) fn bands(
    file: &PackedFile,
    name: &str,
    asked: Format,
    rows: usize,
    columns: usize,
) -> Result<Bands, LoadError> {
    let mut bands: Bands = Vec::new();
    let mut left = rows;
    while left > 0 {
        let named = |format: &Format| weights_name(name, bands.len(), *format);
        let found = Format::ALL.iter().find_map(|format| Some((*format, file.bytes_of(&named(format))?)));
        let Some((format, bytes)) = found else {
            return Err(file.missing(&named(&bands.last().map_or(Format::Int8, |band| band.0))).into());
        };
        if format != asked && !(format.is_integer() && asked.is_integer()) {
            return Err(file.error(PackedErrorKind::Format { tensor: named(&format), asked: asked.name() }).into());
        }
        if let Some(block) = format.stored_block().map(|block| block.inputs)
            && !columns.is_multiple_of(block)
        {
            return Err(file.error(PackedErrorKind::Blocks { tensor: named(&format), block, inputs: columns }).into());
        }
        // Floating-point formats are alone; panels of the others are whole lines, so that their tensors are not filled up.
        let panel = PackedMatrix::buffer_bytes(format, LANES, columns).ok_or_else(LoadError::too_large)?[0];
        let held = if format.is_integer() { bytes.checked_div(panel).unwrap_or(0).saturating_mul(LANES) } else { left };
        if held == 0 || held > left.next_multiple_of(LANES) || (!format.is_integer() && !bands.is_empty()) {
            return Err(file
                .error(PackedErrorKind::Rows { tensor: named(&format), rows: held, expected: left })
                .into());
        }
        bands.push((format, held.min(left)));
        left = left.saturating_sub(held);
    }
    ranges(file, name, &bands, columns)?;
    Ok(bands)
}

/// Where the buffers of a matrix lie in a file, in the order of [`PackedMatrix::buffers`].
fn ranges(
    file: &PackedFile,
    name: &str,
    bands: &[(Format, usize)],
    columns: usize,
) -> Result<Vec<Range<usize>>, LoadError> {
    let range = |(buffer, bytes): (String, usize)| Ok(if bytes == 0 { 0..0 } else { file.range(&buffer, bytes)? });
    buffers(name, bands, columns)?.into_iter().map(range).collect()
}

/// A matrix of a file: where it lies if that is mapped, else in memory of its own.
pub(super) fn matrix(
    exec: &Exec<'_>,
    file: &PackedFile,
    name: &str,
    bands: &[(Format, usize)],
    columns: usize,
) -> Result<PackedMatrix, LoadError> {
    let mut ranges = ranges(file, name, bands, columns)?.into_iter();
    if let Some(map) = file.map() {
        let shared = ranges.map(|range| SharedBytes::new(map.clone(), range).expect("a tensor lies within the file"));
        return PackedMatrix::shared(bands, columns, shared).map_err(|error| match error {
            BufferError::Memory(error) => PackError::Memory(error).into(),
            error => unreachable!("ranges of a packed file begin on lines and are as long as asked for: {error}"),
        });
    }
    PackedMatrix::filled(bands, columns, |bytes| {
        let range = ranges.next().expect("a range for each buffer");
        for (begin, bytes) in range.step_by(READ_BYTES).zip(bytes.chunks_mut(READ_BYTES)) {
            if exec.cancel.poll() {
                return Err(LoadError::Cancelled);
            }
            file.read(begin..begin + bytes.len(), bytes)?;
        }
        Ok(())
    })
}

/// Reads the vector of a role, or only looks whether it is there and as long.
pub(super) fn vector(file: &PackedFile, role: &str, reads: bool, out: &mut [f32]) -> Result<(), LoadError> {
    let range = file.range(role, size_of_val(out))?;
    if !reads {
        return Ok(());
    }
    let mut bytes = vec![0; range.len()];
    file.read(range, &mut bytes)?;
    for (value, stored) in out.iter_mut().zip(bytes.as_chunks().0) {
        *value = f32::from_le_bytes(*stored);
    }
    Ok(())
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
    fn a_load_into_memory_asks_whether_it_is_cancelled() {
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
    fn what_is_packed_is_not_packed_once_more() {
        let model = Model::new("twice");
        let before = std::fs::read(&model.path).unwrap();
        let file = open_packed(&model.path, true).unwrap();
        let source = Source::Packed { file: &file, may_page: false };
        let out = model.path.with_extension("again.safetensors");
        assert!(matches!(model.pack(&out, source), Err(LoadError::PackedAlready { file }) if file == model.path));
        let (int4, cancel, sequences) = (Quantization::named(INT4).unwrap(), Cancel::new(), [vec![1, 2, 3]]);
        let (what, exec) = ((int4, &sequences[..]), model.exec(&cancel));
        let calibrated = crate::calibrate_into(&out, &model.spec, source, what, &BTreeMap::new(), exec, &mut |_, _| ());
        assert!(matches!(calibrated, Err(LoadError::PackedAlready { .. })));
        assert!(!out.exists() && std::fs::read(&model.path).unwrap() == before);
    }
}
