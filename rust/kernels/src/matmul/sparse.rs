//! Weights of sparse formats, which are unpacked a block at a time into the L1 cache, and then multiplied as dense weights
//! are. For few rows, bitmaps are expanded in registers, and weights of which two of each four are stored are multiplied as
//! they are: with activations that are selected for them.

use std::marker::PhantomData;
use std::ops::Range;

use super::activations::{GroupOfRows, group_word};
use super::panels::{MAX_STREAMS, Multiplier, Panels, Pass, UnpackedWeights, Weights, multiply_unpacked, write};
use super::prefetch::Streams;
use super::tile::UNPACKED_BLOCKS;
use super::unroll::unroll;
use crate::arch::{ByteLine, Dot, DotKernel, LANES};
use crate::quant::grouped::GROUP;
use crate::quant::integer::{BLOCK, BLOCK_PAIRS, Unpack};
use crate::quant::sparse::SparseFormat;

/// Weights of a sparse format.
pub(super) struct Sparse<F>(PhantomData<F>);

impl<F: SparseFormat> Weights for Sparse<F> {
    const BLOCKS: usize = UNPACKED_BLOCKS;
    const BLOCK_LINES: usize = F::UNPACKED_BLOCK_LINES;
    const HAS_FACTORS: bool = F::Unpacked::FACTORS.is_some();

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        F::first_line(index)
    }

    #[inline(never)]
    fn few_rows<S: Dot, const R: usize>(panels: &mut Panels<'_, '_, Self>, simd: S) {
        F::few_rows::<S, R>(simd, FewRows(panels));
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

impl<F: SparseFormat> UnpackedWeights for Sparse<F> {
    type Unpacked = F::Unpacked;
    type ByCodes = F::ByCodes;

    #[inline(always)]
    fn unpack<S: Dot>(simd: S, lines: &[ByteLine], cols: usize, blocks: Range<usize>, to: &mut [ByteLine]) {
        let kernel = UnpackBlocks { lines, cols, blocks, to, format: PhantomData::<F> };
        if const { F::EXPANDS } { simd.vectorize_expand(kernel) } else { simd.vectorize_dot(kernel) }
    }
}

/// Kernel that unpacks some blocks of a panel.
struct UnpackBlocks<'a, F> {
    /// Lines of the panel.
    lines: &'a [ByteLine],
    /// Number of inputs of a row.
    cols: usize,
    blocks: Range<usize>,
    to: &'a mut [ByteLine],
    format: PhantomData<F>,
}

impl<F: SparseFormat> DotKernel for UnpackBlocks<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Dot>(self, simd: S) {
        for (block, to) in self.blocks.zip(self.to.chunks_exact_mut(F::UNPACKED_BLOCK_LINES)) {
            let groups = BLOCK_PAIRS.min((self.cols - block * BLOCK) / GROUP);
            F::unpack(simd, self.lines, block, groups, to);
        }
    }
}

/// Format whose products with few rows select activations: it stores two of each four weights.
pub(crate) trait Selects: SparseFormat {
    /// Offset of stored codes from their values.
    const OFFSET: u8;

    /// Returns line `index` of the eight of unit `unit`, two groups: the codes of two of each four inputs, of eight inputs of
    /// each row, stored [`Selects::OFFSET`] above their values, and which of the four inputs they belong to.
    fn kept<S: Dot>(simd: S, lines: &[ByteLine], unit: usize, index: usize) -> (S::Bytes, S::Bytes);

    /// Returns the scales of unit `unit`.
    fn factor<S: Dot>(simd: S, lines: &[ByteLine], unit: usize) -> S::F32;
}

/// Product of all panels with one tile of rows.
pub(crate) struct FewRows<'s, 'a, 'o, F>(&'s mut Panels<'a, 'o, Sparse<F>>);

impl<F: SparseFormat> FewRows<'_, '_, '_, F> {
    /// Multiplies with R rows, and unpacks weights in registers.
    #[inline(always)]
    pub fn unpack<S: Dot, U: Unpack, const R: usize>(self, simd: S) {
        self.0.streams::<S, U, R>(simd);
    }

    /// Multiplies with R rows, whose activations are selected.
    #[inline(always)]
    pub fn select<S: Dot, const R: usize>(self, simd: S)
    where
        F: Selects,
    {
        if const { S::READS_ONE_STREAM && R <= ONE_STREAM_ROWS } && self.0.one_stream {
            return simd.vectorize_dot(Select::<F, R, 1> { of: self.0 });
        }
        simd.vectorize_dot(Select::<F, R, MAX_STREAMS> { of: self.0 });
    }
}

/// Maximum number of rows for which panels may be read one after the other: the activations of more rows would be gathered
/// again for each panel.
const ONE_STREAM_ROWS: usize = 2;

/// Sixteen activations of a row, which are selected by their indices.
type Table = [u8; LANES];

/// Number of tables of a unit of two groups.
const TABLES: usize = 2 * GROUP / LANES;

/// Product of all panels, P at a time side by side, with one tile of R rows, whose activations are selected.
struct Select<'s, 'a, 'o, F, const R: usize, const P: usize> {
    of: &'s mut Panels<'a, 'o, Sparse<F>>,
}

impl<F: Selects, const R: usize, const P: usize> DotKernel for Select<'_, '_, '_, F, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Dot>(self, simd: S) {
        let Self { of } = self;
        let (count, x, groups) = (of.count(), of.x.tile::<R>(0), of.x.groups::<R>(0));
        let streams = Streams::<P> { end: of.panel_lines, in_cache: of.in_cache };
        for first in (0..count).step_by(P) {
            let (_, lines) = of.panels::<P>(first, count - 1);
            let mut sums = [[[[0.0; LANES]; 1]; R]; P];
            for (block, ([_, _, quads @ ..], groups)) in x.iter().zip(groups).enumerate() {
                let block_lines = F::first_line(block + 1) - F::first_line(block);
                let quads = quads.as_chunks::<{ GROUP / 2 }>().0.iter().zip(groups.as_chunks::<2>().0);
                let units = 2 * block..of.cols / (2 * GROUP);
                for ((unit, half), (quads, groups)) in units.zip(0..2).zip(quads) {
                    let tables = tables(quads);
                    let first_line = F::first_line(block) + half * block_lines / 2;
                    let multiplied = first_line..first_line + block_lines.div_ceil(2);
                    for (lines, sums) in lines.iter().zip(&mut sums) {
                        streams.prefetch(simd, lines, multiplied.clone());
                        add_unit::<S, F, R>(simd, lines, unit, &tables, groups, sums);
                    }
                }
            }
            for sums in &sums {
                let columns = of.column..of.end.min(of.column + LANES);
                write(sums, of.out, 0, &columns);
                of.column = columns.end;
            }
        }
    }
}

/// Returns the tables of each row, from the quads of a unit, `[quad][row]`.
#[inline(always)]
fn tables<const R: usize>(quads: &[[i32; R]; GROUP / 2]) -> [[Table; TABLES]; R] {
    let mut tables = [[[0; LANES]; TABLES]; R];
    for (index, quad) in quads.iter().enumerate() {
        for (tables, x) in tables.iter_mut().zip(quad) {
            tables[index / 4][index % 4 * 4..][..4].copy_from_slice(&x.to_le_bytes());
        }
    }
    tables
}

/// Returns whether stored codes are multiplied, and their offset, rather than their values: where that is faster and there
/// are registers for both sums of each row. Sums of eight products of four bits fit 16 bits.
const fn by_codes<S: Dot, F: SparseFormat>(rows: usize) -> bool {
    S::BY_CODES && F::BITS <= 4 && rows <= 2
}

/// Adds the products of one unit of a panel. Sums are in memory, as most of the registers hold integers and weights.
#[inline(always)]
fn add_unit<S: Dot, F: Selects, const R: usize>(
    simd: S,
    lines: &[ByteLine],
    unit: usize,
    tables: &[[Table; TABLES]; R],
    groups: &[GroupOfRows<R>; 2],
    sums: &mut [[[f32; LANES]; 1]; R],
) {
    let (factor, offset) = (F::factor(simd, lines, unit), F::OFFSET);
    // With constant indices the shifts of codes are constant too.
    macro_rules! group {
        ($group:literal, $($line:literal)*) => {
            let mut integers = [simd.splat_i32(0); R];
            let (mut partial, mut offsets) = (integers, integers);
            unroll!(line in [$($line)*] {
                let (codes, indices) = F::kept(simd, lines, unit, line);
                let weights = simd.sub_bytes(codes, simd.splat_byte(offset.wrapping_sub(S::WEIGHT_BIAS)));
                let first = if line % 2 == 0 { [0, 0, 4, 4] } else { [8, 8, 12, 12] };
                let inputs = simd.or(indices, simd.splat_quad(first));
                unroll!(r in 0..R {
                    let x = simd.lookup(&tables[r][line / 2], inputs);
                    if const { by_codes::<S, F>(R) } {
                        partial[r] = simd.dot_codes(partial[r], codes, x);
                        offsets[r] = simd.dot_codes(offsets[r], simd.splat_byte(offset), x);
                    } else {
                        integers[r] = simd.dot(integers[r], weights, x);
                    }
                    if const { S::WEIGHT_BIAS != 0 } {
                        let negated = simd.sub_bytes(simd.splat_byte(0), x);
                        integers[r] = simd.dot(integers[r], simd.splat_byte(S::WEIGHT_BIAS), negated);
                    }
                });
            });
            unroll!(r in 0..R {
                if const { by_codes::<S, F>(R) } {
                    integers[r] = simd.add_scaled(integers[r], partial[r], simd.splat_quad([1, 0, 1, 0]), false);
                    integers[r] = simd.add_scaled(integers[r], offsets[r], simd.splat_quad([-1, -1, -1, -1]), false);
                }
                let scale = simd.splat(f32::from_bits(groups[$group][group_word::SCALE][r].cast_unsigned()));
                let sum = simd.load(&sums[r][0]);
                let sum = simd.mul_add(simd.to_f32(integers[r]), simd.mul(factor, scale), sum);
                simd.store(sum, &mut sums[r][0]);
            });
        };
    }
    group!(0, 0 1 2 3);
    group!(1, 4 5 6 7);
}
