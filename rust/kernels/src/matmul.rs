//! Activations times weights: `out[m, n] = sum over k of x[m, k] * w[n, k]`.
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

use crate::arch::{Kernel, LANES, Simd};
use crate::disjoint::{Tile, Tiles};
use crate::matrix::PackedMatrix;
use crate::quant::{FloatFormat, FormatVisitor, Line};
use crate::{Exec, PoolError};

/// The most rows that any instruction set has in its register tile.
const MAX_TILE_ROWS: usize = 12;

/// Activations of a tile of rows that are laid out k by k on the stack: 12 KiB, a part of the smallest L1 caches.
const PACKED_ACTIVATIONS: usize = 3072;

/// How far ahead of its use a line of weights is asked for.
const PREFETCH_BYTES: usize = 2048;

/// The most panels of a task. With R rows and this many panels, packing activations is work of about 1 in 30.
const MAX_TASK_PANELS: usize = 32;

/// Tiles of rows in a task: bounds its time, so that cancelling stays quick, and what its outputs take in the cache.
const TASK_ROW_TILES: usize = 8;

/// `out[m, n] = x[m, k] * w[n, k]`, all dense and row by row; m is any number.
///
/// # Errors
/// [`PoolError`] if `exec` was cancelled or a task panicked; `out` then holds anything.
///
/// # Panics
/// If `x` and `out` have not the same number of whole rows.
pub fn matmul(exec: &Exec<'_>, x: &[f32], w: &PackedMatrix, out: &mut [f32]) -> Result<(), PoolError> {
    let (n, k) = (w.rows(), w.cols());
    let m = out.len().checked_div(n).unwrap_or(0);
    assert_eq!(out.len(), m * n, "outputs of {n} columns");
    assert!(n == 0 || x.len() == m * k, "{} activations for {m} rows of {k}", x.len());
    if out.is_empty() {
        return Ok(());
    }
    w.format().visit(Matmul { exec, x, w, out })
}

struct Matmul<'a> {
    exec: &'a Exec<'a>,
    x: &'a [f32],
    w: &'a PackedMatrix,
    out: &'a mut [f32],
}

impl FormatVisitor for Matmul<'_> {
    type Output = Result<(), PoolError>;

    fn visit<F: FloatFormat>(self) -> Self::Output {
        let Self { exec, x, w, out } = self;
        let (n, k) = (w.rows(), w.cols());
        let m = out.len() / n;
        let most_rows = TASK_ROW_TILES * exec.isa.run(TileRows);
        let task_rows = m.div_ceil(m.div_ceil(most_rows));
        // Four tasks a thread even out their speeds; whole groups of streams keep tails away.
        let share = n.div_ceil(LANES).div_ceil(4 * exec.pool.threads());
        let task_panels = share.next_multiple_of(MAX_STREAMS).min(MAX_TASK_PANELS);
        let tiles = Tiles::new(out, n, 0..n, task_rows, task_panels * LANES);
        let (down, across) = (m.div_ceil(task_rows), tiles.across());
        exec.run(tiles.len(), |task| {
            // Tasks that follow each other share their weights, which the first of them brings into the cache.
            let tile = tiles.take(task % down * across + task / down);
            exec.isa.run(Task::<F> { x, k, weights: w.lines::<F>(), out: tile });
        })
    }
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
    out: Tile<'a, f32>,
}

impl<F: FloatFormat> Kernel for Task<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let rows = self.out.rows().len();
        // Rows are split evenly: nine are five and four, not eight and one.
        let tiles = rows.div_ceil(S::TILE_ROWS);
        let (least, larger) = (rows / tiles, rows % tiles);
        let block = if rows == 1 { self.k } else { PACKED_ACTIVATIONS / rows.div_ceil(tiles) };
        let mut first_k = 0;
        loop {
            let last_k = (first_k + block).min(self.k);
            let mut row = 0;
            for tile in 0..tiles {
                let tile_rows = least + usize::from(tile < larger);
                self.row_tile(simd, row, tile_rows, first_k..last_k);
                row += tile_rows;
            }
            first_k = last_k;
            if first_k == self.k {
                break;
            }
        }
    }
}

/// The most panels that are worked on side by side.
const MAX_STREAMS: usize = 8;

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
    fn row_tile<S: Simd>(&mut self, simd: S, row: usize, rows: usize, block: Range<usize>) {
        const { assert!(S::TILE_ROWS <= MAX_TILE_ROWS) };
        macro_rules! dispatch {
            ($($n:literal)*) => {
                match rows {
                    $($n => if const { $n <= S::TILE_ROWS } { self.panels::<S, $n>(simd, row, block) })*
                    _ => unreachable!("a tile of {rows} rows"),
                }
            };
        }
        dispatch!(1 2 3 4 5 6 7 8 9 10 11 12);
    }

    #[inline(always)]
    fn panels<S: Simd, const R: usize>(&mut self, simd: S, row: usize, block: Range<usize>) {
        let first = self.out.rows().start + row;
        let mut packed = [0.0f32; PACKED_ACTIVATIONS];
        let x: &[[f32; R]] = if R == 1 {
            self.x[first * self.k..][block.clone()].as_chunks().0
        } else {
            let packed = &mut packed.as_chunks_mut().0[..block.len()];
            let rows: [&[f32]; R] = std::array::from_fn(|r| &self.x[(first + r) * self.k..][block.clone()]);
            for (k, packed) in packed.iter_mut().enumerate() {
                *packed = rows.map(|row| row[k]);
            }
            packed
        };
        let mut column = 0;
        let columns = self.out.columns().len();
        macro_rules! run {
            ($p:expr) => {{
                let first_panel = (self.out.columns().start + column) / LANES;
                let panels: [&[Line<F>]; $p] =
                    std::array::from_fn(|p| &self.weights[(first_panel + p) * self.k..][block.clone()]);
                let fresh = block.start == 0;
                simd.vectorize(Micro::<F, R, { $p }> { x, panels, fresh, row, column, out: &mut self.out });
                column += $p * LANES;
            }};
        }
        while column < columns {
            let left = (columns - column).div_ceil(LANES);
            if const { streams::<S>(R) == 8 } && left >= 8 {
                run!(8);
            } else if const { streams::<S>(R) >= 4 } && left >= 4 {
                run!(4);
            } else if const { streams::<S>(R) >= 2 } && left >= 2 {
                run!(2);
            } else {
                run!(1);
            }
        }
    }
}

/// The register tile: R rows by P panels over a block of k.
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
            for (r, sums) in sums.iter_mut().enumerate() {
                let out = &out.row(row + r)[column..];
                for (p, sum) in sums.iter_mut().enumerate() {
                    *sum = load(simd, &out[p * LANES..]);
                }
            }
        }
        let panels = panels.map(|panel| &panel[..x.len()]);
        for (k, x) in x.iter().enumerate() {
            let weights: [S::F32; P] = std::array::from_fn(|p| F::widen(simd, &panels[p][k]));
            for (sums, x) in sums.iter_mut().zip(x) {
                let x = simd.splat(*x);
                for (sum, weights) in sums.iter_mut().zip(weights) {
                    *sum = simd.mul_add(x, weights, *sum);
                }
            }
            for panel in panels {
                let ahead = const { PREFETCH_BYTES / size_of::<Line<F>>() };
                if size_of::<Line<F>>() == 64 || k % 2 == 0 {
                    simd.prefetch(panel.as_ptr().wrapping_add(k + ahead).cast());
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            let out = &mut out.row(row + r)[column..];
            for (p, sum) in sums.iter().enumerate() {
                store(simd, *sum, &mut out[p * LANES..]);
            }
        }
    }
}

/// The first sixteen of `from`, or all there are.
#[inline(always)]
fn load<S: Simd>(simd: S, from: &[f32]) -> S::F32 {
    if let Some(whole) = from.first_chunk() {
        return simd.load(whole);
    }
    let mut lanes = [0.0; LANES];
    lanes[..from.len()].copy_from_slice(from);
    simd.load(&lanes)
}

/// To the first sixteen of `to`, or all there are.
#[inline(always)]
fn store<S: Simd>(simd: S, value: S::F32, to: &mut [f32]) {
    if let Some(whole) = to.first_chunk_mut() {
        simd.store(value, whole);
    } else {
        to.copy_from_slice(&simd.to_array(value)[..to.len()]);
    }
}
