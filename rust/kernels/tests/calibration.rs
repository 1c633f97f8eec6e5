//! Calibrated packing against its definition, in f64 and with dumb loops.

mod rotation;

use std::num::NonZeroUsize;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::{
    CalibrationError, Cancel, Exec, Format, InputStatistics, Moments, PackedMatrix, Pool, PoolError, RowSource,
};
use proptest::prelude::*;
use rotation::{BLOCK, rotated};

/// A matrix in memory, `[rows][cols]`.
struct Weights<'a>(&'a [f32], usize);

impl RowSource for Weights<'_> {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        out.copy_from_slice(&self.0[row * self.1..][..self.1]);
    }
}

/// Numbers of one sign or the other, never the same twice: [-1, 1).
fn random(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state as i64) >> 40) as f32 / (1 << 23) as f32
    };
    (0..count).map(|_| next()).collect()
}

/// Rows whose numbers go together: sums of a few directions, and a little of their own.
fn inputs(seed: u64, rows: usize, cols: usize, directions: usize) -> Vec<f32> {
    let basis = random(seed, directions * cols);
    let shares = random(seed + 1, rows * directions);
    let own = random(seed + 2, rows * cols);
    let mut x = Vec::with_capacity(rows * cols);
    for row in 0..rows {
        for col in 0..cols {
            let common = (0..directions).map(|d| shares[row * directions + d] * basis[d * cols + col]).sum::<f32>();
            x.push(common + 0.1 * own[row * cols + col]);
        }
    }
    x
}

fn exec<T>(threads: usize, isa: Isa, run: impl FnOnce(&Exec<'_>) -> T) -> T {
    let pool = Pool::new(NonZeroUsize::new(threads).unwrap());
    run(&Exec { isa, pool: &pool, cancel: &Cancel::new() })
}

fn statistics(exec: &Exec<'_>, x: &[f32], cols: usize, piece: usize) -> Option<InputStatistics> {
    let mut moments = Moments::zeroed(cols).unwrap();
    x.chunks(piece * cols).for_each(|x| moments.add(exec, x).unwrap());
    assert_eq!(moments.rows(), (x.len() / cols) as u64);
    moments.statistics(exec).unwrap()
}

/// The squared error of the outputs of all rows.
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

fn contents(matrix: &PackedMatrix) -> Vec<u8> {
    matrix.contents().flatten().copied().collect()
}

const FORMATS: [Format; 3] = [Format::Int4, Format::Int6, Format::Int8];

#[test]
fn outputs_of_inputs_that_go_together_lose_less() {
    for isa in Isa::available() {
        for (format, share) in FORMATS.into_iter().zip([0.5, 0.6, 0.6]) {
            for cols in [128, 200, 256, 300, 640] {
                exec(2, isa, |exec| {
                    let (rows, x) = (40, inputs(1, 3000, cols, 12));
                    let weights = random(9, rows * cols);
                    let source = Weights(&weights, cols);
                    let statistics = statistics(exec, &x, cols, 3000).unwrap();
                    let plain = PackedMatrix::pack(exec, &[(format, rows)], cols, &source).unwrap();
                    let calibrated =
                        PackedMatrix::pack_calibrated(exec, &[(format, rows)], cols, &source, &statistics).unwrap();
                    let [plain, calibrated] =
                        [plain, calibrated].map(|packed| output_error(&weights, &packed, &x[..500 * cols]));
                    println!("{} {} {cols}: {calibrated} of {plain}: {}", isa.name(), format.name(), calibrated / plain);
                    assert!(calibrated < share * plain, "{} {cols}: {calibrated} of {plain}", format.name());
                });
            }
        }
    }
}
