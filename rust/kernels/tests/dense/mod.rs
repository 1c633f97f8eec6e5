//! Matrices and surroundings for tests of the matmul.

use std::num::NonZeroUsize;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::{Cancel, Exec, Format, PackedMatrix, Pool, RowSource};

/// Random weights, in rows of numbers or of blocks as each row's format has it.
pub struct Noise<'a> {
    pub formats: &'a [(Format, usize)],
    pub seed: u64,
    /// The number of the first row among those that have this seed.
    pub first: usize,
}

impl Noise<'_> {
    fn seed(&self, row: usize) -> u64 {
        self.seed ^ ((self.first + row) as u64 + 1) << 20
    }
}

impl RowSource for Noise<'_> {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        out.copy_from_slice(&noise(out.len(), self.seed(row)));
    }

    fn read_stored(&self, first: usize, row_bytes: usize, out: &mut [u8]) {
        (first..).zip(out.chunks_exact_mut(row_bytes)).for_each(|(row, out)| self.write_stored(row, out));
    }
}

impl Noise<'_> {
    fn write_stored(&self, row: usize, out: &mut [u8]) {
        let mut rows = self.formats.iter().flat_map(|(format, rows)| std::iter::repeat_n(*format, *rows));
        let format = rows.nth(row).unwrap();
        // Bits of numbers that differ in all of them.
        let bytes = noise(out.len(), self.seed(row)).into_iter().map(|x| ((x + 1.0) * 128.0) as u8);
        out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = byte);
        for block in out.chunks_exact_mut(format.stored_block().unwrap().bytes) {
            moderate(format, block);
        }
    }
}

/// Gives a block of random bits factors between a quarter and one, and zero points that there are.
fn moderate(format: Format, block: &mut [u8]) {
    let factors: &[usize] = match format {
        Format::Q4K => &[0, 2],
        Format::Q6K => &[208],
        Format::Mxfp4 => &[],
        _ => &[0],
    };
    for &at in factors {
        // The exponents of f16 from 2^-2 to 1.
        block[at + 1] = block[at + 1] & 0x83 | (13 + (block[at + 1] >> 2 & 1)) << 2;
    }
    match format {
        Format::Mxfp4 => block[0] = 120 + block[0] % 16,
        Format::U4 => block[2] %= 17,
        Format::U8 => block[3] = u8::from(block[2] == 0),
        _ => {}
    }
}

/// The next number of inputs that rows of all these formats may have.
pub fn whole(formats: &[(Format, usize)], cols: usize) -> usize {
    let blocks = formats.iter().filter_map(|(format, _)| format.stored_block());
    cols.next_multiple_of(blocks.map(|block| block.inputs).max().unwrap_or(1))
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

/// A matrix of [`Noise`], with `k` inputs of which the formats' blocks must be whole.
pub fn packed_bands(exec: &Exec<'_>, formats: &[(Format, usize)], k: usize, seed: u64) -> PackedMatrix {
    PackedMatrix::pack(exec, formats, k, &Noise { formats, seed, first: 0 }).unwrap()
}

pub fn packed(exec: &Exec<'_>, format: Format, n: usize, k: usize, seed: u64) -> PackedMatrix {
    packed_bands(exec, &[(format, n)], k, seed)
}
