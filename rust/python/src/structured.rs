//! Vocabularies and grammars of structured outputs.

use std::collections::HashSet;
use std::sync::Arc;

use ferrule_engine::structured::Token;
use ferrule_engine::{self as engine, StructuredOutputs};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::{errors, fork};

/// Bytes of a model's tokens, for which grammars are compiled.
#[pyclass(frozen, module = "ferrule._native")]
pub(crate) struct Vocabulary(engine::Vocabulary);

/// Grammar of a request's output, compiled for a vocabulary.
#[pyclass(frozen, module = "ferrule._native")]
pub(crate) struct Grammar(pub Arc<engine::Grammar>);

#[pymethods]
impl Vocabulary {
    #[new]
    #[pyo3(signature = (tokens, special))]
    fn new(py: Python<'_>, tokens: Vec<PyBackedBytes>, special: HashSet<u32>) -> PyResult<Self> {
        let made = py.detach(|| {
            let _guard = fork::hold_off_forks();
            let token = |(id, bytes): (u32, &PyBackedBytes)| match special.contains(&id) {
                true => Token::Special(bytes.to_vec()),
                false => Token::Text(bytes.to_vec()),
            };
            engine::Vocabulary::new(&(0..).zip(&tokens).map(token).collect::<Vec<_>>())
        });
        made.map(Self).map_err(|error| errors::vocabulary_error(&error))
    }

    /// Compiles the grammar of a request, or takes it from the cache.
    fn compile(&self, py: Python<'_>, spec: &str) -> PyResult<Grammar> {
        let compiled = py.detach(|| {
            let _guard = fork::hold_off_forks();
            StructuredOutputs::from_json(spec).and_then(|spec| self.0.compile(&spec))
        });
        compiled.map(Grammar).map_err(|error| errors::grammar_error(&error))
    }
}
