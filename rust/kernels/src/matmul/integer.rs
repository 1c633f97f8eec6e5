//! Matmul of integer and grouped formats: products of bytes, summed exactly over blocks of 128 inputs, or over groups of
//! 32 or 16 inputs if these have separate factors.
//!
//! An output is one chain of multiply-adds over its row, from the first block or group to the last, beginning at zero:
//! `sum = integer * (block_scale * scale) + sum`, in grouped formats with a factor in place of the block scale, followed
//! by `sum = offset * sum of activations + sum` if groups have offsets. Each `integer` is exact, so it may be computed in
//! different ways:
//!
//! - With few rows, each weight is read once, from memory: panels are streams of memory, each with its software prefetch,
//!   and all rows use the unpacked weights. Integer formats are unpacked in registers. With sixteen registers, the streams
//!   of codes with sub-scales take turns block by block. Some machines read panels one after the other, as one stream.
//! - With many rows, a block of weights is unpacked once into the cache and multiplied with one register tile after the
//!   other. Where there is a matrix unit, it multiplies matrices without formats whose groups have factors.
//! - Without an instruction that sums products of bytes in 32 bits, codes are multiplied as they are stored, for any number
//!   of rows, in partial sums of 16 bits, which are then multiplied by the sub-scales. With such an instruction, one or two
//!   rows are multiplied in that way with weights that have sub-scales: unpacking them would take longer.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use super::activations::{Activations, Basis, Input};
use super::grouped::Grouped;
use super::panels::multiply_unpacked;
use super::panels::{MAX_STREAMS, MAX_TASK_ROWS, Multiplier, Panels, Pass, Rows, TileRows, UnpackedWeights, Weights};
use super::sparse::Sparse;
use super::tile::UNPACKED_BLOCKS;
use super::unroll::unroll;
use super::{Part, TaskSizes};
use crate::arch::{ByteLine, Dot, DotKernel, LANES};
use crate::disjoint::{Tile, Tiles};
use crate::machine::reads_one_stream;
use crate::matrix::Band;
use crate::memory::Scratch;
use crate::quant::integer::{BLOCK_QUADS, PAIR_QUADS, Unpack, Unpacked, blocks, pairs};
use crate::quant::sparse::SparseFormat;
use crate::quant::{GroupedFormat, Quantized};
use crate::{Exec, PoolError};

/// Number of tasks per thread, within the limits on a task's size: the last tasks should be short, and tasks that follow
/// each other in memory cost little.
const TASKS_PER_THREAD: usize = 16;

/// Maximum number of panels of a task, which bounds its time, so that cancellation is quick.
const MAX_TASK_PANELS: usize = 16;

thread_local! {
    /// Quantized activations of the calls that this thread makes, kept from call to call.
    static QUANTIZED: RefCell<Scratch<i32>> = RefCell::default();
}

/// Product with weights in quantized formats.
pub(super) type QuantizedPart<'a> = Part<'a, &'a [(Quantized, Band)]>;

/// Multiplies with weights in quantized formats.
pub(super) fn multiply(exec: &Exec<'_>, parts: &mut [QuantizedPart<'_>]) -> Result<(), PoolError> {
    let mut buffer = QUANTIZED.take();
    let result = multiply_in(exec, parts, reads_one_stream(), &mut buffer);
    QUANTIZED.set(buffer);
    result
}

/// Multiplies with weights whose panels are read one after the other where there are few rows, if `one_stream` and if the
/// instruction set has kernels for it.
fn multiply_in(
    exec: &Exec<'_>,
    parts: &mut [QuantizedPart<'_>],
    one_stream: bool,
    buffer: &mut Scratch<i32>,
) -> Result<(), PoolError> {
    let task_sizes = TaskSizes::new(parts, TASKS_PER_THREAD * exec.pool.threads());
    let mut inputs: Vec<Input<'_>> = Vec::with_capacity(parts.len());
    let plan = parts.iter_mut().map(|part| {
        let &mut Part { x, m, n, k, weights: bands, in_cache, ref mut out } = part;
        let has_factors = bands.iter().any(|(format, _)| Basis::of(*format) == Basis::Plain);
        let has_unit = exec.isa.has_matrix_unit() && !has_factors;
        let (rows, by_codes) = exec.isa.run_dot(TileRows { m, has_unit });
        let mut by_basis = [None; Basis::ALL.len()];
        for (format, _) in bands {
            let basis = Basis::of(*format);
            let by_codes = by_codes[basis as usize] && format.has_codes();
            let on_unit = matches!(rows, Rows::OnUnit);
            let input = Input { x, k, tile_rows: rows.tile_rows(), on_unit, by_codes, basis };
            let index = inputs.iter().position(|other| other.is_same(&input)).unwrap_or_else(|| {
                inputs.push(input);
                inputs.len() - 1
            });
            inputs[index].by_codes |= by_codes;
            by_basis[basis as usize] = Some(index);
        }
        let task_rows = m.min(MAX_TASK_ROWS / rows.tile_rows() * rows.tile_rows());
        let task_panels = task_sizes.panels(k, MAX_STREAMS, MAX_TASK_PANELS);
        let tiles = Tiles::new(out, n, 0..n, task_rows, task_panels * LANES);
        Plan { bands, in_cache, k, inputs: by_basis, rows, tiles }
    });
    let plans: Vec<_> = plan.collect();
    let inputs = Activations::quantize_each(exec, &inputs, buffer)?;
    let reads = |product: usize, task| plans[product].reads(task);
    exec.run_each_reading(plans.iter().map(|plan| plan.tiles.len()), reads, |product, task| {
        let &Plan { bands, in_cache, k, inputs: by_basis, rows, ref tiles } = &plans[product];
        // Tasks that follow each other share their weights.
        let mut out = tiles.take_column_major(task);
        let panels = out.columns().start / LANES..out.columns().end.div_ceil(LANES);
        for (format, band) in bands {
            let panels = panels.start.max(band.panels.start)..panels.end.min(band.panels.end);
            if !panels.is_empty() {
                let input = by_basis[Basis::of(*format) as usize].expect("there are activations for each band");
                let task =
                    BandTask { exec, x: &inputs[input], k, band, in_cache, one_stream, panels, rows, out: &mut out };
                match format {
                    Quantized::Integer(format) => format.multiply(task),
                    Quantized::Grouped(format) => format.multiply(task),
                }
            }
        }
    })
}

/// Partition of a product into tasks.
struct Plan<'a> {
    bands: &'a [(Quantized, Band)],
    in_cache: bool,
    k: usize,
    /// Indices of its activations in each basis, which other products may share.
    inputs: [Option<usize>; Basis::ALL.len()],
    rows: Rows,
    tiles: Tiles<'a, f32>,
}

impl<'a> Plan<'a> {
    /// Returns the weights from the first of a task on, up to the end of their band.
    fn reads(&self, task: usize) -> &'a [u8] {
        let panel = self.tiles.first_column(task) / LANES;
        self.bands.iter().find(|(_, band)| band.panels.contains(&panel)).map_or(&[], |(_, band)| band.data(panel))
    }
}

/// Product with some panels of a band.
pub(crate) struct BandTask<'a, 'o> {
    exec: &'a Exec<'a>,
    x: &'a Activations<'a>,
    k: usize,
    band: &'a Band,
    in_cache: bool,
    one_stream: bool,
    /// Panels of the matrix.
    panels: Range<usize>,
    rows: Rows,
    out: &'a mut Tile<'o, f32>,
}

impl<'a, 'o> BandTask<'a, 'o> {
    /// Multiplies with weights in an integer format.
    pub(crate) fn integer<F: Unpack>(self) {
        self.run::<Integer<F>>();
    }

    /// Multiplies with weights in a grouped format.
    pub(crate) fn grouped<F: GroupedFormat>(self) {
        self.run_without_unit::<Grouped<F>>();
    }

    /// Multiplies with weights in a sparse format.
    pub(crate) fn sparse<F: SparseFormat>(self) {
        if const { F::Unpacked::FACTORS.is_some() } {
            return self.run_without_unit::<Sparse<F>>();
        }
        self.run::<Sparse<F>>();
    }

    fn run<W: Weights>(self) {
        let exec = self.exec;
        match self.rows {
            Rows::OnUnit => exec.isa.run_matrix(self.panels::<W>()).expect("plans with tiles of a unit have one"),
            Rows::Few(_) | Rows::Many(_) => exec.isa.run_dot(self.panels::<W>()),
        }
    }

    fn run_without_unit<W: Weights>(self) {
        self.exec.isa.run_dot(self.panels::<W>());
    }

    fn panels<W: Weights>(self) -> Panels<'a, 'o, W> {
        let Self { x, k, band, in_cache, one_stream, panels, rows, out, .. } = self;
        let first_column = out.columns().start;
        Panels {
            x,
            cols: k,
            blocks: blocks(k),
            block_scales: band.block_scales(panels.start),
            panel_scales: band.panel_scales,
            lines: bytemuck::cast_slice(band.data(panels.start)),
            panel_lines: band.panel_bytes / size_of::<ByteLine>(),
            in_cache,
            one_stream,
            column: panels.start * LANES - first_column,
            end: (panels.end * LANES - first_column).min(out.columns().len()),
            rows,
            out,
            weights: PhantomData,
        }
    }
}

/// Weights of an integer format.
struct Integer<F>(PhantomData<F>);

impl<F: Unpack> Weights for Integer<F> {
    const BLOCKS: usize = UNPACKED_BLOCKS;
    const BLOCK_LINES: usize = BLOCK_QUADS;
    const HAS_FACTORS: bool = false;

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        F::first_line(index)
    }

    #[inline(always)]
    fn few_rows<S: Dot, const R: usize>(panels: &mut Panels<'_, '_, Self>, simd: S) {
        panels.streams::<S, F, R>(simd);
    }

    #[inline(always)]
    fn multiply<S: Dot, X: Multiplier, const R: usize, const P: usize>(
        simd: S,
        multiplier: X,
        pass: Pass<'_, '_, R, P>,
        lines: [&[ByteLine]; P],
        unpacked_lines: &mut [ByteLine],
    ) {
        if const { F::HAS_QUAD_LINES || S::BY_CODES && F::BY_CODES.is_some() } {
            return multiplier.multiply::<S, F, R, P>(simd, pass, lines, 0);
        }
        multiply_unpacked::<Self, S, X, R, P>(simd, multiplier, pass, lines, unpacked_lines);
    }
}

impl<F: Unpack> UnpackedWeights for Integer<F> {
    type Unpacked = Unpacked;
    type ByCodes = Unpacked;

    #[inline(always)]
    fn unpack<S: Dot>(simd: S, lines: &[ByteLine], cols: usize, blocks: Range<usize>, to: &mut [ByteLine]) {
        simd.vectorize_dot(UnpackBlocks::<F> { lines, cols, blocks, to, format: PhantomData });
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

impl<F: Unpack> DotKernel for UnpackBlocks<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Dot>(self, simd: S) {
        let Self { lines, cols, blocks, to, .. } = self;
        for (block, to) in blocks.zip(to.as_chunks_mut::<BLOCK_QUADS>().0) {
            let packed = F::block(lines, block);
            for (pair, to) in to.as_chunks_mut::<PAIR_QUADS>().0.iter_mut().enumerate().take(pairs(cols, block)) {
                let pair = F::pair(simd, packed, pair);
                unroll!(q in [0 1 2 3 4 5 6 7] { simd.store_bytes(F::quad(simd, pair, q), &mut to[q].0) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::arch::Isa;
    use crate::matrix::Bands;
    use crate::{Cancel, Format, PackedMatrix, Pool};

    /// Kernel that returns whether there are kernels for one stream.
    struct ReadsOneStream;

    impl DotKernel for ReadsOneStream {
        type Output = bool;

        fn run<S: Dot>(self, _: S) -> bool {
            S::READS_ONE_STREAM
        }
    }

    /// The order depends on the machine, so other tests see only one of them.
    #[test]
    fn products_do_not_depend_on_the_order_in_which_panels_are_read() {
        let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
        // Six panels, the last incomplete.
        let n = 5 * LANES + 3;
        for isa in Isa::available().into_iter().filter(|isa| isa.run_dot(ReadsOneStream)) {
            let exec = Exec { isa, pool: &pool, cancel: &cancel };
            for format in Format::ALL.iter().copied().filter(|format| format.is_integer()) {
                // A half block at the end, where the format allows it.
                let k = if format.stored_block().is_some() { 512 } else { 320 };
                let w = PackedMatrix::random(&exec, &[(format, n)], k, 1).unwrap();
                let Bands::Quantized(bands) = w.bands() else { panic!("quantized weights") };
                for m in [1, 2, 4, 6] {
                    let x: Vec<f32> = (0..m * k).map(|i| (i * 37 % 251) as f32 / 125.0 - 1.0).collect();
                    let products = [false, true].map(|one_stream| {
                        let (mut out, x) = (vec![0.0; m * n], x.as_slice());
                        let weights = &bands[..];
                        let part = Part { x, m, n, k, weights, in_cache: false, out: &mut out };
                        multiply_in(&exec, &mut [part], one_stream, &mut Scratch::default()).unwrap();
                        out
                    });
                    assert!(products[0].iter().any(|x| *x != 0.0), "{format:?}");
                    assert_eq!(products[0], products[1], "{} {} with {m} rows", isa.name(), format.name());
                }
            }
        }
    }
}
