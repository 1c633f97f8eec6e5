//! What the formats have in common whose codes other programs chose.
//!
//! A model that was quantized elsewhere keeps the codes and the scales that it has: packing moves bits, and changes no
//! number. Weights share floating-point factors in groups of [`GROUP`] inputs, or in halves of them. Unpacked
//! ([`Group`]), a group is bytes to multiply with those of the activations, and what their sum is multiplied with:
//!
//! `sum += activations' scale * (factor * integer - offset * activations' sum)`, of one group after the other.
//!
//! A panel of sixteen rows is one run of lines of 64 bytes, group by group as far as the row reaches, where the factors
//! of some groups stand before the codes of all of them ([`Layout`]). Codes lie as in [`integer`](super::integer): four
//! inputs of each row in a line, or eight where two codes share a byte.

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

    /// What groups are unpacked to.
    type Unpacked: Unpack;
    /// The same where codes are multiplied, if they are small enough for it.
    type ByCodes: Unpack;

    /// Lines that so many groups take.
    fn lines(groups: usize) -> usize;

    /// Stores block `index` of sixteen rows in lines that are zero.
    fn store(lines: &mut [ByteLine], index: usize, blocks: &[&[u8]; LANES]);

    /// Unpacks group `index`.
    fn unpack<S: Simd>(simd: S, lines: &[ByteLine], index: usize, to: &mut Group);

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

/// Unpacks the codes of four bits of a group; `value` makes bytes to multiply of them.
#[inline(always)]
pub fn unpack_nibbles<S: Simd>(simd: S, lines: &[ByteLine], to: &mut Group, value: impl Fn(S::Bytes) -> S::Bytes) {
    let (lines, low): (&[ByteLine; PAIR_QUADS / 2], _) = (lines.first_chunk().expect("a group"), simd.splat_byte(0x0f));
    unroll!(i in [0 1 2 3] {
        let line = simd.load_bytes(&lines[i].0);
        simd.store_bytes(value(simd.and(line, low)), &mut to.quads[2 * i].0);
        simd.store_bytes(value(simd.and(simd.shift_right::<4>(line), low)), &mut to.quads[2 * i + 1].0);
    });
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

/// Unpacks the codes of eight bits of a group, which are kept 128 above their values.
#[inline(always)]
pub fn unpack_bytes<S: Simd>(simd: S, lines: &[ByteLine], to: &mut Group) {
    let lines: &[ByteLine; PAIR_QUADS] = lines.first_chunk().expect("a group");
    let bias = simd.splat_byte(128 ^ S::WEIGHT_BIAS);
    unroll!(i in [0 1 2 3 4 5 6 7] {
        simd.store_bytes(simd.xor(simd.load_bytes(&lines[i].0), bias), &mut to.quads[i].0);
    });
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
