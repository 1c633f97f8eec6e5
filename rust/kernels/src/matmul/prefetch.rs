//! Software prefetch of the integer matmul.

use std::ops::Range;

use super::activations::BlockOfRows;
use super::tile::{MAX_TILE_PANELS, UNPACKED_BLOCKS};
use super::unroll::unroll;
use crate::arch::{ByteLine, LANES, LINE, Simd};
use crate::quant::integer::{BLOCK_PAIRS, Unpack};

/// Number of lines that are prefetched ahead in all streams together, into the L1 cache. Fewer would not cover the latency of
/// memory (`benches/record/2026-11-29-amd-epyc-zen5/matmul-one-stream.txt`).
const AHEAD: usize = 128;

/// Distances of the prefetch of weights in two steps, in lines: into the L2 cache, and from there into the L1 cache. More
/// lines can be on the way to the L2 cache than to the L1 cache: with one row and four streams, int4 reads 5 % faster than
/// in one step (`cargo bench -p ferrule-kernels --bench matmul -- int4 1`). Weights that are in the last-level cache are
/// prefetched in the second step alone, since the first one makes their products 3 to 7 % slower (`-- small q4_1 q8_0
/// int4 1`).
const FAR_LINES: usize = 64;
const NEAR_LINES: usize = 20;

/// P panels side by side, each followed by others: P streams of memory.
#[derive(Clone, Copy)]
pub(super) struct Streams<const P: usize> {
    /// Number of lines of a panel.
    pub end: usize,
    /// Whether the weights probably are in the last-level cache.
    pub in_cache: bool,
}

impl<const P: usize> Streams<P> {
    /// Returns the line of a stream given its index in a panel if that went on: past the panel, that of the next one.
    #[inline(always)]
    fn line(self, index: usize) -> usize {
        if index < self.end { index } else { index + (P - 1) * self.end }
    }
}

/// Memory that is prefetched while a tile of R rows is computed, since it is needed next. A tile is compiled for each kind:
/// with a choice in every place the compiler would optimize the code of both.
pub(super) trait Prefetch<const R: usize> {
    /// Prefetches a share at part `index` of block `block` and panel `p`, given the panel's lines. The shares are small, since
    /// the processor stalls when more prefetches are outstanding than the cache can track.
    fn issue<S: Simd, U: Unpack>(&self, simd: S, block: usize, index: usize, p: usize, lines: &[ByteLine]);
}

/// Weights of the panels themselves, which come from memory.
impl<const R: usize, const P: usize> Prefetch<R> for Streams<P> {
    #[inline(always)]
    fn issue<S: Simd, U: Unpack>(&self, simd: S, block: usize, index: usize, _p: usize, lines: &[ByteLine]) {
        let of_block = U::first_line(block)..U::first_line(block + 1);
        if const { P == 1 || waits_for_memory::<U>(R) } {
            let (of_part, more) = part_lines::<U>(&of_block, index);
            self.prefetch(simd, lines, of_part);
            for line in more {
                self.prefetch(simd, lines, line..line + 1);
            }
            return;
        }
        let each = of_block.len().div_ceil(BLOCK_PAIRS);
        for line in 0..each {
            let line = self.line(of_block.start + index * each + line + AHEAD / P);
            simd.prefetch(lines.as_ptr().wrapping_add(line).cast());
        }
    }
}

impl<const P: usize> Streams<P> {
    /// Prefetches as many lines as are `multiplied` at the same time: [`AHEAD`] after them if there is one stream, else
    /// [`NEAR_LINES`] after them, and [`FAR_LINES`] after them unless they are in the last-level cache.
    #[inline(always)]
    pub fn prefetch<S: Simd>(self, simd: S, lines: &[ByteLine], multiplied: Range<usize>) {
        let at = |ahead: usize| lines.as_ptr().wrapping_add(self.line(multiplied.start + ahead));
        if const { P == 1 } {
            return prefetch_lines::<S, false>(simd, at(AHEAD), multiplied.len());
        }
        prefetch_lines::<S, false>(simd, at(NEAR_LINES), multiplied.len());
        if !self.in_cache {
            prefetch_lines::<S, true>(simd, at(FAR_LINES), multiplied.len());
        }
    }
}

/// Weights that are multiplied after these, and the next tile, which multiplies the same weights.
pub(super) struct Next<'a, const R: usize> {
    /// `count` lines of weights for each panel, `each` of them with each part of a block.
    pub lines: [*const ByteLine; MAX_TILE_PANELS],
    pub count: usize,
    pub each: usize,
    /// Index of the first block that is multiplied.
    pub first: usize,
    /// Activations of the next tile.
    pub blocks: &'a [BlockOfRows<R>],
    /// Addresses of the rows of its sums, and of its outputs if they are written next.
    pub rows: [Option<[*const f32; R]>; 2],
}

impl<const R: usize> Prefetch<R> for Next<'_, R> {
    #[inline(always)]
    fn issue<S: Simd, U: Unpack>(&self, simd: S, block: usize, index: usize, p: usize, _lines: &[ByteLine]) {
        let block = block - self.first;
        let line = (block * BLOCK_PAIRS + index) * self.each;
        for line in line..(line + self.each).min(self.count) {
            simd.prefetch(self.lines[p].wrapping_add(line).cast());
        }
        if p > 0 {
            return;
        }
        if let Some(block) = self.blocks.get(block) {
            let part = size_of_val(block) / BLOCK_PAIRS;
            for byte in (0..part).step_by(LINE) {
                simd.prefetch(block.as_ptr().cast::<u8>().wrapping_add(index * part + byte));
            }
        }
        // The rows of this block's share; of each row as many panels as a block has parts.
        const { assert!(MAX_TILE_PANELS <= BLOCK_PAIRS) }
        for rows in self.rows.iter().flatten() {
            unroll!(r in 0..R {
                if r % UNPACKED_BLOCKS == block {
                    simd.prefetch(rows[r].wrapping_add(index * LANES).cast());
                }
            });
        }
    }
}

/// Returns the lines of part `index` of a block, as many as each part has at least, and those that part 0 has besides. The
/// compiler sees that the number of the first is a constant and drops the comparisons with it: where it did not, prefetching
/// int6 took as many instructions as multiplying it. It does not know that of the others, which take a loop.
#[inline(always)]
fn part_lines<U: Unpack>(of_block: &Range<usize>, index: usize) -> (Range<usize>, Range<usize>) {
    // Two blocks may share lines.
    let each = U::first_line(2) / (2 * BLOCK_PAIRS);
    let more = of_block.len().saturating_sub(BLOCK_PAIRS * each);
    let first = of_block.start + index * each + if index > 0 { more } else { 0 };
    (first..first + each, first + each..first + each + if index > 0 { 0 } else { more })
}

/// Prefetches `count` lines, into the L2 cache if `FAR`. Up to eight need no loop where the compiler knows the count: with
/// loops q4_k and q6_k take a tenth longer on AVX512-VNNI (`cargo bench -p ferrule-kernels --bench matmul -- q4_k q6_k 1`).
#[inline(always)]
fn prefetch_lines<S: Simd, const FAR: bool>(simd: S, lines: *const ByteLine, count: usize) {
    macro_rules! prefetch {
        ($line:ident) => {{
            let line = lines.wrapping_add($line).cast();
            if FAR { simd.prefetch_far(line) } else { simd.prefetch(line) }
        }};
    }
    unroll!(line in [0 1 2 3 4 5 6 7] {
        if line < count {
            prefetch!(line);
        }
    });
    for line in 8..count {
        prefetch!(line);
    }
}

/// Returns whether a product of several panels with `rows` rows waits for memory more than for the processor, so that a
/// prefetch in two steps is faster: one row does, several where weights need not be unpacked.
const fn waits_for_memory<U: Unpack>(rows: usize) -> bool {
    rows == 1 || rows <= 8 && !U::EXPANDS && U::BY_CODES.is_none() && U::FACTORS.is_none()
}
