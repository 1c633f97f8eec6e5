//! Random weights and inputs of linear layers, and their Hessians, computed naively in f64.

use std::num::NonZeroUsize;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::{Cancel, Exec, Pool, RowSource};
use proptest::prelude::*;

/// Row source of a matrix `[rows][cols]` in memory, with its number of columns.
pub struct Weights<'a>(pub &'a [f32], pub usize);

impl RowSource for Weights<'_> {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        out.copy_from_slice(&self.0[row * self.1..][..self.1]);
    }
}

/// Returns pseudorandom numbers in [-1, 1).
pub fn random(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state as i64) >> 40) as f32 / (1 << 23) as f32
    };
    (0..count).map(|_| next()).collect()
}

/// Returns rows with correlated elements: sums of a few directions plus a little noise.
pub fn inputs(seed: u64, rows: usize, cols: usize, directions: usize) -> Vec<f32> {
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

pub fn exec<T>(threads: usize, isa: Isa, run: impl FnOnce(&Exec<'_>) -> T) -> T {
    let pool = Pool::new(NonZeroUsize::new(threads).unwrap());
    run(&Exec { isa, pool: &pool, cancel: &Cancel::new() })
}

/// Random test case.
#[derive(Debug, Clone)]
pub struct Case {
    pub rows: usize,
    pub cols: usize,
    /// Number of calibration rows beyond the minimum for correlations.
    pub more: usize,
    pub seed: u64,
}

pub fn case() -> impl Strategy<Value = Case> {
    let cols = prop_oneof![1..40usize, 100..140usize, 250..262usize, 380..400usize, 500..520usize];
    (1..35usize, cols, 0..400usize, any::<u64>()).prop_map(|(rows, cols, more, seed)| Case { rows, cols, more, seed })
}

/// Returns the inverse of a positive definite matrix, `[n][n]`.
pub fn inverse(mut a: Vec<f64>, n: usize) -> Vec<f64> {
    let mut inverse: Vec<f64> = (0..n * n).map(|at| f64::from(u8::from(at / n == at % n))).collect();
    for k in 0..n {
        let pivot = a[k * n + k].recip();
        for j in 0..n {
            a[k * n + j] *= pivot;
            inverse[k * n + j] *= pivot;
        }
        for i in (0..n).filter(|i| *i != k) {
            let factor = a[i * n + k];
            for j in 0..n {
                a[i * n + j] -= factor * a[k * n + j];
                inverse[i * n + j] -= factor * inverse[k * n + j];
            }
        }
    }
    inverse
}

/// Returns the upper triangular U with `a = U^T U`.
pub fn upper_cholesky(a: &[f64], n: usize) -> Vec<f64> {
    let mut u = vec![0.0; n * n];
    for i in 0..n {
        for j in i..n {
            let sum = (0..i).map(|k| u[k * n + i] * u[k * n + j]).sum::<f64>();
            let left = a[i * n + j] - sum;
            u[i * n + j] = if i == j { left.sqrt() } else { left / u[i * n + i] };
        }
    }
    u
}

/// Returns the Hessian of rows `[n]`, damped and scaled to a mean diagonal of 1, and the factor that scaled it.
pub fn damped_hessian(rows: impl Iterator<Item = Vec<f64>>, n: usize, damping: f64) -> (Vec<f64>, f64) {
    let mut sums = vec![0.0; n * n];
    for x in rows {
        for i in 0..n {
            for j in 0..n {
                sums[i * n + j] += x[i] * x[j];
            }
        }
    }
    let mean = (0..n).map(|i| sums[i * n + i]).sum::<f64>() / n as f64;
    let scale = 1.0 / (mean * (1.0 + damping));
    sums.iter_mut().for_each(|sum| *sum *= scale);
    (0..n).for_each(|i| sums[i * n + i] += damping / (1.0 + damping));
    (sums, scale)
}

/// Returns the rows of `x: [rows, cols]`, zero-padded to `n` inputs.
pub fn padded_rows(x: &[f32], cols: usize, n: usize) -> impl Iterator<Item = Vec<f64>> {
    x.chunks_exact(cols).map(move |x| x.iter().map(|x| f64::from(*x)).chain(vec![0.0; n - cols]).collect())
}
