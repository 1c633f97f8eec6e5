//! Predicting tokens with the exact model, and the shares of bands of tokens in the loss of an embedding or lm_head.

use std::collections::BTreeMap;
use std::ops::Range;

use ferrule_kernels::disjoint::Tiles;
use ferrule_kernels::{Exec, PoolError};

use super::kinds::bands;
use super::loss::{log_sum, map_rows};
use super::noise::Noisy;
use super::outside::{LastWeights, OutsideLayers};
use crate::quantization::Quantization;
use crate::random::RandomMatrix;
use crate::spec::ModelSpec;
use crate::weights::{LoadError, Loader, Source};

/// Maximum number of sequences that the model reads, and of tokens of each.
const SEQUENCES: usize = 16;
const LENGTH: usize = 256;

/// Number of tokens of a random sequence.
const RANDOM_LENGTH: usize = 64;

/// Number of rows of logits at a time.
pub(super) const LOGIT_ROWS: usize = 128;

/// Number of tokens of the vocabulary in a task.
const TASK_TOKENS: usize = 1024;

/// Returns what the model reads to predict tokens: the beginnings of some calibration sequences, or random tokens.
pub(super) fn read_tokens(spec: &ModelSpec, sequences: Option<&[Vec<u32>]>) -> Vec<Vec<u32>> {
    if let Some(sequences) = sequences {
        return beginnings(sequences, SEQUENCES, LENGTH);
    }
    let length = RANDOM_LENGTH.min(spec.max_position_embeddings);
    let token = |place: f64| ((place * spec.vocab_size as f64) as u32).min(spec.vocab_size as u32 - 1);
    (0..SEQUENCES).map(|index| uniform_numbers("tokens", index, length).map(token).collect()).collect()
}

/// Returns uniform random numbers from 0 to 1; the same name and index give the same.
fn uniform_numbers(name: &str, index: usize, count: usize) -> impl Iterator<Item = f64> {
    let mut numbers = vec![0.0; count];
    RandomMatrix::new(name, index + 1).read_row(index, &mut numbers);
    // Uniform numbers from -1/2 to 1/2 have the variance 1 / 12.
    let width = (12.0 / count as f32).sqrt();
    numbers.into_iter().map(move |x| f64::from(x / width + 0.5))
}

/// Returns the first `length` tokens of `count` sequences, spread from the first to the last.
pub(super) fn beginnings(sequences: &[Vec<u32>], count: usize, length: usize) -> Vec<Vec<u32>> {
    let count = count.min(sequences.len());
    let chosen = (0..count).map(|index| &sequences[index * (sequences.len() - 1) / (count - 1).max(1)]);
    chosen.map(|tokens| tokens[..tokens.len().min(length)].to_vec()).collect()
}

/// Predictions of the exact model for the second halves of some sequences, by token of the vocabulary.
pub(super) struct Predictions {
    /// Sums of the probabilities `p`.
    probabilities: Vec<f64>,
    /// Sums of `p (1 - p)`.
    variances: Vec<f64>,
    /// Squared norms of the rows of the lm_head.
    squares: Vec<f64>,
}

/// Shares of a band of tokens in the losses of a matrix with a row for each token.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Shares {
    /// Share in the loss of an embedding: the probability of its tokens, since predicted tokens are what the model reads.
    pub inputs: f64,
    /// Share in the loss of an lm_head.
    pub outputs: f64,
}

impl Predictions {
    /// Runs the exact model over sequences. One that has no lm_head predicts all tokens alike. Calls `advance` with the share
    /// of the work that was done.
    pub fn of(
        spec: &ModelSpec,
        source: Source<'_>,
        sequences: &[Vec<u32>],
        exec: Exec<'_>,
        advance: &mut dyn FnMut(f64),
    ) -> Result<Self, LoadError> {
        if spec.lm_head.is_none() {
            let ones = vec![1.0; spec.vocab_size];
            return Ok(Self { probabilities: ones.clone(), variances: ones.clone(), squares: ones });
        }
        let (exact, layers) = (Loader::new(spec, source, Quantization::BF16), spec.layers.len());
        let without_noise = || Noisy::new(exec, None, layers);
        let tables = exact.tables(&mut without_noise())?;
        let model = OutsideLayers { spec, sequences, exec, loader: &exact, tables: &tables };
        let mut pass = model.begin(without_noise())?;
        for (index, layer_spec) in spec.layers.iter().enumerate() {
            let layer = exact.layer(&mut without_noise(), index, layer_spec, &[])?;
            pass.advance(&layer, index, &mut || ())?;
            advance(1.0 / (layers + 1) as f64);
        }
        let weights = model.load(without_noise())?;
        let mut predictions = Self::new(squares(&weights, spec.vocab_size));
        for rows in model.scored(&mut pass, &weights)?.chunks(LOGIT_ROWS * spec.hidden_size) {
            predictions.add(&exec, &model.logits(rows, &weights)?)?;
        }
        advance(1.0 / (layers + 1) as f64);
        if predictions.are_finite() { Ok(predictions) } else { Err(LoadError::OutputNotFinite) }
    }

    /// Creates predictions of no tokens.
    fn new(squares: Vec<f64>) -> Self {
        let zeros = vec![0.0; squares.len()];
        Self { probabilities: zeros.clone(), variances: zeros, squares }
    }

    /// Adds the predictions of rows of logits.
    fn add(&mut self, exec: &Exec<'_>, logits: &[f32]) -> Result<(), PoolError> {
        let Self { probabilities, variances, squares } = self;
        let rows: Vec<_> = logits.chunks_exact(squares.len()).collect();
        let log_sums = map_rows(exec, rows.len(), |row| log_sum(rows[row]))?;
        let tasks = squares.len().div_ceil(TASK_TOKENS);
        let sums = [probabilities, variances].map(|sums| Tiles::row_blocks(sums, 1, TASK_TOKENS));
        exec.run(tasks, |task| {
            let [mut probabilities, mut variances] = [&sums[0], &sums[1]].map(|sums| sums.take(task));
            let (probabilities, variances) = (probabilities.contiguous(), variances.contiguous());
            for (row, log_sum) in rows.iter().zip(&log_sums) {
                let sums = probabilities.iter_mut().zip(&mut *variances);
                for (logit, (probability, variance)) in row[task * TASK_TOKENS..].iter().zip(sums) {
                    let p = (f64::from(*logit) - log_sum).exp();
                    *probability += p;
                    *variance += p * (1.0 - p);
                }
            }
        })
    }

    fn are_finite(&self) -> bool {
        let Self { probabilities, variances, squares } = self;
        [probabilities, variances, squares].into_iter().flatten().all(|number| number.is_finite())
    }

    /// Returns sequences of tokens drawn from the mean prediction, as long as those of `like`. So rare tokens are rare without
    /// any text.
    pub fn draw(&self, like: &[Vec<u32>]) -> Vec<Vec<u32>> {
        let places: Vec<_> =
            (0..like.len()).flat_map(|index| uniform_numbers("predicted tokens", index, like[index].len())).collect();
        let mut drawn = self.tokens_at(&places).into_iter();
        like.iter().map(|tokens| drawn.by_ref().take(tokens.len()).collect()).collect()
    }

    /// Returns the tokens at `places`, numbers from 0 to 1, in the cumulative mean prediction.
    fn tokens_at(&self, places: &[f64]) -> Vec<u32> {
        let mut total = 0.0;
        let to_cumulative = |p: &f64| {
            total += p;
            total
        };
        let cumulative: Vec<_> = self.probabilities.iter().map(to_cumulative).collect();
        let last = cumulative.len() - 1;
        let token = |place: &f64| cumulative.partition_point(|sum| sum <= &(place * total)).min(last) as u32;
        places.iter().map(token).collect()
    }

    /// Returns the shares of bands of tokens, by their first tokens.
    ///
    /// An error of the logit of a token with the probability p adds `p (1 - p) / 2` times its square to the divergence, and the
    /// relative errors of all rows are alike.
    pub fn shares(&self) -> BTreeMap<usize, Shares> {
        let Self { probabilities, variances, squares } = self;
        let inputs = |band: Range<usize>| probabilities[band].iter().sum::<f64>();
        let outputs = |band: Range<usize>| {
            variances[band.clone()].iter().zip(&squares[band]).map(|(variance, square)| variance * square).sum::<f64>()
        };
        let all = 0..squares.len();
        let [all_inputs, all_outputs] = [inputs(all.clone()), outputs(all)].map(|sum| sum.max(f64::MIN_POSITIVE));
        let of_band = |band: Range<usize>| {
            let shares =
                Shares { inputs: inputs(band.clone()) / all_inputs, outputs: outputs(band.clone()) / all_outputs };
            (band.start, shares)
        };
        bands("lm_head", squares.len()).into_iter().map(of_band).collect()
    }
}

/// Returns the squared norms of the rows of the lm_head.
fn squares(weights: &LastWeights, vocabulary: usize) -> Vec<f64> {
    let weight = &weights.lm_head().expect("an lm_head").weight;
    let mut row = vec![0.0; weight.cols()];
    let square = |token| {
        weight.read_row(token, &mut row);
        row.iter().map(|weight| f64::from(*weight).powi(2)).sum()
    };
    (0..vocabulary).map(square).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::num::NonZeroUsize;

    use ferrule_kernels::arch::Isa;
    use ferrule_kernels::{Cancel, Pool};
    use serde_json::json;

    use super::super::loss::divergence;
    use super::*;
    use crate::specs;

    fn predictions(logits: &[f32], squares: &[f64]) -> Predictions {
        let (pool, cancel) = (Pool::new(NonZeroUsize::new(2).unwrap()), Cancel::new());
        let mut predictions = Predictions::new(squares.to_vec());
        predictions.add(&Exec { isa: Isa::best(), pool: &pool, cancel: &cancel }, logits).unwrap();
        predictions
    }

    #[test]
    fn predictions_are_sums_of_softmax() {
        let vocabulary = 2 * TASK_TOKENS + 7;
        let logits: Vec<f32> = (0..3 * vocabulary).map(|i| ((i * i) % 13) as f32 / 3.0).collect();
        let found = predictions(&logits, &vec![1.0; vocabulary]);
        let mut expected = vec![[0.0; 2]; vocabulary];
        for row in logits.chunks(vocabulary) {
            let sum = row.iter().map(|logit| f64::from(*logit).exp()).sum::<f64>();
            for (expected, logit) in expected.iter_mut().zip(row) {
                let p = f64::from(*logit).exp() / sum;
                *expected = [expected[0] + p, expected[1] + p * (1.0 - p)];
            }
        }
        for ([p, variance], (found_p, found_variance)) in
            expected.iter().zip(found.probabilities.iter().zip(&found.variances))
        {
            assert!((p / found_p - 1.0).abs() < 1e-5 && (variance / found_variance - 1.0).abs() < 1e-5);
        }
    }

    #[test]
    fn logits_that_are_not_finite_are_seen() {
        let excluded = [1.0, f32::NEG_INFINITY, 0.0];
        assert!(predictions(&excluded, &[1.0; 3]).are_finite());
        for logits in [[1.0, f32::NAN, 0.0], [1.0, f32::INFINITY, 0.0]] {
            assert!(!predictions(&logits, &[1.0; 3]).are_finite(), "{logits:?}");
        }
    }

    #[test]
    fn random_tokens_are_in_the_vocabulary_and_the_positions() {
        let mut json = specs::llama(96, 1);
        for positions in [7, 256] {
            json["max_position_embeddings"] = json!(positions);
            let spec = ModelSpec::from_json(&json.to_string()).unwrap();
            let read = read_tokens(&spec, None);
            assert_eq!(read.len(), SEQUENCES);
            assert!(read.iter().all(|tokens| tokens.len() == RANDOM_LENGTH.min(positions)));
            let tokens: BTreeSet<_> = read.iter().flatten().copied().collect();
            assert!(tokens.len() > 48 && *tokens.last().unwrap() < 96, "{tokens:?}");
        }
    }

    #[test]
    fn tokens_are_drawn_as_often_as_they_are_predicted() {
        let logits = [0.0, 3.0_f32.ln(), f32::NEG_INFINITY, 0.0, 3.0_f32.ln(), f32::NEG_INFINITY];
        let predictions = predictions(&logits, &[1.0; 3]);
        let places: Vec<_> = (0..1000).map(|place| (f64::from(place) + 0.5) / 1000.0).collect();
        let at = predictions.tokens_at(&places);
        let count = |token| at.iter().filter(|drawn| **drawn == token).count();
        assert_eq!([count(0), count(1), count(2)], [250, 750, 0]);
        let drawn = predictions.draw(&[vec![0; 50], vec![0; 30]]);
        assert_eq!(drawn.iter().map(Vec::len).collect::<Vec<_>>(), [50, 30]);
        assert!(drawn.iter().flatten().all(|token| *token < 2), "{drawn:?}");
    }

    #[test]
    fn beginnings_are_from_the_first_to_the_last() {
        let sequences: Vec<Vec<u32>> = (0..16).map(|index| vec![index; 10]).collect();
        let of = |count| beginnings(&sequences, count, 3).iter().map(|tokens| tokens[0]).collect::<Vec<_>>();
        assert_eq!((of(1), of(2), of(4)), (vec![0], vec![0, 15], vec![0, 5, 10, 15]));
        assert!(of(40).into_iter().eq(0..16));
        assert!(beginnings(&sequences, 4, 3).iter().all(|tokens| tokens.len() == 3));
        assert_eq!(beginnings(&[], 4, 3), Vec::<Vec<u32>>::new());
    }

    #[test]
    fn shares_are_those_of_the_divergence() {
        // The tokens of two bands, of which each of the first band is likely.
        let logits: Vec<f32> = (0..32).map(|token| if token < 16 { 2.0 } else { 0.0 }).collect();
        let squares: Vec<f64> = (0..32).map(|token| if token < 16 { 1.0 } else { 4.0 }).collect();
        let found = predictions(&logits, &squares).shares();
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
}
