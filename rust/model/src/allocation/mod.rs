//! Bit allocation: a format for each matrix, so that the estimated loss is least within a budget of bytes.
//!
//! While errors are small, the loss of a model grows linearly with the relative squared error of each matrix (the linearity
//! theorem of HIGGS, <https://arxiv.org/abs/2411.17525>), and faster where they are large. [`survey`] measures the errors
//! in each format, on a sample of the rows, and [`probe`] how the loss grows with the error of each class of matrices, on
//! tokens that the model predicts. The rows of an embedding or lm_head get formats in bands of tokens, by how much the
//! model predicts them ([`predictions`]). With calibration data, the tokens are from it, and the errors are those of
//! calibrated quantization, as the inputs of the matrix weigh them.

mod budget;
mod growth;
mod kinds;
mod loss;
mod noise;
mod outside;
mod predictions;
mod probe;
mod survey;
mod tensors;

use std::collections::BTreeMap;

use ferrule_kernels::{Exec, Format};
use serde::{Serialize, Serializer};

use crate::calibrate::{self, Sequences};
use crate::quantization::Quantization;
use crate::spec::ModelSpec;
use crate::weights::{LoadError, Loader, Progress, Source, refuse_packed};
use budget::{Choice, choose};
use growth::Growth;
use kinds::class;
use predictions::{Predictions, read_tokens};
use survey::Survey;
use tensors::{Tensor, Tensors};

/// Work of measuring the growth of the loss, relative to that of surveying the errors, for progress.
const PROBE_WORK: f64 = 2.0;

/// Work of predicting tokens from others, relative to that of surveying the errors, for progress.
const PREDICTION_WORK: f64 = 0.2;

/// Limits of an allocation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BitBudget<'a> {
    /// Maximum number of bits per weight.
    pub bits: f64,
    /// Formats of the matrices, some of [`Recipe::FORMATS`](crate::Recipe::FORMATS) in their order.
    pub formats: &'a [Format],
}

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
    /// Name of the tensor, with the range of rows if they are not all, as in a [`Recipe`](crate::Recipe).
    pub tensor: String,
    /// Format.
    #[serde(serialize_with = "name")]
    pub format: Format,
    /// Number of weights.
    pub weights: u64,
    /// Bytes in this format.
    pub bytes: u64,
    /// Squared error of the quantized weights, relative to the squared weights; with calibration, as the inputs of the
    /// matrix weigh it. Of rows of tokens, the mean for both uses: as an input and for a logit.
    pub error: f64,
    /// Estimated KL divergence that its errors cause; for a model without an lm_head, the relative squared error of the
    /// hidden states.
    pub loss: f64,
}

fn name<S: Serializer>(format: &Format, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(format.name())
}

/// Bits could not be allocated.
#[derive(Debug, thiserror::Error)]
pub enum AllocationError {
    /// Error of reading the weights.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A number of bits per weight that no formats have.
    #[error("bits must be a number from {least:.2} to {most:.2} for this model and these formats, got {bits}")]
    Bits {
        /// Requested bits per weight.
        bits: f64,
        /// Bits per weight if all matrices have the narrowest format, rounded up to hundredths.
        least: f64,
        /// Bits per weight if all matrices have the widest format, rounded up to hundredths.
        most: f64,
    },
}

/// Chooses a format for each matrix of a source, so that the estimated loss is least and all matrices together fit the
/// budget. Memory holds one layer twice in bf16, or the embedding and the lm_head.
///
/// With `sequences` of tokens, the model runs over them as in [`crate::calibrate_into`], and the errors are those of
/// calibrated matrices.
///
/// # Errors
/// [`AllocationError`], also if the source is packed already, or a weight or an output of the model is not finite. Bits that
/// no formats have are refused before any weights are read.
///
/// # Panics
/// If a sequence exceeds the model's positions, or a token the vocabulary, or if there are no formats.
pub fn allocate_bits(
    spec: &ModelSpec,
    source: Source<'_>,
    (budget, sequences): (BitBudget<'_>, Option<&[Vec<u32>]>),
    exec: Exec<'_>,
    progress: Progress<'_>,
) -> Result<Allocation, AllocationError> {
    let (loader, mut tensors, bytes) = begin(spec, source, budget)?;
    let mut read = read_tokens(spec, sequences);
    probe::check_memory(spec, source, &read)?;
    // The matrices that the survey packs have almost no errors.
    let calibration = sequences.map(|sequences| Sequences { tokens: sequences, corrects: false });
    if let Some(calibration) = calibration {
        calibrate::check_memory(spec, source, &loader, calibration, exec.pool.threads())?;
    }
    let surveyed = tensors.size.bytes as f64;
    let passes = if sequences.is_some() { 1.0 } else { 2.0 };
    let total = surveyed * (1.0 + passes * PREDICTION_WORK + PROBE_WORK);
    let mut done = 0.0;
    let mut advance = |bytes: f64| {
        done += bytes;
        progress(f64::min(done, total) as u64, total as u64);
    };
    let mut survey = Survey { spec, exec, tensors: &mut tensors, advance: &mut advance, sites: Vec::new() };
    match calibration {
        None => drop(loader.without_vectors().weights(&mut survey)?),
        Some(calibration) => calibrate::calibrate(spec, source, &loader, calibration, exec, &mut survey)?,
    }
    let mut predict = |read: &[Vec<u32>]| {
        Predictions::of(spec, source, read, exec, &mut |share| advance(share * PREDICTION_WORK * surveyed))
    };
    let mut predictions = predict(&read)?;
    // Without a text, the model reads tokens that it predicts after random ones.
    if sequences.is_none() {
        read = predictions.draw(&read);
        predictions = predict(&read)?;
    }
    let (shares, measured_on) = (predictions.shares(), (&probe::tokens(&read)[..], sequences.is_some()));
    let growths =
        probe::measure(spec, source, measured_on, &shares, exec, &mut |share| advance(share * PROBE_WORK * surveyed))?;
    let Tensors { list: mut tensors, fixed, size, .. } = tensors;
    estimate_losses(&mut tensors, spec.layers.len(), &growths);

    let groups = group_choices(&tensors, budget.formats.len());
    let chosen = choose(&groups.values().cloned().collect::<Vec<_>>(), bytes - fixed);
    let chosen: BTreeMap<_, _> = groups.into_keys().zip(chosen).collect();
    let joined = join_bands(tensors, &chosen).into_iter();
    let matrices: Vec<_> = joined.map(|(tensor, format)| tensor.allocated(format, budget.formats)).collect();
    let bytes = fixed + matrices.iter().map(|matrix| matrix.bytes).sum::<u64>();
    Ok(Allocation { matrices, bytes, weights: size.numbers })
}

/// Checks the bits per weight of an allocation without reading any weights.
///
/// # Errors
/// [`AllocationError`] for bits that the formats do not have, also if the source is packed already.
///
/// # Panics
/// If there are no formats.
pub fn check_bits(spec: &ModelSpec, source: Source<'_>, budget: BitBudget<'_>) -> Result<(), AllocationError> {
    begin(spec, source, budget).map(|_| ())
}

/// Returns the loader of a source, its tensors, and the budget in bytes.
fn begin<'a>(
    spec: &'a ModelSpec,
    source: Source<'a>,
    budget: BitBudget<'a>,
) -> Result<(Loader<'a>, Tensors<'a>, u64), AllocationError> {
    refuse_packed(source)?;
    // Any quantization with integer formats says which matrices are quantized.
    let loader = Loader::new(spec, source, Quantization::PLAIN);
    let mut tensors = Tensors::new(spec, budget.formats);
    loader.without_vectors().weights(&mut tensors)?;
    let bytes = bytes_of(&tensors, budget.bits)?;
    Ok((loader, tensors, bytes))
}

/// Returns the budget in bytes for `bits` per weight.
fn bytes_of(tensors: &Tensors<'_>, bits: f64) -> Result<u64, AllocationError> {
    let Tensors { list, fixed, size, .. } = tensors;
    let bytes_in = |format: usize| fixed + list.iter().map(|tensor| tensor.choices[format].bytes).sum::<u64>();
    let bits_of = |bytes: u64| (bytes as f64 * 8.0 / size.numbers as f64 * 100.0).ceil() / 100.0;
    let narrowest = bytes_in(0);
    let [least, most] = [narrowest, bytes_in(tensors.formats.len() - 1)].map(bits_of);
    let budget = (bits * size.numbers as f64 / 8.0) as u64;
    if bits <= most && budget >= narrowest { Ok(budget) } else { Err(AllocationError::Bits { bits, least, most }) }
}

/// Computes the losses of the choices of each tensor from the growths of their classes. The layers of a class share its
/// loss, and in each of them all matrices of the kind together count like one, whether they are one tensor or many, such
/// as experts.
fn estimate_losses(tensors: &mut [Tensor], layers: usize, growths: &BTreeMap<String, Growth>) {
    let mut counts = BTreeMap::<String, usize>::new();
    for kind in tensors.iter().flat_map(|tensor| tensor.kinds.keys()) {
        *counts.entry(kind.clone()).or_default() += 1;
    }
    let mut kinds = BTreeMap::<String, usize>::new();
    for kind in counts.keys() {
        *kinds.entry(class(kind, layers)).or_default() += 1;
    }
    for Tensor { kinds: of_tensor, choices, .. } in tensors {
        for (kind, measured) in of_tensor {
            let class = class(kind, layers);
            let share = ((kinds[&class] * counts[kind]) as f64).recip();
            for (index, choice) in choices.iter_mut().enumerate() {
                choice.loss += share * growths[&class].loss(measured.relative(index));
            }
        }
    }
}

/// Returns the tensors with their chosen formats, where neighbouring rows of one tensor in the same format are joined.
fn join_bands(tensors: Vec<Tensor>, chosen: &BTreeMap<usize, usize>) -> Vec<(Tensor, usize)> {
    let mut joined = Vec::<(Tensor, usize)>::with_capacity(tensors.len());
    for tensor in tensors {
        let format = chosen[&tensor.group];
        match joined.last_mut() {
            Some((last, of_last)) if tensor.rows.is_some() && last.name == tensor.name && *of_last == format => {
                last.append(tensor);
            }
            _ => joined.push((tensor, format)),
        }
    }
    joined
}

/// Returns the choices of each group of tensors that need the same format. `formats` is the number of formats.
fn group_choices(tensors: &[Tensor], formats: usize) -> BTreeMap<usize, Vec<Choice>> {
    let mut groups = BTreeMap::<usize, Vec<Choice>>::new();
    for Tensor { group, choices, .. } in tensors {
        let sums = groups.entry(*group).or_insert_with(|| vec![Choice::default(); formats]);
        for (sum, choice) in sums.iter_mut().zip(choices) {
            sum.bytes += choice.bytes;
            sum.loss += choice.loss;
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::kinds::kind;
    use super::tensors::Errors;
    use super::*;
    use crate::recipe::Recipe;

    /// Allocates the formats of four experts and of the projection to queries; `name` names the tensor of an expert.
    fn formats(name: impl Fn(usize) -> String) -> BTreeMap<String, &'static str> {
        const SHAPE: [usize; 2] = [64, 256];
        let add = |tensor: &mut Tensor, role: &str| {
            tensor.add(vec![kind(role)], SHAPE, Recipe::FORMATS);
            let errors = vec![1e-1, 1e-1, 1e-2, 1e-2, 1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-6];
            let errors = Errors { squares: 1.0, errors };
            tensor.kinds.get_mut(&kind(role)).unwrap().add(&errors);
        };
        let count = Recipe::FORMATS.len();
        let mut tensors = vec![Tensor::new("q", None, 0, count)];
        add(&mut tensors[0], "layers.0.attention.q.weight");
        for expert in 0..4 {
            let name = name(expert);
            let index = tensors.iter().position(|tensor| tensor.name == name).unwrap_or(tensors.len());
            if index == tensors.len() {
                tensors.push(Tensor::new(&name, None, index, count));
            }
            add(&mut tensors[index], &format!("layers.0.ffn.experts.{expert}.output.weight"));
        }
        let classes = tensors.iter().flat_map(|tensor| tensor.kinds.keys()).map(|kind| class(kind, 8));
        let growths = classes.map(|class| (class, Growth { linear: 1.0, quadratic: 0.0 })).collect();
        estimate_losses(&mut tensors, 8, &growths);
        let losses = tensors.iter().map(|tensor| tensor.choices[0].loss);
        assert!((losses.sum::<f64>() - 2e-1).abs() < 1e-9);
        let groups: Vec<_> = group_choices(&tensors, count).into_values().collect();
        // Enough for trellis3 in the projection or in one of the experts.
        let budget =
            groups.iter().map(|choices| choices[0].bytes).sum::<u64>() + groups[0][2].bytes - groups[0][0].bytes;
        let chosen: BTreeMap<_, _> = choose(&groups, budget).into_iter().enumerate().collect();
        tensors
            .into_iter()
            .map(|tensor| {
                let format = chosen[&tensor.group];
                tensor.allocated(format, Recipe::FORMATS)
            })
            .map(|each| (each.tensor, each.format.name()))
            .collect()
    }

    #[test]
    fn stacked_and_separate_experts_get_the_same_formats() {
        let stacked = formats(|_| "experts".to_owned());
        assert_eq!(stacked, BTreeMap::from([("q".to_owned(), "trellis3"), ("experts".to_owned(), "trellis2")]));
        let separate = formats(|expert| format!("experts.{expert}"));
        assert_eq!(separate["q"], "trellis3");
        assert!((0..4).all(|expert| separate[&format!("experts.{expert}")] == "trellis2"));
    }
}
