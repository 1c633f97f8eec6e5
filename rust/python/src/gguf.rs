//! GGUF files.

use std::path::{Path, PathBuf};

use ferrule_formats::gguf::{Array, Value};
use ferrule_formats::{CheckpointError, GgufFile as Opened};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict, PyList, PyTuple};

use crate::engine::floats;
use crate::{errors, fork};

/// A GGUF model, of one file or several.
#[pyclass(frozen, module = "ferrule._native")]
pub(crate) struct GgufFile(Opened);

#[pymethods]
impl GgufFile {
    #[new]
    fn new(py: Python<'_>, path: &str) -> PyResult<Self> {
        let opened = py.detach(|| {
            let _guard = fork::hold_off_forks();
            Opened::open(Path::new(path))
        });
        opened.map(Self).map_err(|error| errors::checkpoint_error(&error))
    }

    /// Returns the paths of the files, in order.
    #[getter]
    fn parts(&self) -> Vec<PathBuf> {
        self.0.paths().to_vec()
    }

    /// Returns the metadata of the first file.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let metadata = PyDict::new(py);
        for key in self.0.keys() {
            let value = self.0.value(key).map_err(|error| errors::checkpoint_error(&error))?;
            if let Some(value) = value {
                metadata.set_item(key, self.value(py, value)?)?;
            }
        }
        Ok(metadata)
    }

    /// Returns the type and the shape of each tensor.
    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let tensors = PyDict::new(py);
        for (name, ty, shape) in self.0.checkpoint().types() {
            tensors.set_item(name, (ty.name(), PyTuple::new(py, shape)?))?;
        }
        Ok(tensors)
    }

    /// Returns a tensor as float32 in row-major order.
    fn dequantize<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyByteArray>> {
        let read = || -> Result<_, CheckpointError> {
            let weight = self.0.checkpoint().weight(name)?;
            let mut numbers = vec![0.0; weight.elements()];
            weight.read_f32(0, &mut numbers);
            Ok(numbers)
        };
        let numbers = py.detach(|| {
            let _guard = fork::hold_off_forks();
            read()
        });
        floats(py, &numbers.map_err(|error| errors::checkpoint_error(&error))?)
    }
}

impl GgufFile {
    fn value<'py>(&self, py: Python<'py>, value: Value<'_>) -> PyResult<Bound<'py, PyAny>> {
        Ok(match value {
            Value::U8(value) => value.into_pyobject(py)?.into_any(),
            Value::I8(value) => value.into_pyobject(py)?.into_any(),
            Value::U16(value) => value.into_pyobject(py)?.into_any(),
            Value::I16(value) => value.into_pyobject(py)?.into_any(),
            Value::U32(value) => value.into_pyobject(py)?.into_any(),
            Value::I32(value) => value.into_pyobject(py)?.into_any(),
            Value::U64(value) => value.into_pyobject(py)?.into_any(),
            Value::I64(value) => value.into_pyobject(py)?.into_any(),
            Value::F32(value) => value.into_pyobject(py)?.into_any(),
            Value::F64(value) => value.into_pyobject(py)?.into_any(),
            Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
            Value::String(value) => value.into_pyobject(py)?.into_any(),
            Value::Array(array) => self.list(py, array)?.into_any(),
        })
    }

    fn list<'py>(&self, py: Python<'py>, array: Array<'_>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for value in array.iter() {
            let value = value.map_err(|error| errors::checkpoint_error(&self.0.error(error)))?;
            list.append(self.value(py, value)?)?;
        }
        Ok(list)
    }
}
