//! Quantized activations of the integer matmul: bytes, with one scale for each block or group of inputs.
//!
//! For rotated weights, a row's block of [`BLOCK`] inputs is rotated too and quantized by its largest magnitude, which
//! becomes 127. For other weights, each group of 32 inputs is quantized by its own largest magnitude, because no rotation
//! spreads outliers, or the whole block where a factor for each group would cost too much. The result does not depend on
//! other rows or other blocks. Rows that are multiplied side by side are laid out side by side, quad by quad. Matrix units
//! read tiles of sixteen rows instead, in which sixteen quads of a row follow each other.

use std::ops::Range;

use crate::arch::{Dot, DotKernel, LANES, LINE, RowTile, Simd};
use crate::disjoint::Tiles;
use crate::memory::Scratch;
use crate::quant::integer::{BLOCK, BLOCK_GROUPS, BLOCK_PAIRS, BLOCK_QUADS, Codes, GROUP, blocks};
use crate::quant::{Quantized, grouped, rotation};
use crate::{Exec, PoolError};

/// Number of words of a row in a block: its scale, the initial value of its accumulators, and its quads.
const BLOCK_WORDS: usize = 2 + BLOCK_QUADS;

/// Number of inputs below which waking the threads costs more than it saves.
const INLINE_INPUTS: usize = 4 * 1024;

/// Number of tasks per thread, which evens out the speeds of threads.
const TASKS_PER_THREAD: usize = 4;

/// Words of one block of R rows: `[scale, start, quads..][row]`. The scale is an f32; `start` subtracts the bias of the
/// weights from the products; a quad is four bytes. If groups have separate scales, the first two are zero.
pub(super) type BlockOfRows<const R: usize> = [[i32; R]; BLOCK_WORDS];

/// Number of quads of a row that follow each other in a tile of a matrix unit.
const TILE_QUADS: usize = LINE / 4;

/// Scales and starts of one block of sixteen rows, as in [`BlockOfRows`], and their inputs in the tiles of a matrix unit,
/// which take the same space: `[tile][row][input]`.
#[derive(Clone, Copy)]
pub(super) struct BlockOnUnit<'a> {
    pub scales: &'a [i32; LANES],
    pub starts: &'a [i32; LANES],
    pub tiles: &'a [RowTile; BLOCK_QUADS / TILE_QUADS],
}

impl<'a> BlockOnUnit<'a> {
    /// Views a block.
    #[inline(always)]
    pub fn new([scales, starts, tiles @ ..]: &'a BlockOfRows<LANES>) -> Self {
        Self { scales, starts, tiles: bytemuck::cast_ref(tiles) }
    }
}

/// Number of words of a row in a block where codes are multiplied: the initial values of partial sums, for each kind of
/// codes and each group.
const START_WORDS: usize = Codes::WITH_OFFSETS.len() * BLOCK_GROUPS;

/// Initial values of the partial sums of one block of R rows, `[kind][group][row]`.
pub(super) type StartsOfRows<const R: usize> = [[[i32; R]; BLOCK_GROUPS]; Codes::WITH_OFFSETS.len()];

/// Number of halves of a group of 32 inputs with factors: its quads are those of two groups of other formats.
const HALVES: usize = grouped::GROUP / LANES;

/// Indices of the words of a row in a group with factors, besides its quads; the words of both halves follow each other.
pub(super) mod group_word {
    /// Scale, an f32.
    pub const SCALE: usize = 0;
    /// Initial value of the products, which subtracts the bias of the weights.
    pub const START: usize = 1;
    /// Initial values of the products of both halves.
    pub const HALF_STARTS: usize = 2;
    /// Negated sum of the activations, an f32.
    pub const SUM: usize = 4;
    /// Negated sums of the activations of both halves.
    pub const HALF_SUMS: usize = 5;
    /// Number of words.
    pub const COUNT: usize = 7;
}

/// Number of words of a row in a block where groups have factors.
const GROUP_WORDS: usize = group_word::COUNT * BLOCK_PAIRS;

/// Words of one group of R rows, [`group_word`].
pub(super) type GroupOfRows<const R: usize> = [[i32; R]; group_word::COUNT];

/// Words of the groups of one block of R rows, `[group of 32 inputs][word][row]`.
pub(super) type GroupsOfRows<const R: usize> = [GroupOfRows<R>; BLOCK_PAIRS];

/// Quantized rows, `[tile][block][word][row]`; rows that pad the last tile are zero.
pub(super) struct Activations<'a> {
    words: &'a mut [i32],
    /// `[tile][block][kind][group][row]`, or empty if no codes are multiplied.
    starts: &'a mut [i32],
    /// `[tile][block][group][word][row]`, or empty if no groups have factors.
    groups: &'a mut [i32],
    blocks: usize,
    tile_rows: usize,
}

/// Basis in which activations are quantized: that of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Basis {
    /// Rotated, for integer formats, with a scale for each block.
    Rotated,
    /// Unchanged, for grouped formats, with a scale for each group.
    Plain,
    /// Unchanged, for formats with a scale for each block.
    PlainBlocks,
}

impl Basis {
    /// All bases.
    pub const ALL: [Self; 3] = [Self::Rotated, Self::Plain, Self::PlainBlocks];

    /// Returns the basis of a format's weights.
    pub fn of(format: Quantized) -> Self {
        match format {
            Quantized::Integer(_) => Self::Rotated,
            Quantized::Grouped(format) if format.has_block_scales() => Self::PlainBlocks,
            Quantized::Grouped(_) => Self::Plain,
        }
    }
}

/// Rows to quantize.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    /// Activations, `[m, k]`.
    pub x: &'a [f32],
    pub k: usize,
    /// Number of rows of a tile.
    pub tile_rows: usize,
    /// Whether a matrix unit multiplies the tiles.
    pub on_unit: bool,
    /// Whether codes are multiplied, which needs initial values of their partial sums.
    pub by_codes: bool,
    /// Basis of the weights.
    pub basis: Basis,
}

impl Input<'_> {
    /// Returns whether both are the same rows in memory, in the same basis and the same tiles.
    pub fn is_same(&self, other: &Self) -> bool {
        let layout = |input: &Self| (input.k, input.basis, input.tile_rows, input.on_unit);
        std::ptr::eq(self.x, other.x) && layout(self) == layout(other)
    }

    /// Returns the number of blocks of all tiles, the units of parallel work: even a single tile occupies all threads.
    fn tile_blocks(&self) -> usize {
        (self.x.len() / self.k).div_ceil(self.tile_rows) * blocks(self.k)
    }

    /// Returns the number of words of a block of a tile, of the initial values of its partial sums, and of its groups.
    fn block_words(&self) -> [usize; 3] {
        let starts = if self.by_codes { START_WORDS } else { 0 };
        let groups = if self.basis == Basis::Plain { GROUP_WORDS } else { 0 };
        [BLOCK_WORDS, starts, groups].map(|words| words * self.tile_rows)
    }
}

impl<'a> Activations<'a> {
    /// Quantizes all `inputs` into `buffer`, with one fork and join of the threads, or in this thread if they are few.
    ///
    /// # Errors
    /// [`PoolError`] if `exec` was cancelled.
    pub fn quantize_each(
        exec: &Exec<'_>,
        inputs: &[Input<'_>],
        buffer: &'a mut Scratch<i32>,
    ) -> Result<Vec<Self>, PoolError> {
        let sizes = |input: &Input<'_>| input.block_words().map(|words| words * input.tile_blocks());
        let mut rest = buffer.take(inputs.iter().flat_map(sizes).sum());
        let mut split = |words| rest.split_off_mut(..words).expect("enough words for all inputs");
        let quantized = inputs.iter().map(|input| {
            let [words, starts, groups] = sizes(input).map(&mut split);
            Self { words, starts, groups, blocks: blocks(input.k), tile_rows: input.tile_rows }
        });
        let mut quantized: Vec<_> = quantized.collect();
        if inputs.iter().map(|input| input.x.len()).sum::<usize>() < INLINE_INPUTS {
            for (&input, Self { words, starts, groups, .. }) in inputs.iter().zip(&mut quantized) {
                exec.isa.run_dot(QuantizeBlocks { input, tile_blocks: 0..input.tile_blocks(), words, starts, groups });
            }
            return Ok(quantized);
        }
        let rows: usize = inputs.iter().map(|input| input.tile_blocks() * input.tile_rows).sum();
        let task_rows = rows.div_ceil(TASKS_PER_THREAD * exec.pool.threads());
        let tiles = inputs.iter().zip(&mut quantized).map(|(input, Self { words, starts, groups, .. })| {
            let task_blocks = task_rows.div_ceil(input.tile_rows);
            let [words_of, starts_of, groups_of] = input.block_words();
            let tiles = |words, row_words| Tiles::row_blocks(words, row_words, task_blocks);
            (tiles(words, words_of), tiles(starts, starts_of), tiles(groups, groups_of))
        });
        let tiles: Vec<_> = tiles.collect();
        exec.run_each(tiles.iter().map(|(words, ..)| words.len()), |input, task| {
            let (words, starts, groups) = &tiles[input];
            let mut words = words.take(task);
            let [mut starts, mut groups] = [starts, groups].map(|tiles| (!tiles.is_empty()).then(|| tiles.take(task)));
            exec.isa.run_dot(QuantizeBlocks {
                input: inputs[input],
                tile_blocks: words.rows(),
                words: words.contiguous(),
                starts: starts.as_mut().map_or(&mut [], |starts| starts.contiguous()),
                groups: groups.as_mut().map_or(&mut [], |groups| groups.contiguous()),
            });
        })?;
        drop(tiles);
        Ok(quantized)
    }

    /// Returns the blocks of tile `index`, which has R rows.
    ///
    /// # Panics
    /// If there is no such tile.
    #[inline(always)]
    pub fn tile<const R: usize>(&self, index: usize) -> &[BlockOfRows<R>] {
        debug_assert_eq!(R, self.tile_rows);
        let tile_words = self.blocks * BLOCK_WORDS * R;
        self.words[index * tile_words..][..tile_words].as_chunks::<R>().0.as_chunks().0
    }

    /// Returns the initial values of the partial sums of the blocks of tile `index`.
    ///
    /// # Panics
    /// If there is no such tile, or codes are not multiplied.
    #[inline(always)]
    pub fn starts<const R: usize>(&self, index: usize) -> &[StartsOfRows<R>] {
        debug_assert_eq!(R, self.tile_rows);
        let tile_starts = self.blocks * START_WORDS * R;
        self.starts[index * tile_starts..][..tile_starts].as_chunks::<R>().0.as_chunks().0.as_chunks().0
    }

    /// Returns the scales and sums of the groups of the blocks of tile `index`.
    ///
    /// # Panics
    /// If there is no such tile, or the weights' groups have no factors.
    #[inline(always)]
    pub fn groups<const R: usize>(&self, index: usize) -> &[GroupsOfRows<R>] {
        debug_assert_eq!(R, self.tile_rows);
        let tile_groups = self.blocks * GROUP_WORDS * R;
        self.groups[index * tile_groups..][..tile_groups].as_chunks::<R>().0.as_chunks().0.as_chunks().0
    }
}

/// Kernel that quantizes blocks of tiles, which follow each other tile by tile.
struct QuantizeBlocks<'a> {
    input: Input<'a>,
    tile_blocks: Range<usize>,
    words: &'a mut [i32],
    /// Initial values of partial sums, if codes are multiplied.
    starts: &'a mut [i32],
    /// Scales and sums of groups, if the weights' groups have factors.
    groups: &'a mut [i32],
}

impl DotKernel for QuantizeBlocks<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Dot>(self, simd: S) {
        let Self { input: Input { x, k, tile_rows, on_unit, basis, .. }, tile_blocks, words, starts, groups } = self;
        let mut starts = starts.chunks_exact_mut(START_WORDS * tile_rows);
        let mut groups = groups.chunks_exact_mut(GROUP_WORDS * tile_rows);
        for (tile_block, words) in tile_blocks.zip(words.chunks_exact_mut(BLOCK_WORDS * tile_rows)) {
            let (tile, block) = (tile_block / blocks(k), tile_block % blocks(k));
            let (starts, groups) = (starts.next().unwrap_or_default(), groups.next().unwrap_or_default());
            let rows = x[tile * tile_rows * k..].chunks_exact(k).take(tile_rows);
            if rows.len() < tile_rows {
                words.fill(0);
                starts.fill(0);
                groups.fill(0);
            }
            for (row, x) in rows.enumerate() {
                let x = &x[block * BLOCK..k.min((block + 1) * BLOCK)];
                let inputs = x.len();
                let mut padded = [[0.0; LANES]; BLOCK / LANES];
                let x = x.as_chunks().0.try_into().unwrap_or_else(|_| {
                    padded.as_flattened_mut()[..x.len()].copy_from_slice(x);
                    &padded
                });
                let (head, inputs_of) = words.split_at_mut((BLOCK_WORDS - BLOCK_QUADS) * tile_rows);
                let head = head[row..].iter_mut().step_by(tile_rows);
                let codes = match basis {
                    Basis::Rotated => quantize_block(
                        simd,
                        rotation::rotate(simd, simd.load_vectors(x), inputs),
                        rotation::SHRINK,
                        head,
                    ),
                    Basis::PlainBlocks => quantize_block(simd, simd.load_vectors(x), 1.0, head),
                    Basis::Plain => {
                        for word in head {
                            *word = 0;
                        }
                        quantize_groups(simd, x, groups[row..].iter_mut().step_by(tile_rows))
                    }
                };
                let quads: &[[i8; 4]; BLOCK_QUADS] = bytemuck::cast_ref(&codes);
                if on_unit {
                    let of_row = inputs_of.as_chunks_mut::<TILE_QUADS>().0.iter_mut().skip(row).step_by(tile_rows);
                    for (quads, words) in quads.as_chunks::<TILE_QUADS>().0.iter().zip(of_row) {
                        *words = bytemuck::cast(*quads);
                    }
                } else {
                    for (quad, word) in quads.iter().zip(inputs_of[row..].iter_mut().step_by(tile_rows)) {
                        *word = bytemuck::cast(*quad);
                    }
                }
                if !starts.is_empty() {
                    write_starts(simd, quads, starts[row..].iter_mut().step_by(tile_rows));
                }
            }
        }
    }
}

/// Returns 0, or NaN if there is an infinity or a NaN. It is added to scales: products with it are NaN too, not some number.
#[inline(always)]
fn not_finite<S: Simd, const N: usize>(simd: S, x: [S::F32; N]) -> f32 {
    let mut sum = simd.splat(0.0);
    for x in x {
        sum = simd.mul_add(x, simd.splat(0.0), sum);
    }
    simd.reduce_add(sum)
}

/// Quantizes finite numbers by their largest magnitude and returns the scale and the codes.
#[inline(always)]
fn quantize<S: Simd, const N: usize>(simd: S, x: [S::F32; N]) -> (f32, [S::I32; N]) {
    let mut largest = simd.splat(0.0);
    for x in x {
        largest = simd.max(simd.max(x, simd.sub(simd.splat(0.0), x)), largest);
    }
    let largest = simd.reduce_max(largest);
    let scale = largest / 127.0;
    let inverse = simd.splat(if largest > 0.0 { 127.0 / largest } else { 0.0 });
    let mut codes = [simd.splat_i32(0); N];
    for (code, x) in codes.iter_mut().zip(x) {
        *code = simd.to_i32(simd.mul(x, inverse));
    }
    (scale, codes)
}

/// Converts codes to bytes.
#[inline(always)]
fn narrow<S: Simd, const N: usize>(simd: S, codes: [S::I32; N]) -> [[i8; LANES]; N] {
    let mut narrow = [[0; LANES]; N];
    for (codes, narrow) in codes.into_iter().zip(&mut narrow) {
        simd.store_i8(codes, narrow);
    }
    narrow
}

/// Returns the sum of the lanes, which are sums of at most [`BLOCK`] codes: as f32 they are exact. Codes of non-finite
/// numbers are unspecified; their scale is NaN.
#[inline(always)]
fn sum<S: Simd>(simd: S, codes: S::I32) -> i32 {
    const { assert!(BLOCK * 127 < 1 << f32::MANTISSA_DIGITS) }
    simd.reduce_add(simd.to_f32(codes)) as i32
}

/// Returns the initial value of products that subtracts the bias of the weights, from the sum of the codes.
#[inline(always)]
fn start<S: Dot>(sum: i32) -> i32 {
    sum.wrapping_mul(-i32::from(S::WEIGHT_BIAS))
}

/// Quantizes a row's block, writes the words of [`BlockOfRows`] before the quads, and returns the codes. `factor` multiplies
/// the scale.
#[inline(always)]
fn quantize_block<'a, S: Dot>(
    simd: S,
    x: [S::F32; BLOCK / LANES],
    factor: f32,
    words: impl Iterator<Item = &'a mut i32>,
) -> [[i8; LANES]; BLOCK / LANES] {
    let (scale, codes) = quantize(simd, x);
    let scale = scale + not_finite(simd, x);
    let mut sums = simd.splat_i32(0);
    for codes in codes {
        sums = simd.add_i32(sums, codes);
    }
    write(words, [(scale * factor).to_bits().cast_signed(), start::<S>(sum(simd, sums))]);
    narrow(simd, codes)
}

/// Quantizes the groups of a row's block, writes the words of [`GroupsOfRows`], and returns the codes.
#[inline(always)]
fn quantize_groups<'a, S: Dot>(
    simd: S,
    x: &[[f32; LANES]; BLOCK / LANES],
    mut words: impl Iterator<Item = &'a mut i32>,
) -> [[i8; LANES]; BLOCK / LANES] {
    let (mut of_block, mut scales) = ([[0; LANES]; BLOCK / LANES], [0.0; BLOCK_PAIRS]);
    let groups = x.as_chunks::<HALVES>().0;
    for ((x, of_group), scale) in groups.iter().zip(of_block.as_chunks_mut().0).zip(&mut scales) {
        let codes;
        (*scale, codes) = quantize(simd, simd.load_vectors(x));
        *of_group = narrow(simd, codes);
    }
    if not_finite(simd, simd.load_vectors(x)) != 0.0 {
        for (x, scale) in groups.iter().zip(&mut scales) {
            *scale += not_finite(simd, simd.load_vectors(x));
        }
    }
    // A lane has the sum of four codes, and four lanes are a half. Adding the lanes of a vector for each half takes longer.
    let mut quads = [[0; LANES]; BLOCK / LINE];
    for (codes, sums) in bytemuck::cast_ref::<_, [[u8; LINE]; BLOCK / LINE]>(&of_block).iter().zip(&mut quads) {
        simd.store_i32(simd.dot(simd.splat_i32(0), simd.splat_byte(1), simd.load_bytes(codes)), sums);
    }
    let halves = quads.as_flattened().as_chunks::<{ LANES / 4 }>().0.as_chunks::<HALVES>().0;
    for (scale, [first, second]) in scales.into_iter().zip(halves) {
        let [first, second] = [first, second].map(|[a, b, c, d]| a + b + c + d);
        let sums = [first + second, first, second];
        write(&mut words, [scale.to_bits().cast_signed()]);
        write(&mut words, sums.map(start::<S>));
        write(&mut words, sums.map(|sum| (-sum as f32 * scale).to_bits().cast_signed()));
    }
    of_block
}

/// Writes values to the next words.
#[inline(always)]
fn write<'a, const N: usize>(words: impl Iterator<Item = &'a mut i32>, values: [i32; N]) {
    for (value, word) in values.into_iter().zip(words) {
        *word = value;
    }
}

/// Writes the initial values of partial sums of codes, `[kind][group]`: products of the negated activations with the
/// offset of the codes. A lane holds each of them, so that the quads of all groups are added side by side.
#[inline(always)]
fn write_starts<'a, S: Dot>(simd: S, quads: &[[i8; 4]; BLOCK_QUADS], starts: impl Iterator<Item = &'a mut i32>) {
    const { assert!(START_WORDS == LANES) }
    let mut offsets = [[0; 4]; LANES];
    for (offsets, kind) in offsets.chunks_exact_mut(BLOCK_GROUPS).zip(Codes::WITH_OFFSETS) {
        offsets.fill([kind.offset() as u8; 4]);
    }
    let offsets = simd.load_bytes(bytemuck::cast_ref(&offsets));
    let mut sums = simd.splat_i32(0);
    for index in 0..GROUP / 4 {
        let mut x = [[0; 4]; LANES];
        for (lane, x) in x.iter_mut().enumerate() {
            *x = quads[lane % BLOCK_GROUPS * (GROUP / 4) + index];
        }
        // Codes of non-finite numbers are unspecified and may be -128.
        let negated = simd.sub_bytes(simd.splat_byte(0), simd.load_bytes(bytemuck::cast_ref(&x)));
        sums = simd.dot_codes(sums, offsets, negated);
    }
    let mut lanes = [0; LANES];
    simd.store_i32(sums, &mut lanes);
    write(starts, lanes);
}
