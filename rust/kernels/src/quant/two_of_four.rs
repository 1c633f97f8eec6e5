//! Formats that store two of each four weights (2:4 sparsity), with an f16 scale for each 64 inputs: int8_2of4, 5.25 bits
//! per weight, and int4_2of4, 3.25 bits.
//!
//! Of each four inputs of a row, two codes are stored, and which inputs they belong to. A line has the codes of eight
//! inputs of each row, or the indices of those codes. Such lines are stored in [bit planes](super::planes), those of 64
//! inputs together: first the indices, then the codes plus an offset. Before the lines of 128 inputs is one with their
//! scales.
//!
//! Products with few rows of activations select the activations that the codes belong to, and are half as many as those
//! of dense weights.

use super::grouped::{GROUP, Whole, half_of, halves, halves_mut};
use super::integer::{BLOCK, BLOCK_PAIRS, PAIR_QUADS, Unpack};
use super::planes::{self, BitPlanes, Bits};
use super::sparse::{Rows, SparseFormat, TooDense};
use crate::arch::{ByteLine, Dot, LANES, LINE};
use crate::matmul::sparse::{FewRows, Selects};
use crate::matmul::unroll::unroll;

/// int8_2of4 format: codes in -127..=127.
pub type Int8TwoOfFour = TwoOfFour<8>;

/// int4_2of4 format: codes in -8..=7.
pub type Int4TwoOfFour = TwoOfFour<4>;

/// 2:4 format with codes of `BITS` bits.
pub struct TwoOfFour<const BITS: usize>;

/// Number of inputs whose lines are stored together.
const UNIT: usize = 2 * GROUP;

/// Number of units of a block.
const UNITS: usize = BLOCK / UNIT;

/// Number of lines of codes of a unit before they are stored in planes.
const CODE_LINES: usize = PAIR_QUADS;

/// Number of lines of an unpacked group: one for each four inputs, and one for its factor.
const UNPACKED_LINES: usize = PAIR_QUADS + 1;

/// Number of weights that are stored of four.
const KEPT: usize = 2;

/// Codes of a 2:4 format.
pub trait Codes: BitPlanes {
    /// Unpacked form on instruction sets that multiply codes, if codes are small enough.
    type ByCodes: Unpack;
}

impl Codes for Bits<8> {
    type ByCodes = Whole<false>;
}

impl Codes for Bits<4> {
    type ByCodes = Whole<true>;
}

impl<const BITS: usize> TwoOfFour<BITS> {
    /// Offset of a stored code from its value.
    const OFFSET: u8 = 1 << (BITS - 1);

    /// Number of lines of a unit: those of the indices, of two bits, and those of the codes.
    const UNIT_LINES: usize = 2 + BITS;

    /// Returns the lines of the indices and of the codes of unit `index` of a panel.
    #[inline(always)]
    fn unit(lines: &[ByteLine], index: usize) -> (&[ByteLine], &[ByteLine]) {
        lines[index / UNITS + 1 + index * Self::UNIT_LINES..][..Self::UNIT_LINES].split_at(2)
    }

    /// Mutable version of [`TwoOfFour::unit`].
    fn unit_mut(lines: &mut [ByteLine], index: usize) -> (&mut [ByteLine], &mut [ByteLine]) {
        lines[index / UNITS + 1 + index * Self::UNIT_LINES..][..Self::UNIT_LINES].split_at_mut(2)
    }

    /// Returns the line of the scales of unit `index`, and their index there.
    #[inline(always)]
    const fn scales_at(index: usize) -> (usize, usize) {
        (index / UNITS * (1 + UNITS * Self::UNIT_LINES), index % UNITS)
    }

    /// Returns the line, and the byte there, of the first of the codes of four inputs: those from input `input` of a unit
    /// on.
    const fn place(row: usize, input: usize) -> (usize, usize) {
        (input / 8, row * 4 + input / 4 % 2 * KEPT)
    }
}

/// Returns the indices of the inputs of which codes are stored: the nonzero ones, and others if these are fewer.
fn kept(codes: [i8; 4]) -> Result<[usize; KEPT], TooDense> {
    let nonzero = codes.iter().filter(|code| **code != 0).count();
    if nonzero > KEPT {
        return Err(TooDense { weights: codes.len(), nonzero, limit: KEPT });
    }
    let mut order = [0, 1, 2, 3];
    order.sort_by_key(|input| codes[*input] == 0);
    let mut kept = [order[0], order[1]];
    kept.sort_unstable();
    Ok(kept)
}

impl<const BITS: usize> SparseFormat for TwoOfFour<BITS>
where
    Bits<BITS>: Codes,
{
    const INPUTS: usize = UNIT;
    const BITS: usize = BITS;
    const EXPANDS: bool = false;
    const UNPACKED_BLOCK_LINES: usize = BLOCK_PAIRS * UNPACKED_LINES;

    type Unpacked = Whole<false>;
    type ByCodes = <Bits<BITS> as Codes>::ByCodes;

    fn lines(cols: usize) -> usize {
        let units = cols.div_ceil(UNIT);
        units.div_ceil(UNITS) + units * Self::UNIT_LINES
    }

    fn first_line(index: usize) -> usize {
        index * (1 + UNITS * Self::UNIT_LINES)
    }

    fn pack(rows: &Rows<'_>, lines: &mut [ByteLine]) -> Result<(), TooDense> {
        for (unit, row) in (0..rows.cols() / UNIT).flat_map(|unit| (0..LANES).map(move |row| (unit, row))) {
            let (line, half) = Self::scales_at(unit);
            halves_mut(lines, line, half)[row] = rows.scale(row, unit * UNIT);
            let (indices, stored) = Self::unit_mut(lines, unit);
            let (indices, stored) = (planes::vectors_mut::<LINE>(indices), planes::vectors_mut::<LINE>(stored));
            for input in (0..UNIT).step_by(4) {
                let codes = std::array::from_fn(|i| rows.code(row, unit * UNIT + input + i));
                let (line, byte) = Self::place(row, input);
                for (slot, kept) in kept(codes)?.into_iter().enumerate() {
                    let code = i16::from(codes[kept]) + i16::from(Self::OFFSET);
                    assert!((0..1 << BITS).contains(&code), "code {} does not have {BITS} bits", codes[kept]);
                    Bits::<2>::store(indices, CODE_LINES, line, byte + slot, kept as u8);
                    Bits::<BITS>::store(stored, CODE_LINES, line, byte + slot, code as u8);
                }
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn few_rows<S: Dot, const R: usize>(simd: S, panels: FewRows<'_, '_, '_, Self>) {
        panels.select::<S, R>(simd);
    }

    #[inline(always)]
    fn unpack<S: Dot>(simd: S, lines: &[ByteLine], index: usize, groups: usize, to: &mut [ByteLine]) {
        let bias = match Self::ByCodes::BY_CODES {
            Some(codes) if S::BY_CODES => codes.offset() as u8,
            _ => S::WEIGHT_BIAS,
        };
        let bias = simd.splat_byte(bias.wrapping_neg());
        let units = to.as_chunks_mut::<{ 2 * UNPACKED_LINES }>().0.iter_mut().take(groups / 2);
        for (unit, to) in (index * UNITS..).zip(units) {
            let factor = Self::factor(simd, lines, unit);
            unroll!(line in [0 1 2 3 4 5 6 7] {
                let (stored, indices) = Self::kept(simd, lines, unit, line);
                let codes = simd.sub_bytes(stored, simd.splat_byte(Self::OFFSET));
                unroll!(quad in [0 1] {
                    let first = Self::slot(simd, codes, indices, 2 * quad);
                    let weights = simd.or(first, Self::slot(simd, codes, indices, 2 * quad + 1));
                    let at = line / 4 * UNPACKED_LINES + line % 4 * 2 + quad;
                    simd.store_bytes(simd.sub_bytes(weights, bias), &mut to[at].0);
                });
            });
            simd.store(factor, bytemuck::cast_mut(&mut to[PAIR_QUADS]));
            simd.store(factor, bytemuck::cast_mut(&mut to[UNPACKED_LINES + PAIR_QUADS]));
        }
    }

    fn make_valid(lines: &mut [ByteLine], cols: usize, scale: u16) {
        for unit in 0..cols / UNIT {
            let (line, half) = Self::scales_at(unit);
            halves_mut(lines, line, half).fill(scale);
            // Inputs 0 or 1 and 2 or 3 of each four: the second index of two has the higher bit.
            let pairs = Self::unit_mut(lines, unit).0.iter_mut().flat_map(|line| line.0.as_chunks_mut::<2>().0);
            pairs.for_each(|[first, second]| (*first, *second) = (*first & 0x55, *second | 0xaa));
        }
    }

    fn read_row(lines: &[ByteLine], row: usize, out: &mut [f32]) {
        out.fill(0.0);
        for (unit, out) in out.chunks_mut(UNIT).enumerate() {
            let (line, half) = Self::scales_at(unit);
            let scale = half_of(halves(lines, line, half), row);
            let (indices, codes) = Self::unit(lines, unit);
            let (indices, codes) = (planes::vectors::<LINE>(indices), planes::vectors::<LINE>(codes));
            for (quad, out) in out.chunks_mut(4).enumerate() {
                let (line, byte) = Self::place(row, quad * 4);
                for slot in byte..byte + KEPT {
                    let input = Bits::<2>::number(indices, CODE_LINES, line, slot);
                    let code = Bits::<BITS>::number(codes, CODE_LINES, line, slot);
                    out[usize::from(input)] += (f32::from(code) - f32::from(Self::OFFSET)) * scale;
                }
            }
        }
    }
}

impl<const BITS: usize> Selects for TwoOfFour<BITS>
where
    Bits<BITS>: Codes,
{
    const OFFSET: u8 = Self::OFFSET;

    #[inline(always)]
    fn kept<S: Dot>(simd: S, lines: &[ByteLine], unit: usize, index: usize) -> (S::Bytes, S::Bytes) {
        let (indices, codes) = Self::unit(lines, unit);
        (Bits::<BITS>::quad(simd, codes, index), Bits::<2>::quad(simd, indices, index))
    }

    #[inline(always)]
    fn factor<S: Dot>(simd: S, lines: &[ByteLine], unit: usize) -> S::F32 {
        let (line, half) = Self::scales_at(unit);
        simd.load_f16(halves(lines, line, half))
    }
}

impl<const BITS: usize> TwoOfFour<BITS> {
    /// Returns the codes of slot `slot` of a line in the places of their inputs, and zeros elsewhere.
    #[inline(always)]
    fn slot<S: Dot>(simd: S, codes: S::Bytes, indices: S::Bytes, slot: usize) -> S::Bytes {
        /// Bytes that are zero.
        const IS_ZERO: [u8; LANES] = [u8::MAX, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let everywhere = simd.load_bytes(&EVERYWHERE[slot].0);
        let other = simd.xor(simd.shuffle(indices, everywhere), simd.splat_quad([0, 1, 2, 3]));
        simd.and(simd.lookup(&IS_ZERO, other), simd.shuffle(codes, everywhere))
    }
}

/// For each slot of a lane, the shuffle that copies it to all bytes of the lane.
static EVERYWHERE: [ByteLine; 4] = {
    let mut shuffles = [ByteLine([0; LINE]); 4];
    let mut slot = 0;
    while slot < shuffles.len() {
        let mut byte = 0;
        while byte < LINE {
            shuffles[slot].0[byte] = (byte % LANES / 4 * 4 + slot) as u8;
            byte += 1;
        }
        slot += 1;
    }
    shuffles
};
