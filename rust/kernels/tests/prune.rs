//! Pruning against a naive f64 implementation of SparseGPT as published, which uses the inverse Hessian.

mod hessian;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::{
    Basis, CalibrationError, Cancel, CodeGrid, Exec, Hessian, InputNorms, InputStatistics, PackError, Pool, PoolError,
    PrunedMatrix, RowSource, Sparsity,
};
use hessian::{Case, Weights, case, damped_hessian, exec, inputs, inverse, padded_rows, random, upper_cholesky};
use proptest::prelude::*;

/// Number of inputs that are compared with each other where sparsity is unstructured, and to which inputs are padded.
const BLOCK: usize = 128;

fn statistics(exec: &Exec<'_>, x: &[f32], cols: usize) -> Option<InputStatistics> {
    let mut hessian = Hessian::zeroed(cols, Basis::Plain).unwrap();
    hessian.add(exec, x).unwrap();
    hessian.statistics(exec).unwrap()
}

fn norms(x: &[f32], cols: usize) -> Result<Option<InputStatistics>, CalibrationError> {
    let mut norms = InputNorms::zeroed(cols);
    norms.add(x);
    norms.statistics()
}

/// Prunes a matrix and returns it as `[rows, cols]`.
fn pruned(
    exec: &Exec<'_>,
    weights: &[f32],
    cols: usize,
    sparsity: Sparsity,
    statistics: Option<&InputStatistics>,
) -> Vec<f32> {
    let rows = weights.len() / cols;
    let pruned = PrunedMatrix::new(exec, rows, cols, &Weights(weights, cols), sparsity, statistics, None).unwrap();
    let mut found = vec![f32::NAN; weights.len()];
    pruned.read_rows(0, cols, &mut found);
    found
}

fn sparsity() -> impl Strategy<Value = Sparsity> {
    prop_oneof![Just("2:4"), Just("0.5"), Just("0.05"), Just("0.3"), Just("0.95")]
        .prop_map(|text| text.parse().unwrap())
}

/// Returns the inputs of a group, and those that are compared with input `start`.
fn group(sparsity: Sparsity) -> usize {
    if sparsity == Sparsity::TWO_OF_FOUR { 4 } else { BLOCK }
}

fn zeros(row: &[f32]) -> usize {
    row.iter().filter(|x| **x == 0.0).count()
}

/// Returns the squared error of the outputs of all rows.
fn output_error(weights: &[f32], found: &[f32], x: &[f32], cols: usize) -> f64 {
    let rows = weights.chunks_exact(cols).zip(found.chunks_exact(cols));
    let errors = rows.flat_map(|(row, found)| {
        x.chunks_exact(cols).map(move |x| {
            let products = row.iter().zip(found).zip(x).map(|((a, b), x)| f64::from(a - b) * f64::from(*x));
            products.sum::<f64>().powi(2)
        })
    });
    errors.sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// The pruned weights of each group are those with the least `w^2 / [H^-1]`, and the others compensate for them.
    #[test]
    fn weights_are_those_of_sparsegpt(case in case(), sparsity in sparsity()) {
        let Case { rows, mut cols, more, seed } = case;
        if !sparsity.fits(cols) {
            cols = cols.next_multiple_of(4);
        }
        let n = cols.next_multiple_of(64);
        let x = inputs(seed, n + more, cols, 9);
        let weights = random(seed ^ 77, rows * cols);
        let u = upper_cholesky(&inverse(damped_hessian(padded_rows(&x, cols, n), n, 0.01).0, n), n);
        let found = exec(2, Isa::best(), |exec| {
            pruned(exec, &weights, cols, sparsity, statistics(exec, &x, cols).as_ref())
        });
        for (weights, found) in weights.chunks_exact(cols).zip(found.chunks_exact(cols)) {
            let mut targets: Vec<f64> = weights.iter().map(|weight| f64::from(*weight)).collect();
            let largest = targets.iter().fold(1.0f64, |largest, target| largest.max(target.abs()));
            for start in (0..cols).step_by(group(sparsity)) {
                let inputs = start..cols.min(start + group(sparsity));
                prop_assert_eq!(zeros(&found[inputs.clone()]), sparsity.zeros(inputs.len()), "{:?}", inputs);
                let score = |k: usize| (targets[k] / u[k * n + k]).abs();
                let scores = |zero: bool| inputs.clone().filter(move |k| (found[*k] == 0.0) == zero).map(score);
                let (most, least) = (scores(true).fold(0.0, f64::max), scores(false).fold(f64::INFINITY, f64::min));
                prop_assert!(most <= least * 1.001 + 1e-4 * largest, "{inputs:?}: {most} is pruned, {least} kept");
                for k in inputs {
                    if found[k] != 0.0 {
                        let difference = (targets[k] - f64::from(found[k])).abs();
                        prop_assert!(difference < 2e-3 * largest, "{k}: {} is not {}", found[k], targets[k]);
                        targets[k] = f64::from(found[k]);
                        continue;
                    }
                    let left = targets[k] / u[k * n + k];
                    (k + 1..cols).for_each(|j| targets[j] -= left * u[k * n + j]);
                }
            }
        }
    }

    /// Without correlations, the weights with the least magnitude times norm are zero and the others are unchanged.
    #[test]
    fn weights_are_those_of_wanda_and_of_magnitude(case in case(), sparsity in sparsity()) {
        let Case { rows, mut cols, seed, .. } = case;
        if !sparsity.fits(cols) {
            cols = cols.next_multiple_of(4);
        }
        let (x, weights) = (inputs(seed, 7, cols, 3), random(seed ^ 77, rows * cols));
        for with_norms in [false, true] {
            let norms = if with_norms { norms(&x, cols).unwrap() } else { None };
            let found = exec(2, Isa::best(), |exec| pruned(exec, &weights, cols, sparsity, norms.as_ref()));
            for (weights, found) in weights.chunks_exact(cols).zip(found.chunks_exact(cols)) {
                prop_assert_eq!(zeros(found), sparsity.zeros(cols));
                let score = |k: usize| {
                    let squares = x.iter().skip(k).step_by(cols).map(|x| f64::from(*x).powi(2)).sum::<f64>();
                    f64::from(weights[k].abs()) * if with_norms { squares.sqrt() } else { 1.0 }
                };
                for start in (0..cols).step_by(group(sparsity)) {
                    let inputs = start..cols.min(start + group(sparsity));
                    let scores = |zero: bool| inputs.clone().filter(move |k| (found[*k] == 0.0) == zero).map(score);
                    let (most, least) = (scores(true).fold(0.0, f64::max), scores(false).fold(f64::INFINITY, f64::min));
                    prop_assert!(most <= least * 1.00001, "{inputs:?}: {most} is pruned, {least} kept");
                }
                prop_assert!(weights.iter().zip(found).all(|(weight, found)| *found == 0.0 || weight == found));
            }
        }
    }
}

const INT8: CodeGrid = CodeGrid { inputs: 128, codes: [-127, 127] };
const INT4: CodeGrid = CodeGrid { inputs: 64, codes: [-8, 7] };

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// Codes of kept weights are nearest to their targets, which compensate the errors of pruning and rounding.
    #[test]
    fn codes_are_nearest_to_the_targets(
        case in case(), sparsity in sparsity(), grid in prop_oneof![Just(INT8), Just(INT4)],
    ) {
        let Case { rows, cols, more, seed } = case;
        let cols = cols.next_multiple_of(grid.inputs);
        let n = cols.next_multiple_of(64);
        let x = inputs(seed, n + more, cols, 9);
        let weights = random(seed ^ 77, rows * cols);
        let u = upper_cholesky(&inverse(damped_hessian(padded_rows(&x, cols, n), n, 0.01).0, n), n);
        let block_bytes = 2 + grid.inputs;
        let row_bytes = cols / grid.inputs * block_bytes;
        let mut stored = vec![0; rows * row_bytes];
        exec(2, Isa::best(), |exec| {
            let (source, statistics) = (Weights(&weights, cols), statistics(exec, &x, cols));
            let pruned = PrunedMatrix::new(exec, rows, cols, &source, sparsity, statistics.as_ref(), Some(grid)).unwrap();
            pruned.read_stored(0, row_bytes, &mut stored);
            let mut row = vec![0.0; cols];
            for (index, blocks) in stored.chunks_exact(row_bytes).enumerate() {
                pruned.read_row(index, &mut row);
                for (k, value) in row.iter().enumerate() {
                    let block = &blocks[k / grid.inputs * block_bytes..];
                    let scale = half::f16::from_le_bytes([block[0], block[1]]).to_f32();
                    let code = block[2 + k % grid.inputs].cast_signed();
                    assert!(*value == f32::from(code) * scale && grid.codes[0] <= code && code <= grid.codes[1]);
                }
            }
        });
        for (weights, blocks) in weights.chunks_exact(cols).zip(stored.chunks_exact(row_bytes)) {
            let mut targets: Vec<f64> = weights.iter().map(|weight| f64::from(*weight)).collect();
            let rounding = 2e-3 * targets.iter().fold(1.0f64, |largest, target| largest.max(target.abs()));
            let code = |k: usize| blocks[k / grid.inputs * block_bytes + 2 + k % grid.inputs].cast_signed();
            for start in (0..cols).step_by(group(sparsity)) {
                let inputs = start..cols.min(start + group(sparsity));
                let zeros = inputs.clone().filter(|k| code(*k) == 0).count();
                prop_assert!(zeros >= sparsity.zeros(inputs.len()), "{inputs:?}: {zeros}");
            }
            for k in 0..cols {
                let block = &blocks[k / grid.inputs * block_bytes..];
                let scale = half::f16::from_le_bytes([block[0], block[1]]).to_f64();
                let error = targets[k] - f64::from(code(k)) * scale;
                let is_saturated = grid.codes.contains(&code(k)) && error * f64::from(code(k)) > 0.0;
                let is_nearest = error.abs() <= 0.502 * scale + rounding;
                prop_assert!(code(k) == 0 || is_nearest || is_saturated, "input {k}: error {error}, scale {scale}");
                let left = error / u[k * n + k];
                (k + 1..cols).for_each(|j| targets[j] -= left * u[k * n + j]);
            }
        }
    }
}

#[test]
fn the_hessian_reduces_the_error_of_correlated_inputs() {
    for isa in Isa::available() {
        for (cols, sparsity) in [(128, "0.5"), (300, "2:4"), (301, "0.5"), (640, "0.7")] {
            exec(2, isa, |exec| {
                let sparsity = sparsity.parse().unwrap();
                let (x, weights) = (inputs(1, 1500, cols, 12), random(9, 40 * cols));
                let [norms, hessian] = [norms(&x, cols).unwrap(), statistics(exec, &x, cols)].map(|each| {
                    output_error(
                        &weights,
                        &pruned(exec, &weights, cols, sparsity, each.as_ref()),
                        &x[..200 * cols],
                        cols,
                    )
                });
                let name = (isa.name(), cols, sparsity.to_string());
                assert!(hessian < 0.3 * norms, "{name:?}: {hessian} of {norms}");
            });
        }
    }
}

#[test]
fn threads_change_no_bit() {
    let (cols, sparsity) = (700, "0.5".parse().unwrap());
    let (x, weights) = (inputs(3, 900, cols, 20), random(8, 200 * cols));
    let found = [1, 2, 8].map(|threads| {
        exec(threads, Isa::best(), |exec| pruned(exec, &weights, cols, sparsity, statistics(exec, &x, cols).as_ref()))
    });
    assert!(found[0] == found[1] && found[0] == found[2]);
}

#[test]
fn equal_scores_prune_the_first_weights() {
    let found = exec(1, Isa::best(), |exec| pruned(exec, &[1.0; 12], 12, Sparsity::TWO_OF_FOUR, None));
    assert_eq!(found, [0.0, 0.0, 1.0, 1.0].repeat(3));
}

#[test]
fn non_finite_weights_stay_in_their_rows() {
    let (x, mut weights) = (inputs(3, 500, 300, 5), random(8, 20 * 300));
    weights[3 * 300 + 7] = f32::INFINITY;
    exec(2, Isa::best(), |exec| {
        for statistics in [None, statistics(exec, &x, 300)] {
            let found = pruned(exec, &weights, 300, Sparsity::TWO_OF_FOUR, statistics.as_ref());
            let finite: Vec<_> = found.chunks_exact(300).map(|row| row.iter().all(|x| x.is_finite())).collect();
            assert!(finite.iter().enumerate().all(|(row, finite)| *finite == (row != 3)), "{finite:?}");
        }
    });
}

#[test]
fn weights_that_are_not_finite_are_kept() {
    // The first input is always zero.
    let norms = norms(&[0.0, 1.0, 1.0, 1.0], 4).unwrap();
    exec(1, Isa::best(), |exec| {
        for weight in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for statistics in [None, norms.as_ref()] {
                let found = pruned(exec, &[weight, 1.0, 3.0, 2.0], 4, Sparsity::TWO_OF_FOUR, statistics);
                assert!(!found[0].is_finite() && found[1..] == [0.0, 3.0, 0.0], "{weight}: {found:?}");
            }
        }
    });
}

#[test]
fn zero_missing_or_non_finite_inputs_have_no_norms() {
    assert!(norms(&[], 40).unwrap().is_none());
    assert!(norms(&[0.0; 80], 40).unwrap().is_none());
    assert!(matches!(norms(&[f32::NAN; 40], 40), Err(CalibrationError::NotFinite)));
}

#[test]
fn a_cancelled_pruning_is_an_error() {
    let (pool, cancel) = (Pool::new(std::num::NonZeroUsize::MIN), Cancel::new());
    let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
    cancel.cancel();
    let found = PrunedMatrix::new(&exec, 1, 4, &Weights(&[1.0; 4], 4), Sparsity::TWO_OF_FOUR, None, None);
    assert!(matches!(found.err(), Some(PackError::Pool(PoolError::Cancelled))));
}
