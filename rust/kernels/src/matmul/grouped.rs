//! Weights in grouped formats: whatever their format, they are unpacked to one form, which few kinds of tiles multiply.
//!
//! Few rows unpack them a block at a time, which stays in the nearest cache: what is read there again costs less than
//! memory takes to bring the next.

use std::marker::PhantomData;
use std::ops::Range;

use super::panels::{Panels, Pass, RowTiles, Weights, streams};
use super::tile::{MAX_TILE_PANELS, PREFETCH_LINES, UNPACKED_BLOCKS};
use crate::arch::{ByteLine, Kernel, LANES, LINE, Simd};
use crate::quant::GroupedFormat;
use crate::quant::grouped::{GROUP, Group, UNPACKED_BLOCK_LINES};
use crate::quant::integer::BLOCK_PAIRS;

/// Blocks that few rows unpack at a time.
const FEW_BLOCKS: usize = 1;

/// The most sums of few rows: register tiles are no larger.
const MAX_FEW_SUMS: usize = 24;

/// Weights of a grouped format.
pub(super) struct Grouped<F>(PhantomData<F>);

impl<F: GroupedFormat> Weights for Grouped<F> {
    const BLOCKS: usize = UNPACKED_BLOCKS;
    const BLOCK_LINES: usize = UNPACKED_BLOCK_LINES;

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        F::lines(index * BLOCK_PAIRS)
    }

    #[inline(always)]
    fn few<S: Simd, const R: usize>(panels: &mut Panels<'_, '_, Self>, simd: S) {
        let mut room = [ByteLine([0; LINE]); MAX_TILE_PANELS * FEW_BLOCKS * UNPACKED_BLOCK_LINES];
        let mut sums = [[0.0; LANES]; MAX_FEW_SUMS];
        const { assert!(R * streams::<S>(R) <= MAX_FEW_SUMS) }
        match const { streams::<S>(R) } {
            4 => panels.row_tiles::<S, R, 4>(simd, FEW_BLOCKS, &mut room, &mut sums),
            2 => panels.row_tiles::<S, R, 2>(simd, FEW_BLOCKS, &mut room, &mut sums),
            _ => panels.row_tiles::<S, R, 1>(simd, FEW_BLOCKS, &mut room, &mut sums),
        }
    }

    #[inline(always)]
    fn multiply<S: Simd, const R: usize, const P: usize>(
        simd: S,
        mut pass: Pass<'_, '_, R, P>,
        lines: [&[ByteLine]; P],
        room: &mut [ByteLine],
    ) {
        let blocks = pass.blocks.clone();
        let groups = blocks.start * BLOCK_PAIRS..(pass.cols / GROUP).min(blocks.end * BLOCK_PAIRS);
        // One tile waits for the weights that come next as much as for its own: they are asked for a few at a time.
        let streams = pass.sums.len() == 1;
        let ahead = streams.then_some((pass.panel_lines, (P - 1) * pass.panel_lines));
        if streams {
            pass.next_lines = 0;
        }
        let (mut unpacked, panel_room) = ([&[][..]; P], blocks.len() * UNPACKED_BLOCK_LINES);
        for (p, room) in room.chunks_exact_mut(panel_room).take(P).enumerate() {
            let to = bytemuck::cast_slice_mut(room);
            simd.vectorize(UnpackGroups::<F> {
                lines: lines[p],
                groups: groups.clone(),
                to,
                ahead,
                format: PhantomData,
            });
            unpacked[p] = room;
        }
        let (lines, first_block) = (unpacked, blocks.start);
        if const { S::BY_CODES } {
            simd.vectorize(RowTiles { pass, lines, first_block, format: PhantomData::<F::ByCodes> });
        } else {
            simd.vectorize(RowTiles { pass, lines, first_block, format: PhantomData::<F::Unpacked> });
        }
    }
}

/// Unpacks some groups of a panel.
struct UnpackGroups<'a, F> {
    /// The panel's lines.
    lines: &'a [ByteLine],
    groups: Range<usize>,
    to: &'a mut [Group],
    /// Where weights come from memory now: the lines of a panel, and those from there to the panel that comes next.
    ahead: Option<(usize, usize)>,
    format: PhantomData<F>,
}

impl<F: GroupedFormat> Kernel for UnpackGroups<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (group, to) in self.groups.zip(self.to) {
            if let Some((end, skip)) = self.ahead {
                for line in F::lines(group)..F::lines(group + 1) {
                    let line = line + PREFETCH_LINES;
                    let line = if line < end { line } else { line + skip };
                    simd.prefetch(self.lines.as_ptr().wrapping_add(line).cast());
                }
            }
            F::unpack(simd, self.lines, group, to);
        }
    }
}
