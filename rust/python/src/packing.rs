//! Where an engine's weights come from, and packed files as Python makes them.

use std::collections::BTreeMap;
use std::path::Path;

use ferrule_formats::{Checkpoint, GgufFile, PackedFile};
use ferrule_kernels::{Exec, Pool};
use ferrule_model::{LoadError, ModelSpec, Quantization, Source, calibrate_into, open_packed, pack_into};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use serde_json::json;

use crate::errors;
use crate::fork;
use crate::interrupt::Interrupt;
use crate::options::Options;

/// Of each type that tensors are stored as, their number and their bytes.
type StoredTypes = BTreeMap<&'static str, (usize, u64)>;

/// Open files of weights.
pub(crate) enum WeightFiles {
    /// None: random numbers.
    Random,
    Checkpoint(Checkpoint),
    Packed(PackedFile),
}

impl WeightFiles {
    /// Opens the checkpoint of a directory, with the folders within it that the spec names, or a GGUF file; or a packed
    /// file: mapped, if so told.
    pub fn open(path: Option<&str>, spec: &ModelSpec, mapped: bool) -> Result<Self, LoadError> {
        let Some(path) = path.map(Path::new) else { return Ok(Self::Random) };
        if path.is_file() && !GgufFile::is_gguf(path) {
            return Ok(Self::Packed(open_packed(path, mapped)?));
        }
        let mut checkpoint = Checkpoint::open(path)?.stored_as(spec.stored_as.clone());
        spec.folders().into_iter().try_for_each(|folder| checkpoint.add_folder(folder))?;
        Ok(Self::Checkpoint(checkpoint))
    }

    pub fn source(&self, may_page: bool) -> Source<'_> {
        match self {
            Self::Random => Source::Random,
            Self::Checkpoint(checkpoint) => Source::Checkpoint(checkpoint),
            Self::Packed(file) => Source::Packed { file, may_page },
        }
    }

    /// Bytes of the tensors, and how many are of each type that checkpoints have, and their bytes; None where there are
    /// no files.
    pub fn stored(&self) -> Option<(u64, StoredTypes)> {
        match self {
            Self::Random => None,
            Self::Checkpoint(checkpoint) => Some((checkpoint.total_bytes(), checkpoint.stored())),
            Self::Packed(file) => Some((file.total_bytes(), BTreeMap::new())),
        }
    }
}

/// Packs the weights of a checkpoint, or random ones, into a file.
#[pyfunction]
#[pyo3(signature = (spec, weights, options, path, metadata, calibration=None, progress=None))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
pub(crate) fn pack(
    py: Python<'_>,
    spec: &str,
    weights: Option<&str>,
    options: &str,
    path: &str,
    metadata: BTreeMap<String, String>,
    calibration: Option<Vec<Vec<u32>>>,
    progress: Option<Py<PyAny>>,
) -> PyResult<()> {
    let spec = ModelSpec::from_json(spec).map_err(|error| errors::spec_error(&error))?;
    let Options { quantization, threads, .. } = Options::from_json(options, &spec)?;
    calibration.as_deref().map_or(Ok(()), |sequences| check_calibration(sequences, &spec))?;
    let isa = errors::chosen_isa()?;
    let interrupt = Interrupt::new();
    let mut report = reporter(progress, &interrupt);
    let packed = py.detach(|| {
        let _gate = fork::keep_out();
        let files = WeightFiles::open(weights, &spec, true)?;
        let source = files.source(false);
        let quantization = quantization.unwrap_or_else(|| Quantization::auto(source));
        let exec = Exec { isa, pool: &Pool::new(threads), cancel: &interrupt.cancel };
        let path = Path::new(path);
        match &calibration {
            None => pack_into(path, &spec, source, quantization, &metadata, exec, &mut report),
            Some(sequences) => {
                calibrate_into(path, &spec, source, (quantization, sequences), &metadata, exec, &mut report)
            }
        }
    });
    packed.map_err(|error| match error {
        LoadError::Cancelled => interrupt.take(),
        error => errors::load_error(&error),
    })?;
    interrupt.settle(py);
    Ok(())
}

/// Holds the tokens of a calibration against the model that is to run over them.
fn check_calibration(sequences: &[Vec<u32>], spec: &ModelSpec) -> PyResult<()> {
    let (most, vocab_size) = (spec.max_position_embeddings, spec.vocab_size);
    if sequences.is_empty() {
        return Err(errors::invalid("calibration", Vec::<u32>::new(), "a list of at least one sequence of tokens"));
    }
    for (index, tokens) in sequences.iter().enumerate() {
        let field = format!("calibration[{index}]");
        if tokens.is_empty() || tokens.len() > most {
            return Err(errors::invalid(field, tokens.as_slice(), format!("a list of 1 to {most} tokens")));
        }
        if let Some(token) = tokens.iter().position(|token| *token as usize >= vocab_size) {
            let requirement = format!("a token id of the model, 0 to {}", vocab_size.saturating_sub(1));
            return Err(errors::invalid(format!("{field}[{token}]"), tokens[token], requirement));
        }
    }
    Ok(())
}

/// What a packed file says of itself, as JSON, and the bytes of its tensors.
#[pyfunction]
pub(crate) fn packed_metadata(path: &str) -> PyResult<(String, u64)> {
    let file = open_packed(Path::new(path), false).map_err(|error| errors::load_error(&error))?;
    Ok((json!(file.all_metadata()).to_string(), file.total_bytes()))
}

/// Tells Python how many bytes are packed, of how many. What a progress bar raises must not end the work, but for what
/// is no `Exception`: a signal's handler may run in the midst of it, and Ctrl-C is not the bar's to lose.
pub(crate) fn reporter(progress: Option<Py<PyAny>>, interrupt: &Interrupt) -> impl FnMut(u64, u64) + Send {
    move |done, total| {
        let Some(progress) = &progress else { return };
        Python::attach(|py| match progress.call1(py, (done, total)) {
            Err(error) if !error.is_instance_of::<PyException>(py) => interrupt.raise(error),
            Ok(_) | Err(_) => {}
        });
    }
}
