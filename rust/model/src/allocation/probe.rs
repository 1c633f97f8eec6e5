//! Measuring how much the loss of a model grows with the error of each class of matrices.
//!
//! The model runs over a few tokens, exactly and twice for each class with noise in the matrices of the class. The noise
//! has the squared error of a four-bit and of a two-bit format, and the loss is the KL divergence of the noisy predictions
//! from the exact ones. While errors are small, it grows linearly with their squares (the linearity theorem of HIGGS,
//! <https://arxiv.org/abs/2411.17525>, which measures it with noise as well). With errors of two bits it can be several
//! times as large, which the second measurement shows ([`Growth`]).
//!
//! Everything runs layer by layer, so memory holds one layer exactly and with noise, or the embedding and the lm_head, and the
//! hidden states of all runs. "Exactly" means in bf16.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use ferrule_kernels::{Exec, machine};

use super::growth::Growth;
use super::kinds::{as_inputs, class, is_of_tokens, kind, kind_of_band};
use super::loss::{divergence, map_rows, relative_error};
use super::noise::{NOISES, Noise, Noisy, noises};
use super::outside::{LastWeights, OutsideLayers};
use super::predictions::{LOGIT_ROWS, Shares, beginnings};
use crate::calibrate::{Pass, State, float_bytes};
use crate::quantization::Quantization;
use crate::spec::ModelSpec;
use crate::weights::{LoadError, Loader, Measure, QuantizedRoles, Source};

/// Number of sequences, and maximum number of tokens of each.
const SEQUENCES: usize = 4;
const LENGTH: usize = 64;

/// Returns the tokens to measure on, from those that the model reads to predict tokens.
pub(super) fn tokens(read: &[Vec<u32>]) -> Vec<Vec<u32>> {
    beginnings(read, SEQUENCES, LENGTH)
}

/// Returns how the loss grows with the relative squared error of each class of matrices, which are calibrated or not, and of
/// each band of tokens, by their `shares`. Calls `advance` with the share of the work that was done.
pub(super) fn measure(
    spec: &ModelSpec,
    source: Source<'_>,
    (sequences, is_calibrated): (&[Vec<u32>], bool),
    shares: &BTreeMap<usize, Shares>,
    exec: Exec<'_>,
    advance: &mut dyn FnMut(f64),
) -> Result<BTreeMap<String, Growth>, LoadError> {
    let exact = Loader::new(spec, source, Quantization::BF16);
    // Any quantization with integer formats says which matrices are quantized.
    let integer = Loader::new(spec, source, Quantization::PLAIN).without_vectors();
    let layers = spec.layers.len();
    let classes =
        |list: QuantizedRoles| -> BTreeSet<_> { list.roles.iter().map(|role| class(&kind(role), layers)).collect() };

    let tables = exact.tables(&mut Noisy::new(exec, None, layers))?;
    let model = OutsideLayers { spec, sequences, exec, loader: &exact, tables: &tables };
    let mut outside = QuantizedRoles::default();
    integer.embedding(&mut outside)?;
    integer.streams(&mut outside)?;
    integer.lm_head_projection(&mut outside)?;
    integer.lm_head(&mut outside)?;
    let outside = classes(outside);
    let mut pass = model.begin(Noisy::new(exec, None, layers))?;
    let mut states = BTreeMap::new();
    for noise in noises(&outside, is_calibrated) {
        let state = model.begin(Noisy::new(exec, Some(&noise), layers))?.state;
        states.insert(noise, state);
    }
    for (index, layer_spec) in spec.layers.iter().enumerate() {
        let mut of_layer = QuantizedRoles::default();
        integer.layer(&mut of_layer, index, layer_spec, &[])?;
        let of_layer = classes(of_layer);
        for noise in noises(&of_layer, is_calibrated) {
            if let Entry::Vacant(vacant) = states.entry(noise) {
                vacant.insert(pass.copy_state()?);
            }
        }
        let layer = exact.layer(&mut Noisy::new(exec, None, layers), index, layer_spec, &[])?;
        for (noise, state) in &mut states {
            std::mem::swap(state, &mut pass.state);
            if of_layer.contains(&noise.class) {
                let changed = exact.layer(&mut Noisy::new(exec, Some(noise), layers), index, layer_spec, &[])?;
                pass.advance(&changed, index, &mut || ())?;
            } else {
                pass.advance(&layer, index, &mut || ())?;
            }
            std::mem::swap(state, &mut pass.state);
        }
        pass.advance(&layer, index, &mut || ())?;
        advance(1.0 / (layers + 1) as f64);
    }

    let weights = model.load(Noisy::new(exec, None, layers))?;
    let (outside, inside): (Vec<_>, Vec<_>) = states.into_iter().partition(|(noise, _)| outside.contains(&noise.class));
    let of_tokens = outside.iter().filter(|(noise, _)| is_of_tokens(&noise.class));
    let mut exact_states = of_tokens.map(|_| pass.copy_state()).collect::<Result<Vec<_>, _>>()?;
    let reference = outputs(&model, &mut pass, &weights)?;
    let mut loss = |state: State, weights: &LastWeights| -> Result<f64, LoadError> {
        pass.state = state;
        let loss = mean_loss(spec, exec, &reference, &outputs(&model, &mut pass, weights)?)?;
        if loss.is_finite() { Ok(loss) } else { Err(LoadError::OutputNotFinite) }
    };
    let mut losses = Losses::new();
    for (Noise { class, level, .. }, state) in inside {
        losses.entry(class).or_default()[level] = loss(state, &weights)?;
    }
    // The embedding is measured before its second use as the lm_head, since both depend on other tokens.
    let (mut of_inputs, mut of_outputs) = (Losses::new(), Losses::new());
    let mut last = Vec::with_capacity(outside.len());
    for (noise, state) in outside {
        let state = match is_of_tokens(&noise.class) {
            true => {
                of_inputs.entry(noise.class.clone()).or_default()[noise.level] = loss(state, &weights)?;
                exact_states.pop().expect("a copy for each noise")
            }
            false => state,
        };
        last.push((noise, state));
    }
    drop(weights);
    for (noise, state) in last {
        let changed = model.load(Noisy::new(exec, Some(&noise), layers))?;
        let losses = if is_of_tokens(&noise.class) { &mut of_outputs } else { &mut losses };
        losses.entry(noise.class).or_default()[noise.level] = loss(state, &changed)?;
    }
    advance(1.0 / (layers + 1) as f64);

    let mut factors: BTreeMap<_, _> = losses.into_iter().map(|(class, losses)| (class, Growth::of(losses))).collect();
    let mut of_bands = BTreeMap::new();
    for (class, losses) in of_inputs {
        let (inputs, outputs) = (Growth::of(losses), Growth::of(of_outputs[&class]));
        for (band, share) in shares {
            let kind = kind_of_band(&class, *band);
            of_bands.insert(as_inputs(&kind), inputs * share.inputs);
            of_bands.insert(kind, outputs * share.outputs);
        }
    }
    raise_zeros(&mut factors);
    // Bands of tokens that are never predicted grow by almost nothing, which is not that of a class that matters.
    raise_zeros(&mut of_bands);
    factors.append(&mut of_bands);
    Ok(factors)
}

/// Losses with each noise of [`NOISES`], by class.
type Losses = BTreeMap<String, [f64; NOISES.len()]>;

/// Gives classes without any loss the least loss of the others. A few tokens do not show the effect of some classes, such as
/// the indexer of an attention that selects more positions than they have.
fn raise_zeros(factors: &mut BTreeMap<String, Growth>) {
    let above_zero = factors.values().copied().filter(|growth| *growth != Growth::default());
    let least = above_zero.min_by(|a, b| a.loss(NOISES[0]).total_cmp(&b.loss(NOISES[0])));
    let least = least.unwrap_or(Growth { linear: 1.0, quadratic: 0.0 });
    factors.values_mut().filter(|growth| **growth == Growth::default()).for_each(|growth| *growth = least);
}

/// Checks that the peak memory of [`measure`] is available, and that of predicting tokens from what the model reads.
pub(super) fn check_memory(spec: &ModelSpec, source: Source<'_>, read: &[Vec<u32>]) -> Result<(), LoadError> {
    let loader = Loader::new(spec, source, Quantization::BF16).without_vectors();
    let [probed, read] = [&tokens(read), read].map(|sequences| sequences.iter().map(Vec::len).sum::<usize>());
    let mut embedding = Measure::default();
    loader.embedding(&mut embedding)?;
    let mut last = Measure::default();
    loader.streams(&mut last)?;
    loader.lm_head_projection(&mut last)?;
    loader.lm_head(&mut last)?;
    if spec.has_tied_lm_head() {
        last.bytes = last.bytes.saturating_add(embedding.bytes);
    }
    let logits = float_bytes(probed.max(LOGIT_ROWS), spec.vocab_size);
    let mut most = embedding.bytes.max(last.bytes.saturating_add(logits));
    let mut classes = BTreeSet::new();
    for (index, layer_spec) in spec.layers.iter().enumerate() {
        let mut layer = Measure::default();
        loader.layer(&mut layer, index, layer_spec, &[])?;
        most = most.max(layer.bytes.saturating_mul(2));
        let mut roles = QuantizedRoles::default();
        loader.layer(&mut roles, index, layer_spec, &[])?;
        classes.extend(roles.roles.iter().map(|role| class(&kind(role), spec.layers.len())));
    }
    // Classes of layers and the few outside of them, each with hidden states and perhaps those before the first layer, for
    // each noise.
    let states = 2 * NOISES.len() as u64 * (classes.len() as u64 + 4) * float_bytes(probed, spec.streams_width());
    // To predict tokens: hidden states, those before the first layer, and those that are scored.
    let states = states.max(float_bytes(read, spec.streams_width()).saturating_mul(3));
    let (needs, available) = (most.saturating_add(states), machine::available_memory());
    if needs > available {
        let what = "bit allocation, with a layer twice in bf16 and the hidden states of all runs,";
        return Err(LoadError::Memory { what, needs, available });
    }
    Ok(())
}

/// Computes the outputs of the scored tokens after the last layer: logits `[tokens, vocab_size]`, or hidden states
/// `[tokens, hidden_size]` of a model that has no lm_head.
fn outputs(model: &OutsideLayers<'_, '_>, pass: &mut Pass<'_>, weights: &LastWeights) -> Result<Vec<f32>, LoadError> {
    let rows = model.scored(pass, weights)?;
    if model.spec.lm_head.is_some() { model.logits(&rows, weights) } else { Ok(rows) }
}

/// Returns the mean loss of outputs: their KL divergence from the exact ones if they are logits, else their relative
/// squared error.
fn mean_loss(spec: &ModelSpec, exec: Exec<'_>, exact: &[f32], found: &[f32]) -> Result<f64, LoadError> {
    let (width, of_row): (usize, RowLoss) = match spec.lm_head {
        Some(_) => (spec.vocab_size, divergence),
        None => (spec.hidden_size, relative_error),
    };
    let losses = map_rows(&exec, exact.len() / width, |row| {
        let [exact, found] = [exact, found].map(|rows| &rows[row * width..][..width]);
        of_row(exact, found)
    })?;
    let mean = losses.iter().sum::<f64>() / losses.len() as f64;
    // Rounding can make the divergence of equal rows slightly negative. NaN stays NaN.
    Ok(if mean < 0.0 { 0.0 } else { mean })
}

/// Loss of a row of outputs, from the exact row and the one found.
type RowLoss = fn(&[f32], &[f32]) -> f64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_without_a_loss_get_the_least_of_the_others() {
        let factors = |values: [f64; 3]| {
            let growths = values.map(|linear| Growth { linear, quadratic: 2.0 * linear });
            let mut factors: BTreeMap<_, _> = ["a", "b", "c"].map(String::from).into_iter().zip(growths).collect();
            raise_zeros(&mut factors);
            factors.into_values().map(|growth| growth.linear).collect::<Vec<_>>()
        };
        assert_eq!(factors([0.0, 3.0, 2.0]), [2.0, 3.0, 2.0]);
        assert_eq!(factors([0.0; 3]), [1.0; 3]);
    }
}
