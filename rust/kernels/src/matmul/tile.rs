//! Register tile of the integer matmul.

use std::marker::PhantomData;
use std::ops::Range;

use super::activations::{BlockOfRows, GroupOfRows, GroupsOfRows, StartsOfRows, group_word};
use super::prefetch::Prefetch;
use super::unroll::unroll;
use crate::arch::{ByteLine, Dot, DotKernel, LANES, Simd};
use crate::quant::grouped::{self, Factors};
use crate::quant::integer::{self, BLOCK, BLOCK_PAIRS, BlockScales, Codes, GROUP, PAIR_QUADS, Unpack};

/// Number of blocks that are unpacked at a time for many rows: 32 KiB for four panels, which fit most L1 caches.
pub(super) const UNPACKED_BLOCKS: usize = 4;

/// Maximum number of panels of a register tile of any instruction set.
pub(super) const MAX_TILE_PANELS: usize = 4;

/// Maximum number of sums of a tile that stay in registers beside as many integers.
const SUMS_IN_REGISTERS: usize = 8;

/// Number of rows from which on activations are memory operands of the multiply-adds, as they do not fit the registers.
const READ_ROWS: usize = 12;

/// Number of rows from which on weights are prefetched before the multiply-adds of a pair, not between them: the compiler
/// loads the activations of the quads before a prefetch first and spills them, which took a quarter of the time of int4.
const PREFETCH_FIRST_ROWS: usize = 16;

/// Number of rows whose integers take half of sixteen registers, so that their sums do not fit beside weights.
const FILLING_ROWS: usize = 4;

/// Activations of a tile in some blocks.
pub(super) struct TileInput<'a, const R: usize> {
    pub x: &'a [BlockOfRows<R>],
    /// Initial values of partial sums, where codes are multiplied.
    pub starts: &'a [StartsOfRows<R>],
    /// Scales and sums of the groups, for weights whose groups have factors.
    pub groups: &'a [GroupsOfRows<R>],
    /// Indices of the blocks. Block 0 begins the chains; later blocks continue them.
    pub blocks: Range<usize>,
    /// Number of inputs of a row, in all its blocks.
    pub cols: usize,
}

/// Register tile: R rows by P panels over some blocks.
pub(super) struct Micro<'a, U: Unpack, N: Prefetch<R>, const R: usize, const P: usize> {
    pub x: TileInput<'a, R>,
    /// Block scales of the panels, beginning with super-block 0.
    pub block_scales: [&'a [BlockScales]; P],
    /// Lines of the panels.
    pub lines: [&'a [ByteLine]; P],
    /// Index of the block at the beginning of `lines`.
    pub first_block: usize,
    pub prefetch: &'a N,
    pub sums: &'a mut [[[f32; LANES]; P]; R],
    pub format: PhantomData<U>,
}

impl<U: Unpack, N: Prefetch<R>, const R: usize, const P: usize> DotKernel for Micro<'_, U, N, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Dot>(self, simd: S) {
        if const { U::FACTORS.is_some() } {
            return self.add_factored_blocks(simd);
        }
        let Self { x, block_scales, lines, first_block, prefetch, sums: saved, .. } = self;
        let TileInput { x, starts: group_starts, blocks, cols, .. } = x;
        let first = blocks.start;
        let mut sums = [[simd.splat(0.0); P]; R];
        if blocks.start > 0 {
            unroll!(r in 0..R { load_row(simd, &saved[r], &mut sums[r]) });
        }
        for (block, [scales, starts, quads @ ..]) in blocks.zip(x) {
            let mut integers = [[simd.splat_i32(0); P]; R];
            if const { codes::<S, U>(R).is_none() } {
                unroll!(r in 0..R { integers[r] = [simd.splat_i32(starts[r]); P] });
            }
            let mut at = [U::block(lines[0], block - first_block); P];
            unroll!(p in 0..P { at[p] = U::block(lines[p], block - first_block) });
            let quads = quads.as_chunks::<PAIR_QUADS>().0.iter();
            for (index, quads) in quads.enumerate().take(integer::pairs(cols, block)) {
                let quads = if const { R >= READ_ROWS } { in_own_register(quads) } else { quads };
                if const { codes::<S, U>(R).is_some() } {
                    let starts = &group_starts[block - first][kind::<S, U, R>()].as_chunks::<2>().0[index];
                    // The sub-scales of one panel after the other: those of all panels fill registers, which took a twelfth of
                    // the time of int4 and int6 in the cache.
                    unroll!(p in 0..P {
                        prefetch.issue::<S, U>(simd, block, index, p, lines[p]);
                        let pair = U::pair(simd, at[p], index);
                        add_codes::<S, U, R, P>(simd, &mut integers, pair, p, 0, quads, &starts[0]);
                        add_codes::<S, U, R, P>(simd, &mut integers, pair, p, 1, quads, &starts[1]);
                    });
                } else if const { U::EXPANDS } {
                    unroll!(p in 0..P {
                        prefetch.issue::<S, U>(simd, block, index, p, lines[p]);
                        add_pair::<S, U, R, P>(simd, &mut integers, U::pair(simd, at[p], index), p, quads);
                    });
                } else {
                    let mut pairs = [U::pair(simd, at[0], index); P];
                    unroll!(p in 0..P { pairs[p] = U::pair(simd, at[p], index) });
                    if const { R >= PREFETCH_FIRST_ROWS } {
                        unroll!(p in 0..P { prefetch.issue::<S, U>(simd, block, index, p, lines[p]) });
                    }
                    unroll!(q in [0 1 2 3 4 5 6 7] {
                        add_quad::<S, U, R, P>(simd, &mut integers, &pairs, q, &quads[q]);
                        if const { R < PREFETCH_FIRST_ROWS } && q % 2 == 1 && q / 2 < P {
                            prefetch.issue::<S, U>(simd, block, index, q / 2, lines[q / 2]);
                        }
                    });
                }
            }
            let mut block_scale = [simd.splat(0.0); P];
            unroll!(p in 0..P { block_scale[p] = U::block_scale(simd, block_scales[p], block, at[p]) });
            unroll!(r in 0..R {
                add_scaled(simd, &mut sums[r], &integers[r], &block_scale, f32::from_bits(scales[r].cast_unsigned()));
            });
        }
        unroll!(r in 0..R { store_row(simd, &sums[r], &mut saved[r]) });
    }
}

impl<U: Unpack, N: Prefetch<R>, const R: usize, const P: usize> Micro<'_, U, N, R, P> {
    /// Adds the products of blocks whose groups have factors. Sums are in memory, so that integers get the registers; of
    /// few sums there is a copy, which the compiler keeps in registers, unless integers fill them.
    #[inline(always)]
    fn add_factored_blocks<S: Dot>(self, simd: S) {
        let Self { x, lines, first_block, prefetch, sums: saved, .. } = self;
        let TileInput { x, starts: group_starts, groups, blocks, cols } = x;
        let first = blocks.start;
        if blocks.start == 0 {
            *saved = [[[0.0; LANES]; P]; R];
        }
        let in_registers = const { R * P <= SUMS_IN_REGISTERS && !integers_fill_registers::<S>(R) };
        let mut local = [[[0.0; LANES]; P]; R];
        if in_registers {
            local = *saved;
        }
        for (block, [_, _, quads @ ..]) in blocks.zip(x) {
            let mut at = [U::block(lines[0], block - first_block); P];
            unroll!(p in 0..P { at[p] = U::block(lines[p], block - first_block) });
            let (quads, words) = (quads.as_chunks::<PAIR_QUADS>().0, &groups[block - first]);
            let mut starts = &[[[0; R]; 2]; BLOCK_PAIRS];
            if const { has_starts::<S, U>(R) } {
                starts = group_starts[block - first][kind::<S, U, R>()].as_chunks().0.first_chunk().expect("a block");
            }
            macro_rules! group {
                ($index:ident) => {{
                    let (quads, words, starts) = (&quads[$index], &words[$index], &starts[$index]);
                    let x = Group { quads, words, starts, index: $index };
                    let sums = if in_registers { &mut local } else { in_memory(saved) };
                    add_group::<S, U, R, P>(simd, sums, &at, x);
                    unroll!(p in 0..P { prefetch.issue::<S, U>(simd, block, $index, p, lines[p]) });
                }};
            }
            // With constant indices the shifts of sub-scales are constant too, and scales are widened once for a block.
            if const { U::UNROLLED && in_turn::<S, U>(R) } {
                unroll!(index in [0 1 2 3] { group!(index) });
            } else {
                for index in 0..BLOCK_PAIRS.min((cols - block * BLOCK) / grouped::GROUP) {
                    group!(index);
                }
            }
        }
        if in_registers {
            *saved = local;
        }
    }
}

/// Returns whether codes are multiplied with `rows` rows; `has_factors` says whether groups have factors.
pub(super) const fn multiplies_codes<S: Dot>(rows: usize, has_factors: bool) -> bool {
    S::BY_CODES || !has_factors && rows <= S::CODE_ROWS
}

/// Returns the codes that are multiplied with `rows` rows; `None` where weights are.
pub(super) const fn codes<S: Dot, U: Unpack>(rows: usize) -> Option<Codes> {
    if multiplies_codes::<S>(rows, U::FACTORS.is_some()) { U::BY_CODES } else { None }
}

/// Returns whether the partial sums of a group fit 16 bits.
const fn is_short<S: Dot, U: Unpack>(rows: usize) -> bool {
    matches!(codes::<S, U>(rows), Some(Codes::FourBits))
}

/// Returns whether there are initial values of the partial sums of codes.
const fn has_starts<S: Dot, U: Unpack>(rows: usize) -> bool {
    matches!(codes::<S, U>(rows), Some(codes) if codes.offset() != 0)
}

/// Returns whether the panels of `rows` rows take turns block by block: since the integers and sums of several panels do not
/// fit sixteen registers beside codes and sub-scales, or since the positions of expanded codes of several panels do not fit
/// the general-purpose registers.
pub(super) const fn in_turn<S: Dot, U: Unpack>(rows: usize) -> bool {
    let fills_registers = U::TURNS && codes::<S, U>(rows).is_some() && S::BYTE_TILE_PANELS == 1;
    U::EXPANDS || fills_registers && rows < S::BYTE_TILE_ROWS
}

/// Returns whether the integers of `rows` rows and weights fill the registers of this instruction set, so that sums stay
/// in memory. Instruction sets with more than sixteen registers have tiles of several panels.
const fn integers_fill_registers<S: Dot>(rows: usize) -> bool {
    S::BYTE_TILE_PANELS == 1 && rows >= FILLING_ROWS
}

/// Returns the index of the codes that are multiplied among [`Codes::WITH_OFFSETS`]; 0 where weights are multiplied.
#[inline(always)]
fn kind<S: Dot, U: Unpack, const R: usize>() -> usize {
    const { if let Some(codes) = codes::<S, U>(R) { codes as usize } else { 0 } }
}

/// Returns whether each half of a group has its own factor.
pub(super) const fn halves<U: Unpack>() -> bool {
    matches!(U::FACTORS, Some(Factors { halves: true, .. }))
}

/// Returns whether groups, or their halves, have offsets.
const fn has_offsets<U: Unpack>() -> bool {
    matches!(U::FACTORS, Some(Factors { offsets: true, .. }))
}

/// Returns the same reference, whose target the compiler must assume to be visible elsewhere, so that it stays in memory.
/// Otherwise the compiler would assign the sums of large tiles to more registers than there are and spill them, which took
/// half of the time.
#[inline(always)]
fn in_memory<T>(sums: &mut T) -> &mut T {
    let mut address: *mut T = sums;
    // SAFETY: the assembly holds no instruction, so the address does not change.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) address, options(nostack, preserves_flags));
        &mut *address
    }
}

/// Returns the same reference, whose address the compiler must assume to be new. Otherwise it indexes all streams with one
/// register, and a multiply-add with an indexed memory operand is two operations for the processor: at sixteen rows that
/// took a twelfth of the time.
#[inline(always)]
#[allow(clippy::pointers_in_nomem_asm_block, reason = "nothing is read through the address there")]
fn in_own_register<T>(quads: &T) -> &T {
    let mut address: *const T = quads;
    // SAFETY: the assembly holds no instruction, so the address does not change.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) address, options(pure, nomem, nostack, preserves_flags));
        &*address
    }
}

/// Returns the same reference, through which the compiler must not read before this place. Otherwise it reads the
/// activations of all rows first, or those of all panels before the first of them, and spills them, which took a third of
/// the time.
#[inline(always)]
pub(super) fn in_order<T>(quads: &T) -> &T {
    let mut address: *const T = quads;
    // SAFETY: the assembly holds no instruction, so the address does not change.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) address, options(nostack, preserves_flags));
        &*address
    }
}

// Each loop level is a separate function: unrolled in one body they would be thousands of lines.

#[inline(always)]
pub(super) fn load_row<S: Simd, const P: usize>(simd: S, from: &[[f32; LANES]; P], to: &mut [S::F32; P]) {
    unroll!(p in 0..P { to[p] = simd.load(&from[p]) });
}

#[inline(always)]
pub(super) fn store_row<S: Simd, const P: usize>(simd: S, from: &[S::F32; P], to: &mut [[f32; LANES]; P]) {
    unroll!(p in 0..P { simd.store(from[p], &mut to[p]) });
}

/// Adds the products of one quad of inputs to the integers of all rows and panels.
#[inline(always)]
fn add_quad<'a, S: Dot, U: Unpack, const R: usize, const P: usize>(
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
fn add_products<S: Dot, const P: usize>(simd: S, integers: &mut [S::I32; P], weights: &[S::Bytes; P], x: i32) {
    let x = simd.splat_quad(bytemuck::cast(x));
    unroll!(p in 0..P { integers[p] = simd.dot(integers[p], weights[p], x) });
}

/// Adds the products of a pair of groups in panel `p`. Odd quads have a separate sum, so that fewer multiply-adds wait
/// for each other.
#[inline(always)]
fn add_pair<S: Dot, U: Unpack, const R: usize, const P: usize>(
    simd: S,
    integers: &mut [[S::I32; P]; R],
    pair: U::Pair<'_, S>,
    p: usize,
    quads: &[[i32; R]; PAIR_QUADS],
) {
    let mut odd = [simd.splat_i32(0); R];
    unroll!(q in [0 1 2 3 4 5 6 7] {
        let weights = U::quad(simd, pair, q);
        unroll!(r in 0..R {
            let sum = if q % 2 == 0 { &mut integers[r][p] } else { &mut odd[r] };
            *sum = simd.dot(*sum, weights, simd.splat_quad(bytemuck::cast(quads[q][r])));
        });
    });
    unroll!(r in 0..R { integers[r][p] = simd.add_i32(integers[r][p], odd[r]) });
}

/// Adds the products of group `group` of the pair in panel `p`, by multiplying codes.
#[inline(always)]
fn add_codes<S: Dot, U: Unpack, const R: usize, const P: usize>(
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
    let integers = if const { integers_fill_registers::<S>(R) } { in_memory(integers) } else { integers };
    unroll!(r in 0..R {
        let quads = if const { integers_fill_registers::<S>(R) } { in_order(quads) } else { quads };
        let mut partial = simd.splat_i32(starts[r]);
        unroll!(q in [0 1 2 3] {
            partial = simd.dot_codes(partial, codes[q], simd.splat_quad(bytemuck::cast(quads[first + q][r])));
        });
        integers[r][p] = simd.add_scaled(integers[r][p], partial, scale, const { is_short::<S, U>(R) });
    });
}

/// Activations of a group with factors.
#[derive(Clone, Copy)]
struct Group<'a, const R: usize> {
    quads: &'a [[i32; R]; PAIR_QUADS],
    words: &'a GroupOfRows<R>,
    /// Initial values of the partial sums of both halves, where codes are multiplied.
    starts: &'a [[i32; R]; 2],
    /// Index of the group in its block.
    index: usize,
}

/// Adds the products of one group with factors: `sums += integers * (factor * scale)`, of both halves where each has its
/// own factor, and then the products of the offsets with the sums of the activations.
#[inline(always)]
fn add_group<S: Dot, U: Unpack, const R: usize, const P: usize>(
    simd: S,
    sums: &mut [[[f32; LANES]; P]; R],
    at: &[U::Block<'_>; P],
    x: Group<'_, R>,
) {
    let quads = if const { R >= READ_ROWS } { in_own_register(x.quads) } else { x.quads };
    let mut pairs = [U::pair(simd, at[0], x.index); P];
    unroll!(p in 0..P { pairs[p] = U::pair(simd, at[p], x.index) });
    if const { halves::<U>() } {
        unroll!(half in [0 1] {
            let mut integers = [[simd.splat_i32(0); P]; R];
            if const { codes::<S, U>(R).is_some() } {
                unroll!(p in 0..P {
                    add_codes::<S, U, R, P>(simd, &mut integers, pairs[p], p, half, quads, &x.starts[half]);
                });
            } else {
                unroll!(r in 0..R { integers[r] = [simd.splat_i32(x.words[group_word::HALF_STARTS + half][r]); P] });
                unroll!(q in [0 1 2 3] {
                    let quad = half * (GROUP / 4) + q;
                    add_quad::<S, U, R, P>(simd, &mut integers, &pairs, quad, &quads[quad]);
                });
            }
            add_integers::<S, U, R, P>(simd, sums, &integers, &pairs, half, &x.words[group_word::SCALE]);
        });
        if const { has_offsets::<U>() } {
            unroll!(half in [0 1] { add_offset::<S, U, R, P>(simd, sums, &pairs, 2 + half, &x.words[group_word::HALF_SUMS + half]) });
        }
    } else {
        let mut integers = [[simd.splat_i32(0); P]; R];
        if const { codes::<S, U>(R).is_some() } {
            unroll!(half in [0 1] {
                unroll!(p in 0..P {
                    add_codes::<S, U, R, P>(simd, &mut integers, pairs[p], p, half, quads, &x.starts[half]);
                });
            });
        } else {
            unroll!(r in 0..R { integers[r] = [simd.splat_i32(x.words[group_word::START][r]); P] });
            unroll!(q in [0 1 2 3 4 5 6 7] { add_quad::<S, U, R, P>(simd, &mut integers, &pairs, q, &quads[q]) });
        }
        if const { has_offsets::<U>() } {
            add_integers_and_offset::<S, U, R, P>(simd, sums, &integers, &pairs, x.words);
        } else {
            add_integers::<S, U, R, P>(simd, sums, &integers, &pairs, 0, &x.words[group_word::SCALE]);
        }
    }
}

/// Adds the integers of a group times their factor and the scales of the activations, and then the products of its offset with
/// the sums of the activations. The sums of the tile are read and written once for both: in two passes q4_k was a tenth slower
/// with 512 rows.
#[inline(always)]
fn add_integers_and_offset<S: Dot, U: Unpack, const R: usize, const P: usize>(
    simd: S,
    sums: &mut [[[f32; LANES]; P]; R],
    integers: &[[S::I32; P]; R],
    pairs: &[U::Pair<'_, S>; P],
    words: &GroupOfRows<R>,
) {
    let (mut factor, mut offset) = ([simd.splat(0.0); P], [simd.splat(0.0); P]);
    unroll!(p in 0..P {
        factor[p] = U::factor(simd, pairs[p], 0);
        offset[p] = U::factor(simd, pairs[p], 1);
    });
    unroll!(r in 0..R {
        let mut row = [simd.splat(0.0); P];
        load_row(simd, &sums[r], &mut row);
        add_scaled(simd, &mut row, &integers[r], &factor, f32::from_bits(words[group_word::SCALE][r].cast_unsigned()));
        let of_activations = simd.splat(f32::from_bits(words[group_word::SUM][r].cast_unsigned()));
        add_product(simd, &mut row, &offset, of_activations);
        store_row(simd, &row, &mut sums[r]);
    });
}

/// Adds the products of factor `index`, an offset, with sums of activations.
#[inline(always)]
fn add_offset<S: Dot, U: Unpack, const R: usize, const P: usize>(
    simd: S,
    sums: &mut [[[f32; LANES]; P]; R],
    pairs: &[U::Pair<'_, S>; P],
    index: usize,
    of_activations: &[i32; R],
) {
    let mut offset = [simd.splat(0.0); P];
    unroll!(p in 0..P { offset[p] = U::factor(simd, pairs[p], index) });
    unroll!(r in 0..R {
        let mut row = [simd.splat(0.0); P];
        load_row(simd, &sums[r], &mut row);
        add_product(simd, &mut row, &offset, simd.splat(f32::from_bits(of_activations[r].cast_unsigned())));
        store_row(simd, &row, &mut sums[r]);
    });
}

/// Adds the integers of a group, or of its half `half`, times their factors and the scales of the activations.
#[inline(always)]
fn add_integers<S: Dot, U: Unpack, const R: usize, const P: usize>(
    simd: S,
    sums: &mut [[[f32; LANES]; P]; R],
    integers: &[[S::I32; P]; R],
    pairs: &[U::Pair<'_, S>; P],
    half: usize,
    scales: &[i32; R],
) {
    let mut factor = [simd.splat(0.0); P];
    unroll!(p in 0..P { factor[p] = U::factor(simd, pairs[p], half) });
    unroll!(r in 0..R { add_factored(simd, &mut sums[r], &integers[r], &factor, scales[r]) });
}

/// Computes `sums += integers * (factor * scale)`, where `scale` holds the bits of an f32 and sums are in memory.
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

/// Computes `sums += values * factor`.
#[inline(always)]
fn add_product<S: Simd, const P: usize>(simd: S, sums: &mut [S::F32; P], values: &[S::F32; P], factor: S::F32) {
    unroll!(p in 0..P { sums[p] = simd.mul_add(values[p], factor, sums[p]) });
}

/// Computes `sums += integers * (block_scale * scale)`.
#[inline(always)]
pub(super) fn add_scaled<S: Simd, const P: usize>(
    simd: S,
    sums: &mut [S::F32; P],
    integers: &[S::I32; P],
    block_scale: &[S::F32; P],
    scale: f32,
) {
    let scale = simd.splat(scale);
    unroll!(p in 0..P { sums[p] = simd.mul_add(simd.to_f32(integers[p]), simd.mul(block_scale[p], scale), sums[p]) });
}
