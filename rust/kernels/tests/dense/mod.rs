//! Random matrices and execution contexts for matmul tests.

use std::num::NonZeroUsize;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::{Cancel, Exec, Format, PackedMatrix, Pool, RowSource};

/// Row source of random weights: numbers or quantized blocks, by the format of each row.
pub struct Noise<'a> {
    pub formats: &'a [(Format, usize)],
    pub seed: u64,
    /// Index of the first row in the sequence of this seed.
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
        // The upper bits of the numbers, which all vary.
        let bytes = noise(out.len(), self.seed(row)).into_iter().map(|x| ((x + 1.0) * 128.0) as u8);
        out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = byte);
        for block in out.chunks_exact_mut(format.stored_block().unwrap().bytes) {
            set_valid_scales(format, block);
            if format.is_sparse() {
                thin_out(&mut block[2..]);
            }
            if format == Format::Int4TwoOfFour {
                block[2..].iter_mut().for_each(|code| *code = (code.cast_signed() >> 4).cast_unsigned());
            }
        }
    }
}

/// Sets the scales of a random block to numbers between 1/4 and 1, and its zero points to valid ones.
fn set_valid_scales(format: Format, block: &mut [u8]) {
    let factors: &[usize] = match format {
        Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => &[0, 2],
        Format::Q2K => &[80, 82],
        Format::Q3K => &[108],
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

/// Clears one of each two codes.
fn thin_out(codes: &mut [u8]) {
    for pair in codes.as_chunks_mut::<2>().0 {
        pair[usize::from(pair[0] >> 3 & 1)] = 0;
    }
}

/// Rounds `cols` up to whole stored blocks of all these formats.
pub fn whole(formats: &[(Format, usize)], cols: usize) -> usize {
    let blocks = formats.iter().filter_map(|(format, _)| format.stored_block());
    cols.next_multiple_of(blocks.map(|block| block.inputs).max().unwrap_or(1))
}

/// Returns numbers in [-1, 1) from a linear congruential generator, which is fast and deterministic.
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

/// Packs a matrix with the fastest instruction set: all of them quantize to the same bits, and the search for the codes of a
/// trellis format takes most of the time of a test.
pub fn pack(formats: &[(Format, usize)], k: usize, source: &dyn RowSource) -> PackedMatrix {
    with_exec(Isa::best(), 2, |exec| PackedMatrix::pack(exec, formats, k, source)).unwrap()
}

/// Packs a matrix of [`Noise`]. `k` must be a whole number of stored blocks of the formats.
pub fn packed_bands(formats: &[(Format, usize)], k: usize, seed: u64) -> PackedMatrix {
    pack(formats, k, &Noise { formats, seed, first: 0 })
}

pub fn packed(format: Format, n: usize, k: usize, seed: u64) -> PackedMatrix {
    packed_bands(&[(format, n)], k, seed)
}
