//! ggml's q8_0: codes in -128..=127 with an f16 scale for each 32 inputs; 8.5 bits per weight.
//!
//! Packed codes are stored as code + 128.

use std::ops::RangeInclusive;

use super::Int8;
use super::blocks::{BlockFormat, Values, stored_half};
use super::grouped::{GROUP, StoredBlock, Whole};
use super::planes::Bits;
use super::quantize::{Grid, not_finite};
use crate::arch::{Isa, Kernel, LANES, Simd};

/// Offset of a packed code from its value.
const OFFSET: u8 = 128;

/// q8_0 format: ggml's `block_q8_0`.
pub struct Q8_0;

/// Candidate codes for the largest number of a group, which determine the scale.
const PEAK_CODES: RangeInclusive<u8> = 64..=127;

impl Q8_0 {
    /// Quantizes numbers to stored blocks.
    ///
    /// Numbers that were quantized before lie on a grid that the usual scale, absmax / 127, rarely matches. Of the scales
    /// that map the largest number to a code in 64..=127, the one with the least squared error is chosen: multiples of a
    /// scale by codes of up to seven bits are preserved exactly, FP8 numbers and 4-bit lookup values almost exactly. If a
    /// number is not finite, its whole group becomes NaN. All instruction sets give the same result.
    ///
    /// # Panics
    /// If `blocks` does not have one block for each 32 numbers.
    pub fn quantize(numbers: &[f32], blocks: &mut [u8]) {
        let (groups, rest) = numbers.as_chunks::<GROUP>();
        let (blocks, part) = blocks.as_chunks_mut::<{ Self::STORED.bytes }>();
        assert!(
            rest.is_empty() && part.is_empty() && groups.len() == blocks.len(),
            "blocks must have one block per group of 32"
        );
        Isa::best().run(Quantize { groups, blocks });
    }
}

/// Kernel that quantizes groups, sixteen at a time.
struct Quantize<'a> {
    groups: &'a [[f32; GROUP]],
    blocks: &'a mut [[u8; Q8_0::STORED.bytes]],
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let grid = Grid::<S, Int8>::new(simd);
        for (groups, blocks) in self.groups.chunks(LANES).zip(self.blocks.chunks_mut(LANES)) {
            let mut columns = [[[0.0; LANES]; GROUP / 2]; 2];
            for (lane, group) in groups.iter().enumerate() {
                for (column, value) in columns.as_flattened_mut().iter_mut().zip(group) {
                    column[lane] = *value;
                }
            }
            let largest = grid.peak(columns.as_flattened());
            let (mut best, mut least) = (simd.splat(0.0), simd.splat(f32::INFINITY));
            for code in PEAK_CODES.rev() {
                let scale = grid.to_f16(simd.div(largest, simd.splat(f32::from(code))));
                let [first, second] = &columns;
                let error =
                    simd.add(grid.error(first, scale, |_, error| error), grid.error(second, scale, |_, error| error));
                best = simd.select_greater(least, error, scale, best);
                least = simd.min(error, least);
            }
            let mut factors = [0; LANES];
            simd.store_f16(simd.add(best, not_finite(simd, &columns)), &mut factors);
            for (block, factor) in blocks.iter_mut().zip(factors) {
                block[..2].copy_from_slice(&factor.to_le_bytes());
            }
            let inverse = grid.inverse(best);
            for (input, column) in columns.as_flattened().iter().enumerate() {
                let mut codes = [0; LANES];
                simd.store_i8(simd.to_i32(grid.code(simd.load(column), inverse)), &mut codes);
                for (block, code) in blocks.iter_mut().zip(codes) {
                    block[2 + input] = code.cast_unsigned();
                }
            }
        }
    }
}

impl BlockFormat for Q8_0 {
    const STORED: StoredBlock = StoredBlock { inputs: GROUP, bytes: 34 };
    const VALUES: Values = Values::Minus(OFFSET);

    type Codes = Bits<8>;
    type SubScaleBits = Bits<0>;
    type Unpacked = Whole<false>;
    type ByCodes = Whole<false>;

    fn scale(block: &[u8], _: usize) -> u16 {
        stored_half(block)
    }

    fn code(block: &[u8], input: usize) -> u8 {
        block[2 + input] ^ OFFSET
    }
}
