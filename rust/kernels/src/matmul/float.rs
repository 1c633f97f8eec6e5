//! The matmul of floating-point formats.
//!
//! One algorithm for one row and for a thousand. Behind every output stands one chain of multiply-adds over k, from the
//! first to the last, beginning at zero. Tiles, blocks of k and threads only decide which chains run side by side: a
//! chain that pauses at the end of a block keeps its sum in `out` and goes on from there. So the result depends on the
//! format, the instruction set and K alone.
//!
//! The register tile is R rows of activations by P panels of sixteen outputs. Weights are the larger side when R is
//! small, and stream from memory: P is then the number of streams, each with its software prefetch. When there are many
//! rows, a block of weights comes from memory with the first tile of rows and from the cache with the others.

use std::ops::Range;

use super::unroll::unroll;
use super::{Product, Shares, to_multiply};
use crate::arch::{Kernel, LANES, Simd};
use crate::disjoint::{Tile, Tiles};
use crate::matrix::PackedMatrix;
use crate::quant::{FloatFormat, Line};
use crate::{Exec, PoolError};

/// The most rows that any instruction set has in its register tile.
const MAX_TILE_ROWS: usize = 12;

/// Activations of a tile of rows that are laid out k by k on the stack: 24 KiB, which the smallest L1
/// caches hold. The larger, the fewer times a tile's sums go to memory and back.
const PACKED_ACTIVATIONS: usize = 6144;

/// Steps of k at a time: as many 16-bit lines as fill a cache line, which is what a prefetch brings.
const UNROLL: usize = 2;

/// How far ahead of its use a line of weights is asked for. With four streams 512 to 1024 bytes measured best.
const PREFETCH_BYTES: usize = 1024;

/// How many tasks a thread gets, to even out the speeds of threads.
const TASKS_A_THREAD: usize = 4;

/// The most panels of a task. With R rows and this many panels, packing activations is work of about 1 in 30.
const MAX_TASK_PANELS: usize = 32;

/// Tiles of rows in a task: bounds its time, so that cancelling stays quick, and what its outputs take in the cache.
const TASK_ROW_TILES: usize = 8;

/// Multiplies with weights in format `F`.
pub(super) fn multiply<F: FloatFormat>(exec: &Exec<'_>, products: &mut [Product<'_>]) -> Result<(), PoolError> {
    let most_rows = exec.isa.run(TileRows);
    let shares = Shares::new(products, TASKS_A_THREAD * exec.pool.threads());
    let plan = to_multiply(products).map(|product| {
        let task_panels = shares.panels(product, MAX_STREAMS, MAX_TASK_PANELS);
        let (m, n) = (product.m(), product.w.rows());
        // Rows are split evenly: nine are five and four, not eight and one.
        let tile_rows = m.div_ceil(m.div_ceil(most_rows));
        let task_rows = tile_rows * TASK_ROW_TILES.min(m.div_ceil(tile_rows));
        let tiles = Tiles::new(product.out, n, 0..n, task_rows, task_panels * LANES);
        Plan { x: product.x, w: product.w, tile_rows, tiles }
    });
    let plans: Vec<_> = plan.collect();
    exec.run_each(plans.iter().map(|plan| plan.tiles.len()), |product, task| {
        let Plan { x, w, tile_rows, tiles } = &plans[product];
        let [band] = w.bands() else { unreachable!("floating-point formats are alone in their matrix") };
        let weights = band.lines::<F>(0);
        // Tasks that follow each other share their weights, which the first of them brings into the cache.
        let out = tiles.take_column_major(task);
        exec.isa.run(Task::<F> { x, k: w.cols(), weights, tile_rows: *tile_rows, out });
    })
}

/// How a product is cut into tasks.
struct Plan<'a> {
    x: &'a [f32],
    w: &'a PackedMatrix,
    tile_rows: usize,
    tiles: Tiles<'a, f32>,
}

/// Asks an instruction set for the rows of its register tile.
struct TileRows;

impl Kernel for TileRows {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::TILE_ROWS
    }
}

/// One task: all of k for some rows and some panels.
struct Task<'a, F: FloatFormat> {
    /// All activations, `[m, k]`.
    x: &'a [f32],
    k: usize,
    /// All weights, `[panels][k]`.
    weights: &'a [Line<F>],
    /// Rows that are worked on side by side; what is left at the end of the task are fewer.
    tile_rows: usize,
    out: Tile<'a, f32>,
}

impl<F: FloatFormat> Kernel for Task<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let block = if self.tile_rows == 1 { self.k } else { PACKED_ACTIVATIONS / self.tile_rows };
        let mut room: [f32; PACKED_ACTIVATIONS];
        let packed: &mut [f32] = if self.tile_rows == 1 {
            // A single row is read where it is; clearing room for it would cost as much as a small task.
            &mut []
        } else {
            room = [0.0; PACKED_ACTIVATIONS];
            &mut room
        };
        let mut first_k = 0;
        loop {
            let last_k = (first_k + block).min(self.k);
            let rows = self.out.rows().len();
            for row in (0..rows).step_by(self.tile_rows) {
                self.row_tile(simd, row, self.tile_rows.min(rows - row), first_k..last_k, packed);
            }
            first_k = last_k;
            if first_k == self.k {
                break;
            }
        }
    }
}

/// The most panels that are worked on side by side. Reading four streams at once is much faster than one; eight are
/// not faster than four, and in f32 slower.
const MAX_STREAMS: usize = 4;

/// How many panels are worked on side by side for a number of rows: what fits the registers.
const fn streams<S: Simd>(rows: usize) -> usize {
    let mut streams = MAX_STREAMS;
    while streams > 1 && streams * rows > S::TILE_ROWS * S::TILE_PANELS {
        streams /= 2;
    }
    streams
}

impl<F: FloatFormat> Task<'_, F> {
    /// `rows` rows from `row` on, over a block of k and all panels of the task.
    #[inline(always)]
    fn row_tile<S: Simd>(&mut self, simd: S, row: usize, rows: usize, block: Range<usize>, packed: &mut [f32]) {
        const { assert!(S::TILE_ROWS <= MAX_TILE_ROWS) };
        macro_rules! dispatch {
            ($($n:literal)*) => {
                match rows {
                    $($n => if const { $n <= S::TILE_ROWS } { self.panels::<S, $n>(simd, row, block, packed) })*
                    _ => unreachable!("a tile of {rows} rows"),
                }
            };
        }
        dispatch!(1 2 3 4 5 6 7 8 9 10 11 12);
    }

    #[inline(always)]
    fn panels<S: Simd, const R: usize>(&mut self, simd: S, row: usize, block: Range<usize>, packed: &mut [f32]) {
        let rows: [&[f32]; R] =
            std::array::from_fn(|r| &self.x[(self.out.rows().start + row + r) * self.k..][block.clone()]);
        let x = if const { R == 1 } { rows[0].as_chunks().0 } else { interleave(&rows, packed) };
        let fresh = block.start == 0;
        let (first_column, columns) = (self.out.columns().start, self.out.columns().len());
        let mut column = 0;
        macro_rules! micro {
            ($p:literal) => {{
                let first_panel = (first_column + column) / LANES;
                let panels: [&[Line<F>]; $p] =
                    std::array::from_fn(|p| &self.weights[(first_panel + p) * self.k..][block.clone()]);
                simd.vectorize(Micro::<F, R, $p> { x, panels, fresh, row, column, out: &mut self.out });
                column += $p * LANES;
            }};
        }
        while column + const { streams::<S>(R) } * LANES <= columns {
            match const { streams::<S>(R) } {
                8 => micro!(8),
                4 => micro!(4),
                2 => micro!(2),
                _ => micro!(1),
            }
        }
        while column < columns {
            micro!(1);
        }
    }
}

/// R rows as one, k by k.
#[inline(always)]
fn interleave<'a, const R: usize>(rows: &[&[f32]; R], packed: &'a mut [f32]) -> &'a [[f32; R]] {
    let packed = &mut packed.as_chunks_mut().0[..rows[0].len()];
    let (quads, rest) = packed.as_chunks_mut::<4>();
    let row_quads = rows.map(|row| &row.as_chunks::<4>().0[..quads.len()]);
    for (i, quad) in quads.iter_mut().enumerate() {
        unroll!(r in 0..R {
            let [a, b, c, d] = row_quads[r][i];
            quad[0][r] = a;
            quad[1][r] = b;
            quad[2][r] = c;
            quad[3][r] = d;
        });
    }
    let done = quads.len() * 4;
    for (k, packed) in rest.iter_mut().enumerate() {
        *packed = rows.map(|row| row[done + k]);
    }
    packed
}

/// The register tile: R rows by P panels over a block of k. Only where P is one may the panel reach past the outputs.
struct Micro<'a, 'o, F: FloatFormat, const R: usize, const P: usize> {
    x: &'a [[f32; R]],
    panels: [&'a [Line<F>]; P],
    /// Whether the chains begin here, or go on from what `out` holds.
    fresh: bool,
    row: usize,
    column: usize,
    out: &'a mut Tile<'o, f32>,
}

impl<F: FloatFormat, const R: usize, const P: usize> Kernel for Micro<'_, '_, F, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, panels, fresh, row, column, out } = self;
        let mut sums = [[simd.splat(0.0); P]; R];
        if !fresh {
            unroll!(r in 0..R {
                let out = &out.row(row + r)[column..];
                if const { P == 1 } {
                    sums[r][0] = load_edge(simd, out);
                } else {
                    let lines = &out.as_chunks().0[..P];
                    unroll!(p in 0..P { sums[r][p] = simd.load(&lines[p]) });
                }
            });
        }
        let (steps, rest) = x.as_chunks::<UNROLL>();
        let last_lines = panels.map(|panel| &panel[steps.len() * UNROLL..x.len()]);
        let panels = panels.map(|panel| &panel.as_chunks::<UNROLL>().0[..steps.len()]);
        for (i, x) in steps.iter().enumerate() {
            for (u, x) in x.iter().enumerate() {
                step::<S, F, R, P>(simd, &mut sums, x, |p| &panels[p][i][u]);
            }
            for panel in panels {
                let ahead = panel[i].as_ptr().cast::<u8>().wrapping_add(PREFETCH_BYTES);
                for line in (0..UNROLL * size_of::<Line<F>>()).step_by(64) {
                    simd.prefetch(ahead.wrapping_add(line));
                }
            }
        }
        for (i, x) in rest.iter().enumerate() {
            step::<S, F, R, P>(simd, &mut sums, x, |p| &last_lines[p][i]);
        }
        unroll!(r in 0..R {
            let out = &mut out.row(row + r)[column..];
            if const { P == 1 } {
                store_edge(simd, sums[r][0], out);
            } else {
                let lines = &mut out.as_chunks_mut().0[..P];
                unroll!(p in 0..P { simd.store(sums[r][p], &mut lines[p]) });
            }
        });
    }
}

/// One k: every chain of the tile grows by one multiply-add. Of the factors, the fewer ones stay in registers.
#[inline(always)]
fn step<'a, S: Simd, F: FloatFormat, const R: usize, const P: usize>(
    simd: S,
    sums: &mut [[S::F32; P]; R],
    x: &[f32; R],
    line: impl Fn(usize) -> &'a Line<F>,
) {
    if const { R < P } {
        let mut activations = [simd.splat(0.0); R];
        unroll!(r in 0..R { activations[r] = simd.splat(x[r]) });
        unroll!(p in 0..P {
            let weights = F::widen(simd, line(p));
            unroll!(r in 0..R { sums[r][p] = simd.mul_add(activations[r], weights, sums[r][p]) });
        });
    } else {
        let mut weights = [simd.splat(0.0); P];
        unroll!(p in 0..P { weights[p] = F::widen(simd, line(p)) });
        unroll!(r in 0..R {
            let activation = simd.splat(x[r]);
            unroll!(p in 0..P { sums[r][p] = simd.mul_add(activation, weights[p], sums[r][p]) });
        });
    }
}

/// The first sixteen of `from`, or all there are.
#[inline(always)]
fn load_edge<S: Simd>(simd: S, from: &[f32]) -> S::F32 {
    if let Some(whole) = from.first_chunk() {
        return simd.load(whole);
    }
    let mut lanes = [0.0; LANES];
    lanes[..from.len()].copy_from_slice(from);
    simd.load(&lanes)
}

/// To the first sixteen of `to`, or all there are.
#[inline(always)]
fn store_edge<S: Simd>(simd: S, value: S::F32, to: &mut [f32]) {
    if let Some(whole) = to.first_chunk_mut() {
        simd.store(value, whole);
    } else {
        to.copy_from_slice(&simd.to_array(value)[..to.len()]);
    }
}
