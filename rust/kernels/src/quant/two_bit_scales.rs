//! Sub-scales of two bits, in a line before the codes of their super-block.
//!
//! A super-block is a line of sub-scales, then the codes of its one or two blocks, of which the last may be a half
//! block. Byte 16 j + r of the sub-scales belongs to row r and holds the sub-scale of group 4j + i, less the lowest
//! sub-scale of the format, in bits 2i and 2i + 1.
//!
//! Codes of formats that store them in [`planes`] take as many lines for a pair of groups as they have bits.

use std::ops::Range;

use super::integer::{BLOCK, BLOCK_GROUPS, BLOCK_PAIRS, GROUP, HALF, PAIR_QUADS, SUPER};
use super::planes::{self, BitPlanes};
use crate::arch::{ByteLine, Dot, LANES, LINE};

const SUPER_BLOCKS: usize = SUPER / BLOCK;
const BLOCK_HALVES: usize = BLOCK / HALF;

/// Layout of a panel.
#[derive(Clone, Copy)]
pub struct TwoBitScales {
    /// Number of lines of the codes of a block.
    pub code_lines: usize,
    /// Lowest sub-scale; the highest is three above it.
    pub lowest: u8,
    /// Offset of a code that is multiplied from its value. Products of both with a sub-scale fit a byte.
    pub offset: u8,
}

/// Packed block: its half of the sub-scales, and the lines from those of its codes on.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    scales: &'a [[u8; LANES]; 2],
    pub codes: &'a [ByteLine],
}

/// Sub-scales of two groups.
#[derive(Clone, Copy)]
pub struct PairScales<S: Dot> {
    /// Sub-scales of each group, in the low byte of each pair of bytes.
    pub scales: [S::Bytes; 2],
    /// Difference of `sub-scale * (code + offset)` and `sub-scale * code + bias` of each group, in each byte.
    offsets: [S::Bytes; 2],
}

/// Packed data of two groups whose codes are stored in planes.
#[derive(Clone, Copy)]
pub struct PlanePair<'a, S: Dot> {
    pub codes: &'a [ByteLine],
    pub scales: PairScales<S>,
}

impl<S: Dot> PairScales<S> {
    /// Returns the weights of codes plus their offset in group `group` of the pair, with the bias of the instruction set.
    #[inline(always)]
    pub fn weights(self, simd: S, codes: S::Bytes, group: usize) -> S::Bytes {
        // The products fit a byte, so a product of byte pairs is two byte products.
        simd.sub_bytes(simd.mul_pairs(codes, self.scales[group]), self.offsets[group])
    }
}

impl TwoBitScales {
    /// Returns the layout of codes in planes of type `B`.
    pub const fn of_planes<B: BitPlanes>(lowest: u8, offset: u8) -> Self {
        Self { code_lines: BLOCK_PAIRS * B::BITS, lowest, offset }
    }

    /// Returns the lowest and the highest sub-scale.
    pub const fn range(self) -> [i32; 2] {
        [self.lowest as i32, self.lowest as i32 + 3]
    }

    /// Returns the number of lines of `halves` half blocks.
    pub fn lines(self, halves: usize) -> usize {
        halves.div_ceil(SUPER_BLOCKS * BLOCK_HALVES) + halves * self.code_lines / BLOCK_HALVES
    }

    /// Returns the line of the sub-scales of block `index`.
    #[inline(always)]
    fn scale_line(self, index: usize) -> usize {
        index / SUPER_BLOCKS * (1 + SUPER_BLOCKS * self.code_lines)
    }

    /// Returns the first line of the codes of block `index`.
    #[inline(always)]
    pub fn first_code_line(self, index: usize) -> usize {
        self.scale_line(index) + 1 + index % SUPER_BLOCKS * self.code_lines
    }

    /// Returns the first line of block `index`: that of the sub-scales, if the super-block begins with it.
    #[inline(always)]
    pub fn first_line(self, index: usize) -> usize {
        self.first_code_line(index) - usize::from(index.is_multiple_of(SUPER_BLOCKS))
    }

    /// Returns block `index` of a panel.
    #[inline(always)]
    pub fn block(self, lines: &[ByteLine], index: usize) -> Block<'_> {
        let scales = lines[self.scale_line(index)].0.as_chunks::<LANES>().0;
        Block { scales: &scales.as_chunks().0[index % SUPER_BLOCKS], codes: &lines[self.first_code_line(index)..] }
    }

    /// Returns the sub-scales of groups `2 * index` and `2 * index + 1` of a block.
    #[inline(always)]
    pub fn pair<S: Dot>(self, simd: S, block: Block<'_>, index: usize) -> PairScales<S> {
        let four = simd.spread(&block.scales[index / 2]);
        let two = if index.is_multiple_of(2) { four } else { simd.shift_right::<4>(four) };
        let (low, less) = (simd.splat_quad([0x03, 0, 0x03, 0]), -self.lowest.cast_signed());
        let scales = |stored| simd.sub_bytes(simd.and(stored, low), simd.splat_quad([less, 0, less, 0]));
        let scales = [scales(two), scales(simd.shift_right::<2>(two))];
        let offset =
            |scales| simd.xor(simd.mul_pairs(scales, simd.splat_byte(self.offset)), simd.splat_byte(S::WEIGHT_BIAS));
        PairScales { scales, offsets: [offset(scales[0]), offset(scales[1])] }
    }

    /// Stores the sub-scales of group `group` of block `block` into zeroed lines.
    pub fn store(self, lines: &mut [ByteLine], block: usize, group: usize, scales: &[u8; LANES]) {
        let of_super = block % SUPER_BLOCKS * BLOCK_GROUPS + group;
        let line = &mut lines[self.scale_line(block)];
        for (row, scale) in scales.iter().enumerate() {
            line.0[of_super / 4 * LANES + row] |= (scale - self.lowest) << (2 * (of_super % 4));
        }
    }

    /// Returns the sub-scale of group `group` of block `block` in row `row`.
    pub fn scale(self, lines: &[ByteLine], block: usize, group: usize, row: usize) -> i32 {
        let of_super = block % SUPER_BLOCKS * BLOCK_GROUPS + group;
        let stored = lines[self.scale_line(block)].0[of_super / 4 * LANES + row] >> (2 * (of_super % 4)) & 3;
        i32::from(stored + self.lowest)
    }

    /// Returns groups `2 * index` and `2 * index + 1` of a block whose codes are stored in planes.
    #[inline(always)]
    pub fn plane_pair<B: BitPlanes, S: Dot>(self, simd: S, block: Block<'_>, index: usize) -> PlanePair<'_, S> {
        PlanePair { codes: &block.codes[index * B::BITS..][..B::BITS], scales: self.pair(simd, block, index) }
    }

    /// Returns the lines of the codes of a pair of groups, stored in planes, and the index of quad `quad` of group `group`.
    fn plane_lines<B: BitPlanes>(self, block: usize, group: usize, quad: usize) -> (Range<usize>, usize) {
        let first = self.first_code_line(block) + group / 2 * B::BITS;
        (first..first + B::BITS, group % 2 * (GROUP / 4) + quad)
    }

    /// Stores group `group` of block `block` into zeroed lines: the sub-scales of its rows, and its codes `[input][row]`
    /// as the numbers that `number` returns.
    pub fn store_planes<B: BitPlanes>(
        self,
        lines: &mut [ByteLine],
        (block, group): (usize, usize),
        codes: &[[i8; LANES]; GROUP],
        scales: &[u8; LANES],
        number: impl Fn(i8) -> u8,
    ) {
        self.store(lines, block, group, scales);
        for (input, codes) in codes.iter().enumerate() {
            let (range, quad) = self.plane_lines::<B>(block, group, input / 4);
            let lines = planes::vectors_mut::<LINE>(&mut lines[range]);
            for (row, code) in codes.iter().enumerate() {
                B::store(lines, PAIR_QUADS, quad, row * 4 + input % 4, number(*code));
            }
        }
    }

    /// Returns the sub-scale and the stored number of one rotated weight: row `row`, input `input` of block `block`.
    pub fn plane_weight<B: BitPlanes>(self, lines: &[ByteLine], block: usize, input: usize, row: usize) -> (i32, u8) {
        let group = input / GROUP;
        let (range, quad) = self.plane_lines::<B>(block, group, input % GROUP / 4);
        let number = B::number(planes::vectors::<LINE>(&lines[range]), PAIR_QUADS, quad, row * 4 + input % 4);
        (self.scale(lines, block, group, row), number)
    }
}
