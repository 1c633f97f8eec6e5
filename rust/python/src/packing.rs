//! Packed files.

use std::collections::BTreeMap;
use std::path::Path;

use ferrule_formats::PackedFile as Opened;
use ferrule_kernels::{Format, Sparsity, SparsityError};
use ferrule_model::{BitBudget, Calibration, Pruning, PruningMethod, Recipe, open_packed};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

use crate::errors;
use crate::fork;
use crate::interrupt::Interrupt;
use crate::load::{LoadArguments, reporter};
use crate::parameters::to_json;

/// Packs the weights of a checkpoint, or random weights, into a file.
#[pyfunction]
#[pyo3(signature = (
    spec, weights, options, path, metadata, calibration=None, progress=None, recipe=None, pruning=None,
    kept_layers=None,
))]
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
    recipe: Option<(String, Vec<(String, String)>)>,
    pruning: Option<(String, String)>,
    kept_layers: Option<&str>,
) -> PyResult<()> {
    let model = LoadArguments::read(spec, weights, options)?;
    let recipe = recipe.map(|(name, rules)| Recipe::new(&name, rules)).transpose();
    let recipe = recipe.map_err(|error| errors::load_error(&error.into()))?;
    let pruning = pruning.map(|(sparsity, method)| read_pruning(&sparsity, &method)).transpose()?;
    let isa = errors::chosen_isa()?;
    let interrupt = Interrupt::new();
    let mut report = reporter(progress, &interrupt);
    let packed = py.detach(|| {
        let _guard = fork::hold_off_forks();
        let builder = model.builder().isa(isa).cancel(&interrupt.cancel).progress(&mut report);
        let kept_layers = kept_layers.map(Path::new);
        let calibration = calibration.as_deref().map(|sequences| Calibration { sequences, kept_layers });
        builder.pack(Path::new(path), &metadata, calibration, recipe.as_ref(), pruning)
    });
    packed.map_err(|error| interrupt.build_error(&error))?;
    interrupt.settle(py);
    Ok(())
}

/// Reads a sparsity and the name of a pruning method.
fn read_pruning(sparsity: &str, method: &str) -> PyResult<Pruning> {
    let refused = |error: SparsityError| errors::invalid("sparsity", error.found, Sparsity::REQUIREMENT);
    let names = PruningMethod::ALL.map(|(name, _)| name).join(", ");
    let unknown = || errors::invalid("pruning", method, format!("one of {names}"));
    Ok(Pruning {
        sparsity: sparsity.parse().map_err(refused)?,
        method: PruningMethod::named(method).ok_or_else(unknown)?,
    })
}

/// Chooses one of the given formats for each matrix, so that the estimated loss is least with `bits` per weight; returns
/// JSON.
#[pyfunction]
#[pyo3(signature = (spec, weights, options, bits, formats=None, calibration=None, progress=None))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
pub(crate) fn allocate_bits(
    py: Python<'_>,
    spec: &str,
    weights: Option<&str>,
    options: &str,
    bits: f64,
    formats: Option<Vec<String>>,
    calibration: Option<Vec<Vec<u32>>>,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let model = LoadArguments::read(spec, weights, options)?;
    let formats = read_formats(formats)?;
    let isa = errors::chosen_isa()?;
    let interrupt = Interrupt::new();
    let mut report = reporter(progress, &interrupt);
    let allocated = py.detach(|| {
        let _guard = fork::hold_off_forks();
        let builder = model.builder().isa(isa).cancel(&interrupt.cancel).progress(&mut report);
        builder.allocate_bits(BitBudget { bits, formats: &formats }, calibration.as_deref())
    });
    let allocated = allocated.map_err(|error| interrupt.build_error(&error))?;
    interrupt.settle(py);
    to_json(&allocated)
}

/// Checks the bits per weight and the formats of `allocate_bits` without reading any weights.
#[pyfunction]
#[pyo3(signature = (spec, weights, options, bits, formats=None))]
pub(crate) fn check_bits(
    spec: &str,
    weights: Option<&str>,
    options: &str,
    bits: f64,
    formats: Option<Vec<String>>,
) -> PyResult<()> {
    let model = LoadArguments::read(spec, weights, options)?;
    let formats = read_formats(formats)?;
    model.builder().check_bits(BitBudget { bits, formats: &formats }).map_err(|error| errors::build_error(&error))
}

/// Reads the names of the formats of an allocation; `None` for all of them.
fn read_formats(names: Option<Vec<String>>) -> PyResult<Vec<Format>> {
    let all = Recipe::FORMATS;
    let Some(names) = names else { return Ok(all.to_vec()) };
    let unknown = names.iter().find(|name| all.iter().all(|format| format.name() != **name));
    if let Some(wrong) = unknown.map(String::as_str).or(names.is_empty().then_some("")) {
        let known: Vec<_> = all.iter().map(|format| format.name()).collect();
        return Err(errors::invalid("formats", wrong, format!("some of {}", known.join(", "))));
    }
    Ok(all.iter().copied().filter(|format| names.iter().any(|name| name == format.name())).collect())
}

/// A packed file whose header has been read. Tensors are read on demand.
#[pyclass(frozen, module = "ferrule._native")]
pub(crate) struct PackedFile(Opened);

#[pymethods]
impl PackedFile {
    #[new]
    fn new(path: &str) -> PyResult<Self> {
        open_packed(Path::new(path), false).map(Self).map_err(|error| errors::load_error(&error))
    }

    /// Returns the metadata.
    #[getter]
    fn metadata(&self) -> BTreeMap<String, String> {
        self.0.all_metadata().clone()
    }

    /// Returns the bytes of all tensors together.
    #[getter]
    fn total_bytes(&self) -> u64 {
        self.0.total_bytes()
    }

    /// Returns the names of the tensors in the order of the file.
    #[getter]
    fn tensors(&self) -> Vec<String> {
        self.0.names().to_vec()
    }

    /// Compares the checksum of the tensor at `index` of `tensors`.
    fn verify(&self, py: Python<'_>, index: usize) -> PyResult<()> {
        if index >= self.0.names().len() {
            return Err(PyIndexError::new_err("tensor index out of range"));
        }
        py.detach(|| self.0.verify(index)).map_err(|error| errors::load_error(&error.into()))
    }
}
