//! Tensors whose formats are chosen, with their sizes, found without reading any weights.

use std::collections::BTreeMap;
use std::ops::Range;

use ferrule_kernels::Format;
use ferrule_kernels::arch::LANES;

use super::AllocatedMatrix;
use super::budget::Choice;
use super::kinds::{as_inputs, bands, is_of_tokens, kind, kind_of_band};
use crate::recipe::{rows_name, tensor_name};
use crate::spec::ModelSpec;
use crate::weights::{LoadError, MatrixPlan, MatrixSize, Packer, Site};

/// A tensor, some of its rows, or several tensors whose rows are one role, with size and loss in each format.
pub(super) struct Tensor {
    pub name: String,
    /// Rows, and the number of rows of the whole tensor, if their formats are chosen in bands.
    pub rows: Option<(Range<usize>, usize)>,
    /// The same number for tensors that need the same format.
    pub group: usize,
    weights: u64,
    /// Errors of its rows by [`kind`].
    pub kinds: BTreeMap<String, Errors>,
    pub choices: Vec<Choice>,
}

impl Tensor {
    /// Creates a tensor without rows. `formats` is the number of formats.
    pub fn new(name: &str, rows: Option<(Range<usize>, usize)>, group: usize, formats: usize) -> Self {
        let choices = vec![Choice::default(); formats];
        Self { name: name.to_owned(), rows, group, weights: 0, kinds: BTreeMap::new(), choices }
    }

    /// Adds rows of some kinds, whose errors are not known yet.
    pub fn add(&mut self, kinds: Vec<String>, [rows, columns]: [usize; 2], formats: &[Format]) {
        self.weights += rows as u64 * columns as u64;
        for kind in kinds {
            self.kinds.entry(kind).or_default();
        }
        for (choice, format) in self.choices.iter_mut().zip(formats) {
            choice.bytes += MatrixSize::of(*format, rows, columns).bytes;
        }
    }

    /// Adds the rows of a tensor that follow on those of this one.
    pub fn append(&mut self, next: Self) {
        if let (Some((rows, _)), Some((added, _))) = (&mut self.rows, next.rows) {
            rows.end = added.end;
        }
        self.weights += next.weights;
        self.kinds.extend(next.kinds);
        for (choice, added) in self.choices.iter_mut().zip(next.choices) {
            (choice.bytes, choice.loss) = (choice.bytes + added.bytes, choice.loss + added.loss);
        }
    }

    /// Returns the tensor in `formats[chosen]`.
    pub fn allocated(self, chosen: usize, formats: &[Format]) -> AllocatedMatrix {
        let Choice { bytes, loss } = self.choices[chosen];
        let mut errors = Errors::default();
        self.kinds.values().for_each(|kind| errors.add(kind));
        let (format, error) = (formats[chosen], errors.relative(chosen));
        let tensor = match &self.rows {
            Some((rows, all)) if rows.len() < *all => rows_name(&self.name, rows),
            _ => self.name,
        };
        AllocatedMatrix { tensor, format, weights: self.weights, bytes, error, loss }
    }
}

/// Squares of weights and of their errors.
#[derive(Debug, Clone, Default)]
pub(super) struct Errors {
    /// Sum of the squared weights.
    pub squares: f64,
    /// Sum of the squared errors in each format; none before any weights are added.
    pub errors: Vec<f64>,
}

impl Errors {
    pub fn add(&mut self, other: &Self) {
        self.squares += other.squares;
        self.errors.resize(self.errors.len().max(other.errors.len()), 0.0);
        self.errors.iter_mut().zip(&other.errors).for_each(|(sum, error)| *sum += error);
    }

    pub fn scaled(self, scale: f64) -> Self {
        Self { squares: self.squares * scale, errors: self.errors.into_iter().map(|error| error * scale).collect() }
    }

    pub fn are_finite(&self) -> bool {
        self.squares.is_finite() && self.errors.iter().all(|error| error.is_finite())
    }

    /// Returns the relative error in a format. Weights that are zero have none.
    pub fn relative(&self, format: usize) -> f64 {
        if self.squares > 0.0 { self.errors[format] / self.squares } else { 0.0 }
    }
}

/// Returns the kinds of the band of a role's rows that begins at `first`: as a matrix that multiplies inputs and, if it has
/// rows of tokens, as inputs of the model.
fn band_kinds(role: &str, first: usize) -> Vec<String> {
    if !is_of_tokens(role) {
        return vec![kind(role)];
    }
    let kind = kind_of_band(&kind(role), first);
    vec![kind.clone(), as_inputs(&kind)]
}

/// Lists the tensors that are quantized, in the order of the model.
pub(super) struct Tensors<'a> {
    spec: &'a ModelSpec,
    /// Formats from which one is chosen for each, narrowest first.
    pub formats: &'a [Format],
    pub list: Vec<Tensor>,
    /// Indices in `list` by name and first row.
    indices: BTreeMap<(String, usize), usize>,
    /// Size of all matrices, as the loader would pack them.
    pub size: MatrixSize,
    /// Bytes of matrices that are not quantized.
    pub fixed: u64,
    sites: Vec<Site>,
}

impl<'a> Tensors<'a> {
    pub fn new(spec: &'a ModelSpec, formats: &'a [Format]) -> Self {
        let (list, indices, size) = (Vec::new(), BTreeMap::new(), MatrixSize::default());
        Self { spec, formats, list, indices, size, fixed: 0, sites: Vec::new() }
    }

    /// Returns the tensor that has the band of a role's rows which begins at `first`, and its kinds there: as a matrix and,
    /// for rows of tokens, as inputs.
    ///
    /// # Errors
    /// [`LoadError`] if the spec has no such role.
    ///
    /// # Panics
    /// If the band was not listed.
    pub fn of_band(&mut self, role: &str, first: usize) -> Result<(&mut Tensor, Vec<String>), LoadError> {
        let key = (tensor_name(self.spec.tensor(role)?).to_owned(), first);
        Ok((&mut self.list[self.indices[&key]], band_kinds(role, first)))
    }

    /// Adds the rows of a role and returns the indices of its tensors.
    fn add(&mut self, role: &str, [rows, columns]: [usize; 2]) -> Result<Vec<usize>, LoadError> {
        let name = tensor_name(self.spec.tensor(role)?).to_owned();
        let add = |band: Range<usize>| {
            let next = self.list.len();
            let index = *self.indices.entry((name.clone(), band.start)).or_insert(next);
            if index == next {
                let band = (band.len() < rows).then(|| (band.clone(), rows));
                self.list.push(Tensor::new(&name, band, index, self.formats.len()));
            }
            self.list[index].add(band_kinds(role, band.start), [band.len(), columns], self.formats);
            index
        };
        Ok(bands(role, rows).into_iter().map(add).collect())
    }

    /// Joins the groups of some tensors.
    fn join(&mut self, indices: &[usize]) {
        let group = self.list[indices[0]].group;
        for index in indices {
            let joined = self.list[*index].group;
            self.list.iter_mut().filter(|tensor| tensor.group == joined).for_each(|tensor| tensor.group = group);
        }
    }
}

impl Packer for Tensors<'_> {
    type Matrix = MatrixSize;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<MatrixSize, LoadError> {
        let size = plan.size();
        if plan.is_again {
            return Ok(size);
        }
        self.size = self.size + size;
        if !plan.is_quantized() {
            self.fixed += size.bytes;
            return Ok(size);
        }
        let indices = plan.roles.iter().map(|(role, rows)| self.add(role, [*rows, plan.columns]));
        let indices = indices.collect::<Result<Vec<_>, _>>()?.concat();
        let (_, before_last) = plan.roles.split_last().expect("a matrix has roles");
        if before_last.iter().any(|(_, rows)| !rows.is_multiple_of(LANES)) {
            self.join(&indices);
        }
        Ok(size)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_tokens_are_also_inputs() {
        assert_eq!(band_kinds("embedding.weight", 64), ["embedding[64]", "embedding[64] as inputs"]);
        assert_eq!(band_kinds("layers.0.ffn.up.weight", 0), ["layers.0.ffn.up"]);
    }
}
