//! mxfp4 of the OCP microscaling formats (MX), in ggml's blocks: e2m1 codes (sign, two exponent bits, one mantissa bit)
//! with a power-of-two scale for each 32 inputs; 4.25 bits per weight.
//!
//! Every 128 inputs have one line of exponents, `[group][row]`, then four lines of codes per group.

use super::blocks::{Values, nibble};
use super::grouped::{self, GROUP, GroupedFormat, Layout, StoredBlock, Whole};
use super::planes::{BitPlanes, Bits};
use crate::arch::{ByteLine, Dot, LANES};

/// Values of the codes, doubled to make them integers.
const VALUES: Values = Values::Table([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]);

/// Bias of a stored exponent, for doubled values.
const BIAS: u8 = 128;

const LAYOUT: Layout = Layout { block_groups: 4, shared: 0, factors: 1, codes: 4 };

/// Stored block: exponent, and codes of the first and the last sixteen inputs in the low and high half of each byte.
#[repr(C, packed)]
struct Stored(u8, [u8; GROUP / 2]);

/// Packing is lossless: four blocks of sixteen rows take as many lines as a block has bytes.
const _: () = assert!(size_of::<Stored>() == Mxfp4::STORED.bytes && LAYOUT.lines(4) == Mxfp4::STORED.bytes);

/// mxfp4 format: ggml's `block_mxfp4`.
pub struct Mxfp4;

/// Packed data of a group.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    codes: &'a [ByteLine; 4],
    exponents: &'a [i8; LANES],
}

impl GroupedFormat for Mxfp4 {
    const STORED: StoredBlock = StoredBlock { inputs: GROUP, bytes: 17 };
    const UNROLLED: bool = false;
    const TURNS: bool = false;

    type Group<'a, S: Dot> = Packed<'a>;
    type Unpacked = Whole<false>;
    type ByCodes = Whole<true>;

    #[inline(always)]
    fn lines(groups: usize) -> usize {
        LAYOUT.lines(groups)
    }

    /// Stores a block. Exponents become signed bytes.
    fn store(lines: &mut [ByteLine], index: usize, blocks: &[&[u8]; LANES]) {
        let (line, of_block) = LAYOUT.factors_of(index);
        for (row, block) in blocks.iter().enumerate() {
            grouped::bytes_mut(lines, line, of_block)[row] = block[0] ^ BIAS;
            grouped::store_codes::<Bits<4>>(&mut lines[LAYOUT.codes_of(index)..], row, |input| {
                nibble(&block[1..], input)
            });
        }
    }

    #[inline(always)]
    fn group<'a, S: Dot>(_: S, lines: &'a [ByteLine], index: usize) -> Packed<'a> {
        let (line, of_block) = LAYOUT.factors_of(index);
        let exponents = bytemuck::cast_ref(grouped::bytes(lines, line, of_block));
        Packed { codes: grouped::lines_at(lines, LAYOUT.codes_of(index)), exponents }
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, group: Packed<'_>, index: usize) -> S::Bytes {
        let biased = const { &VALUES.biased(grouped::unpacked_bias::<S, Self>()) };
        biased.quad(simd, Bits::<4>::quad(simd, group.codes, index))
    }

    /// Returns the scale. The two lowest exponents give subnormal numbers, computed as a product of two powers of two.
    #[inline(always)]
    fn factor<S: Dot>(simd: S, group: Packed<'_>, _: usize) -> S::F32 {
        let exponents = simd.to_f32(simd.load_i8(group.exponents));
        let normal = simd.max(exponents, simd.splat(-126.0));
        simd.mul(simd.exp2_integer(normal), simd.exp2_integer(simd.sub(exponents, normal)))
    }

    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32 {
        let group = input / GROUP;
        let (line, of_block) = LAYOUT.factors_of(group);
        let code = grouped::code::<Bits<4>>(&lines[LAYOUT.codes_of(group)..], input % GROUP, row);
        let factor = match grouped::bytes(lines, line, of_block)[row] ^ BIAS {
            subnormal @ 0..2 => f32::from_bits(0x0020_0000 << subnormal),
            exponent => f32::from_bits(u32::from(exponent - 1) << 23),
        };
        factor * VALUES.of(code)
    }

    fn set_deviation(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        // Divided by the root mean square of the values, and rounded to a power of two.
        let exponent = (deviation / 5.895).log2().round() as i8;
        for group in 0..groups {
            let (line, of_block) = LAYOUT.factors_of(group);
            grouped::bytes_mut(lines, line, of_block).fill(exponent as u8);
        }
    }
}
