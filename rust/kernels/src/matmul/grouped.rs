//! Weights of grouped formats, which are unpacked to one layout for each kind of factors, so that they share register
//! tiles.
//!
//! For up to four rows, weights are unpacked in registers by a kernel for each format, as fast as memory delivers them.
//! For more rows they are unpacked a block at a time into the L1 cache: kernels for each format and number of rows would
//! gain little.

use std::marker::PhantomData;
use std::ops::Range;

use super::panels::{Multiplier, Panels, Pass, UnpackedWeights, Weights, multiply_unpacked};
use super::tile::UNPACKED_BLOCKS;
use crate::arch::{ByteLine, Dot, DotKernel};
use crate::quant::GroupedFormat;
use crate::quant::grouped::{self, GROUP, Packed};
use crate::quant::integer::BLOCK_PAIRS;

/// Maximum number of rows for which weights are unpacked in registers.
const DIRECT_ROWS: usize = 4;

/// Weights of a grouped format.
pub(super) struct Grouped<F>(PhantomData<F>);

impl<F: GroupedFormat> Weights for Grouped<F> {
    const BLOCKS: usize = UNPACKED_BLOCKS;
    const BLOCK_LINES: usize = BLOCK_PAIRS * grouped::unpacked_lines::<F>();
    const HAS_FACTORS: bool = true;

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        F::lines(index * BLOCK_PAIRS)
    }

    #[inline(never)]
    fn few_rows<S: Dot, const R: usize>(panels: &mut Panels<'_, '_, Self>, simd: S) {
        if const { R <= DIRECT_ROWS } {
            return panels.streams::<S, Packed<F>, R>(simd);
        }
        panels.few_row_tiles::<S, R>(simd);
    }

    #[inline(always)]
    fn multiply<S: Dot, X: Multiplier, const R: usize, const P: usize>(
        simd: S,
        multiplier: X,
        pass: Pass<'_, '_, R, P>,
        lines: [&[ByteLine]; P],
        unpacked_lines: &mut [ByteLine],
    ) {
        multiply_unpacked::<Self, S, X, R, P>(simd, multiplier, pass, lines, unpacked_lines);
    }
}

impl<F: GroupedFormat> UnpackedWeights for Grouped<F> {
    type Unpacked = F::Unpacked;
    type ByCodes = F::ByCodes;

    #[inline(always)]
    fn unpack<S: Dot>(simd: S, lines: &[ByteLine], cols: usize, blocks: Range<usize>, to: &mut [ByteLine]) {
        let groups = blocks.start * BLOCK_PAIRS..(cols / GROUP).min(blocks.end * BLOCK_PAIRS);
        simd.vectorize_dot(UnpackGroups { lines, groups, to, format: PhantomData::<F> });
    }
}

/// Kernel that unpacks some groups of a panel.
struct UnpackGroups<'a, F> {
    /// Lines of the panel.
    lines: &'a [ByteLine],
    groups: Range<usize>,
    to: &'a mut [ByteLine],
    format: PhantomData<F>,
}

impl<F: GroupedFormat> DotKernel for UnpackGroups<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Dot>(self, simd: S) {
        for (group, to) in self.groups.zip(self.to.chunks_exact_mut(const { grouped::unpacked_lines::<F>() })) {
            grouped::unpack::<S, F>(simd, self.lines, group, to);
        }
    }
}
