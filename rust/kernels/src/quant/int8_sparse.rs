//! int8_sparse: codes in -127..=127 of which at most half are nonzero, with an f16 scale for each 128 inputs; about 5.14
//! bits per weight.
//!
//! A panel begins with the position of each block, in bytes from the start of the panel, a u32. A block has the scales of
//! its sixteen rows, a bitmap, and the nonzero codes. The bitmap has a bit for each byte of the unpacked lines, in their
//! order; codes follow each other in the same order. As the blocks of a panel share its space, sixteen rows may have their
//! zeros anywhere. The blocks are followed by a line, so that a whole line can be read wherever codes begin.

use super::grouped::Whole;
use super::integer::{BLOCK, BLOCK_QUADS, PAIR_QUADS};
use super::sparse::{Rows, SparseFormat, TooDense, UNPACKED_BLOCK_LINES, UNPACKED_LINES, unpacked_bias};
use crate::arch::{ByteLine, Dot, LANES, LINE};

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

/// Returns the head of a block, and everything that follows it. `None` if a damaged panel has no such block.
fn block(panel: &[u8], index: usize) -> Option<(&Head, &[u8])> {
    let position = panel.get(index * POSITION..)?.first_chunk()?;
    panel.get(u32::from_le_bytes(*position) as usize..)?.split_first_chunk()
}

/// Returns the scales of a block.
fn scales(head: &Head) -> [u16; LANES] {
    bytemuck::pod_read_unaligned(&head[..SCALES])
}

/// Returns the bitmap of a block, a number for each unpacked line.
fn bitmap(head: &Head) -> [u64; BLOCK_QUADS] {
    bytemuck::pod_read_unaligned(&head[SCALES..])
}

impl SparseFormat for Int8Sparse {
    const INPUTS: usize = BLOCK;
    const BITS: usize = 8;

    type Unpacked = Whole<false>;
    type ByCodes = Whole<false>;

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
        let Some((head, mut codes)) = block(bytemuck::cast_slice(lines), index) else {
            to.fill(ByteLine([unpacked_bias::<S, Self>(); LINE]));
            to.as_chunks_mut::<UNPACKED_LINES>().0.iter_mut().for_each(|group| group[PAIR_QUADS] = ByteLine([0; LINE]));
            return;
        };
        let (scales, bitmap) = (simd.load_f16(&scales(head)), bitmap(head));
        let groups = to.as_chunks_mut::<UNPACKED_LINES>().0.iter_mut();
        for (masks, group) in bitmap.as_chunks::<PAIR_QUADS>().0.iter().zip(groups) {
            let [quads @ .., factor] = group;
            codes = simd.expand_lines(masks, codes, unpacked_bias::<S, Self>(), quads);
            simd.store(scales, bytemuck::cast_mut(factor));
        }
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
            let Some((head, mut codes)) = block(bytemuck::cast_slice(lines), index) else { continue };
            let scale = half::f16::from_bits(scales(head)[row]).to_f32();
            for (mask, out) in bitmap(head).into_iter().zip(out.chunks_mut(4)) {
                let Some(line) = codes.first_chunk::<LINE>() else { break };
                for (input, out) in out.iter_mut().enumerate() {
                    let bit = row * 4 + input;
                    let before = (mask & !(u64::MAX << bit)).count_ones() as usize;
                    if mask >> bit & 1 == 1 {
                        *out = f32::from(line[before].cast_signed()) * scale;
                    }
                }
                codes = &codes[mask.count_ones() as usize..];
            }
        }
    }
}

const _: () = assert!(UNPACKED_BLOCK_LINES == BLOCK_QUADS / PAIR_QUADS * UNPACKED_LINES);
