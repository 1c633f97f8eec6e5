//! Vocabularies and grammars as Python sees them.

use std::collections::HashSet;
use std::sync::Arc;

use ferrule_engine::structured::Token;
use ferrule_engine::{self as engine, StructuredOutputs};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::{errors, fork};

/// The bytes of a model's tokens, for which grammars are compiled.
#[pyclass(frozen, module = "ferrule._native")]
pub(crate) struct Vocabulary(engine::Vocabulary);

/// What the output of a request must be, compiled for a vocabulary.
#[pyclass(frozen, module = "ferrule._native")]
pub(crate) struct Grammar(pub Arc<engine::Grammar>);

#[pymethods]
impl Vocabulary {
    #[new]
    #[pyo3(signature = (tokens, special))]
    fn new(py: Python<'_>, tokens: Vec<PyBackedBytes>, special: HashSet<u32>) -> PyResult<Self> {
        let made = py.detach(|| {
            let _gate = fork::keep_out();
            let token = |(id, bytes): (u32, &PyBackedBytes)| match special.contains(&id) {
                true => Token::Special(bytes.to_vec()),
                false => Token::Text(bytes.to_vec()),
            };
            engine::Vocabulary::new(&(0..).zip(&tokens).map(token).collect::<Vec<_>>())
        });
        made.map(Self).map_err(|error| errors::vocabulary_error(&error))
    }

    /// Compiles what a request asks for, or takes it from among the latest that were.
    fn compile(&self, py: Python<'_>, asked: &str) -> PyResult<Grammar> {
        let compiled = py.detach(|| {
            let _gate = fork::keep_out();
            StructuredOutputs::from_json(asked).and_then(|asked| self.0.compile(&asked))
        });
        compiled.map(Grammar).map_err(|error| errors::grammar_error(&error))
    }
}
