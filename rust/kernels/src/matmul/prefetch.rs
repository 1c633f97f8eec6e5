//! Software prefetch of the integer matmul.

use std::ops::Range;

use super::activations::BlockOfRows;
use super::tile::{MAX_TILE_PANELS, UNPACKED_BLOCKS};
use super::unroll::unroll;
use crate::arch::{ByteLine, LANES, LINE, Simd};
use crate::quant::integer::{BLOCK_PAIRS, Unpack};

/// Distance of the prefetch of weights into the L1 cache, in lines.
const PREFETCH_LINES: usize = 32;

/// Distances of the prefetch of weights in two steps, in lines: into the L2 cache, and from there into the L1 cache. More
/// lines can be on the way to the L2 cache than to the L1 cache: with one row, int4 reads 5 % faster than in one step
/// (`cargo bench -p ferrule-kernels --bench matmul -- int4 1`). Weights that are in the last-level cache are prefetched in
/// the second step alone, since the first one makes their products 3 to 7 % slower (`-- small q4_1 q8_0 int4 1`).
const FAR_LINES: usize = 64;
const NEAR_LINES: usize = 20;

/// Layout of the panels that are read after each other.
#[derive(Clone, Copy)]
pub(super) struct Stream {
    /// Number of lines of a panel.
    pub end: usize,
    /// Number of lines from there to the next panel of the stream.
    pub skip: usize,
    /// Whether the weights probably are in the last-level cache.
    pub in_cache: bool,
}

/// Memory that is prefetched while a tile of R rows is computed, since it is needed next. A tile is compiled for each kind:
/// with a choice in every place the compiler would optimize the code of both.
pub(super) trait Prefetch<const R: usize> {
    /// Prefetches a share at part `index` of block `block` and panel `p`, given the panel's lines. The shares are small, since
    /// the processor stalls when more prefetches are outstanding than the cache can track.
    fn issue<S: Simd, U: Unpack>(&self, simd: S, block: usize, index: usize, p: usize, lines: &[ByteLine]);
}

/// Weights of the panels themselves, which come from memory in as many streams as there are panels side by side.
impl<const R: usize> Prefetch<R> for Stream {
    #[inline(always)]
    fn issue<S: Simd, U: Unpack>(&self, simd: S, block: usize, index: usize, _p: usize, lines: &[ByteLine]) {
        let of_block = U::first_line(block)..U::first_line(block + 1);
        if const { waits_for_memory::<U>(R) } {
            let each = part_lines::<U>();
            let more = of_block.len().saturating_sub(BLOCK_PAIRS * each);
            let first = of_block.start + index * each + if index > 0 { more } else { 0 };
            prefetch_stream(simd, lines, first..first + each, *self);
            if index == 0 {
                // The compiler does not know how many there are, and comparisons would take longer than a loop.
                for line in first + each..first + each + more {
                    prefetch_stream(simd, lines, line..line + 1, *self);
                }
            }
            return;
        }
        let each = of_block.len().div_ceil(BLOCK_PAIRS);
        for line in 0..each {
            let line = of_block.start + index * each + line + PREFETCH_LINES;
            let line = if line < self.end { line } else { line + self.skip };
            simd.prefetch(lines.as_ptr().wrapping_add(line).cast());
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

/// Returns the number of lines that each part of a block has at least. The compiler sees that it is a constant and drops
/// the comparisons with it: where it did not, prefetching int6 took as many instructions as multiplying it.
#[inline(always)]
fn part_lines<U: Unpack>() -> usize {
    // Two blocks may share lines.
    U::first_line(2) / (2 * BLOCK_PAIRS)
}

/// Prefetches as many lines as are `multiplied` at the same time, [`NEAR_LINES`] after them, and [`FAR_LINES`] after them
/// unless they are in the last-level cache.
#[inline(always)]
pub(super) fn prefetch_stream<S: Simd>(
    simd: S,
    lines: &[ByteLine],
    multiplied: Range<usize>,
    Stream { end, skip, in_cache }: Stream,
) {
    let mut ahead = [multiplied.start + NEAR_LINES, multiplied.start + FAR_LINES];
    for line in &mut ahead {
        *line = if *line < end { *line } else { *line + skip };
    }
    let [near, far] = ahead.map(|line| lines.as_ptr().wrapping_add(line));
    prefetch_lines::<S, false>(simd, near, multiplied.len());
    if !in_cache {
        prefetch_lines::<S, true>(simd, far, multiplied.len());
    }
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

/// Returns whether a product with `rows` rows waits for memory more than for the processor, so that a prefetch in two steps
/// is faster: one row does, several where weights need not be unpacked.
const fn waits_for_memory<U: Unpack>(rows: usize) -> bool {
    rows == 1 || rows <= 8 && !U::EXPANDS && U::BY_CODES.is_none() && U::FACTORS.is_none()
}
