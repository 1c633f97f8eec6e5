//! Rows of the engine's parameter tables, and JSON values as Python objects.

use ferrule_engine::{BeamSearchParams, Bounds, EngineOptions, SamplingParams};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use serde::Serialize;
use serde_json::Value;

use crate::errors;

/// A row of a parameter table.
#[pyclass(frozen, get_all, module = "ferrule._native")]
pub(crate) struct ParameterRow {
    name: &'static str,
    kind: &'static str,
    default: Py<PyAny>,
    required: bool,
    minimum: Py<PyAny>,
    maximum: Py<PyAny>,
    exclusive_minimum: bool,
    max_items: Option<usize>,
    choices: Vec<&'static str>,
    requirement: String,
    doc: &'static str,
}

/// Returns the sampling parameters that the engine reads.
#[pyfunction]
pub(crate) fn sampling_parameters(py: Python<'_>) -> PyResult<Vec<ParameterRow>> {
    rows(py, SamplingParams::rows())
}

/// Returns the parameters of a beam search that the engine reads.
#[pyfunction]
pub(crate) fn beam_search_parameters(py: Python<'_>) -> PyResult<Vec<ParameterRow>> {
    rows(py, BeamSearchParams::rows())
}

/// Returns the options that the engine reads.
#[pyfunction]
pub(crate) fn engine_options(py: Python<'_>) -> PyResult<Vec<ParameterRow>> {
    rows(py, EngineOptions::rows())
}

fn rows(py: Python<'_>, rows: Vec<ferrule_engine::ParameterRow>) -> PyResult<Vec<ParameterRow>> {
    let convert = |row: ferrule_engine::ParameterRow| {
        let Bounds { kind, required, minimum, maximum, exclusive_minimum, max_items, choices, requirement } =
            row.bounds;
        Ok(ParameterRow {
            name: row.name,
            kind,
            default: object(py, &row.default)?.unbind(),
            required,
            minimum: object(py, &minimum)?.unbind(),
            maximum: object(py, &maximum)?.unbind(),
            exclusive_minimum,
            max_items,
            choices,
            requirement,
            doc: row.doc,
        })
    };
    rows.into_iter().map(convert).collect()
}

/// Writes a value as JSON, with the keys of objects in alphabetical order.
pub(crate) fn to_json(value: &impl Serialize) -> PyResult<String> {
    let value = serde_json::to_value(value).map_err(|error| errors::EngineError::new_err(error.to_string()))?;
    Ok(value.to_string())
}

/// Converts a JSON value.
pub(crate) fn object<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(flag) => flag.into_pyobject(py)?.to_owned().into_any(),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => number.into_pyobject(py)?.into_any(),
            (_, Some(number)) => number.into_pyobject(py)?.into_any(),
            _ => number.as_f64().into_pyobject(py)?.into_any(),
        },
        Value::String(text) => text.into_pyobject(py)?.into_any(),
        Value::Array(items) => {
            let items = items.iter().map(|item| object(py, item)).collect::<PyResult<Vec<_>>>()?;
            PyList::new(py, items)?.into_any()
        }
        Value::Object(map) => {
            let dict = PyDict::new(py);
            for (key, item) in map {
                dict.set_item(key, object(py, item)?)?;
            }
            dict.into_any()
        }
    })
}
