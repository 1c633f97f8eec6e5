//! Activations as the integer matmul reads them: bytes, with one scale for each block or group of inputs.
//!
//! Where the weights are rotated, a row's block of [`BLOCK`] inputs is too, and quantized by its largest magnitude, which
//! becomes 127; where they are not, each group of 32 inputs is quantized by its own, since nothing spreads what stands
//! out. Nothing that other rows or other blocks hold has a part in it. Rows that are multiplied side by side are laid out
//! side by side, quad by quad.

use std::ops::Range;

use crate::arch::{Kernel, LANES, Simd};
use crate::disjoint::Tiles;
use crate::memory::Scratch;
use crate::quant::integer::{BLOCK, BLOCK_GROUPS, BLOCK_PAIRS, BLOCK_QUADS, Codes, GROUP, blocks};
use crate::quant::{Format, grouped, rotation};
use crate::{Exec, PoolError};

/// Words that a row has in a block: its scale, what its accumulators begin with, and its quads.
const BLOCK_WORDS: usize = 2 + BLOCK_QUADS;

/// Inputs below which waking the threads costs more than it saves.
const INLINE_INPUTS: usize = 4 * 1024;

/// Tasks that even out the speeds of threads.
const TASKS_A_THREAD: usize = 4;

/// The words of one block of R rows: `[scale, start, quads..][row]`. The scale is an f32; `start` is what takes the
/// bias of the weights off the products; a quad is four bytes. Where groups have scales of their own, the first two are
/// nothing.
pub(super) type BlockOfRows<const R: usize> = [[i32; R]; BLOCK_WORDS];

/// Words that a row has in a block where codes are multiplied: what partial sums begin with, for each kind of codes and
/// each group.
const START_WORDS: usize = Codes::ALL.len() * BLOCK_GROUPS;

/// The words of one block of R rows, `[kind][group][row]`.
pub(super) type StartsOfRows<const R: usize> = [[[i32; R]; BLOCK_GROUPS]; Codes::ALL.len()];

/// Halves of a group of 32 inputs with factors: its quads are those of two groups of other formats.
const HALVES: usize = grouped::GROUP / LANES;

/// Words that a row has in such a group, besides its quads.
const OF_GROUP: usize = 5;

/// Words that a row has in a block where groups have factors.
const GROUP_WORDS: usize = OF_GROUP * BLOCK_PAIRS;

/// The words of one block of R rows, `[group of 32 inputs][scale, start, starts of both halves, sum][row]`. The scale is
/// an f32; starts take the bias of the weights off the products; the sum is that of the group's activations, negative, an
/// f32.
pub(super) type GroupsOfRows<const R: usize> = [[[i32; R]; OF_GROUP]; BLOCK_PAIRS];

/// Quantized rows, `[tile][block][word][row]`; those that fill up the last tile are zero.
pub(super) struct Activations<'a> {
    words: &'a mut [i32],
    /// `[tile][block][kind][group][row]`, or nothing if no codes are multiplied.
    starts: &'a mut [i32],
    /// `[tile][block][group][word][row]`, or nothing if no groups have factors.
    groups: &'a mut [i32],
    blocks: usize,
    tile_rows: usize,
}

/// What activations are seen in, as the weights are that they will meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Basis {
    /// Rotated, for integer formats: a scale for each block.
    Rotated,
    /// As they are, for grouped formats, whose groups have factors: a scale for each group.
    Plain,
}

impl Basis {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Rotated, Self::Plain];

    /// That of a format's weights.
    pub fn of(format: Format) -> Self {
        if format.stored_block().is_some() { Self::Plain } else { Self::Rotated }
    }
}

/// Rows that are to be quantized.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    /// `[m, k]`
    pub x: &'a [f32],
    pub k: usize,
    /// Rows of a tile.
    pub tile_rows: usize,
    /// Whether codes will be multiplied.
    pub by_codes: bool,
    /// What they are seen in.
    pub basis: Basis,
}

impl Input<'_> {
    /// Whether both are the same rows, by where they lie, seen alike.
    pub fn is_same(&self, other: &Self) -> bool {
        std::ptr::eq(self.x, other.x) && self.k == other.k && self.basis == other.basis
    }

    /// Rows are cut into tiles, and tiles into blocks: few rows are enough for all threads.
    fn pieces(&self) -> usize {
        (self.x.len() / self.k).div_ceil(self.tile_rows) * blocks(self.k)
    }

    /// Words of a piece, of what its partial sums begin with, and of its groups.
    fn piece_words(&self) -> [usize; 3] {
        let starts = if self.by_codes { START_WORDS } else { 0 };
        let groups = if self.basis == Basis::Plain { GROUP_WORDS } else { 0 };
        [BLOCK_WORDS, starts, groups].map(|words| words * self.tile_rows)
    }
}

impl<'a> Activations<'a> {
    /// Quantizes all `inputs` into `buffer`, with one fork and join of the threads, or none if they are few.
    ///
    /// # Errors
    /// [`PoolError`] if `exec` was cancelled.
    pub fn quantize_each(
        exec: &Exec<'_>,
        inputs: &[Input<'_>],
        buffer: &'a mut Scratch<i32>,
    ) -> Result<Vec<Self>, PoolError> {
        let sizes = |input: &Input<'_>| input.piece_words().map(|words| words * input.pieces());
        let mut room = buffer.take(inputs.iter().flat_map(sizes).sum());
        let mut split = |words| room.split_off_mut(..words).expect("room for all inputs");
        let quantized = inputs.iter().map(|input| {
            let [words, starts, groups] = sizes(input).map(&mut split);
            Self { words, starts, groups, blocks: blocks(input.k), tile_rows: input.tile_rows }
        });
        let mut quantized: Vec<_> = quantized.collect();
        if inputs.iter().map(|input| input.x.len()).sum::<usize>() < INLINE_INPUTS {
            for (&input, Self { words, starts, groups, .. }) in inputs.iter().zip(&mut quantized) {
                exec.isa.run(QuantizePieces { input, pieces: 0..input.pieces(), words, starts, groups });
            }
            return Ok(quantized);
        }
        let rows: usize = inputs.iter().map(|input| input.pieces() * input.tile_rows).sum();
        let task_rows = rows.div_ceil(TASKS_A_THREAD * exec.pool.threads());
        let tiles = inputs.iter().zip(&mut quantized).map(|(input, Self { words, starts, groups, .. })| {
            let task_pieces = task_rows.div_ceil(input.tile_rows);
            let [words_of, starts_of, groups_of] = input.piece_words();
            let tiles = |words, of_piece| Tiles::row_blocks(words, of_piece, task_pieces);
            (tiles(words, words_of), tiles(starts, starts_of), tiles(groups, groups_of))
        });
        let tiles: Vec<_> = tiles.collect();
        exec.run_each(tiles.iter().map(|(words, ..)| words.len()), |input, task| {
            let (words, starts, groups) = &tiles[input];
            let mut words = words.take(task);
            let [mut starts, mut groups] = [starts, groups].map(|tiles| (!tiles.is_empty()).then(|| tiles.take(task)));
            exec.isa.run(QuantizePieces {
                input: inputs[input],
                pieces: words.rows(),
                words: words.contiguous(),
                starts: starts.as_mut().map_or(&mut [], |starts| starts.contiguous()),
                groups: groups.as_mut().map_or(&mut [], |groups| groups.contiguous()),
            });
        })?;
        drop(tiles);
        Ok(quantized)
    }

    /// The blocks of tile `index`, which has R rows.
    ///
    /// # Panics
    /// If there is no such tile.
    #[inline(always)]
    pub fn tile<const R: usize>(&self, index: usize) -> &[BlockOfRows<R>] {
        debug_assert_eq!(R, self.tile_rows);
        let tile_words = self.blocks * BLOCK_WORDS * R;
        self.words[index * tile_words..][..tile_words].as_chunks::<R>().0.as_chunks().0
    }

    /// What partial sums of the blocks of tile `index` begin with.
    ///
    /// # Panics
    /// If there is no such tile, or no codes were to be multiplied.
    #[inline(always)]
    pub fn starts<const R: usize>(&self, index: usize) -> &[StartsOfRows<R>] {
        debug_assert_eq!(R, self.tile_rows);
        let tile_starts = self.blocks * START_WORDS * R;
        self.starts[index * tile_starts..][..tile_starts].as_chunks::<R>().0.as_chunks().0.as_chunks().0
    }

    /// What groups with factors need of the blocks of tile `index`.
    ///
    /// # Panics
    /// If there is no such tile, or no groups with factors were to be met.
    #[inline(always)]
    pub fn groups<const R: usize>(&self, index: usize) -> &[GroupsOfRows<R>] {
        debug_assert_eq!(R, self.tile_rows);
        let tile_groups = self.blocks * GROUP_WORDS * R;
        self.groups[index * tile_groups..][..tile_groups].as_chunks::<R>().0.as_chunks().0.as_chunks().0
    }
}

/// Quantizes blocks of tiles, which follow each other tile by tile.
struct QuantizePieces<'a> {
    input: Input<'a>,
    pieces: Range<usize>,
    words: &'a mut [i32],
    /// What partial sums begin with, if codes will be multiplied.
    starts: &'a mut [i32],
    /// What groups with factors need, if there will be any.
    groups: &'a mut [i32],
}

impl Kernel for QuantizePieces<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { input: Input { x, k, tile_rows, basis, .. }, pieces, words, starts, groups } = self;
        let mut starts = starts.chunks_exact_mut(START_WORDS * tile_rows);
        let mut groups = groups.chunks_exact_mut(GROUP_WORDS * tile_rows);
        for (piece, words) in pieces.zip(words.chunks_exact_mut(BLOCK_WORDS * tile_rows)) {
            let (tile, block) = (piece / blocks(k), piece % blocks(k));
            let (starts, groups) = (starts.next().unwrap_or_default(), groups.next().unwrap_or_default());
            let rows = x[tile * tile_rows * k..].chunks_exact(k).take(tile_rows);
            if rows.len() < tile_rows {
                words.fill(0);
                starts.fill(0);
                groups.fill(0);
            }
            for (row, x) in rows.enumerate() {
                let x = &x[block * BLOCK..k.min((block + 1) * BLOCK)];
                let mut padded = [[0.0; LANES]; BLOCK / LANES];
                let x = x.as_chunks().0.try_into().unwrap_or_else(|_| {
                    padded.as_flattened_mut()[..x.len()].copy_from_slice(x);
                    &padded
                });
                let mut words = words[row..].iter_mut().step_by(tile_rows);
                let head = words.by_ref().take(BLOCK_WORDS - BLOCK_QUADS);
                let codes = match basis {
                    Basis::Rotated => quantize_block(simd, x, head),
                    Basis::Plain => {
                        head.for_each(|word| *word = 0);
                        quantize_groups(simd, x, groups[row..].iter_mut().step_by(tile_rows))
                    }
                };
                let quads = codes.as_flattened().as_chunks().0;
                for (quad, word) in quads.iter().zip(words) {
                    *word = bytemuck::cast(*quad);
                }
                if !starts.is_empty() {
                    write_starts::<S>(quads, starts[row..].iter_mut().step_by(tile_rows));
                }
            }
        }
    }
}

/// Quantizes a block by its largest magnitude. Returns the scale and the codes.
#[inline(always)]
fn quantize<S: Simd, const N: usize>(simd: S, x: [S::F32; N]) -> (f32, [S::I32; N]) {
    let (mut largest, mut not_finite) = (simd.splat(0.0), simd.splat(0.0));
    for x in x {
        largest = simd.max(simd.max(x, simd.sub(simd.splat(0.0), x)), largest);
        // 0, or NaN from an infinity or a NaN: what it is multiplied into then is NaN too, not some number.
        not_finite = simd.mul_add(x, simd.splat(0.0), not_finite);
    }
    let largest = simd.reduce_max(largest);
    let scale = largest / 127.0 + simd.reduce_add(not_finite);
    let inverse = simd.splat(if largest > 0.0 { 127.0 / largest } else { 0.0 });
    (scale, x.map(|x| simd.to_i32(simd.mul(x, inverse))))
}

/// Bytes of codes.
#[inline(always)]
fn narrow<S: Simd, const N: usize>(simd: S, codes: [S::I32; N]) -> [[i8; LANES]; N] {
    let mut narrow = [[0; LANES]; N];
    for (codes, narrow) in codes.into_iter().zip(&mut narrow) {
        simd.store_i8(codes, narrow);
    }
    narrow
}

/// The sum of sixteen codes. Of what is not finite they are anything; the scale is what makes it NaN.
#[inline(always)]
fn sum<S: Simd>(simd: S, codes: S::I32) -> i32 {
    let mut lanes = [0; LANES];
    simd.store_i32(codes, &mut lanes);
    lanes.into_iter().fold(0, i32::wrapping_add)
}

/// What products begin with, so that the bias of the weights comes off them, where these are the codes' sum.
#[inline(always)]
fn start<S: Simd>(sum: i32) -> i32 {
    sum.wrapping_mul(-i32::from(S::WEIGHT_BIAS))
}

/// Quantizes a row's block, rotated, and writes what [`BlockOfRows`] has of it before the quads. Returns the codes.
#[inline(always)]
fn quantize_block<'a, S: Simd>(
    simd: S,
    x: &[[f32; LANES]; BLOCK / LANES],
    words: impl Iterator<Item = &'a mut i32>,
) -> [[i8; LANES]; BLOCK / LANES] {
    let (scale, codes) = quantize(simd, rotation::rotate(simd, x.map(|x| simd.load(&x))));
    let sum = sum(simd, codes.into_iter().fold(simd.splat_i32(0), |sum, codes| simd.add_i32(sum, codes)));
    write(words, [(scale * rotation::SHRINK).to_bits().cast_signed(), start::<S>(sum)]);
    narrow(simd, codes)
}

/// Quantizes the groups of a row's block, as they are, and writes what [`GroupsOfRows`] has of them. Returns the codes.
#[inline(always)]
fn quantize_groups<'a, S: Simd>(
    simd: S,
    x: &[[f32; LANES]; BLOCK / LANES],
    mut words: impl Iterator<Item = &'a mut i32>,
) -> [[i8; LANES]; BLOCK / LANES] {
    let mut of_block = [[0; LANES]; BLOCK / LANES];
    for (x, of_group) in x.as_chunks::<HALVES>().0.iter().zip(of_block.as_chunks_mut().0) {
        let (scale, codes) = quantize(simd, x.map(|x| simd.load(&x)));
        let halves = codes.map(|codes| sum(simd, codes));
        let sum = halves[0].wrapping_add(halves[1]);
        let [scale, negative] = [scale, sum.wrapping_neg() as f32 * scale].map(|word| word.to_bits().cast_signed());
        write(&mut words, [scale, start::<S>(sum), start::<S>(halves[0]), start::<S>(halves[1]), negative]);
        *of_group = narrow(simd, codes);
    }
    of_block
}

/// Writes values to the next words.
#[inline(always)]
fn write<'a, const N: usize>(words: impl Iterator<Item = &'a mut i32>, values: [i32; N]) {
    values.into_iter().zip(words).for_each(|(value, word)| *word = value);
}

/// What partial sums of codes begin with: `[kind][group]`.
#[inline(always)]
fn write_starts<'a, S: Simd>(quads: &[[i8; 4]], mut starts: impl Iterator<Item = &'a mut i32>) {
    for kind in Codes::ALL {
        for (quads, start) in quads.chunks_exact(GROUP / 4).zip(&mut starts) {
            // Of what is not finite the codes are anything, -128 too.
            *start = S::partial(shares(quads).map(|share| share.wrapping_mul(-kind.offset())));
        }
    }
}

/// The sums of the first two inputs of all quads, and of the others.
#[inline(always)]
fn shares(quads: &[[i8; 4]]) -> [i16; 2] {
    quads.iter().fold([0; 2], |[first, second], &[a, b, c, d]| {
        [first + i16::from(a) + i16::from(b), second + i16::from(c) + i16::from(d)]
    })
}
