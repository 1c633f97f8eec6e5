//! Matrices and surroundings for tests of the matmul.

use std::num::NonZeroUsize;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::{Cancel, Exec, Format, PackedMatrix, Pool, RowSource};

/// A dense matrix in f32.
pub struct Dense {
    pub cols: usize,
    pub values: Vec<f32>,
}

impl RowSource for Dense {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        out.copy_from_slice(&self.values[row * self.cols..][..self.cols]);
    }
}

/// Numbers in [-1, 1) from a linear congruential generator: quick, and the same in every run.
pub fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

pub fn pool(threads: usize) -> Pool {
    Pool::new(NonZeroUsize::new(threads).unwrap())
}

pub fn with_exec<T>(isa: Isa, threads: usize, work: impl FnOnce(&Exec<'_>) -> T) -> T {
    work(&Exec { isa, pool: &pool(threads), cancel: &Cancel::new() })
}

pub fn packed(exec: &Exec<'_>, format: Format, n: usize, k: usize, seed: u64) -> PackedMatrix {
    let source = Dense { cols: k, values: noise(n * k, seed) };
    PackedMatrix::pack(exec, &[(format, n)], k, &source).unwrap()
}
