//! mxfp4 of the OCP microscaling formats, in ggml's blocks: numbers of one sign, two exponent bits and one of mantissa,
//! and a power of two for each 32 inputs. 4.25 bits a weight.
//!
//! Of each 128 inputs the factors are one line, `[group][row]`, of exponents, then four lines a group hold codes.

use super::grouped::{self, GROUP, Group, GroupedFormat, Layout, StoredBlock, Whole};
use crate::arch::{ByteLine, LANES, Simd};

/// What the codes stand for, doubled, so that all are integers.
const VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// What a stored exponent is above that of the factor of doubled values.
const BIAS: u8 = 128;

const LAYOUT: Layout = Layout { block_groups: 4, factors: 1, codes: 4 };

/// A stored block: the exponent, and the codes of its first and its last sixteen inputs, low and high in each byte.
#[repr(C, packed)]
struct Stored(u8, [u8; GROUP / 2]);

/// Sixteen rows of four blocks are as many lines as a block has bytes.
const _: () = assert!(size_of::<Stored>() == Mxfp4::STORED.bytes && LAYOUT.lines(4) == Mxfp4::STORED.bytes);

/// ggml's `block_mxfp4`.
pub struct Mxfp4;

impl GroupedFormat for Mxfp4 {
    const STORED: StoredBlock = StoredBlock { inputs: GROUP, bytes: 17 };

    type Unpacked = Whole<false>;
    type ByCodes = Whole<true>;

    #[inline(always)]
    fn lines(groups: usize) -> usize {
        LAYOUT.lines(groups)
    }

    /// Exponents are kept as signed bytes.
    fn store(lines: &mut [ByteLine], index: usize, blocks: &[&[u8]; LANES]) {
        let (line, of_block) = LAYOUT.factors_of(index);
        for (row, block) in blocks.iter().enumerate() {
            grouped::bytes_mut(lines, line, of_block)[row] = block[0] ^ BIAS;
            grouped::store_nibbles(&mut lines[LAYOUT.codes_of(index)..], row, &grouped::stored_nibbles(&block[1..]));
        }
    }

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, lines: &[ByteLine], index: usize, to: &mut Group) {
        let (line, of_block) = LAYOUT.factors_of(index);
        let exponents = bytemuck::cast_ref(grouped::bytes(lines, line, of_block));
        let exponents = simd.to_f32(simd.load_i8(exponents));
        // The two lowest are those of subnormal numbers, which are products of two powers.
        let normal = simd.max(exponents, simd.splat(-126.0));
        let factors = simd.mul(simd.exp2_integer(normal), simd.exp2_integer(simd.sub(exponents, normal)));
        simd.store(factors, &mut to.factors[0]);
        let table = const { &grouped::raised::<S, Self>(&VALUES) };
        grouped::unpack_nibbles(simd, &lines[LAYOUT.codes_of(index)..], to, |codes| simd.lookup(table, codes));
    }

    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32 {
        let group = input / GROUP;
        let (line, of_block) = LAYOUT.factors_of(group);
        let code = grouped::nibble(&lines[LAYOUT.codes_of(group)..], input % GROUP, row);
        let factor = match grouped::bytes(lines, line, of_block)[row] ^ BIAS {
            subnormal @ 0..2 => f32::from_bits(0x0020_0000 << subnormal),
            exponent => f32::from_bits(u32::from(exponent - 1) << 23),
        };
        factor * f32::from(VALUES[usize::from(code)])
    }

    fn level(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        // The root mean square of the values; the factor is the nearest power of two.
        let exponent = (deviation / 5.895).log2().round() as i8;
        for group in 0..groups {
            let (line, of_block) = LAYOUT.factors_of(group);
            grouped::bytes_mut(lines, line, of_block).fill(exponent as u8);
        }
    }
}
