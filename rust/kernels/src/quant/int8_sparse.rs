//! int8_sparse: codes in -127..=127 of which at most half are nonzero, with an f16 scale for each 128 inputs; about 5.14
//! bits per weight.
//!
//! A panel begins with the position of each block, in bytes from the start of the panel, a u32. A block has the scales of
//! its sixteen rows, a bitmap, and the nonzero codes. The bitmap has a bit for each byte of the unpacked lines, in their
//! order; codes follow each other in the same order. As the blocks of a panel share its space, sixteen rows may have their
//! zeros anywhere. The blocks are followed by a line, so that a whole line can be read wherever codes begin.

use super::integer::{BLOCK, BLOCK_PAIRS, BLOCK_QUADS, BlockScales, Codes, PAIR_QUADS, Unpack, UnpackedScaled};
use super::sparse::{Rows, SparseFormat, TooDense};
use crate::arch::{ByteLine, Dot, LANES, LINE};
use crate::matmul::sparse::FewRows;
use crate::matmul::unroll::unroll;

/// int8_sparse format.
pub struct Int8Sparse;

/// Bytes of the scales of a block.
const SCALES: usize = size_of::<[u16; LANES]>();

/// Bytes of the scales and the bitmap of a block.
const HEAD: usize = SCALES + LANES * BLOCK / 8;

/// Number of nonzero codes for which a block of a panel has space, on average.
const CODES: usize = LANES * BLOCK / 2;

/// Bytes of the position of a block.
const POSITION: usize = size_of::<u32>();

/// Returns the number of lines of the positions of `blocks` blocks.
const fn position_lines(blocks: usize) -> usize {
    (blocks * POSITION).div_ceil(LINE)
}

/// Scales and bitmap of a block.
type Head = [u8; HEAD];

/// Head and codes of a block without weights, which replaces a block that a damaged panel lacks.
static NO_WEIGHTS: (Head, [u8; LINE]) = ([0; HEAD], [0; LINE]);

/// Returns the head of a block, and everything that follows it, at least a line.
#[inline(always)]
fn block(panel: &[u8], index: usize) -> (&Head, &[u8]) {
    let position = panel.get(index * POSITION..).and_then(<[u8]>::first_chunk);
    let block = position.and_then(|position| panel.get(u32::from_le_bytes(*position) as usize..)?.split_first_chunk());
    block.filter(|(_, codes)| codes.len() >= LINE).unwrap_or((&NO_WEIGHTS.0, &NO_WEIGHTS.1))
}

/// Returns the scales of a block.
#[inline(always)]
fn scales(head: &Head) -> [u16; LANES] {
    bytemuck::pod_read_unaligned(&head[..SCALES])
}

/// Bits of an unpacked line, in the order of its bytes.
type Mask = [u8; LINE / 8];

/// Returns the bitmap of a block, a mask for each unpacked line.
#[inline(always)]
fn bitmap(head: &Head) -> &[Mask; BLOCK_QUADS] {
    head[SCALES..].as_chunks().0.first_chunk().expect("a mask for each line")
}

/// Returns the number of codes of some lines.
#[inline(always)]
fn codes_of(masks: &[Mask]) -> usize {
    masks.iter().map(|mask| u64::from_le_bytes(*mask).count_ones() as usize).sum()
}

/// Returns the line of codes that begins with code `first`; the last line of what follows the block if a damaged panel ends
/// before. There is a line at least, so the compiler removes the checks of bounds.
#[inline(always)]
fn line_of(codes: &[u8], first: usize) -> &[u8; LINE] {
    codes[first.min(codes.len() - LINE)..].first_chunk().expect("a line")
}

/// Blocks of a panel, whose codes are expanded in registers.
struct Packed;

/// Packed block.
#[derive(Clone, Copy)]
struct PackedBlock<'a> {
    head: &'a Head,
    /// Codes of the block, and everything that follows them.
    codes: &'a [u8],
    /// Index of the first code of each pair of groups.
    firsts: [usize; BLOCK_PAIRS],
}

/// Packed pair of groups.
#[derive(Clone, Copy)]
struct PackedPair<'a> {
    masks: &'a [Mask; PAIR_QUADS],
    /// Codes of the block, and the index of the first one of the pair.
    codes: &'a [u8],
    first: usize,
}

impl Unpack for Packed {
    const BY_CODES: Option<Codes> = None;
    const EXPANDS: bool = true;

    type Block<'a> = PackedBlock<'a>;
    type Pair<'a, S: Dot> = PackedPair<'a>;

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        Int8Sparse::first_line(index)
    }

    #[inline(always)]
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_> {
        let (head, codes) = block(bytemuck::cast_slice(lines), index);
        // Tells the compiler what `block` ensures, so that it removes the checks of bounds in `line_of`.
        assert!(codes.len() >= LINE);
        let (mut firsts, mut first) = ([0; BLOCK_PAIRS], 0);
        for (masks, of_pair) in bitmap(head).as_chunks::<PAIR_QUADS>().0.iter().zip(&mut firsts) {
            *of_pair = first;
            first += codes_of(masks);
        }
        PackedBlock { head, codes, firsts }
    }

    #[inline(always)]
    fn pair<'a, S: Dot>(_: S, block: Self::Block<'a>, index: usize) -> Self::Pair<'a, S> {
        let PackedBlock { head, codes, firsts } = block;
        PackedPair { masks: &bitmap(head).as_chunks().0[index], codes, first: firsts[index] }
    }

    #[inline(always)]
    fn block_scale<S: Dot>(simd: S, _: &[BlockScales], _: usize, block: Self::Block<'_>) -> S::F32 {
        simd.load_f16(&scales(block.head))
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        let PackedPair { masks, codes, first } = pair;
        let line = line_of(codes, first + codes_of(&masks[..index]));
        simd.xor(simd.expand(u64::from_le_bytes(masks[index]), line), simd.splat_byte(S::WEIGHT_BIAS))
    }
}

impl SparseFormat for Int8Sparse {
    const INPUTS: usize = BLOCK;
    const BITS: usize = 8;
    const EXPANDS: bool = true;
    const UNPACKED_BLOCK_LINES: usize = UnpackedScaled::LINES;

    type Unpacked = UnpackedScaled;
    type ByCodes = UnpackedScaled;

    fn lines(cols: usize) -> usize {
        let blocks = cols.div_ceil(BLOCK);
        position_lines(blocks) + (blocks * (HEAD + CODES)).div_ceil(LINE) + usize::from(blocks > 0)
    }

    fn first_line(index: usize) -> usize {
        index * (HEAD + CODES) / LINE
    }

    fn pack(rows: &Rows<'_>, lines: &mut [ByteLine]) -> Result<(), TooDense> {
        let blocks = rows.cols() / BLOCK;
        let (nonzero, limit) = (rows.nonzero(), blocks * CODES);
        if nonzero > limit {
            return Err(TooDense { weights: LANES * rows.cols(), nonzero, limit });
        }
        let panel: &mut [u8] = bytemuck::cast_slice_mut(lines);
        let mut at = position_lines(blocks) * LINE;
        for block in 0..blocks {
            panel[block * POSITION..][..POSITION].copy_from_slice(&(at as u32).to_le_bytes());
            let (head, values) = panel[at..].split_at_mut(HEAD);
            let mut used = 0;
            for row in 0..LANES {
                head[2 * row..][..2].copy_from_slice(&rows.scale(row, block * BLOCK).to_le_bytes());
            }
            for byte in 0..LANES * BLOCK {
                let (row, input) = (byte % LINE / 4, byte / LINE * 4 + byte % 4);
                let code = rows.code(row, block * BLOCK + input);
                if code != 0 {
                    head[SCALES + byte / 8] |= 1 << (byte % 8);
                    values[used] = code.cast_unsigned();
                    used += 1;
                }
            }
            at += HEAD + used;
        }
        Ok(())
    }

    #[inline(always)]
    fn unpack<S: Dot>(simd: S, lines: &[ByteLine], index: usize, _: usize, to: &mut [ByteLine]) {
        let block = Packed::block(lines, index);
        let Some([quads @ .., scales]) = to.first_chunk_mut::<{ UnpackedScaled::LINES }>() else { return };
        for (pair, quads) in quads.as_chunks_mut::<PAIR_QUADS>().0.iter_mut().enumerate() {
            let pair = Packed::pair(simd, block, pair);
            unroll!(q in [0 1 2 3 4 5 6 7] { simd.store_bytes(Packed::quad(simd, pair, q), &mut quads[q].0) });
        }
        simd.store(Packed::block_scale(simd, &[], index, block), bytemuck::cast_mut(scales));
    }

    #[inline(always)]
    fn few_rows<S: Dot, const R: usize>(simd: S, panels: FewRows<'_, '_, '_, Self>) {
        panels.unpack::<S, Packed, R>(simd);
    }

    fn make_valid(lines: &mut [ByteLine], cols: usize, scale: u16) {
        let panel: &mut [u8] = bytemuck::cast_slice_mut(lines);
        let blocks = cols / BLOCK;
        for block in 0..blocks {
            let at = position_lines(blocks) * LINE + block * (HEAD + CODES);
            panel[block * POSITION..][..POSITION].copy_from_slice(&(at as u32).to_le_bytes());
            let (scales, bitmap) = panel[at..][..HEAD].split_at_mut(SCALES);
            scales.as_chunks_mut().0.fill(scale.to_le_bytes());
            // Every other byte has ones where the one before it has zeros.
            bitmap.as_chunks_mut().0.iter_mut().for_each(|[first, second]| *second = !*first);
        }
    }

    fn read_row(lines: &[ByteLine], row: usize, out: &mut [f32]) {
        for (index, out) in out.chunks_mut(BLOCK).enumerate() {
            out.fill(0.0);
            let ((head, codes), mut first) = (block(bytemuck::cast_slice(lines), index), 0);
            let scale = half::f16::from_bits(scales(head)[row]).to_f32();
            for (mask, out) in bitmap(head).iter().zip(out.chunks_mut(4)) {
                let (line, mask) = (line_of(codes, first), u64::from_le_bytes(*mask));
                for (input, out) in out.iter_mut().enumerate() {
                    let bit = row * 4 + input;
                    let before = (mask & !(u64::MAX << bit)).count_ones() as usize;
                    if mask >> bit & 1 == 1 {
                        *out = f32::from(line[before].cast_signed()) * scale;
                    }
                }
                first += mask.count_ones() as usize;
            }
        }
    }
}
