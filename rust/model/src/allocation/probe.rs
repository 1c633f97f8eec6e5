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

use std::cell::RefCell;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ferrule_kernels::disjoint::Tiles;
use ferrule_kernels::{Exec, PackedMatrix, Scratch, machine};

use super::growth::Growth;
use super::kinds::{as_inputs, bands, class, is_of_tokens, kind, kind_of_band};
use super::noise::{NOISES, Noise, NoisyRows, noises};
use crate::calibrate::{Pass, State, float_bytes};
use crate::layer::{AdapterBuffers, AdapterRows, norm_in_place};
use crate::lm_head::{LmHeadWeights, apply_lm_head};
use crate::quantization::Quantization;
use crate::random::RandomMatrix;
use crate::spec::ModelSpec;
use crate::streams::StreamEnds;
use crate::weights::{
    Embedding, Linear, LoadError, Loader, MatrixPlan, Measure, Norm, Packer, QuantizedRoles, Site, Source, TokenTable,
};

/// Number of sequences, and maximum number of tokens of each. The second half of the tokens is scored.
const SEQUENCES: usize = 4;
const LENGTH: usize = 64;

/// Returns the sequences to measure on: the beginnings of some calibration sequences, or random tokens.
pub(super) fn tokens(spec: &ModelSpec, sequences: Option<&[Vec<u32>]>) -> Vec<Vec<u32>> {
    let length = LENGTH.min(spec.max_position_embeddings);
    match sequences {
        Some(sequences) => {
            let count = sequences.len().min(SEQUENCES);
            let chosen = (0..count).map(|index| &sequences[index * sequences.len() / count]);
            chosen.map(|tokens| tokens[..tokens.len().min(length)].to_vec()).collect()
        }
        None => {
            let numbers = |index: usize| {
                let mut numbers = vec![0.0; length];
                RandomMatrix::new("tokens", SEQUENCES).read_row(index, &mut numbers);
                numbers
            };
            // Uniform numbers of variance 1 / length.
            let width = (12.0 / length as f32).sqrt();
            let token = |number: f32| ((number / width + 0.5) * spec.vocab_size as f32) as u32;
            let of_sequence = |index| numbers(index).into_iter().map(|x| token(x).min(spec.vocab_size as u32 - 1));
            (0..SEQUENCES).map(|index| of_sequence(index).collect()).collect()
        }
    }
}

/// Returns sequences of tokens drawn from the mean of what the model predicts in the second halves of `sequences`, which
/// have the lengths of these. So rare tokens are rare without any text. Those of a model that predicts none are unchanged.
pub(super) fn predicted_tokens(
    spec: &ModelSpec,
    source: Source<'_>,
    sequences: &[Vec<u32>],
    exec: Exec<'_>,
) -> Result<Vec<Vec<u32>>, LoadError> {
    if spec.lm_head.is_none() {
        return Ok(sequences.to_vec());
    }
    let (exact, layers) = (Loader::new(spec, source, Quantization::BF16), spec.layers.len());
    let tables = exact.tables(&mut Noisy::new(exec, None, layers))?;
    let ends = Ends { spec, sequences, exec, loader: &exact, tables: &tables };
    let mut pass = ends.begin(Noisy::new(exec, None, layers))?;
    for (index, layer_spec) in spec.layers.iter().enumerate() {
        let layer = exact.layer(&mut Noisy::new(exec, None, layers), index, layer_spec, &[])?;
        pass.advance(&layer, index, &mut || ())?;
    }
    let logits = ends.outputs(&mut pass, &ends.load(Noisy::new(exec, None, layers))?)?;
    let mut numbers = vec![0.0; sequences.iter().map(Vec::len).sum()];
    RandomMatrix::new("predicted tokens", 1).read_row(0, &mut numbers);
    // Uniform numbers from -1/2 to 1/2 have the variance 1 / 12.
    let width = (12.0 / numbers.len() as f32).sqrt();
    let mut drawn = draw(&logits, spec.vocab_size, numbers.iter().map(|x| f64::from(x / width + 0.5))).into_iter();
    Ok(sequences.iter().map(|tokens| drawn.by_ref().take(tokens.len()).collect()).collect())
}

/// Returns the tokens at `places`, numbers from 0 to 1, in the cumulative mean distribution of rows of logits.
fn draw(logits: &[f32], vocabulary: usize, places: impl Iterator<Item = f64>) -> Vec<u32> {
    let mut cumulative = vec![0.0; vocabulary];
    for row in logits.chunks_exact(vocabulary) {
        let log_sum = log_sum(row);
        for (sum, logit) in cumulative.iter_mut().zip(row) {
            *sum += (f64::from(*logit) - log_sum).exp();
        }
    }
    let mut total = 0.0;
    for sum in &mut cumulative {
        total += *sum;
        *sum = total;
    }
    let token = |place: f64| cumulative.partition_point(|sum| *sum <= place * total).min(vocabulary - 1) as u32;
    places.map(token).collect()
}

/// Returns how the loss grows with the relative squared error of each class of matrices, which are calibrated or not.
/// Calls `advance` with the share of the work that was done.
pub(super) fn measure(
    spec: &ModelSpec,
    source: Source<'_>,
    (sequences, is_calibrated): (&[Vec<u32>], bool),
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
    let ends = Ends { spec, sequences, exec, loader: &exact, tables: &tables };
    let mut outside = QuantizedRoles::default();
    integer.embedding(&mut outside)?;
    integer.streams(&mut outside)?;
    integer.lm_head_projection(&mut outside)?;
    integer.lm_head(&mut outside)?;
    let outside = classes(outside);
    let mut pass = ends.begin(Noisy::new(exec, None, layers))?;
    let mut states = BTreeMap::new();
    for noise in noises(&outside, is_calibrated) {
        let state = ends.begin(Noisy::new(exec, Some(&noise), layers))?.state;
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

    let weights = ends.load(Noisy::new(exec, None, layers))?;
    let (outside, inside): (Vec<_>, Vec<_>) = states.into_iter().partition(|(noise, _)| outside.contains(&noise.class));
    let of_tokens = outside.iter().filter(|(noise, _)| is_of_tokens(&noise.class));
    let mut exact_states = of_tokens.map(|_| pass.copy_state()).collect::<Result<Vec<_>, _>>()?;
    let reference = ends.outputs(&mut pass, &weights)?;
    let shares = ends.shares(&reference, &weights);
    let mut loss = |state: State, weights: &LastWeights| -> Result<f64, LoadError> {
        pass.state = state;
        let loss = ends.loss(&reference, &ends.outputs(&mut pass, weights)?)?;
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
        let changed = ends.load(Noisy::new(exec, Some(&noise), layers))?;
        let losses = if is_of_tokens(&noise.class) { &mut of_outputs } else { &mut losses };
        losses.entry(noise.class).or_default()[noise.level] = loss(state, &changed)?;
    }
    advance(1.0 / (layers + 1) as f64);

    let mut factors: BTreeMap<_, _> = losses.into_iter().map(|(class, losses)| (class, Growth::of(losses))).collect();
    let mut of_bands = BTreeMap::new();
    for (class, losses) in of_inputs {
        let (inputs, outputs) = (Growth::of(losses), Growth::of(of_outputs[&class]));
        for (band, share) in &shares {
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

/// Shares of a band of tokens in the losses of a matrix with a row for each token.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Shares {
    /// Share in the loss of an embedding: the probability of its tokens, since predicted tokens are what the model reads.
    inputs: f64,
    /// Share in the loss of an lm_head.
    outputs: f64,
}

/// Returns the shares of bands of tokens, by their first tokens, from rows of logits and the squared norms of the lm_head's
/// rows.
///
/// An error of the logit of a token with the probability p adds `p (1 - p) / 2` times its square to the divergence, and the
/// relative errors of all rows are alike.
fn shares(logits: &[f32], squares: &[f64]) -> BTreeMap<usize, Shares> {
    let (mut inputs, mut outputs) = (vec![0.0; squares.len()], vec![0.0; squares.len()]);
    for row in logits.chunks_exact(squares.len()) {
        let log_sum = log_sum(row);
        for (token, logit) in row.iter().enumerate() {
            let p = f64::from((f64::from(*logit) - log_sum).exp() as f32);
            inputs[token] += p;
            outputs[token] += p * (1.0 - p) * squares[token];
        }
    }
    let [all_inputs, all_outputs] =
        [&inputs, &outputs].map(|of_tokens| of_tokens.iter().sum::<f64>().max(f64::MIN_POSITIVE));
    let of_band = |band: Range<usize>| {
        let inputs = inputs[band.clone()].iter().sum::<f64>() / all_inputs;
        (band.start, Shares { inputs, outputs: outputs[band].iter().sum::<f64>() / all_outputs })
    };
    bands("lm_head", squares.len()).into_iter().map(of_band).collect()
}

/// Gives classes without any loss the least loss of the others. A few tokens do not show the effect of some classes, such as
/// the indexer of an attention that selects more positions than they have.
fn raise_zeros(factors: &mut BTreeMap<String, Growth>) {
    let above_zero = factors.values().copied().filter(|growth| *growth != Growth::default());
    let least = above_zero.min_by(|a, b| a.loss(NOISES[0]).total_cmp(&b.loss(NOISES[0])));
    let least = least.unwrap_or(Growth { linear: 1.0, quadratic: 0.0 });
    factors.values_mut().filter(|growth| **growth == Growth::default()).for_each(|growth| *growth = least);
}

/// Checks that the peak memory of [`measure`] is available.
pub(super) fn check_memory(spec: &ModelSpec, source: Source<'_>, sequences: &[Vec<u32>]) -> Result<(), LoadError> {
    let loader = Loader::new(spec, source, Quantization::BF16).without_vectors();
    let tokens = sequences.iter().map(Vec::len).sum::<usize>();
    let mut embedding = Measure::default();
    loader.embedding(&mut embedding)?;
    let mut last = Measure::default();
    loader.streams(&mut last)?;
    loader.lm_head_projection(&mut last)?;
    loader.lm_head(&mut last)?;
    if spec.has_tied_lm_head() {
        last.bytes = last.bytes.saturating_add(embedding.bytes);
    }
    let logits = float_bytes(tokens, spec.vocab_size);
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
    let states = 2 * NOISES.len() as u64 * (classes.len() as u64 + 4) * float_bytes(tokens, spec.streams_width());
    let (needs, available) = (most.saturating_add(states), machine::available_memory());
    if needs > available {
        let what = "bit allocation, with a layer twice in bf16 and the hidden states of all runs,";
        return Err(LoadError::Memory { what, needs, available });
    }
    Ok(())
}

/// The model before its first and after its last layer.
struct Ends<'a, 's> {
    spec: &'a ModelSpec,
    sequences: &'a [Vec<u32>],
    exec: Exec<'a>,
    loader: &'a Loader<'s>,
    tables: &'a [TokenTable],
}

/// Weights after the last layer.
struct LastWeights {
    streams: Option<StreamEnds>,
    norm: Option<Norm>,
    projection: Option<Linear>,
    lm_head: Option<Linear>,
    tied_bias: Option<Vec<f32>>,
    /// Embedding of a tied lm_head.
    embedding: Option<Embedding>,
}

impl<'a> Ends<'a, '_> {
    /// Returns all sequences before the first layer.
    fn begin(&self, mut noisy: Noisy<'_>) -> Result<Pass<'a>, LoadError> {
        let embedding = self.loader.embedding(&mut noisy)?;
        let streams = self.loader.streams(&mut noisy)?;
        Pass::new(self.exec, self.spec, self.sequences, &embedding, self.tables, streams.as_ref())
    }

    /// Loads what follows the last layer.
    fn load(&self, mut noisy: Noisy<'_>) -> Result<LastWeights, LoadError> {
        let Self { spec, loader, .. } = self;
        let embedding = if spec.has_tied_lm_head() { Some(loader.embedding(&mut noisy)?) } else { None };
        let (streams, norm) = (loader.streams(&mut noisy)?, loader.final_norm()?);
        let projection = loader.lm_head_projection(&mut noisy)?;
        let (lm_head, tied_bias) = loader.lm_head(&mut noisy)?;
        Ok(LastWeights { streams, norm, projection, lm_head, tied_bias, embedding })
    }

    /// Computes the outputs of the scored tokens after the last layer: logits `[tokens, vocab_size]`, or hidden states
    /// `[tokens, hidden_size]` of a model that has no lm_head.
    fn outputs(&self, pass: &mut Pass<'_>, weights: &LastWeights) -> Result<Vec<f32>, LoadError> {
        let Self { spec, exec, .. } = self;
        let width = spec.hidden_size;
        let hidden = pass.take_hidden(weights.streams.as_ref())?;
        let (mut rows, mut first) = (Vec::new(), 0);
        for tokens in self.sequences {
            let scored = first + tokens.len() / 2..first + tokens.len();
            rows.extend_from_slice(&hidden[scored.start * width..scored.end * width]);
            first = scored.end;
        }
        norm_in_place(exec, weights.norm.as_ref(), &mut rows, width)?;
        if spec.lm_head.is_none() {
            return Ok(rows);
        }
        let mut logits = vec![0.0; rows.len() / width * spec.vocab_size];
        let weights = LmHeadWeights {
            projection: weights.projection.as_ref(),
            lm_head: weights.lm_head.as_ref(),
            tied: weights.embedding.as_ref().and_then(|embedding| embedding.tokens.as_ref()),
            bias: weights.tied_bias.as_deref(),
        };
        let buffers = RefCell::<AdapterBuffers>::default();
        let (adapters, mut narrow) = (AdapterRows::new(&[], &buffers), Scratch::default());
        apply_lm_head(exec, spec, weights, &rows, adapters, &mut narrow, &mut logits)?;
        Ok(logits)
    }

    /// Returns the shares of bands of tokens. Those of a model without an lm_head are their numbers of tokens.
    fn shares(&self, outputs: &[f32], LastWeights { embedding, lm_head, .. }: &LastWeights) -> BTreeMap<usize, Shares> {
        let vocabulary = self.spec.vocab_size;
        let tied = embedding.as_ref().and_then(|embedding| embedding.tokens.as_ref());
        let Some(Linear { weight, .. }) = tied.or(lm_head.as_ref()) else {
            return shares(&vec![0.0; vocabulary], &vec![1.0; vocabulary]);
        };
        let mut row = vec![0.0; weight.cols()];
        let squares = (0..vocabulary).map(|token| {
            weight.read_row(token, &mut row);
            row.iter().map(|weight| f64::from(*weight).powi(2)).sum()
        });
        shares(outputs, &squares.collect::<Vec<_>>())
    }

    /// Returns the mean loss of outputs: their KL divergence from the exact ones if they are logits, else their relative
    /// squared error.
    fn loss(&self, exact: &[f32], found: &[f32]) -> Result<f64, LoadError> {
        let Self { spec, exec, .. } = self;
        let (width, of_row): (usize, RowLoss) = match spec.lm_head {
            Some(_) => (spec.vocab_size, divergence),
            None => (spec.hidden_size, relative_error),
        };
        let mut losses = vec![0.0; exact.len() / width];
        let count = losses.len();
        let tiles = Tiles::row_blocks(&mut losses, 1, 1);
        exec.run(count, |row| {
            let [exact, found] = [exact, found].map(|rows| &rows[row * width..][..width]);
            tiles.take(row).contiguous()[0] = of_row(exact, found);
        })?;
        drop(tiles);
        let mean = losses.iter().sum::<f64>() / count as f64;
        // Rounding can make the divergence of equal rows slightly negative. NaN stays NaN.
        Ok(if mean < 0.0 { 0.0 } else { mean })
    }
}

/// Loss of a row of outputs, from the exact row and the one found.
type RowLoss = fn(&[f32], &[f32]) -> f64;

/// Returns the KL divergence of the probabilities of two rows of logits.
fn divergence(exact: &[f32], found: &[f32]) -> f64 {
    let (of_exact, of_found) = (log_sum(exact), log_sum(found));
    let of_logits = |(exact, found): (&f32, &f32)| {
        let log_probability = f64::from(*exact) - of_exact;
        let probability = f64::from((log_probability as f32).exp());
        // A token that the model excludes has no weight, also where both logits are minus infinity.
        if probability == 0.0 { 0.0 } else { probability * (log_probability - (f64::from(*found) - of_found)) }
    };
    exact.iter().zip(found).map(of_logits).sum()
}

/// Returns the logarithm of the sum of the exponentials of logits.
fn log_sum(logits: &[f32]) -> f64 {
    let peak = logits.iter().fold(f32::NEG_INFINITY, |peak, logit| peak.max(*logit));
    f64::from(peak) + logits.iter().map(|logit| f64::from((logit - peak).exp())).sum::<f64>().ln()
}

/// Returns the squared error of a row, relative to its squares.
fn relative_error(exact: &[f32], found: &[f32]) -> f64 {
    let squares = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let error = squares(&mut exact.iter().zip(found).map(|(exact, found)| exact - found));
    if error > 0.0 { error / squares(&mut exact.iter().copied()) } else { 0.0 }
}

/// Packs the matrices of a model in bf16, those of one class with noise.
struct Noisy<'a> {
    exec: Exec<'a>,
    noise: Option<&'a Noise>,
    /// Number of layers of the model.
    layers: usize,
    sites: Vec<Site>,
}

impl<'a> Noisy<'a> {
    fn new(exec: Exec<'a>, noise: Option<&'a Noise>, layers: usize) -> Self {
        Self { exec, noise, layers, sites: Vec::new() }
    }
}

impl Packer for Noisy<'_> {
    type Matrix = PackedMatrix;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<PackedMatrix, LoadError> {
        let mut first = 0;
        let mut noise = Vec::new();
        for (role, rows) in &plan.roles {
            if let Some(found) = self.noise.filter(|noise| class(&kind(role), self.layers) == noise.class) {
                noise.push((first..first + rows, RandomMatrix::new(role, *rows), found.factors()));
            }
            first += rows;
        }
        let rows = NoisyRows { exact: &plan, noise };
        let matrix = PackedMatrix::pack(&self.exec, &plan.bands, plan.columns, &rows)?;
        plan.release();
        Ok(matrix)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_that_of_softmax() {
        let (exact, found) = ([0.0, 1.0, -2.0, 3.0], [0.5, 1.0, -1.0, 2.0f32]);
        let softmax = |logits: &[f32]| {
            let sum = logits.iter().map(|logit| f64::from(*logit).exp()).sum::<f64>();
            logits.iter().map(|logit| f64::from(*logit).exp() / sum).collect::<Vec<_>>()
        };
        let (p, q) = (softmax(&exact), softmax(&found));
        let expected = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum::<f64>();
        assert!((divergence(&exact, &found) - expected).abs() < 1e-6);
        assert!(divergence(&exact, &exact.map(|x| x + 7.0)).abs() < 1e-6);
        let excluded = [0.0, 1.0, f32::NEG_INFINITY];
        assert!(divergence(&excluded, &excluded).abs() < 1e-6);
    }

    #[test]
    fn tokens_are_drawn_as_often_as_they_are_predicted() {
        let logits = [0.0, 3.0_f32.ln(), f32::NEG_INFINITY, 0.0, 3.0_f32.ln(), f32::NEG_INFINITY];
        let places = (0..1000).map(|place| (f64::from(place) + 0.5) / 1000.0);
        let drawn = draw(&logits, 3, places);
        let count = |token| drawn.iter().filter(|drawn| **drawn == token).count();
        assert_eq!([count(0), count(1), count(2)], [250, 750, 0]);
    }

    #[test]
    fn shares_are_those_of_the_divergence() {
        // The tokens of two bands, of which each of the first band is likely.
        let logits: Vec<f32> = (0..32).map(|token| if token < 16 { 2.0 } else { 0.0 }).collect();
        let squares: Vec<f64> = (0..32).map(|token| if token < 16 { 1.0 } else { 4.0 }).collect();
        let found = shares(&logits, &squares);
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), [0, 16]);
        for (of, sum) in [(found[&0].inputs, found[&16].inputs), (found[&0].outputs, found[&16].outputs)] {
            assert!((of + sum - 1.0).abs() < 1e-9);
        }
        // A small error of all rows of a band, relative to their norms, changes the divergence in the same ratio.
        let changed = |band: Range<usize>| {
            let noise = |token: usize| if token.is_multiple_of(2) { 0.01 } else { -0.01 };
            let change = |token: usize| if band.contains(&token) { noise(token) * squares[token].sqrt() } else { 0.0 };
            let noisy: Vec<f32> = (0..32).map(|token| logits[token] + change(token) as f32).collect();
            divergence(&logits, &noisy)
        };
        let (first, second) = (changed(0..16), changed(16..32));
        assert!((first / second / (found[&0].outputs / found[&16].outputs) - 1.0).abs() < 0.1, "{first} {second}");
    }

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

    #[test]
    fn relative_errors_are_squared() {
        assert_eq!(relative_error(&[3.0, 4.0], &[3.0, 3.0]), 1.0 / 25.0);
        assert_eq!(relative_error(&[0.0], &[0.0]), 0.0);
    }
}
