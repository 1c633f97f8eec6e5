//! The register tile of the integer matmul, and what it asks of memory ahead of time.

use std::marker::PhantomData;
use std::ops::Range;

use super::activations::{BlockOfRows, GroupsOfRows, StartsOfRows};
use super::unroll::unroll;
use crate::arch::{ByteLine, Kernel, LANES, LINE, Simd};
use crate::quant::grouped::{self, Factors};
use crate::quant::integer::{BLOCK, BLOCK_GROUPS, BLOCK_PAIRS, GROUP, PAIR_QUADS, SUPER, Steps, Unpack};

/// How far ahead of its use a line of weights is asked for.
const PREFETCH_LINES: usize = 32;

/// Blocks that are unpacked at a time for many rows: of four panels 32 KiB, which most L1 caches hold.
pub(super) const UNPACKED_BLOCKS: usize = 4;

/// The most panels of a register tile of any instruction set.
pub(super) const MAX_TILE_PANELS: usize = 4;

/// The most sums of a tile that may stay in registers beside as many integers.
const SUMS_IN_REGISTERS: usize = 8;

/// Rows from which on activations do not stay in registers, but are read as part of the multiply-adds.
const READ_ROWS: usize = 12;

/// What will be needed next, and is asked for while a tile is computed.
pub(super) enum Ahead<'a, const R: usize> {
    /// Panels come from memory one after the other; as many streams as there are panels side by side.
    Weights {
        /// Lines of a panel.
        end: usize,
        /// Lines from there to the panel that comes next in its stream.
        skip: usize,
    },
    /// Some lines for each panel, so many for each part of a block.
    Lines { lines: [*const ByteLine; MAX_TILE_PANELS], each: usize },
    /// The next tile multiplies the same weights with other activations, and has other sums.
    Tile {
        blocks: &'a [BlockOfRows<R>],
        /// The number of the first of `blocks`.
        first: usize,
        /// Where the rows of its sums begin, and those of its outputs if they are written next.
        rows: [Option<[*const f32; R]>; 2],
    },
}

impl<const R: usize> Ahead<'_, R> {
    /// Asks for a share of it, at part `index` of a block, whose lines of a panel are `of_block`, and panel `p`: a little
    /// at a time, since whoever asks for more than the cache can wait for waits himself.
    #[inline(always)]
    fn prefetch<S: Simd>(
        &self,
        simd: S,
        (block, of_block): (usize, &Range<usize>),
        index: usize,
        p: usize,
        lines: &[ByteLine],
    ) {
        match self {
            Self::Weights { end, skip } => {
                let each = of_block.len().div_ceil(BLOCK_PAIRS);
                for line in 0..each {
                    let line = of_block.start + index * each + line + PREFETCH_LINES;
                    let line = if line < *end { line } else { line + skip };
                    simd.prefetch(lines.as_ptr().wrapping_add(line).cast());
                }
            }
            Self::Lines { lines, each } => {
                for line in 0..*each {
                    simd.prefetch(lines[p].wrapping_add(index * each + line).cast());
                }
            }
            Self::Tile { .. } if p > 0 => {}
            Self::Tile { blocks, first, rows } => {
                let block = block - first;
                if let Some(block) = blocks.get(block) {
                    let part = size_of_val(block) / BLOCK_PAIRS;
                    for byte in (0..part).step_by(LINE) {
                        simd.prefetch(block.as_ptr().cast::<u8>().wrapping_add(index * part + byte));
                    }
                }
                // The rows that fall to this block; of each as many panels as a block has parts.
                const { assert!(MAX_TILE_PANELS <= BLOCK_PAIRS) }
                for rows in rows.iter().flatten() {
                    for row in rows.iter().skip(block).step_by(UNPACKED_BLOCKS) {
                        simd.prefetch(row.wrapping_add(index * LANES).cast());
                    }
                }
            }
        }
    }
}

/// The activations of a tile in some blocks.
pub(super) struct TileInput<'a, const R: usize> {
    pub x: &'a [BlockOfRows<R>],
    /// What partial sums begin with, where codes are multiplied.
    pub starts: &'a [StartsOfRows<R>],
    /// What groups with factors need.
    pub groups: &'a [GroupsOfRows<R>],
    /// Block 0 begins the chains; later ones go on.
    pub blocks: Range<usize>,
    /// Inputs of a row, in all its blocks.
    pub cols: usize,
}

/// The register tile: R rows by P panels over some blocks.
pub(super) struct Micro<'a, U: Unpack, const R: usize, const P: usize> {
    pub x: TileInput<'a, R>,
    /// Steps of the panels, from super-block 0 on.
    pub steps: [&'a [Steps]; P],
    /// Lines of the panels.
    pub lines: [&'a [ByteLine]; P],
    /// The block at the beginning of `lines`.
    pub first_block: usize,
    pub ahead: Ahead<'a, R>,
    pub sums: &'a mut [[[f32; LANES]; P]; R],
    pub format: PhantomData<U>,
}

impl<U: Unpack, const R: usize, const P: usize> Kernel for Micro<'_, U, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        if let Some(factors) = U::FACTORS {
            return self.add_factored_blocks(simd, factors);
        }
        let Self { x, steps, lines, first_block, ahead, sums: paused, .. } = self;
        let TileInput { x, starts: group_starts, blocks, .. } = x;
        let codes = if S::BY_CODES { U::BY_CODES } else { None };
        let first = blocks.start;
        let mut sums = [[simd.splat(0.0); P]; R];
        if blocks.start > 0 {
            unroll!(r in 0..R { load_row(simd, &paused[r], &mut sums[r]) });
        }
        for (block, [scales, starts, quads @ ..]) in blocks.zip(x) {
            let mut integers = [[simd.splat_i32(0); P]; R];
            if codes.is_none() {
                unroll!(r in 0..R { integers[r] = [simd.splat_i32(starts[r]); P] });
            }
            let here = (block, &(U::first_line(block)..U::first_line(block + 1)));
            let mut at = [U::block(lines[0], block - first_block); P];
            unroll!(p in 0..P { at[p] = U::block(lines[p], block - first_block) });
            for (index, quads) in quads.as_chunks::<PAIR_QUADS>().0.iter().enumerate() {
                let quads = if R >= READ_ROWS { in_own_register(quads) } else { quads };
                let mut pairs = [U::pair(simd, at[0], index); P];
                unroll!(p in 0..P { pairs[p] = U::pair(simd, at[p], index) });
                if let Some(codes) = codes {
                    let starts = &group_starts[block - first][codes as usize].as_chunks::<2>().0[index];
                    unroll!(p in 0..P {
                        add_codes::<S, U, R, P>(simd, &mut integers, pairs[p], p, 0, quads, &starts[0]);
                        add_codes::<S, U, R, P>(simd, &mut integers, pairs[p], p, 1, quads, &starts[1]);
                        ahead.prefetch(simd, here, index, p, lines[p]);
                    });
                } else {
                    unroll!(q in [0 1 2 3 4 5 6 7] {
                        add_quad::<S, U, R, P>(simd, &mut integers, &pairs, q, &quads[q]);
                        if q % 2 == 1 && q / 2 < P {
                            ahead.prefetch(simd, here, index, q / 2, lines[q / 2]);
                        }
                    });
                }
            }
            let mut step = [simd.splat(0.0); P];
            unroll!(p in 0..P { step[p] = simd.load_f16(&steps[p][block * BLOCK / SUPER]) });
            unroll!(r in 0..R {
                add_scaled(simd, &mut sums[r], &integers[r], &step, f32::from_bits(scales[r].cast_unsigned()));
            });
        }
        unroll!(r in 0..R { store_row(simd, &sums[r], &mut paused[r]) });
    }
}

impl<U: Unpack, const R: usize, const P: usize> Micro<'_, U, R, P> {
    /// The blocks of weights whose groups have factors. Sums are in memory, and registers are left to the integers; of few
    /// there is a copy, which the compiler gets into registers.
    #[inline(always)]
    fn add_factored_blocks<S: Simd>(self, simd: S, factors: Factors) {
        let Self { x, lines, first_block, ahead, sums: paused, .. } = self;
        let TileInput { x, starts: group_starts, groups, blocks, cols } = x;
        let codes = if S::BY_CODES { U::BY_CODES } else { None };
        let first = blocks.start;
        if blocks.start == 0 {
            *paused = [[[0.0; LANES]; P]; R];
        }
        let mut few = [[[0.0; LANES]; P]; R];
        let are_few = R * P <= SUMS_IN_REGISTERS;
        if are_few {
            few = *paused;
        }
        for (block, [_, _, quads @ ..]) in blocks.zip(x) {
            let here = (block, &(U::first_line(block)..U::first_line(block + 1)));
            let mut at = [U::block(lines[0], block - first_block); P];
            unroll!(p in 0..P { at[p] = U::block(lines[p], block - first_block) });
            let quads = quads.as_chunks::<PAIR_QUADS>().0;
            for index in 0..BLOCK_PAIRS.min((cols - block * BLOCK) / grouped::GROUP) {
                let starts = codes.map(|codes| &group_starts[block - first][codes as usize]);
                let x = Group { quads: &quads[index], words: &groups[block - first][index], starts, index };
                let sums = if are_few { &mut few } else { in_memory(paused) };
                add_group::<S, U, R, P>(simd, sums, &at, factors, x);
                unroll!(p in 0..P { ahead.prefetch(simd, here, index, p, lines[p]) });
            }
        }
        if are_few {
            *paused = few;
        }
    }
}

/// The same, of which the compiler does not know who else may see it, so that it stays where it is. Else it would keep the
/// sums of large tiles in registers that there are not, and move them from place to place: half of the time was that.
#[inline(always)]
fn in_memory<T>(sums: &mut T) -> &mut T {
    let mut address: *mut T = sums;
    // SAFETY: there is no instruction in it, so that the address is what it was.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) address, options(nostack, preserves_flags));
        &mut *address
    }
}

/// The same, at an address that the compiler takes for a new one. Else it counts one register up for all streams and adds
/// it to each of their beginnings, and a multiply-add that reads from such a sum is two operations for the processor: at
/// sixteen rows that took a twelfth of the time.
#[inline(always)]
#[allow(clippy::pointers_in_nomem_asm_block, reason = "nothing is read through the address there")]
fn in_own_register<T>(quads: &T) -> &T {
    let mut address: *const T = quads;
    // SAFETY: there is no instruction in it, so that the address is what it was.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) address, options(pure, nomem, nostack, preserves_flags));
        &*address
    }
}

// Each level of the loops is a function of its own: written out in one body they would be thousands of lines.

#[inline(always)]
fn load_row<S: Simd, const P: usize>(simd: S, from: &[[f32; LANES]; P], to: &mut [S::F32; P]) {
    unroll!(p in 0..P { to[p] = simd.load(&from[p]) });
}

#[inline(always)]
fn store_row<S: Simd, const P: usize>(simd: S, from: &[S::F32; P], to: &mut [[f32; LANES]; P]) {
    unroll!(p in 0..P { simd.store(from[p], &mut to[p]) });
}

/// Adds the products of one quad of inputs.
#[inline(always)]
fn add_quad<'a, S: Simd, U: Unpack, const R: usize, const P: usize>(
    simd: S,
    integers: &mut [[S::I32; P]; R],
    pairs: &[U::Pair<'a, S>; P],
    index: usize,
    quad: &[i32; R],
) {
    let mut weights = [simd.splat_byte(0); P];
    unroll!(p in 0..P { weights[p] = U::quad(simd, pairs[p], index) });
    unroll!(r in 0..R { add_products(simd, &mut integers[r], &weights, quad[r]) });
}

#[inline(always)]
fn add_products<S: Simd, const P: usize>(simd: S, integers: &mut [S::I32; P], weights: &[S::Bytes; P], x: i32) {
    let x = simd.splat_quad(bytemuck::cast(x));
    unroll!(p in 0..P { integers[p] = simd.dot(integers[p], weights[p], x) });
}

/// Adds the products of group `group` of the pair with panel `p`, by their codes.
#[inline(always)]
fn add_codes<S: Simd, U: Unpack, const R: usize, const P: usize>(
    simd: S,
    integers: &mut [[S::I32; P]; R],
    pair: U::Pair<'_, S>,
    p: usize,
    group: usize,
    quads: &[[i32; R]; PAIR_QUADS],
    starts: &[i32; R],
) {
    let (first, scale) = (group * GROUP / 4, U::scale(simd, pair, group));
    let mut codes = [simd.splat_byte(0); GROUP / 4];
    unroll!(q in [0 1 2 3] { codes[q] = U::codes(simd, pair, first + q) });
    unroll!(r in 0..R {
        let mut partial = simd.splat_i32(starts[r]);
        unroll!(q in [0 1 2 3] {
            partial = simd.dot_codes(partial, codes[q], simd.splat_quad(bytemuck::cast(quads[first + q][r])));
        });
        integers[r][p] = simd.add_scaled(integers[r][p], partial, scale);
    });
}

/// Activations of a group with factors.
#[derive(Clone, Copy)]
struct Group<'a, const R: usize> {
    quads: &'a [[i32; R]; PAIR_QUADS],
    /// The scale, what products begin with, of all and of each half, and the sum.
    words: &'a [[i32; R]; 5],
    /// What partial sums of the block's halves of groups begin with, where codes are multiplied.
    starts: Option<&'a [[i32; R]; BLOCK_GROUPS]>,
    /// The group's number in its block.
    index: usize,
}

/// Adds the products of one group with factors: `sums += integers * (factor * scale)`, of both halves where each has its
/// own factor, and then what the offset makes of the activations' sum.
#[inline(always)]
fn add_group<S: Simd, U: Unpack, const R: usize, const P: usize>(
    simd: S,
    sums: &mut [[[f32; LANES]; P]; R],
    at: &[U::Block<'_>; P],
    factors: Factors,
    x: Group<'_, R>,
) {
    let quads = if R >= READ_ROWS { in_own_register(x.quads) } else { x.quads };
    let mut pairs = [U::pair(simd, at[0], x.index); P];
    unroll!(p in 0..P { pairs[p] = U::pair(simd, at[p], x.index) });
    unroll!(half in [0 1] {
        if half == 0 || factors.halves {
            let mut integers = [[simd.splat_i32(0); P]; R];
            if let Some(starts) = x.starts {
                unroll!(of_pair in [0 1] {
                    if of_pair == half || !factors.halves {
                        let starts = &starts[2 * x.index + of_pair];
                        unroll!(p in 0..P {
                            add_codes::<S, U, R, P>(simd, &mut integers, pairs[p], p, of_pair, quads, starts);
                        });
                    }
                });
            } else {
                let starts = &x.words[if factors.halves { 2 + half } else { 1 }];
                unroll!(r in 0..R { integers[r] = [simd.splat_i32(starts[r]); P] });
                unroll!(q in [0 1 2 3 4 5 6 7] {
                    if q / (GROUP / 4) == half || !factors.halves {
                        add_quad::<S, U, R, P>(simd, &mut integers, &pairs, q, &quads[q]);
                    }
                });
            }
            let mut factor = [simd.splat(0.0); P];
            unroll!(p in 0..P { factor[p] = U::factor(simd, pairs[p], half) });
            unroll!(r in 0..R { add_factored(simd, &mut sums[r], &integers[r], &factor, x.words[0][r]) });
        }
    });
    if factors.offsets {
        let mut offset = [simd.splat(0.0); P];
        unroll!(p in 0..P { offset[p] = U::factor(simd, pairs[p], 1) });
        unroll!(r in 0..R { add_product(simd, &mut sums[r], &offset, x.words[4][r]) });
    }
}

/// `sums += integers * (factor * scale)`, of the bits of an f32, with sums in memory.
#[inline(always)]
fn add_factored<S: Simd, const P: usize>(
    simd: S,
    sums: &mut [[f32; LANES]; P],
    integers: &[S::I32; P],
    factor: &[S::F32; P],
    scale: i32,
) {
    let mut row = [simd.splat(0.0); P];
    load_row(simd, sums, &mut row);
    add_scaled(simd, &mut row, integers, factor, f32::from_bits(scale.cast_unsigned()));
    store_row(simd, &row, sums);
}

/// `sums += values * scale`, of the bits of an f32, with sums in memory.
#[inline(always)]
fn add_product<S: Simd, const P: usize>(simd: S, sums: &mut [[f32; LANES]; P], values: &[S::F32; P], scale: i32) {
    let scale = simd.splat(f32::from_bits(scale.cast_unsigned()));
    unroll!(p in 0..P { simd.store(simd.mul_add(values[p], scale, simd.load(&sums[p])), &mut sums[p]) });
}

/// `sums += integers * (step * scale)`
#[inline(always)]
fn add_scaled<S: Simd, const P: usize>(
    simd: S,
    sums: &mut [S::F32; P],
    integers: &[S::I32; P],
    step: &[S::F32; P],
    scale: f32,
) {
    let scale = simd.splat(scale);
    unroll!(p in 0..P { sums[p] = simd.mul_add(simd.to_f32(integers[p]), simd.mul(step[p], scale), sums[p]) });
}
