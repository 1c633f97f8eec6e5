//! Matmul of floating-point formats.
//!
//! One algorithm serves any number of rows. Each output is one chain of multiply-adds over k, from the first to the last,
//! beginning at zero. Tiles, blocks of k and threads only decide which chains run side by side: a chain that pauses at the
//! end of a block keeps its sum in `out` and continues from there. So the result depends on the format, the instruction
//! set and K alone.
//!
//! The register tile is R rows of activations by P panels of sixteen outputs. Weights are the larger side when R is
//! small, and stream from memory: P is then the number of streams, each with its software prefetch. When there are many
//! rows, a block of weights comes from memory with the first tile of rows and from the cache with the others.

use std::ops::Range;

use super::unroll::unroll;
use super::{Part, TaskSizes};
use crate::arch::{Kernel, LANES, Simd};
use crate::disjoint::{Tile, Tiles};
use crate::matrix::Band;
use crate::quant::family::FloatPanels;
use crate::quant::{FloatFormat, Line};
use crate::{Exec, PoolError};

/// Maximum number of rows of the register tile of any instruction set.
const MAX_TILE_ROWS: usize = 12;

/// Number of activations of a tile of rows that are laid out k by k on the stack: 24 KiB, which fit the smallest L1
/// caches. The more, the less often a tile's sums go to memory and back.
const PACKED_ACTIVATIONS: usize = 6144;

/// Number of steps of k at a time: as many 16-bit lines as a cache line holds, which is what one prefetch loads.
const UNROLL: usize = 2;

/// Distance of the prefetch of weights, in bytes. With four streams, 512 to 1024 bytes measured best.
const PREFETCH_BYTES: usize = 1024;

/// Number of tasks per thread, which evens out the speeds of threads.
const TASKS_PER_THREAD: usize = 4;

/// Maximum number of panels of a task. With this many, packing activations is about 1/30 of the work.
const MAX_TASK_PANELS: usize = 32;

/// Number of tiles of rows in a task: bounds its time, so that cancellation is quick, and its outputs in the cache.
const TASK_ROW_TILES: usize = 8;

/// Product with weights in a floating-point format.
pub(crate) type FloatPart<'a> = Part<'a, (&'static dyn FloatPanels, &'a Band)>;

/// Multiplies with weights in format `F`.
pub(crate) fn multiply<F: FloatFormat>(exec: &Exec<'_>, parts: &mut [FloatPart<'_>]) -> Result<(), PoolError> {
    let most_rows = exec.isa.run(TileRows);
    let task_sizes = TaskSizes::new(parts, TASKS_PER_THREAD * exec.pool.threads());
    let plan = parts.iter_mut().map(|part| {
        let &mut Part { x, m, n, k, weights: (_, band), ref mut out, .. } = part;
        let task_panels = task_sizes.panels(k, MAX_STREAMS, MAX_TASK_PANELS);
        // Rows are split evenly: nine are five and four, not eight and one.
        let tile_rows = m.div_ceil(m.div_ceil(most_rows));
        let task_rows = tile_rows * TASK_ROW_TILES.min(m.div_ceil(tile_rows));
        let tiles = Tiles::new(out, n, 0..n, task_rows, task_panels * LANES);
        Plan::<F> { x, k, weights: band.lines::<F>(), tile_rows, tiles }
    });
    let plans: Vec<_> = plan.collect();
    let reads = |product: usize, task| {
        let Plan { k, weights, ref tiles, .. } = plans[product];
        bytemuck::cast_slice(&weights[tiles.first_column(task) / LANES * k..])
    };
    exec.run_each_reading(plans.iter().map(|plan| plan.tiles.len()), reads, |product, task| {
        let &Plan { x, k, weights, tile_rows, ref tiles } = &plans[product];
        // Tasks that follow each other share their weights, which the first of them brings into the cache.
        let out = tiles.take_column_major(task);
        exec.isa.run(Task::<F> { x, k, weights, tile_rows, out });
    })
}

/// Partition of a product into tasks.
struct Plan<'a, F: FloatFormat> {
    x: &'a [f32],
    k: usize,
    weights: &'a [Line<F>],
    tile_rows: usize,
    tiles: Tiles<'a, f32>,
}

/// Kernel that returns the number of rows of the register tile.
struct TileRows;

impl Kernel for TileRows {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::TILE_ROWS
    }
}

/// Task that computes some rows and some panels over all of k.
struct Task<'a, F: FloatFormat> {
    /// All activations, `[m, k]`.
    x: &'a [f32],
    k: usize,
    /// All weights, `[panels][k]`.
    weights: &'a [Line<F>],
    /// Number of rows of a tile; the last tile of the task may have fewer.
    tile_rows: usize,
    out: Tile<'a, f32>,
}

impl<F: FloatFormat> Kernel for Task<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let block = if self.tile_rows == 1 { self.k } else { PACKED_ACTIVATIONS / self.tile_rows };
        let mut buffer: [f32; PACKED_ACTIVATIONS];
        let packed: &mut [f32] = if self.tile_rows == 1 {
            // A single row is read in place; clearing a buffer for it would cost as much as a small task.
            &mut []
        } else {
            buffer = [0.0; PACKED_ACTIVATIONS];
            &mut buffer
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

/// Maximum number of panels that are read side by side. Reading four streams at once is much faster than one; eight are
/// not faster than four, and in f32 slower.
const MAX_STREAMS: usize = 4;

/// Returns how many panels are read side by side for a number of rows: as many as fit the registers.
const fn streams<S: Simd>(rows: usize) -> usize {
    let mut streams = MAX_STREAMS;
    while streams > 1 && streams * rows > S::TILE_ROWS * S::TILE_PANELS {
        streams /= 2;
    }
    streams
}

impl<F: FloatFormat> Task<'_, F> {
    /// Multiplies `rows` rows from `row` on with all panels of the task, over a block of k.
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

    #[inline(never)]
    fn panels<S: Simd, const R: usize>(&mut self, simd: S, row: usize, block: Range<usize>, packed: &mut [f32]) {
        let mut rows: [&[f32]; R] = [&[]; R];
        for (r, x) in rows.iter_mut().enumerate() {
            *x = &self.x[(self.out.rows().start + row + r) * self.k..][block.clone()];
        }
        let x = if const { R == 1 } {
            rows[0].as_chunks().0
        } else {
            let packed = &mut packed.as_chunks_mut().0[..block.len()];
            simd.vectorize(Interleave { rows, packed: &mut *packed });
            packed
        };
        match const { streams::<S>(R) } {
            4 => self.streams::<S, R, 4>(simd, row, block, x),
            2 => self.streams::<S, R, 2>(simd, row, block, x),
            _ => self.streams::<S, R, 1>(simd, row, block, x),
        }
    }

    /// Multiplies a tile of rows with all panels, P at a time. Past the last panel the last takes the place of the missing
    /// ones, and their results are dropped: kernels for each smaller number would double what has to be compiled.
    #[inline(always)]
    fn streams<S: Simd, const R: usize, const P: usize>(
        &mut self,
        simd: S,
        row: usize,
        block: Range<usize>,
        x: &[[f32; R]],
    ) {
        let (first_panel, columns) = (self.out.columns().start / LANES, self.out.columns().len());
        let last = columns.div_ceil(LANES) - 1;
        for panel in (0..=last).step_by(P) {
            let mut panels: [&[Line<F>]; P] = [&[]; P];
            for (p, lines) in panels.iter_mut().enumerate() {
                *lines = &self.weights[(first_panel + last.min(panel + p)) * self.k..][block.clone()];
            }
            let fresh = block.start == 0;
            simd.vectorize(Micro::<F, R, P> { x, panels, fresh, row, column: panel * LANES, out: &mut self.out });
        }
    }
}

/// Lays out R rows as one, k by k.
struct Interleave<'a, const R: usize> {
    rows: [&'a [f32]; R],
    packed: &'a mut [[f32; R]],
}

impl<const R: usize> Kernel for Interleave<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { rows, packed } = self;
        let (quads, rest) = packed.as_chunks_mut::<4>();
        let mut row_quads: [&[[f32; 4]]; R] = [&[]; R];
        unroll!(r in 0..R { row_quads[r] = &rows[r].as_chunks::<4>().0[..quads.len()] });
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
            for (row, value) in rows.iter().zip(packed) {
                *value = row[done + k];
            }
        }
    }
}

/// Register tile: R rows by P panels over a block of k.
struct Micro<'a, 'o, F: FloatFormat, const R: usize, const P: usize> {
    x: &'a [[f32; R]],
    panels: [&'a [Line<F>]; P],
    /// Whether the chains begin here; otherwise they continue from what `out` holds.
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
                if let Some(lines) = out.as_chunks().0.first_chunk::<P>() {
                    unroll!(p in 0..P { sums[r][p] = simd.load(&lines[p]) });
                } else {
                    unroll!(p in 0..P { sums[r][p] = simd.load(&load_edge(out, p)) });
                }
            });
        }
        let steps = x.as_chunks::<UNROLL>().0;
        let mut pairs: [&[[Line<F>; UNROLL]]; P] = [&[]; P];
        unroll!(p in 0..P { pairs[p] = &panels[p].as_chunks::<UNROLL>().0[..steps.len()] });
        for (i, x) in steps.iter().enumerate() {
            unroll!(u in [0 1] {
                let mut lines = [&pairs[0][i][u]; P];
                unroll!(p in 0..P { lines[p] = &pairs[p][i][u] });
                step::<S, F, R, P>(simd, &mut sums, &x[u], lines);
            });
            for pair in &pairs {
                let address = pair[i].as_ptr().cast::<u8>().wrapping_add(PREFETCH_BYTES);
                for line in (0..UNROLL * size_of::<Line<F>>()).step_by(64) {
                    simd.prefetch(address.wrapping_add(line));
                }
            }
        }
        let done = steps.len() * UNROLL;
        for (i, x) in x[done..].iter().enumerate() {
            let mut lines = [&panels[0][done + i]; P];
            unroll!(p in 0..P { lines[p] = &panels[p][done + i] });
            step::<S, F, R, P>(simd, &mut sums, x, lines);
        }
        unroll!(r in 0..R {
            let out = &mut out.row(row + r)[column..];
            if let Some(lines) = out.as_chunks_mut().0.first_chunk_mut::<P>() {
                unroll!(p in 0..P { simd.store(sums[r][p], &mut lines[p]) });
            } else {
                unroll!(p in 0..P { store_edge(&simd.to_array(sums[r][p]), out, p) });
            }
        });
    }
}

/// `UNROLL` lines are written out in [`Micro`].
const _: () = assert!(UNROLL == 2);

/// Adds one k to every chain of the tile. Of the two kinds of factors, the fewer ones stay in registers.
#[inline(always)]
fn step<S: Simd, F: FloatFormat, const R: usize, const P: usize>(
    simd: S,
    sums: &mut [[S::F32; P]; R],
    x: &[f32; R],
    lines: [&Line<F>; P],
) {
    if const { R < P } {
        let mut activations = [simd.splat(0.0); R];
        unroll!(r in 0..R { activations[r] = simd.splat(x[r]) });
        unroll!(p in 0..P {
            let weights = F::widen(simd, lines[p]);
            unroll!(r in 0..R { sums[r][p] = simd.mul_add(activations[r], weights, sums[r][p]) });
        });
    } else {
        let mut weights = [simd.splat(0.0); P];
        unroll!(p in 0..P { weights[p] = F::widen(simd, lines[p]) });
        unroll!(r in 0..R {
            let activation = simd.splat(x[r]);
            unroll!(p in 0..P { sums[r][p] = simd.mul_add(activation, weights[p], sums[r][p]) });
        });
    }
}

/// Returns line `index` of `from`, padded with zeros where `from` ends.
#[inline(never)]
fn load_edge(from: &[f32], index: usize) -> [f32; LANES] {
    let mut line = [0.0; LANES];
    line.iter_mut().zip(from.iter().skip(index * LANES)).for_each(|(to, from)| *to = *from);
    line
}

/// Stores `line` as line `index` of `to`, as far as `to` reaches.
#[inline(never)]
fn store_edge(line: &[f32; LANES], to: &mut [f32], index: usize) {
    to.iter_mut().skip(index * LANES).zip(line).for_each(|(to, from)| *to = *from);
}
