//! Grouped formats: quantization by other programs, such as ggml, GPTQ and AWQ.
//!
//! Packing keeps the codes and scales of the stored model exactly; it only moves bits. Weights share floating-point
//! factors in groups of [`GROUP`] inputs, or in halves of them. An unpacked group ([`unpack`]) consists of bytes, which
//! are multiplied with those of the activations, and of factors for their integer sum:
//!
//! `sum += integer * (factor * activation scale) - offset * activation sum`, group by group.
//!
//! A panel of sixteen rows is a contiguous sequence of lines of 64 bytes, in blocks of groups: the factors of the groups,
//! then their codes ([`Layout`]). Codes are arranged as in [`integer`](super::integer): four inputs of each row per line,
//! or eight if two codes share a byte.

use std::marker::PhantomData;

use super::integer::{BLOCK_PAIRS, Codes, PAIR_QUADS, Unpack};
use super::planes::{self, BitPlanes};
use crate::arch::{ByteLine, Dot, LANES, LINE};
use crate::matmul::unroll::unroll;

/// Number of inputs of a group.
pub const GROUP: usize = 4 * PAIR_QUADS;

/// Size of a stored quantized block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// Number of weights in a block.
    pub inputs: usize,
    /// Bytes of a block.
    pub bytes: usize,
}

impl StoredBlock {
    /// Returns the bytes of a row of `cols` weights.
    #[must_use]
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols / self.inputs * self.bytes
    }
}

/// Format whose groups have floating-point factors.
pub trait GroupedFormat: Send + Sync + 'static {
    /// Stored block.
    const STORED: StoredBlock;

    /// See [`Unpack::UNROLLED`].
    const UNROLLED: bool;

    /// See [`Unpack::TURNS`].
    const TURNS: bool;

    /// Packed data of a group.
    type Group<'a, S: Dot>: Copy;

    /// Unpacked form of groups.
    type Unpacked: Unpack;
    /// Unpacked form on instruction sets that multiply codes, if codes are small enough.
    type ByCodes: Unpack;

    /// Returns the number of lines of `groups` groups.
    fn lines(groups: usize) -> usize;

    /// Stores block `index` of sixteen rows into zeroed lines.
    fn store(lines: &mut [ByteLine], index: usize, blocks: &[&[u8]; LANES]);

    /// Returns group `index` of a panel.
    fn group<'a, S: Dot>(simd: S, lines: &'a [ByteLine], index: usize) -> Self::Group<'a, S>;

    /// Unpacks four inputs of a group to bytes with the bias [`unpacked_bias`].
    fn quad<S: Dot>(simd: S, group: Self::Group<'_, S>, index: usize) -> S::Bytes;

    /// Returns factor `index` of a group; see [`Unpack::FACTORS`].
    fn factor<S: Dot>(simd: S, group: Self::Group<'_, S>, index: usize) -> S::F32;

    /// Dequantizes the weight of row `row` and input `input`.
    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32;

    /// Sets the factors of `groups` groups of random codes so that the root mean square of weights is about `deviation`.
    fn set_deviation(lines: &mut [ByteLine], groups: usize, deviation: f32);
}

/// Kinds of factors of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Factors {
    /// Whether each half of the group has its own factors.
    pub halves: bool,
    /// Whether factors are followed by as many offsets, which are multiplied by sums of activations.
    pub offsets: bool,
}

impl Factors {
    /// Returns the number of parts of a group that have their own factors.
    pub const fn parts(self) -> usize {
        if self.halves { 2 } else { 1 }
    }

    /// Returns the number of factors of a part: of its weights, and of its offset if there are offsets.
    pub const fn kinds(self) -> usize {
        if self.offsets { 2 } else { 1 }
    }

    /// Returns the number of lines of an unpacked group: one for each four inputs, and one for each factor.
    const fn unpacked_lines(self) -> usize {
        PAIR_QUADS + self.parts() * self.kinds()
    }
}

/// Returns the factors of the groups of a format.
pub const fn factors<F: GroupedFormat>() -> Factors {
    F::Unpacked::FACTORS.expect("groups have factors")
}

/// Returns the number of lines of an unpacked group of a format.
pub const fn unpacked_lines<F: GroupedFormat>() -> usize {
    factors::<F>().unpacked_lines()
}

/// Maximum number of lines of the unpacked groups of a block of activations.
pub const MAX_UNPACKED_BLOCK_LINES: usize = BLOCK_PAIRS * Factors { halves: true, offsets: true }.unpacked_lines();

/// Unpacked groups of `LINES` lines. `SMALL` codes have at most six bits, or five if groups have offsets,
/// and can be multiplied as codes.
pub struct UnpackedGroups<const HALVES: bool, const OFFSETS: bool, const SMALL: bool, const LINES: usize>;

/// Unpacked groups with one factor.
pub type Whole<const SMALL: bool> = UnpackedGroups<false, false, SMALL, { PAIR_QUADS + 1 }>;

/// Unpacked groups with a factor for each half.
pub type Halves<const SMALL: bool> = UnpackedGroups<true, false, SMALL, { PAIR_QUADS + 2 }>;

/// Unpacked groups with a factor and an offset.
pub type Offset<const SMALL: bool> = UnpackedGroups<false, true, SMALL, { PAIR_QUADS + 2 }>;

/// Unpacked groups with a factor and an offset for each half.
pub type OffsetHalves<const SMALL: bool> = UnpackedGroups<true, true, SMALL, { PAIR_QUADS + 4 }>;

impl<const HALVES: bool, const OFFSETS: bool, const SMALL: bool, const LINES: usize> Unpack
    for UnpackedGroups<HALVES, OFFSETS, SMALL, LINES>
{
    const BY_CODES: Option<Codes> = match (SMALL, OFFSETS) {
        (true, true) => Some(Codes::Unsigned),
        (true, false) => Some(Codes::SixBits),
        (false, _) => None,
    };
    const FACTORS: Option<Factors> = {
        let factors = Factors { halves: HALVES, offsets: OFFSETS };
        assert!(factors.unpacked_lines() == LINES, "groups need a line for each quad and each factor");
        Some(factors)
    };

    type Block<'a> = &'a [[ByteLine; LINES]; BLOCK_PAIRS];
    type Pair<'a, S: Dot> = &'a [ByteLine; LINES];

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        index * BLOCK_PAIRS * LINES
    }

    #[inline(always)]
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_> {
        &lines.as_chunks().0.as_chunks().0[index]
    }

    #[inline(always)]
    fn pair<'a, S: Dot>(_: S, block: Self::Block<'a>, index: usize) -> Self::Pair<'a, S> {
        &block[index]
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        simd.load_bytes(&pair[index].0)
    }

    #[inline(always)]
    fn codes<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        Self::quad(simd, pair, index)
    }

    /// One: what sub-scales there are is part of the factors.
    #[inline(always)]
    fn scale<S: Dot>(simd: S, _: Self::Pair<'_, S>, _: usize) -> S::Bytes {
        simd.splat_quad([1, 0, 1, 0])
    }

    #[inline(always)]
    fn factor<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::F32 {
        simd.load(bytemuck::cast_ref(&pair[PAIR_QUADS + index]))
    }
}

/// Packed groups of a format, unpacked on the fly.
pub struct Packed<F>(PhantomData<F>);

impl<F: GroupedFormat> Unpack for Packed<F> {
    const BY_CODES: Option<Codes> = F::ByCodes::BY_CODES;
    const FACTORS: Option<Factors> = F::Unpacked::FACTORS;
    const UNROLLED: bool = F::UNROLLED;
    const TURNS: bool = F::TURNS;

    /// Lines of the panel, and index of the first group of the block.
    type Block<'a> = (&'a [ByteLine], usize);
    type Pair<'a, S: Dot> = F::Group<'a, S>;

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        F::lines(index * BLOCK_PAIRS)
    }

    #[inline(always)]
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_> {
        (lines, index * BLOCK_PAIRS)
    }

    #[inline(always)]
    fn pair<'a, S: Dot>(simd: S, (lines, first): Self::Block<'a>, index: usize) -> Self::Pair<'a, S> {
        F::group(simd, lines, first + index)
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        F::quad(simd, pair, index)
    }

    #[inline(always)]
    fn codes<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        F::quad(simd, pair, index)
    }

    /// One: what sub-scales there are is part of the factors.
    #[inline(always)]
    fn scale<S: Dot>(simd: S, _: Self::Pair<'_, S>, _: usize) -> S::Bytes {
        simd.splat_quad([1, 0, 1, 0])
    }

    #[inline(always)]
    fn factor<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::F32 {
        F::factor(simd, pair, index)
    }
}

/// Unpacks group `index` of a panel to [`unpacked_lines`]: bytes with the bias [`unpacked_bias`], a line for each four
/// inputs, and a line for each factor.
#[inline(always)]
pub fn unpack<S: Dot, F: GroupedFormat>(simd: S, lines: &[ByteLine], index: usize, to: &mut [ByteLine]) {
    let group = F::group(simd, lines, index);
    // Two at a time, before they are stored, because they may share what is loaded.
    unroll!(pair in [0 1 2 3] {
        let quads = [F::quad(simd, group, 2 * pair), F::quad(simd, group, 2 * pair + 1)];
        simd.store_bytes(quads[0], &mut to[2 * pair].0);
        simd.store_bytes(quads[1], &mut to[2 * pair + 1].0);
    });
    let end = const { unpacked_lines::<F>() };
    unroll!(factor in [0 1 2 3] {
        if PAIR_QUADS + factor < end {
            simd.store(F::factor(simd, group, factor), bytemuck::cast_mut(&mut to[PAIR_QUADS + factor]));
        }
    });
}

/// Returns the bias of unpacked bytes.
pub const fn unpacked_bias<S: Dot, F: GroupedFormat>() -> u8 {
    match F::ByCodes::BY_CODES {
        Some(codes) if S::BY_CODES => codes.offset() as u8,
        _ => S::WEIGHT_BIAS,
    }
}

/// Line layout of a panel: blocks of groups, each of which starts with the factors of its groups. Two blocks may share
/// lines before the first of them.
pub struct Layout {
    /// Number of groups in a block.
    pub block_groups: usize,
    /// Number of lines that two blocks share.
    pub shared: usize,
    /// Number of lines of the factors of a block.
    pub factors: usize,
    /// Number of lines of the codes of a group.
    pub codes: usize,
}

impl Layout {
    /// Returns the number of lines of `groups` groups.
    #[inline(always)]
    pub const fn lines(&self, groups: usize) -> usize {
        let blocks = groups.div_ceil(self.block_groups);
        blocks.div_ceil(2) * self.shared + blocks * self.factors + groups * self.codes
    }

    /// Returns the first line that the block of group `index` shares with its neighbour.
    #[inline(always)]
    pub const fn shared_of(&self, index: usize) -> usize {
        let pair = index / (2 * self.block_groups);
        pair * (self.shared + 2 * self.block_lines())
    }

    /// Returns the first line of the factors of group `index`, and the index of the group in its block.
    #[inline(always)]
    pub const fn factors_of(&self, index: usize) -> (usize, usize) {
        let block = index / self.block_groups;
        ((block / 2 + 1) * self.shared + block * self.block_lines(), index % self.block_groups)
    }

    /// Returns the first line of the codes of group `index`.
    #[inline(always)]
    pub const fn codes_of(&self, index: usize) -> usize {
        let (first, of_block) = self.factors_of(index);
        first + self.factors + of_block * self.codes
    }

    /// Returns the number of lines of a block, without shared ones.
    const fn block_lines(&self) -> usize {
        self.factors + self.block_groups * self.codes
    }
}

/// Returns N lines from `line` on.
#[inline(always)]
pub fn lines_at<const N: usize>(lines: &[ByteLine], line: usize) -> &[ByteLine; N] {
    lines[line..].first_chunk().expect("a whole group")
}

/// Returns the f16 vector of sixteen rows at index `index` from line `line` on.
#[inline(always)]
pub fn halves(lines: &[ByteLine], line: usize, index: usize) -> &[u16; LANES] {
    &bytemuck::cast_slice(&lines[line..])[index]
}

/// Mutable version of [`halves`].
pub fn halves_mut(lines: &mut [ByteLine], line: usize, index: usize) -> &mut [u16; LANES] {
    &mut bytemuck::cast_slice_mut(&mut lines[line..])[index]
}

/// Returns the byte vector of sixteen rows at index `index` from line `line` on.
#[inline(always)]
pub fn bytes(lines: &[ByteLine], line: usize, index: usize) -> &[u8; LANES] {
    &bytemuck::cast_slice(&lines[line..])[index]
}

/// Mutable version of [`bytes`].
pub fn bytes_mut(lines: &mut [ByteLine], line: usize, index: usize) -> &mut [u8; LANES] {
    &mut bytemuck::cast_slice_mut(&mut lines[line..])[index]
}

/// Returns the f16 of row `row` as f32.
pub fn half_of(halves: &[u16; LANES], row: usize) -> f32 {
    half::f16::from_bits(halves[row]).to_f32()
}

/// Stores the codes of row `row` in the zeroed lines of a group.
pub fn store_codes<C: BitPlanes>(lines: &mut [ByteLine], row: usize, code: impl Fn(usize) -> u8) {
    let lines = planes::vectors_mut::<LINE>(lines);
    for input in 0..GROUP {
        C::store(lines, PAIR_QUADS, input / 4, row * 4 + input % 4, code(input));
    }
}

/// Returns the code of row `row` and input `input` of a group.
pub fn code<C: BitPlanes>(lines: &[ByteLine], input: usize, row: usize) -> u8 {
    C::number(planes::vectors::<LINE>(lines), PAIR_QUADS, input / 4, row * 4 + input % 4)
}

/// Sets the f16 factors of all rows of `groups` groups to `factor`.
pub fn set_factors(lines: &mut [ByteLine], layout: &Layout, groups: usize, factor: f32) {
    for group in 0..groups {
        let (line, index) = layout.factors_of(group);
        halves_mut(lines, line, index).fill(half::f16::from_f32(factor).to_bits());
    }
}

/// Dequantizes row `row` of a panel.
pub fn read_row<F: GroupedFormat>(lines: &[ByteLine], row: usize, out: &mut [f32]) {
    for (input, value) in out.iter_mut().enumerate() {
        *value = F::weight(lines, input, row);
    }
}

/// Packs sixteen stored rows, `rows: [16][bytes of a row]`, into the zeroed lines of a panel.
pub fn pack_panel<F: GroupedFormat>(rows: &[u8], lines: &mut [ByteLine]) {
    let row_bytes = rows.len() / LANES;
    for index in 0..row_bytes / F::STORED.bytes {
        let block = |row: usize| &rows[row * row_bytes + index * F::STORED.bytes..][..F::STORED.bytes];
        F::store(lines, index, &std::array::from_fn(block));
    }
}
