//! Weights in grouped formats: whatever their format, they are unpacked to one form, which few kinds of tiles multiply.
//!
//! Up to four rows do it in registers, each format by itself, as fast as memory brings the weights. More rows do it a block
//! at a time, which stays in the nearest cache: kernels of all formats for all numbers of rows would gain little.

use std::marker::PhantomData;
use std::ops::Range;

use super::panels::{Panels, Pass, RowTiles, Weights, streams};
use super::tile::{MAX_TILE_PANELS, UNPACKED_BLOCKS};
use crate::arch::{ByteLine, Kernel, LANES, LINE, Simd};
use crate::quant::GroupedFormat;
use crate::quant::grouped::{self, GROUP, Group, Packed, UNPACKED_BLOCK_LINES};
use crate::quant::integer::BLOCK_PAIRS;

/// The most rows for which weights are unpacked in registers.
const DIRECT_ROWS: usize = 4;

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
        let mut panel = 0;
        if const { R <= DIRECT_ROWS } {
            [panel, _] = panels.streams::<S, Packed<F>, R>(simd);
            if panels.column >= panels.end {
                return;
            }
        }
        let mut room = [ByteLine([0; LINE]); MAX_TILE_PANELS * FEW_BLOCKS * UNPACKED_BLOCK_LINES];
        let mut sums = [[0.0; LANES]; MAX_FEW_SUMS];
        const { assert!(R * streams::<S>(R) <= MAX_FEW_SUMS) }
        match const { if R <= DIRECT_ROWS { 1 } else { streams::<S>(R) } } {
            4 => panels.row_tiles::<S, R, 4>(simd, panel, FEW_BLOCKS, &mut room, &mut sums),
            2 => panels.row_tiles::<S, R, 2>(simd, panel, FEW_BLOCKS, &mut room, &mut sums),
            _ => panels.row_tiles::<S, R, 1>(simd, panel, FEW_BLOCKS, &mut room, &mut sums),
        }
    }

    #[inline(always)]
    fn multiply<S: Simd, const R: usize, const P: usize>(
        simd: S,
        pass: Pass<'_, '_, R, P>,
        lines: [&[ByteLine]; P],
        room: &mut [ByteLine],
    ) {
        let blocks = pass.blocks.clone();
        let groups = blocks.start * BLOCK_PAIRS..(pass.cols / GROUP).min(blocks.end * BLOCK_PAIRS);
        let (mut unpacked, panel_room) = ([&[][..]; P], blocks.len() * UNPACKED_BLOCK_LINES);
        for (p, room) in room.chunks_exact_mut(panel_room).take(P).enumerate() {
            let to = bytemuck::cast_slice_mut(room);
            simd.vectorize(UnpackGroups::<F> { lines: lines[p], groups: groups.clone(), to, format: PhantomData });
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
    format: PhantomData<F>,
}

impl<F: GroupedFormat> Kernel for UnpackGroups<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (group, to) in self.groups.zip(self.to) {
            grouped::unpack::<S, F>(simd, self.lines, group, to);
        }
    }
}
