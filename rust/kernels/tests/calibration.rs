//! Calibrated packing (GPTQ) against a naive f64 implementation.

mod descent;
mod hessian;
#[allow(dead_code, reason = "of the module that tests share")]
mod rotation;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use descent::Cost;
use ferrule_kernels::arch::Isa;
use ferrule_kernels::{
    Basis, CalibrationError, Cancel, Exec, Format, Hessian, InputStatistics, PackError, PackedMatrix, Pool, PoolError,
    RowSource,
};
use hessian::{Case, Weights, case, damped_hessian, exec, inputs, inverse, padded_rows, random, upper_cholesky};
use proptest::prelude::*;
use rotation::{BLOCK, HALF, rotated};

fn statistics(exec: &Exec<'_>, x: &[f32], cols: usize, chunk: usize) -> Option<InputStatistics> {
    let mut hessian = Hessian::zeroed(cols, Basis::Rotated).unwrap();
    x.chunks(chunk * cols).for_each(|x| hessian.add(exec, x).unwrap());
    assert_eq!(hessian.rows(), (x.len() / cols) as u64);
    hessian.statistics(exec).unwrap()
}

/// Returns the statistics of inputs with the errors of their outputs.
fn statistics_with_errors(exec: &Exec<'_>, x: &[f32], errors: &[f32], cols: usize, chunk: usize) -> InputStatistics {
    let outputs = errors.len() / (x.len() / cols);
    let mut hessian = Hessian::zeroed(cols, Basis::Rotated).unwrap().with_errors(outputs).unwrap();
    for (x, errors) in x.chunks(chunk * cols).zip(errors.chunks(chunk * outputs)) {
        hessian.add_with_errors(exec, x, errors).unwrap();
    }
    hessian.statistics(exec).unwrap().unwrap()
}

/// Packs a matrix in one format, calibrated if `inputs` is given.
fn packed(
    exec: &Exec<'_>,
    format: Format,
    weights: &[f32],
    cols: usize,
    inputs: Option<&InputStatistics>,
) -> PackedMatrix {
    let (bands, source) = ([(format, weights.len() / cols)], Weights(weights, cols));
    match inputs {
        None => PackedMatrix::pack(exec, &bands, cols, &source).unwrap(),
        Some(inputs) => PackedMatrix::pack_calibrated(exec, &bands, cols, &source, inputs).unwrap(),
    }
}

/// Returns the squared error of the outputs of all rows.
fn output_error(weights: &[f32], packed: &PackedMatrix, x: &[f32]) -> f64 {
    let cols = packed.cols();
    let mut back = vec![0.0; cols];
    let mut sum = 0.0;
    for (row, weights) in weights.chunks_exact(cols).enumerate() {
        packed.read_row(row, &mut back);
        let error: Vec<f64> = weights.iter().zip(&back).map(|(a, b)| f64::from(*a) - f64::from(*b)).collect();
        for x in x.chunks_exact(cols) {
            let product = error.iter().zip(x).map(|(e, x)| e * f64::from(*x)).sum::<f64>();
            sum += product * product;
        }
    }
    sum
}

/// Returns the damping that calibration adds for `rows` rows of `n` inputs.
fn damping(n: usize, rows: usize) -> f64 {
    f64::max(0.01, 0.5 * n as f64 / rows as f64)
}

/// Returns the rotated rows of `x: [rows, cols]`, padded to `n` inputs.
fn rotated_rows(x: &[f32], cols: usize, n: usize) -> impl Iterator<Item = Vec<f64>> {
    padded_rows(x, cols, n).map(|row| {
        let row: Vec<f32> = row.into_iter().map(|x| x as f32).collect();
        rotated(&row).into_iter().map(f64::from).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// int8 codes are nearest to the targets of GPTQ as published, which uses the inverse Hessian.
    #[test]
    fn codes_are_nearest_to_the_targets_of_gptq(case in case()) {
        let Case { rows, cols, more, seed } = case;
        let n = cols.next_multiple_of(HALF);
        let x = inputs(seed, n + more, cols, 9);
        let weights = random(seed ^ 77, rows * cols);
        let u = upper_cholesky(&inverse(damped_hessian(rotated_rows(&x, cols, n), n, damping(n, n + more)).0, n), n);
        let packed = exec(2, Isa::best(), |exec| {
            packed(exec, Format::Int8, &weights, cols, statistics(exec, &x, cols, 100).as_ref())
        });
        let [lines, scales] = packed.buffers().collect::<Vec<_>>().try_into().unwrap();
        let supers = n.div_ceil(256);
        for (row, weights) in weights.chunks_exact(cols).enumerate() {
            let mut whole = vec![0.0; n];
            whole[..cols].copy_from_slice(weights);
            let mut targets: Vec<f64> = rotated(&whole).into_iter().map(f64::from).collect();
            // Targets are f32 sums: if the weights of a block are far smaller than others, its scale is near their rounding.
            let rounding = 1e-6 * targets.iter().fold(0.0f64, |largest, target| largest.max(target.abs()));
            for k in 0..n {
                // A panel has a line of 64 bytes for four inputs of sixteen rows, and a block scale per 256 inputs.
                let (panel, lane) = (row / 16, row % 16);
                let code = f64::from(lines[(panel * n / 4 + k / 4) * 64 + lane * 4 + k % 4]) - 128.0;
                let at = 2 * ((panel * supers + k / 256) * 16 + lane);
                let scale = half::f16::from_le_bytes([scales[at], scales[at + 1]]).to_f64();
                let error = targets[k] - code * scale;
                let is_saturated = code.abs() == 127.0 && error * code > 0.0;
                let is_nearest = error.abs() <= 0.502 * scale + rounding;
                prop_assert!(is_nearest || is_saturated, "row {row}, input {k}: error {error}, scale {scale}");
                let left = error / u[k * n + k];
                (k + 1..n).for_each(|j| targets[j] -= left * u[k * n + j]);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    /// int4 has the loss of a naive implementation, which descends from the loss of GPTQ.
    #[test]
    fn descent_reduces_the_loss_of_gptq(halves in 1..6usize, seed in any::<u64>()) {
        const ROWS: usize = 48;
        let n = halves * HALF;
        let (x, weights) = (inputs(seed, 10 * n, n, 20), random(seed ^ 77, ROWS * n));
        let (h, _) = damped_hessian(rotated_rows(&x, n, n), n, damping(n, 10 * n));
        let packed = exec(2, Isa::best(), |exec| {
            packed(exec, Format::Int4, &weights, n, statistics(exec, &x, n, 100).as_ref())
        });
        let [_, scales] = packed.buffers().collect::<Vec<_>>().try_into().unwrap();
        let (supers, h_cost) = (n.div_ceil(256), Cost::new(&h, n));
        let (mut greedy, mut expected, mut found, mut rounded_otherwise) = (0.0, 0.0, 0.0, 0);
        for (row, weights) in weights.chunks_exact(n).enumerate() {
            let rotated = |row: &[f32]| -> Vec<f64> { rotated(row).into_iter().map(f64::from).collect() };
            let scales: Vec<f64> = (0..supers).map(|index| {
                let at = 2 * ((row / 16 * supers + index) * 16 + row % 16);
                half::f16::from_le_bytes([scales[at], scales[at + 1]]).to_f64()
            }).collect();
            let [of_gptq, of_descent] = descent::losses(&rotated(weights), &h, &h_cost, &scales);
            greedy += of_gptq;
            expected += of_descent;
            let mut back = vec![0.0; n];
            packed.read_row(row, &mut back);
            let errors: Vec<f64> = rotated(weights).iter().zip(rotated(&back)).map(|(exact, back)| exact - back).collect();
            let products = errors.iter().zip(h.chunks_exact(n)).map(|(error, h)| {
                error * h.iter().zip(&errors).map(|(h, error)| h * error).sum::<f64>()
            });
            let loss = products.sum::<f64>();
            found += loss;
            rounded_otherwise += usize::from((loss - of_descent).abs() > 1e-3 * of_descent);
        }
        prop_assert!(expected < 0.95 * greedy, "{expected} after {greedy}");
        // Where f32 and f64 round a target to different sides, the codes after it differ too.
        prop_assert!(rounded_otherwise <= ROWS / 8, "{rounded_otherwise} of {ROWS} rows");
        prop_assert!((found - expected).abs() < 0.05 * expected, "{found} for {expected}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// The weights that are quantized are those of a naive implementation: `W + V H^-1` in the rotated basis, with a smaller
    /// change the fewer rows there are for each input.
    #[test]
    fn corrected_weights_minimize_the_errors_of_outputs(case in case()) {
        let Case { rows, cols, more, seed } = case;
        let n = cols.next_multiple_of(HALF);
        let x = inputs(seed, n + more, cols, 9);
        // Errors that a change of the weights would correct.
        let [weights, change] = [77, 5].map(|salt| random(seed ^ salt, rows * cols));
        let product = |row: &[f32], x: &[f32]| row.iter().zip(x).map(|(weight, x)| 4.0 * weight * x).sum::<f32>();
        let errors = x.chunks_exact(cols).flat_map(|x| change.chunks_exact(cols).map(move |row| product(row, x)));
        let errors = errors.collect::<Vec<_>>();
        let (hessian, scale) = damped_hessian(rotated_rows(&x, cols, n), n, damping(n, n + more));
        let inverse = inverse(hessian, n);
        // Rows of V, and of the corrected weights.
        let mut sums = vec![0.0; rows * n];
        for (x, errors) in rotated_rows(&x, cols, n).zip(errors.chunks_exact(rows)) {
            for (sums, error) in sums.chunks_exact_mut(n).zip(errors) {
                sums.iter_mut().zip(&x).for_each(|(sum, x)| *sum += f64::from(*error) * x * scale);
            }
        }
        let found = exec(2, Isa::best(), |exec| {
            let statistics = statistics_with_errors(exec, &x, &errors, cols, 100);
            packed(exec, Format::Int8, &weights, cols, Some(&statistics))
        });
        let mut back = vec![0.0; cols];
        for (row, (weights, sums)) in weights.chunks_exact(cols).zip(sums.chunks_exact(n)).enumerate() {
            let mut whole = vec![0.0; n];
            whole[..cols].copy_from_slice(weights);
            let mut target: Vec<f64> = rotated(&whole).into_iter().map(f64::from).collect();
            for (j, target) in target.iter_mut().enumerate() {
                let change = sums.iter().enumerate().map(|(k, sum)| sum * inverse[k * n + j]).sum::<f64>();
                *target += change * BLOCK as f64 / (1.0 + 16.0 * n as f64 / (n + more) as f64);
            }
            found.read_row(row, &mut back);
            whole[..cols].copy_from_slice(&back);
            // The outputs of the quantized weights are those of the target on the inputs that were seen.
            let back: Vec<f64> = rotated(&whole).into_iter().map(f64::from).collect();
            let [mut error, mut size] = [0.0; 2];
            for x in rotated_rows(&x, cols, n) {
                let product = |row: &[f64]| row.iter().zip(&x).map(|(weight, x)| weight * x).sum::<f64>();
                size += product(&target).powi(2);
                error += (product(&target) - product(&back)).powi(2);
            }
            prop_assert!(error < 1e-3 * size, "row {row}: {error} of {size}");
        }
    }
}

/// Weights corrected for inputs with errors have less error of their outputs.
#[test]
fn correction_reduces_the_error_that_inputs_cause() {
    const ROWS: usize = 37;
    for isa in Isa::available() {
        for cols in [64, 200, 640] {
            exec(2, isa, |exec| {
                let (exact, weights) =
                    (inputs(1, 16 * usize::next_multiple_of(cols, HALF), cols, 40), random(9, ROWS * cols));
                // Errors that are correlated with the inputs, as those of matrices with too small weights are.
                let noise = random(3, exact.len());
                let x: Vec<_> = exact.iter().zip(&noise).map(|(x, noise)| 0.9 * x + 0.05 * noise).collect();
                let product = |weights: &[f32], x: &[f32]| -> f32 { weights.iter().zip(x).map(|(w, x)| w * x).sum() };
                let outputs = |x: &[f32]| -> Vec<f32> {
                    let rows = x.chunks_exact(cols);
                    rows.flat_map(|x| weights.chunks_exact(cols).map(move |row| product(row, x))).collect()
                };
                let (wanted, found) = (outputs(&exact), outputs(&x));
                let errors: Vec<_> = wanted.iter().zip(&found).map(|(wanted, found)| wanted - found).collect();
                let plain = statistics(exec, &x, cols, 1500).unwrap();
                let corrected = statistics_with_errors(exec, &x, &errors, cols, 1500);
                let [plain, corrected] = [plain, corrected].map(|statistics| {
                    let packed = packed(exec, Format::Int6, &weights, cols, Some(&statistics));
                    let mut out = vec![0.0; wanted.len()];
                    let mut back = vec![0.0; cols];
                    for row in 0..ROWS {
                        packed.read_row(row, &mut back);
                        for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(ROWS)) {
                            out[row] = product(&back, x);
                        }
                    }
                    wanted.iter().zip(&out).map(|(wanted, out)| f64::from(wanted - out).powi(2)).sum::<f64>()
                });
                assert!(corrected < 0.5 * plain, "{}, {cols}: {corrected} of {plain}", isa.name());
            });
        }
    }
}

/// A correction takes as many rows as there are inputs.
#[test]
fn few_rows_correct_nothing() {
    exec(2, Isa::best(), |exec| {
        let (cols, rows) = (200, 21);
        let (x, weights) = (inputs(3, 100, cols, 5), random(8, rows * cols));
        let plain = statistics(exec, &x, cols, 100).unwrap();
        let corrected = statistics_with_errors(exec, &x, &random(2, 100 * rows), cols, 100);
        let [plain, corrected] = [plain, corrected].map(|it| packed(exec, Format::Int4, &weights, cols, Some(&it)));
        assert!(plain.buffers().eq(corrected.buffers()));
    });
}

const FORMATS: [Format; 10] = [
    Format::Trellis2,
    Format::Int2,
    Format::Trellis3,
    Format::Int3,
    Format::Trellis4,
    Format::Int4,
    Format::Trellis5,
    Format::Int5,
    Format::Int6,
    Format::Int8,
];

/// The error is that of the packed rows, weighed by the damped Hessian.
#[test]
fn calibrated_errors_are_those_of_the_packed_rows() {
    const ROWS: usize = 19;
    for cols in [HALF, BLOCK, 3 * BLOCK, 4 * BLOCK + HALF] {
        let (x, weights) = (inputs(6, cols + 150, cols, 9), random(7, ROWS * cols));
        let (hessian, _) = damped_hessian(rotated_rows(&x, cols, cols), cols, damping(cols, cols + 150));
        exec(2, Isa::best(), |exec| {
            let (statistics, source) = (statistics(exec, &x, cols, 100).unwrap(), Weights(&weights, cols));
            for format in FORMATS {
                let found = PackedMatrix::calibrated_error(exec, (format, ROWS), cols, &source, &statistics).unwrap();
                let packed = packed(exec, format, &weights, cols, Some(&statistics));
                let (mut expected, mut back) = (0.0, vec![0.0; cols]);
                for (row, weights) in weights.chunks_exact(cols).enumerate() {
                    packed.read_row(row, &mut back);
                    let error: Vec<f32> = weights.iter().zip(&back).map(|(exact, back)| exact - back).collect();
                    let error: Vec<f64> = rotated(&error).into_iter().map(f64::from).collect();
                    for (error_of_row, hessian) in error.iter().zip(hessian.chunks_exact(cols)) {
                        let product = hessian.iter().zip(&error).map(|(h, error)| h * error).sum::<f64>();
                        expected += error_of_row * product / BLOCK as f64;
                    }
                }
                let found = found.unwrap();
                assert!((found - expected).abs() < 0.01 * expected, "{format:?}, {cols}: {found} is not {expected}");
            }
            let source = Weights(&weights, cols);
            let ignored = PackedMatrix::calibrated_error(exec, (Format::Bf16, ROWS), cols, &source, &statistics);
            assert_eq!(ignored, Ok(None));
        });
    }
}

#[test]
fn calibration_reduces_the_error_of_correlated_inputs() {
    for cols in [128, 192, 200, 256, 300, 640] {
        let (x, weights) = (inputs(1, 1500, cols, 12), random(9, 40 * cols));
        for isa in Isa::available() {
            exec(2, isa, |exec| {
                let statistics = statistics(exec, &x, cols, 1500);
                // Scalar code takes seconds for wide matrices in trellis formats.
                let is_quick = cols < 300 || isa.name() == Isa::best().name();
                for format in FORMATS.into_iter().filter(|format| is_quick || !format.name().starts_with("trellis")) {
                    let [plain, calibrated] = [None, statistics.as_ref()].map(|statistics| {
                        output_error(&weights, &packed(exec, format, &weights, cols, statistics), &x[..200 * cols])
                    });
                    // Most errors can be kept out of 12 directions in 128 inputs.
                    let name = (isa.name(), format.name(), cols);
                    assert!(calibrated < 0.2 * plain, "{name:?}: {calibrated} of {plain}");
                }
            });
        }
    }
}

#[test]
fn calibration_does_not_increase_the_error_of_uncorrelated_inputs() {
    exec(2, Isa::best(), |exec| {
        for cols in [130, 512] {
            let (x, weights) = (random(4, 6000 * cols), random(5, 32 * cols));
            // Few rows determine the magnitude of inputs only.
            for seen in [1, 40, cols - 1, 6000] {
                let statistics = statistics(exec, &x[..seen * cols], cols, 64);
                let [plain, calibrated] = [None, statistics.as_ref()].map(|statistics| {
                    output_error(&weights, &packed(exec, Format::Int4, &weights, cols, statistics), &x[..500 * cols])
                });
                assert!(calibrated < 1.1 * plain, "{cols}, {seen} rows: {calibrated} of {plain}");
            }
        }
    });
}

#[test]
fn threads_and_chunks_change_no_bit() {
    let cols = 700;
    let (x, weights) = (inputs(3, 900, cols, 20), random(8, 100 * cols));
    for format in FORMATS {
        let bytes = |threads, chunk| {
            exec(threads, Isa::best(), |exec| {
                let statistics = statistics(exec, &x, cols, chunk);
                let packed = packed(exec, format, &weights, cols, statistics.as_ref());
                packed.buffers().flatten().copied().collect::<Vec<u8>>()
            })
        };
        let once = bytes(1, 900);
        for (threads, chunk) in [(2, 256), (3, 7), (8, 900)] {
            assert!(bytes(threads, chunk) == once, "{}: {threads} threads, {chunk} rows", format.name());
        }
    }
}

#[test]
fn threads_and_chunks_change_no_bit_of_corrected_weights() {
    let (cols, rows) = (700, 150);
    let (x, weights, errors) = (inputs(3, 900, cols, 20), random(8, rows * cols), random(9, 900 * rows));
    let bytes = |threads, chunk| {
        exec(threads, Isa::best(), |exec| {
            let statistics = statistics_with_errors(exec, &x, &errors, cols, chunk);
            let packed = packed(exec, Format::Int4, &weights, cols, Some(&statistics));
            packed.buffers().flatten().copied().collect::<Vec<u8>>()
        })
    };
    let once = bytes(1, 900);
    for (threads, chunk) in [(2, 900), (3, 7), (1, 256), (8, 300)] {
        assert!(bytes(threads, chunk) == once, "{threads} threads, {chunk} rows");
    }
}

#[test]
fn floating_point_formats_ignore_calibration() {
    exec(2, Isa::best(), |exec| {
        let (x, weights) = (inputs(3, 300, 50, 5), random(8, 20 * 50));
        let statistics = statistics(exec, &x, 50, 300);
        let [plain, calibrated] =
            [None, statistics.as_ref()].map(|statistics| packed(exec, Format::Bf16, &weights, 50, statistics));
        assert!(plain.buffers().eq(calibrated.buffers()));
    });
}

#[test]
fn non_finite_weights_become_nan() {
    exec(2, Isa::best(), |exec| {
        let (x, mut weights) = (inputs(3, 500, 300, 5), random(8, 20 * 300));
        weights[3 * 300 + 7] = f32::INFINITY;
        let statistics = statistics(exec, &x, 300, 500);
        for format in FORMATS {
            let packed = packed(exec, format, &weights, 300, statistics.as_ref());
            let mut row = vec![0.0; 300];
            for (index, finite) in [(2, true), (3, false), (4, true)] {
                packed.read_row(index, &mut row);
                assert_eq!(row.iter().all(|x| x.is_finite()), finite, "{format:?}, row {index}");
            }
        }
    });
}

#[test]
fn zero_or_missing_inputs_give_no_statistics() {
    exec(2, Isa::best(), |exec| {
        assert!(statistics(exec, &[], 40, 1).is_none());
        assert!(statistics(exec, &[0.0; 300 * 40], 40, 300).is_none());
    });
}

#[test]
fn non_finite_inputs_are_refused() {
    for value in [f32::NAN, f32::INFINITY] {
        exec(2, Isa::best(), |exec| {
            let mut hessian = Hessian::zeroed(40, Basis::Rotated).unwrap();
            let mut x = random(1, 300 * 40);
            x[40 * 40 + 3] = value;
            hessian.add(exec, &x).unwrap();
            assert!(matches!(hessian.statistics(exec), Err(CalibrationError::NotFinite)));
        });
    }
}

/// Rows that take a while to be read the first time. They cancel the matrix meanwhile, unless a hook does it.
struct CancelledRows<'a> {
    values: &'a [f32],
    cancel: Option<&'a Cancel>,
    is_reading: &'a AtomicBool,
}

impl RowSource for CancelledRows<'_> {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        out.copy_from_slice(&self.values[row * out.len()..][..out.len()]);
        if !self.is_reading.swap(true, Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(40));
        }
        if let Some(cancel) = self.cancel {
            cancel.cancel();
        }
    }
}

#[test]
fn a_matrix_is_cancelled_while_its_only_task_runs() {
    let (rows, cols) = (16, 256);
    let (x, values) = (inputs(3, 300, cols, 20), random(8, rows * cols));
    let statistics = exec(1, Isa::best(), |exec| statistics(exec, &x, cols, 100).unwrap());
    let pool = Pool::new(NonZeroUsize::MIN);
    for has_hook in [false, true] {
        let is_reading = Arc::new(AtomicBool::new(false));
        let hook = Arc::clone(&is_reading);
        let cancel = if has_hook { Cancel::with_poll(move || hook.load(Ordering::Relaxed)) } else { Cancel::new() };
        let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
        let source = CancelledRows { values: &values, cancel: (!has_hook).then_some(&cancel), is_reading: &is_reading };
        let packed = PackedMatrix::pack_calibrated(&exec, &[(Format::Int4, rows)], cols, &source, &statistics);
        assert!(matches!(packed, Err(PackError::Pool(PoolError::Cancelled))), "has a hook: {has_hook}");
    }
}

#[test]
fn a_cancelled_calibration_is_an_error() {
    let (pool, cancel) = (Pool::new(NonZeroUsize::new(2).unwrap()), Cancel::new());
    let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
    let mut hessian = Hessian::zeroed(300, Basis::Rotated).unwrap();
    hessian.add(&exec, &random(1, 300 * 300)).unwrap();
    cancel.cancel();
    assert!(matches!(hessian.add(&exec, &random(1, 300)), Err(PoolError::Cancelled)));
    assert!(matches!(hessian.statistics(&exec), Err(CalibrationError::Pool(PoolError::Cancelled))));
}
