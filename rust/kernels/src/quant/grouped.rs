//! What the formats have in common whose codes other programs chose.
//!
//! A model that was quantized elsewhere keeps the codes and the scales that it has: packing moves bits, and changes no
//! number. Weights share floating-point factors in groups of [`GROUP`] inputs, or in halves of them. Unpacked
//! ([`Group`]), a group is bytes to multiply with those of the activations, and what their sum is multiplied with:
//!
//! `sum += integer * (factor * activations' scale) - offset * activations' sum`, of one group after the other.
//!
//! A panel of sixteen rows is one run of lines of 64 bytes, group by group as far as the row reaches, where the factors
//! of some groups stand before the codes of all of them ([`Layout`]). Codes lie as in [`integer`](super::integer): four
//! inputs of each row in a line, or eight where two codes share a byte.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};

use super::integer::{BLOCK_PAIRS, Codes, PAIR_QUADS, Unpack};
use crate::arch::{ByteLine, LANES, Simd};
use crate::matmul::unroll::unroll;

/// Inputs of a group.
pub const GROUP: usize = 4 * PAIR_QUADS;

/// A block of a row as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// Weights in it.
    pub inputs: usize,
    /// Bytes of it.
    pub bytes: usize,
}

impl StoredBlock {
    /// Bytes of a row of `cols` weights.
    #[must_use]
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols / self.inputs * self.bytes
    }
}

/// A format whose groups have floating-point factors.
pub trait GroupedFormat: Send + Sync + 'static {
    /// What rows are stored in.
    const STORED: StoredBlock;

    /// What a group is unpacked from.
    type Group<'a, S: Simd>: Copy;

    /// What groups are unpacked to.
    type Unpacked: Unpack;
    /// The same where codes are multiplied, if they are small enough for it.
    type ByCodes: Unpack;

    /// Lines that so many groups take.
    fn lines(groups: usize) -> usize;

    /// Stores block `index` of sixteen rows in lines that are zero.
    fn store(lines: &mut [ByteLine], index: usize, blocks: &[&[u8]; LANES]);

    /// Group `index` of a panel.
    fn group<'a, S: Simd>(simd: S, lines: &'a [ByteLine], index: usize) -> Self::Group<'a, S>;

    /// Four inputs of a group; bytes lie [`raise`] above their values.
    fn quad<S: Simd>(simd: S, group: Self::Group<'_, S>, index: usize) -> S::Bytes;

    /// Factor `index` of a group, of which there are as many as `Unpacked` has.
    fn factor<S: Simd>(simd: S, group: Self::Group<'_, S>, index: usize) -> S::F32;

    /// One weight: of row `row` and input `input`.
    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32;

    /// Gives `groups` groups of random codes such factors that their weights' root mean square is about `deviation`.
    fn level(lines: &mut [ByteLine], groups: usize, deviation: f32);
}

/// A group of sixteen rows, unpacked.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Group {
    /// A line for each four inputs; bytes lie [`raise`] above their values.
    pub quads: [ByteLine; PAIR_QUADS],
    /// The factor of each row; after it that of the second half, or the offset.
    pub factors: [[f32; LANES]; 2],
}

/// Lines of an unpacked group.
const UNPACKED_LINES: usize = size_of::<Group>() / size_of::<ByteLine>();

const _: () = assert!(UNPACKED_LINES == PAIR_QUADS + 2);

/// Lines of as many unpacked groups as a block of activations has.
pub const UNPACKED_BLOCK_LINES: usize = BLOCK_PAIRS * UNPACKED_LINES;

/// What the factors of a group belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Factors {
    /// Whether each half of the group has its own factor.
    pub halves: bool,
    /// Whether a second factor is that of the activations' sum.
    pub offsets: bool,
}

/// Unpacked groups; with `SMALL` codes those that are multiplied as codes of six bits where codes are.
pub struct UnpackedGroups<const HALVES: bool, const OFFSETS: bool, const SMALL: bool>;

/// Groups with one factor.
pub type Whole<const SMALL: bool> = UnpackedGroups<false, false, SMALL>;

/// Groups with a factor for each half.
pub type Halves<const SMALL: bool> = UnpackedGroups<true, false, SMALL>;

/// Groups with a factor and an offset.
pub type Offset<const SMALL: bool> = UnpackedGroups<false, true, SMALL>;

impl<const HALVES: bool, const OFFSETS: bool, const SMALL: bool> Unpack for UnpackedGroups<HALVES, OFFSETS, SMALL> {
    const BY_CODES: Option<Codes> = if SMALL { Some(Codes::SixBits) } else { None };
    const FACTORS: Option<Factors> = Some(Factors { halves: HALVES, offsets: OFFSETS });

    type Block<'a> = &'a [ByteLine; UNPACKED_BLOCK_LINES];
    type Pair<'a, S: Simd> = &'a [ByteLine; UNPACKED_LINES];

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        index * UNPACKED_BLOCK_LINES
    }

    #[inline(always)]
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_> {
        &lines.as_chunks().0[index]
    }

    #[inline(always)]
    fn pair<'a, S: Simd>(_: S, block: Self::Block<'a>, index: usize) -> Self::Pair<'a, S> {
        &block.as_chunks().0[index]
    }

    #[inline(always)]
    fn quad<S: Simd>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        simd.load_bytes(&pair[index].0)
    }

    #[inline(always)]
    fn codes<S: Simd>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        Self::quad(simd, pair, index)
    }

    /// One: what sub-scales there are is part of the factors.
    #[inline(always)]
    fn scale<S: Simd>(simd: S, _: Self::Pair<'_, S>, _: usize) -> S::Bytes {
        simd.splat_quad([1, 0, 1, 0])
    }

    #[inline(always)]
    fn factor<S: Simd>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::F32 {
        simd.load(bytemuck::cast_ref(&pair[PAIR_QUADS + index]))
    }
}

/// Groups of a format as they come from memory.
pub struct Packed<F>(PhantomData<F>);

impl<F: GroupedFormat> Unpack for Packed<F> {
    const BY_CODES: Option<Codes> = F::ByCodes::BY_CODES;
    const FACTORS: Option<Factors> = F::Unpacked::FACTORS;

    /// The panel's lines, and the number of the block's first group.
    type Block<'a> = (&'a [ByteLine], usize);
    type Pair<'a, S: Simd> = F::Group<'a, S>;

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        F::lines(index * BLOCK_PAIRS)
    }

    #[inline(always)]
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_> {
        (lines, index * BLOCK_PAIRS)
    }

    #[inline(always)]
    fn pair<'a, S: Simd>(simd: S, (lines, first): Self::Block<'a>, index: usize) -> Self::Pair<'a, S> {
        F::group(simd, lines, first + index)
    }

    #[inline(always)]
    fn quad<S: Simd>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        F::quad(simd, pair, index)
    }

    #[inline(always)]
    fn codes<S: Simd>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        F::quad(simd, pair, index)
    }

    /// One: what sub-scales there are is part of the factors.
    #[inline(always)]
    fn scale<S: Simd>(simd: S, _: Self::Pair<'_, S>, _: usize) -> S::Bytes {
        simd.splat_quad([1, 0, 1, 0])
    }

    #[inline(always)]
    fn factor<S: Simd>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::F32 {
        F::factor(simd, pair, index)
    }
}

/// Unpacks group `index` of a panel.
#[inline(always)]
pub fn unpack<S: Simd, F: GroupedFormat>(simd: S, lines: &[ByteLine], index: usize, to: &mut Group) {
    let group = F::group(simd, lines, index);
    unroll!(quad in [0 1 2 3 4 5 6 7] { simd.store_bytes(F::quad(simd, group, quad), &mut to.quads[quad].0) });
    simd.store(F::factor(simd, group, 0), &mut to.factors[0]);
    if const { !matches!(F::Unpacked::FACTORS, Some(Factors { halves: false, offsets: false })) } {
        simd.store(F::factor(simd, group, 1), &mut to.factors[1]);
    }
}

/// What unpacked bytes are above their values.
pub const fn raise<S: Simd, F: GroupedFormat>() -> u8 {
    match F::ByCodes::BY_CODES {
        Some(codes) if S::BY_CODES => codes.offset() as u8,
        _ => S::WEIGHT_BIAS,
    }
}

/// A table whose entries are raised so that lookups give bytes to multiply.
pub const fn raised<S: Simd, F: GroupedFormat>(values: &[i8; 16]) -> [u8; 16] {
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = (values[i] as u8).wrapping_add(raise::<S, F>());
        i += 1;
    }
    table
}

/// Where the lines of a panel are: in blocks of so many groups, each of which begins with the factors of all.
pub struct Layout {
    /// Groups of a block.
    pub block_groups: usize,
    /// Lines of the block's factors.
    pub factors: usize,
    /// Lines of the codes of one group.
    pub codes: usize,
}

impl Layout {
    /// Lines that so many groups take.
    #[inline(always)]
    pub const fn lines(&self, groups: usize) -> usize {
        groups.div_ceil(self.block_groups) * self.factors + groups * self.codes
    }

    /// The first line of the factors of group `index`, and the group's number among those that they belong to.
    #[inline(always)]
    pub const fn factors_of(&self, index: usize) -> (usize, usize) {
        let block = index / self.block_groups;
        (block * (self.factors + self.block_groups * self.codes), index % self.block_groups)
    }

    /// The first line of the codes of group `index`.
    #[inline(always)]
    pub const fn codes_of(&self, index: usize) -> usize {
        (index / self.block_groups + 1) * self.factors + index * self.codes
    }
}

/// N lines from `line` on.
#[inline(always)]
pub fn lines_at<const N: usize>(lines: &[ByteLine], line: usize) -> &[ByteLine; N] {
    lines[line..].first_chunk().expect("a whole group")
}

/// Number `index` of the f16 of sixteen rows that begin with line `line`.
#[inline(always)]
pub fn halves(lines: &[ByteLine], line: usize, index: usize) -> &[u16; LANES] {
    &bytemuck::cast_slice(&lines[line..])[index]
}

/// As [`halves`], to be written.
pub fn halves_mut(lines: &mut [ByteLine], line: usize, index: usize) -> &mut [u16; LANES] {
    &mut bytemuck::cast_slice_mut(&mut lines[line..])[index]
}

/// Number `index` of the bytes of sixteen rows that begin with line `line`.
#[inline(always)]
pub fn bytes(lines: &[ByteLine], line: usize, index: usize) -> &[u8; LANES] {
    &bytemuck::cast_slice(&lines[line..])[index]
}

/// As [`bytes`], to be written.
pub fn bytes_mut(lines: &mut [ByteLine], line: usize, index: usize) -> &mut [u8; LANES] {
    &mut bytemuck::cast_slice_mut(&mut lines[line..])[index]
}

/// The f16 of row `row` as f32.
pub fn half_of(halves: &[u16; LANES], row: usize) -> f32 {
    half::f16::from_bits(halves[row]).to_f32()
}

/// The bits of an f16 that stands at the beginning of stored bytes.
pub fn stored_half(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[0], bytes[1]])
}

/// The codes of a stored group: the first half of its inputs in the low four bits, the second in the high ones.
pub fn stored_nibbles(stored: &[u8]) -> [u8; GROUP] {
    std::array::from_fn(|input| stored[input % (GROUP / 2)] >> (4 * (input / (GROUP / 2))) & 0x0f)
}

/// Stores codes of four bits of row `row` in the four lines of a group.
pub fn store_nibbles(lines: &mut [ByteLine], row: usize, codes: &[u8; GROUP]) {
    for (input, code) in codes.iter().enumerate() {
        let quad = input / 4;
        lines[quad / 2].0[row * 4 + input % 4] |= code << (4 * (quad % 2));
    }
}

/// The code of four bits of row `row` and input `input` of a group.
pub fn nibble(lines: &[ByteLine], input: usize, row: usize) -> u8 {
    let quad = input / 4;
    lines[quad / 2].0[row * 4 + input % 4] >> (4 * (quad % 2)) & 0x0f
}

/// The codes of four bits of one quad of a group.
#[inline(always)]
pub fn nibbles<S: Simd>(simd: S, lines: &[ByteLine; PAIR_QUADS / 2], index: usize) -> S::Bytes {
    let line = simd.load_bytes(&lines[index / 2].0);
    let line = if index.is_multiple_of(2) { line } else { simd.shift_right::<4>(line) };
    simd.and(line, simd.splat_byte(0x0f))
}

/// Stores codes of eight bits of row `row` in the eight lines of a group.
pub fn store_bytes(lines: &mut [ByteLine], row: usize, codes: impl Iterator<Item = u8>) {
    for (input, code) in codes.enumerate() {
        lines[input / 4].0[row * 4 + input % 4] = code;
    }
}

/// The code of eight bits of row `row` and input `input` of a group.
pub fn byte(lines: &[ByteLine], input: usize, row: usize) -> u8 {
    lines[input / 4].0[row * 4 + input % 4]
}

/// The bytes of one quad of a group, of codes that are kept 128 above their values and never multiplied as codes.
#[inline(always)]
pub fn quad_of_bytes<S: Simd>(simd: S, lines: &[ByteLine; PAIR_QUADS], index: usize) -> S::Bytes {
    let bytes = simd.load_bytes(&lines[index].0);
    if const { S::WEIGHT_BIAS == 128 } { bytes } else { simd.xor(bytes, simd.splat_byte(128 ^ S::WEIGHT_BIAS)) }
}

/// Writes `factor` for all rows of the groups whose f16 factors are numbers `0..` of the lines of each block.
pub fn level_halves(lines: &mut [ByteLine], layout: &Layout, groups: usize, factor: f32) {
    for group in 0..groups {
        let (line, index) = layout.factors_of(group);
        halves_mut(lines, line, index).fill(half::f16::from_f32(factor).to_bits());
    }
}

/// The weights of row `row` of a panel, as f32.
pub fn read_row<F: GroupedFormat>(lines: &[ByteLine], row: usize, out: &mut [f32]) {
    for (input, value) in out.iter_mut().enumerate() {
        *value = F::weight(lines, input, row);
    }
}

/// Stores sixteen rows, `rows: [16][bytes of a row]`, in a panel whose lines are zero.
pub fn pack_panel<F: GroupedFormat>(rows: &[u8], lines: &mut [ByteLine]) {
    let row_bytes = rows.len() / LANES;
    for index in 0..row_bytes / F::STORED.bytes {
        let block = |row: usize| &rows[row * row_bytes + index * F::STORED.bytes..][..F::STORED.bytes];
        F::store(lines, index, &std::array::from_fn(block));
    }
}
