//! Bit allocation: a format for each matrix, so that the estimated loss is least within a budget of bytes.
//!
//! While errors are small, the loss of a model grows linearly with the relative squared error of each matrix (the
//! linearity theorem of HIGGS, <https://arxiv.org/abs/2411.17525>). The errors are measured in each format, on a sample
//! of the rows; the factors are those of [`sensitivity`], so that no calibration data is needed.

mod budget;
mod sensitivity;

use std::collections::BTreeMap;

use ferrule_kernels::arch::LANES;
use ferrule_kernels::{Exec, Format, PackedMatrix, RowSource};
use serde::{Serialize, Serializer};

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
    /// Squared error of the quantized weights, relative to the squared weights.
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
/// # Errors
/// [`AllocationError`], also if the source is packed already.
pub fn allocate_bits(
    spec: &ModelSpec,
    source: Source<'_>,
    bits: f64,
    exec: Exec<'_>,
    progress: Progress<'_>,
) -> Result<Allocation, AllocationError> {
    refuse_packed(source)?;
    // Any quantization with integer formats says which matrices are quantized.
    let loader = Loader::new(spec, source, Quantization::PLAIN).without_vectors();
    let mut all = Measure::default();
    loader.weights(&mut all)?;
    let mut survey = Survey {
        spec,
        exec,
        tensors: Vec::new(),
        indices: BTreeMap::new(),
        size: MatrixSize::default(),
        fixed: 0,
        total: all.bytes,
        done: 0,
        progress,
        sites: Vec::new(),
    };
    loader.weights(&mut survey)?;
    let Survey { tensors, size, fixed, .. } = survey;

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
    /// Squares of the sampled weights, scaled to all rows.
    squares: f64,
    /// Squared errors of the sampled weights in each format, scaled to all rows.
    errors: Vec<f64>,
    choices: Vec<Choice>,
}

impl Tensor {
    fn allocated(self, chosen: &BTreeMap<usize, usize>) -> AllocatedMatrix {
        let chosen = chosen[&self.group];
        let Choice { bytes, loss } = self.choices[chosen];
        let error = relative(self.errors[chosen], self.squares);
        AllocatedMatrix {
            tensor: self.name,
            format: Recipe::FORMATS[chosen],
            weights: self.weights,
            bytes,
            error,
            loss,
        }
    }
}

/// Returns the relative error. Weights that are zero or not finite are the same in any format.
fn relative(error: f64, squares: f64) -> f64 {
    let relative = error / squares;
    if relative.is_finite() { relative } else { 0.0 }
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
    done: u64,
    progress: Progress<'a>,
    sites: Vec<Site>,
}

impl Packer for Survey<'_> {
    type Matrix = MatrixSize;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<MatrixSize, LoadError> {
        let size = plan.size();
        self.done += size.bytes;
        if plan.is_again {
            return Ok(size);
        }
        self.size = self.size + size;
        if plan.is_quantized() {
            let mut first = 0;
            let mut indices = Vec::with_capacity(plan.roles.len());
            for (role, rows) in &plan.roles {
                indices.push(self.measure(&plan, role, first, *rows)?);
                first += rows;
            }
            let (_, before_last) = plan.roles.split_last().expect("a matrix has roles");
            if before_last.iter().any(|(_, rows)| !rows.is_multiple_of(LANES)) {
                self.join(&indices);
            }
            plan.release();
        } else {
            self.fixed += size.bytes;
        }
        (self.progress)(self.done, self.total);
        Ok(size)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

impl Survey<'_> {
    /// Measures the rows of a role, from `first` on, and returns the index of its tensor.
    fn measure(&mut self, plan: &MatrixPlan<'_>, role: &str, first: usize, rows: usize) -> Result<usize, LoadError> {
        let name = tensor_name(self.spec.tensor(role)?);
        let next = self.tensors.len();
        let index = *self.indices.entry(name.to_owned()).or_insert(next);
        if index == next {
            let formats = Recipe::FORMATS.len();
            self.tensors.push(Tensor {
                name: name.to_owned(),
                group: index,
                weights: 0,
                squares: 0.0,
                errors: vec![0.0; formats],
                choices: vec![Choice::default(); formats],
            });
        }
        let count = rows.min(SAMPLE_ROWS);
        let sample = Sample { plan, rows: (0..count).map(|row| first + row * rows / count).collect() };
        let (squares, errors) = sample.errors(&self.exec)?;
        let scale = rows as f64 / count as f64;
        let factor = sensitivity::of_role(role, self.spec.layers.len());
        let tensor = &mut self.tensors[index];
        tensor.weights += rows as u64 * plan.columns as u64;
        tensor.squares += squares * scale;
        for (index, (error, format)) in errors.iter().zip(Recipe::FORMATS).enumerate() {
            tensor.errors[index] += error * scale;
            tensor.choices[index].loss += factor * relative(*error, squares);
            tensor.choices[index].bytes += MatrixSize::of(*format, rows, plan.columns).bytes;
        }
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
    plan: &'a MatrixPlan<'a>,
    rows: Vec<usize>,
}

impl RowSource for Sample<'_> {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        self.plan.read_row(self.rows[row], out);
    }
}

impl Sample<'_> {
    /// Returns the sum of squares of the weights, and of their errors in each of [`Recipe::FORMATS`].
    fn errors(&self, exec: &Exec<'_>) -> Result<(f64, Vec<f64>), LoadError> {
        let columns = self.plan.columns;
        let (mut exact, mut found) = (vec![0.0; columns], vec![0.0; columns]);
        let mut squares = 0.0;
        let errors = Recipe::FORMATS.iter().map(|format| {
            let packed = PackedMatrix::pack(exec, &[(*format, self.rows.len())], columns, self)?;
            let (mut sum, mut error) = (0.0, 0.0);
            for row in 0..self.rows.len() {
                self.read_row(row, &mut exact);
                packed.read_row(row, &mut found);
                for (exact, found) in exact.iter().zip(&found) {
                    sum += f64::from(*exact).powi(2);
                    error += f64::from(exact - found).powi(2);
                }
            }
            squares = sum;
            Ok(error)
        });
        let errors = errors.collect::<Result<_, LoadError>>()?;
        Ok((squares, errors))
    }
}
