//! Bit allocation: a format for each matrix, so that the estimated loss is least within a budget of bytes.
//!
//! While errors are small, the loss of a model grows linearly with the relative squared error of each matrix (the
//! linearity theorem of HIGGS, <https://arxiv.org/abs/2411.17525>). The errors are measured in each format, on a sample
//! of the rows; the factors are those of [`sensitivity`], so that no calibration data is needed. With calibration data,
//! the errors are those of calibrated quantization, as the inputs of the matrix weigh them.

mod budget;
mod sensitivity;

use std::collections::BTreeMap;
use std::ops::Range;

use ferrule_kernels::arch::LANES;
use ferrule_kernels::{Exec, Format, InputStatistics, PackedMatrix, RowSource};
use serde::{Serialize, Serializer};

use crate::calibrate::{self, Target};
use crate::quantization::Quantization;
use crate::recipe::{Recipe, tensor_name};
use crate::spec::ModelSpec;
use crate::weights::{
    LoadError, Loader, MatrixPlan, MatrixSize, Measure, Packer, Progress, Site, Source, refuse_packed,
};
use budget::{Choice, choose};

/// Maximum number of rows of a matrix that are quantized to measure its error. Errors of a hundred thousand weights or
/// more average out: those of all rows differ by a few percent.
const SAMPLE_ROWS: usize = 64;

/// Formats of all quantized matrices.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Allocation {
    /// Quantized matrices in the order of the model.
    pub matrices: Vec<AllocatedMatrix>,
    /// Bytes of all matrices, with those that are not quantized.
    pub bytes: u64,
    /// Number of weights in all matrices.
    pub weights: u64,
}

/// The format of one matrix.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AllocatedMatrix {
    /// Name of the tensor, as in a [`Recipe`].
    pub tensor: String,
    /// Format.
    #[serde(serialize_with = "name")]
    pub format: Format,
    /// Number of weights.
    pub weights: u64,
    /// Bytes in this format.
    pub bytes: u64,
    /// Squared error of the quantized weights, relative to the squared weights; with calibration, as the inputs of the
    /// matrix weigh it.
    pub error: f64,
    /// Estimated increase of the loss, in units that are the same for all matrices of the model.
    pub loss: f64,
}

fn name<S: Serializer>(format: &Format, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(format.name())
}

/// Bits could not be allocated.
#[derive(Debug, thiserror::Error)]
pub enum AllocationError {
    /// The weights cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A number of bits per weight that no formats have.
    #[error("bits must be a number from {least:.2} to {most:.2} for this model, got {bits}")]
    Bits {
        /// Requested bits per weight.
        bits: f64,
        /// Bits per weight if all matrices have the narrowest format, rounded up to hundredths.
        least: f64,
        /// Bits per weight if all matrices have the widest format, rounded up to hundredths.
        most: f64,
    },
}

/// Chooses a format of [`Recipe::FORMATS`] for each matrix of a source, so that the estimated loss is least and all
/// matrices together have at most `bits` per weight. Memory holds a sample of the rows of one matrix.
///
/// With `sequences` of tokens, the model runs over them as in [`crate::calibrate_into`], and the errors are those of
/// calibrated matrices.
///
/// # Errors
/// [`AllocationError`], also if the source is packed already, or a row of a sample is not finite.
///
/// # Panics
/// If a sequence exceeds the model's positions, or a token the vocabulary.
pub fn allocate_bits(
    spec: &ModelSpec,
    source: Source<'_>,
    (bits, sequences): (f64, Option<&[Vec<u32>]>),
    exec: Exec<'_>,
    progress: Progress<'_>,
) -> Result<Allocation, AllocationError> {
    refuse_packed(source)?;
    // Any quantization with integer formats says which matrices are quantized.
    let loader = Loader::new(spec, source, Quantization::PLAIN);
    let mut all = Measure::default();
    loader.without_vectors().weights(&mut all)?;
    let mut survey = Survey {
        spec,
        exec,
        tensors: Vec::new(),
        indices: BTreeMap::new(),
        size: MatrixSize::default(),
        fixed: 0,
        total: all.bytes,
        done: 0.0,
        progress,
        sites: Vec::new(),
    };
    match sequences {
        None => drop(loader.without_vectors().weights(&mut survey)?),
        Some(sequences) => {
            calibrate::check_memory(spec, source, &loader, sequences)?;
            calibrate::calibrate(spec, source, &loader, sequences, exec, &mut survey)?;
        }
    }
    let Survey { mut tensors, size, fixed, .. } = survey;
    estimate_losses(&mut tensors, spec.layers.len());

    let groups = group_choices(&tensors);
    let bytes_of = |choice: fn(&[Choice]) -> u64| fixed + groups.values().map(|choices| choice(choices)).sum::<u64>();
    let bits_of = |bytes: u64| (bytes as f64 * 8.0 / size.numbers as f64 * 100.0).ceil() / 100.0;
    let narrowest = bytes_of(|choices| choices[0].bytes);
    let [least, most] = [narrowest, bytes_of(|choices| choices[choices.len() - 1].bytes)].map(bits_of);
    let budget = (bits * size.numbers as f64 / 8.0) as u64;
    if !(bits <= most && budget >= narrowest) {
        return Err(AllocationError::Bits { bits, least, most });
    }
    let chosen = choose(&groups.values().cloned().collect::<Vec<_>>(), budget - fixed);
    let chosen: BTreeMap<_, _> = groups.into_keys().zip(chosen).collect();
    let matrices: Vec<_> = tensors.into_iter().map(|tensor| tensor.allocated(&chosen)).collect();
    let bytes = fixed + matrices.iter().map(|matrix| matrix.bytes).sum::<u64>();
    Ok(Allocation { matrices, bytes, weights: size.numbers })
}

/// Computes the losses of the choices of each tensor. All matrices of a kind together count like one, whether they are
/// one tensor or many, such as experts.
fn estimate_losses(tensors: &mut [Tensor], layers: usize) {
    let mut counts = BTreeMap::<String, usize>::new();
    for kind in tensors.iter().flat_map(|tensor| tensor.kinds.keys()) {
        *counts.entry(kind.clone()).or_default() += 1;
    }
    for Tensor { kinds, choices, .. } in tensors {
        for (kind, measured) in kinds {
            let factor = sensitivity::of_kind(kind, layers) / counts[kind] as f64;
            for (index, choice) in choices.iter_mut().enumerate() {
                choice.loss += factor * measured.relative(index);
            }
        }
    }
}

/// Returns the choices of each group of tensors that need the same format.
fn group_choices(tensors: &[Tensor]) -> BTreeMap<usize, Vec<Choice>> {
    let mut groups = BTreeMap::<usize, Vec<Choice>>::new();
    for Tensor { group, choices, .. } in tensors {
        let sums = groups.entry(*group).or_insert_with(|| vec![Choice::default(); choices.len()]);
        for (sum, choice) in sums.iter_mut().zip(choices) {
            sum.bytes += choice.bytes;
            sum.loss += choice.loss;
        }
    }
    groups
}

/// A tensor, or several whose rows are one role, with its size and loss in each of [`Recipe::FORMATS`].
struct Tensor {
    name: String,
    /// The same number for tensors that need the same format.
    group: usize,
    weights: u64,
    /// Errors of its rows by [`sensitivity::kind`].
    kinds: BTreeMap<String, Errors>,
    choices: Vec<Choice>,
}

impl Tensor {
    fn new(name: &str, group: usize) -> Self {
        let choices = vec![Choice::default(); Recipe::FORMATS.len()];
        Self { name: name.to_owned(), group, weights: 0, kinds: BTreeMap::new(), choices }
    }

    /// Adds rows of a kind.
    fn add(&mut self, kind: String, [rows, columns]: [usize; 2], errors: &Errors) {
        self.weights += rows as u64 * columns as u64;
        self.kinds.entry(kind).or_default().add(errors);
        for (choice, format) in self.choices.iter_mut().zip(Recipe::FORMATS) {
            choice.bytes += MatrixSize::of(*format, rows, columns).bytes;
        }
    }

    fn allocated(self, chosen: &BTreeMap<usize, usize>) -> AllocatedMatrix {
        let chosen = chosen[&self.group];
        let Choice { bytes, loss } = self.choices[chosen];
        let mut errors = Errors::default();
        self.kinds.values().for_each(|kind| errors.add(kind));
        AllocatedMatrix {
            tensor: self.name,
            format: Recipe::FORMATS[chosen],
            weights: self.weights,
            bytes,
            error: errors.relative(chosen),
            loss,
        }
    }
}

/// Squares of weights and of their errors.
#[derive(Debug, Clone, Default)]
struct Errors {
    /// Sum of the squared weights.
    squares: f64,
    /// Sum of the squared errors in each of [`Recipe::FORMATS`].
    errors: [f64; Recipe::FORMATS.len()],
}

impl Errors {
    fn add(&mut self, other: &Self) {
        self.squares += other.squares;
        self.errors.iter_mut().zip(other.errors).for_each(|(sum, error)| *sum += error);
    }

    fn scaled(self, scale: f64) -> Self {
        Self { squares: self.squares * scale, errors: self.errors.map(|error| error * scale) }
    }

    fn are_finite(&self) -> bool {
        self.squares.is_finite() && self.errors.iter().all(|error| error.is_finite())
    }

    /// Returns the relative error in a format. Weights that are zero have none.
    fn relative(&self, format: usize) -> f64 {
        if self.squares > 0.0 { self.errors[format] / self.squares } else { 0.0 }
    }
}

/// Measures the errors of each matrix that is quantized.
struct Survey<'a> {
    spec: &'a ModelSpec,
    exec: Exec<'a>,
    tensors: Vec<Tensor>,
    /// Indices in `tensors` by name.
    indices: BTreeMap<String, usize>,
    /// Size of all matrices.
    size: MatrixSize,
    /// Bytes of matrices that are not quantized.
    fixed: u64,
    total: u64,
    done: f64,
    progress: Progress<'a>,
    sites: Vec<Site>,
}

impl Packer for Survey<'_> {
    type Matrix = MatrixSize;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<MatrixSize, LoadError> {
        let size = plan.size();
        self.survey(&plan, None)?;
        plan.release();
        self.advance(size.bytes as f64);
        Ok(size)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

impl Target for Survey<'_> {
    fn pack(
        &mut self,
        exec: &Exec<'_>,
        plan: &MatrixPlan<'_>,
        statistics: Option<&InputStatistics>,
    ) -> Result<PackedMatrix, LoadError> {
        self.survey(plan, statistics)?;
        // The format of the matrix is not known yet. In int8, later layers get almost the inputs of the exact model.
        plan.pack(exec)
    }

    fn advance(&mut self, bytes: f64) {
        self.done += bytes;
        (self.progress)((self.done as u64).min(self.total), self.total);
    }
}

impl Survey<'_> {
    /// Measures a matrix, unless it was measured before.
    fn survey(&mut self, plan: &MatrixPlan<'_>, statistics: Option<&InputStatistics>) -> Result<(), LoadError> {
        if plan.is_again {
            return Ok(());
        }
        let size = plan.size();
        self.size = self.size + size;
        if !plan.is_quantized() {
            self.fixed += size.bytes;
            return Ok(());
        }
        let mut first = 0;
        let mut indices = Vec::with_capacity(plan.roles.len());
        for (role, rows) in &plan.roles {
            indices.push(self.measure(plan, role, first..first + rows, statistics)?);
            first += rows;
        }
        let (_, before_last) = plan.roles.split_last().expect("a matrix has roles");
        if before_last.iter().any(|(_, rows)| !rows.is_multiple_of(LANES)) {
            self.join(&indices);
        }
        Ok(())
    }

    /// Measures the rows of a role and returns the index of its tensor.
    fn measure(
        &mut self,
        plan: &MatrixPlan<'_>,
        role: &str,
        rows: Range<usize>,
        statistics: Option<&InputStatistics>,
    ) -> Result<usize, LoadError> {
        let spec = self.spec.tensor(role)?;
        let name = tensor_name(spec);
        let next = self.tensors.len();
        let index = *self.indices.entry(name.to_owned()).or_insert(next);
        if index == next {
            self.tensors.push(Tensor::new(name, index));
        }
        let count = rows.len().min(SAMPLE_ROWS);
        let sampled = (0..count).map(|row| rows.start + row * rows.len() / count).collect();
        let sample = Sample { source: plan, rows: sampled };
        let errors = sample.errors(&self.exec, plan.columns, statistics)?.scaled(rows.len() as f64 / count as f64);
        if !errors.are_finite() {
            return Err(LoadError::NotQuantizable { tensor: spec.names[0].clone() });
        }
        self.tensors[index].add(sensitivity::kind(role), [rows.len(), plan.columns], &errors);
        Ok(index)
    }

    /// Joins the groups of some tensors.
    fn join(&mut self, indices: &[usize]) {
        let group = self.tensors[indices[0]].group;
        for index in indices {
            let joined = self.tensors[*index].group;
            self.tensors.iter_mut().filter(|tensor| tensor.group == joined).for_each(|tensor| tensor.group = group);
        }
    }
}

/// Some rows of a matrix.
struct Sample<'a> {
    source: &'a dyn RowSource,
    rows: Vec<usize>,
}

impl RowSource for Sample<'_> {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        self.source.read_row(self.rows[row], out);
    }
}

impl Sample<'_> {
    /// Measures the errors of the rows in each format; with statistics of their inputs, those of calibrated rows.
    fn errors(
        &self,
        exec: &Exec<'_>,
        columns: usize,
        statistics: Option<&InputStatistics>,
    ) -> Result<Errors, LoadError> {
        let mut exact = vec![0.0; self.rows.len() * columns];
        self.read_rows(0, columns, &mut exact);
        let squares = exact.iter().map(|weight| f64::from(*weight).powi(2)).sum();
        let mut all = Errors { squares, ..Errors::default() };
        for (format, error) in Recipe::FORMATS.iter().zip(&mut all.errors) {
            let rows = (*format, self.rows.len());
            let calibrated = match statistics {
                Some(statistics) => PackedMatrix::calibrated_error(exec, rows, columns, self, statistics)?,
                None => None,
            };
            *error = match calibrated {
                Some(error) => error,
                None => squared_error(&PackedMatrix::pack(exec, &[rows], columns, self)?, &exact),
            };
        }
        Ok(all)
    }
}

/// Returns the squared error of the weights of a matrix.
fn squared_error(packed: &PackedMatrix, exact: &[f32]) -> f64 {
    let mut found = vec![0.0; packed.cols()];
    let rows = exact.chunks_exact(packed.cols()).enumerate().map(|(row, exact)| {
        packed.read_row(row, &mut found);
        exact.iter().zip(&found).map(|(exact, found)| f64::from(exact - found).powi(2)).sum::<f64>()
    });
    rows.sum()
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use ferrule_kernels::arch::Isa;
    use ferrule_kernels::{Cancel, Pool};

    use super::*;

    /// Rows of one number.
    struct Constant(f32);

    impl RowSource for Constant {
        fn read_row(&self, _row: usize, out: &mut [f32]) {
            out.fill(self.0);
        }
    }

    #[test]
    fn errors_of_numbers_that_are_not_finite_are_not_finite() {
        let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
        let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
        for (number, finite) in [(0.0, true), (0.5, true), (f32::NAN, false), (f32::NEG_INFINITY, false)] {
            let errors = Sample { source: &Constant(number), rows: vec![0, 3] }.errors(&exec, 100, None).unwrap();
            assert_eq!(errors.are_finite(), finite, "{number}");
            assert!(!finite || errors.relative(0) < 1e-1, "{errors:?}");
        }
    }

    /// Allocates the formats of four experts and of the projection to queries; `name` names the tensor of an expert.
    fn formats(name: impl Fn(usize) -> String) -> BTreeMap<String, &'static str> {
        const SHAPE: [usize; 2] = [64, 256];
        let errors = Errors { squares: 1.0, errors: [1e-1, 1e-2, 1e-3, 1e-4] };
        let mut tensors = vec![Tensor::new("q", 0)];
        tensors[0].add(sensitivity::kind("layers.0.attention.q.weight"), SHAPE, &errors);
        for expert in 0..4 {
            let name = name(expert);
            let index = tensors.iter().position(|tensor| tensor.name == name).unwrap_or(tensors.len());
            if index == tensors.len() {
                tensors.push(Tensor::new(&name, index));
            }
            let kind = sensitivity::kind(&format!("layers.0.ffn.experts.{expert}.output.weight"));
            tensors[index].add(kind, SHAPE, &errors);
        }
        estimate_losses(&mut tensors, 8);
        let losses = tensors.iter().map(|tensor| tensor.choices[0].loss);
        assert!((losses.sum::<f64>() - 2e-1).abs() < 1e-9);
        let groups: Vec<_> = group_choices(&tensors).into_values().collect();
        // Enough for int4 in the projection or in one of the experts.
        let budget =
            groups.iter().map(|choices| choices[0].bytes).sum::<u64>() + groups[0][1].bytes - groups[0][0].bytes;
        let chosen = choose(&groups, budget).into_iter().enumerate().collect();
        tensors
            .into_iter()
            .map(|tensor| tensor.allocated(&chosen))
            .map(|each| (each.tensor, each.format.name()))
            .collect()
    }

    #[test]
    fn stacked_and_separate_experts_get_the_same_formats() {
        let stacked = formats(|_| "experts".to_owned());
        assert_eq!(stacked, BTreeMap::from([("q".to_owned(), "int4"), ("experts".to_owned(), "int3")]));
        let separate = formats(|expert| format!("experts.{expert}"));
        assert_eq!(separate["q"], "int4");
        assert!((0..4).all(|expert| separate[&format!("experts.{expert}")] == "int3"));
    }
}
