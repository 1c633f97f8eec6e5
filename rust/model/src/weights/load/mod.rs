//! Loading the weights of a model: the matrices and vectors that a spec asks for, from any source.
//!
//! `roles` reads one role at a time (a linear layer, a norm, a table). The other files say which roles each part of a
//! spec has, one file a part; those of mixers are in [`crate::mixers`].

mod block;
mod embedding;
mod output;
mod roles;

use std::cell::RefCell;
use std::rc::Rc;

use ferrule_kernels::Exec;

use super::Weights;
use super::error::LoadError;
use super::plan::{Measure, Pack, Packer, Progress};
use super::sizes::MatrixSize;
use super::source::{Source, WeightSource};
use crate::pruning::Pruning;
use crate::quantization::Quantization;
use crate::recipe::{MatrixFormats, Recipe};
use crate::spec::ModelSpec;
use crate::stage::{LoadedPart, StageLayers};
pub(crate) use roles::RolePart;

/// Loads the weights that a spec asks for from a source.
#[derive(Clone)]
pub(crate) struct Loader<'a> {
    spec: &'a ModelSpec,
    /// The layers that are loaded, and the workers that divide the rows of the matrices of linear layers.
    part: LoadedPart,
    source: Rc<dyn WeightSource<'a> + 'a>,
    /// Formats to pack matrices in.
    quantization: Quantization,
    recipe: Option<&'a Recipe>,
    pruning: Option<Pruning>,
    /// Whether vectors are read. If not, they are checked and allocated but stay zero, and only headers are read.
    reads: bool,
    /// Whether the weights were loaded before, for an earlier layer.
    again: bool,
    /// Receives each vector with its role.
    vectors: Option<Rc<RefCell<Vectors>>>,
}

/// Vectors with their roles.
pub(super) type Vectors = Vec<(String, Vec<f32>)>;

impl<'a> Loader<'a> {
    pub fn new(spec: &'a ModelSpec, source: Source<'a>, formats: impl Into<MatrixFormats<'a>>) -> Self {
        let MatrixFormats { quantization, recipe, pruning } = formats.into();
        let (part, source) = (StageLayers::whole(spec).into(), source.reader(spec));
        Self { spec, part, source, quantization, recipe, pruning, reads: true, again: false, vectors: None }
    }

    /// Returns a loader of the weights of some layers, and of what precedes or follows them; of this worker's rows of the
    /// matrices of linear layers, if a group divides them.
    pub fn of_part(self, part: LoadedPart) -> Self {
        Self { part, ..self }
    }

    /// Packs all weights, tensor by tensor; releases the pages of the source after each.
    ///
    /// # Errors
    /// [`LoadError`]; a faulty file or too little memory is reported before anything large is allocated.
    pub fn load(&self, exec: Exec<'_>, progress: Progress<'_>) -> Result<Weights, LoadError> {
        let total = self.packed_bytes()?;
        self.check_memory(total)?;
        let _bound = exec.pool.bind_caller();
        let weights = self.weights(&mut Pack { exec, done: 0, total, progress, sites: Vec::new() })?;
        // Without a limit they may exceed the memory, and reading all of them would be in vain.
        if self.source.memory_limit().is_some() {
            weights.place(&exec)?;
        }
        Ok(weights)
    }

    /// Returns the bytes of the packed matrices. Reads only the headers of the files.
    ///
    /// # Errors
    /// The errors of [`Loader::measure`].
    pub fn packed_bytes(&self) -> Result<u64, LoadError> {
        Ok(self.measure()?.sizes(self.spec, &self.part.layers).weight_bytes)
    }

    /// Checks that the memory of this machine holds `needs` bytes of packed matrices.
    ///
    /// # Errors
    /// [`LoadError::Weights`] if not.
    pub fn check_memory(&self, needs: u64) -> Result<(), LoadError> {
        match self.source.memory_limit().filter(|available| needs > *available) {
            Some(available) => Err(LoadError::Weights { needs, available }),
            None => Ok(()),
        }
    }

    /// Returns the sizes of all weights; reads only the headers of the files.
    ///
    /// # Errors
    /// [`LoadError`] if a tensor is missing or does not fit the spec.
    pub fn measure(&self) -> Result<Weights<MatrixSize>, LoadError> {
        self.without_vectors().weights(&mut Measure::default())
    }

    /// Returns a loader that allocates vectors but does not read them.
    pub fn without_vectors(&self) -> Self {
        Self { reads: false, ..self.clone() }
    }

    /// Returns a loader of weights that were loaded before, which need not be calibrated or written again.
    fn again(&self) -> Self {
        Self { again: true, vectors: None, ..self.clone() }
    }

    /// Returns a loader that adds each vector that it reads to `vectors`.
    pub fn recording(&self, vectors: &Rc<RefCell<Vectors>>) -> Self {
        Self { vectors: Some(Rc::clone(vectors)), ..self.clone() }
    }

    /// Loads all weights of the stage with `packer`.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn weights<P: Packer>(&self, packer: &mut P) -> Result<Weights<P::Matrix>, LoadError> {
        let (spec, stage) = (self.spec, &self.part.layers);
        let is_last = stage.is_last();
        let has_lm_head = is_last || self.part.vocabulary.is_divided();
        let embedding = if stage.is_first() || self.has_token_rows() { Some(self.embedding(packer)?) } else { None };
        let tables = self.tables(packer)?;
        let streams = self.streams(packer)?;
        let mut layers = Vec::with_capacity(stage.range().len());
        for index in stage.range() {
            layers.push(self.layer(packer, index, &spec.layers[index], &layers)?);
        }
        let lm_head_projection = if is_last { self.lm_head_projection(packer)? } else { None };
        let (lm_head, lm_head_bias) = if has_lm_head { self.lm_head(packer)? } else { (None, None) };
        let final_norm = if is_last { self.final_norm()? } else { None };
        let classifier = if is_last { self.classifier(packer)? } else { None };
        let text_projections = if is_last { self.text_projections(packer)? } else { Vec::new() };
        let sites = std::mem::take(packer.sites());
        Ok(Weights {
            embedding,
            tables,
            streams,
            layers,
            final_norm,
            lm_head_projection,
            lm_head,
            lm_head_bias,
            classifier,
            text_projections,
            sites,
        })
    }
}
