//! Symmetric rank-k updates (BLAS `syrk`): `C += A^T A` and `C -= A^T A`, where A has few rows. Only the upper triangle
//! of C is computed. Updates with two matrices, `C += A^T B`, compute all of C.
//!
//! A and B are stored in panels of columns, so that a tile of C reads contiguous memory. An element of C is updated
//! once, by the sum over all rows of A from the first to the last.

use crate::arch::{Kernel, LANES, Simd};
use crate::disjoint::{Tile, Tiles};
use crate::quant::integer::{BLOCK, SUPER};
use crate::{Exec, PoolError};

/// Columns of a panel.
pub(super) const PANEL: usize = 2 * LANES;

/// Maximum number of rows of A, and number of rows of a panel in memory.
pub(super) const DEPTH: usize = SUPER;

/// Rows and columns of C that a task updates: one block of inputs, of which the last may be a half block.
const TILE: usize = BLOCK;

/// Sign of an update.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sign {
    Plus,
    Minus,
}

/// Updates the first `count` rows and columns of `c: [stride][stride]` with the first `depth` rows of
/// `a: [count / PANEL][DEPTH][PANEL]`.
pub(super) fn rank_update(
    exec: &Exec<'_>,
    c: &mut [f32],
    stride: usize,
    count: usize,
    a: &[f32],
    depth: usize,
    sign: Sign,
) -> Result<(), PoolError> {
    let tiles = Tiles::new(c, stride, 0..count, TILE, TILE);
    let side = count.div_ceil(TILE);
    let upper: Vec<_> = (0..side).flat_map(|down| (down..side).map(move |across| (down, across))).collect();
    exec.run(upper.len(), |task| {
        let (down, across) = upper[task];
        exec.isa.run(Update { a, b: a, depth, sign, tile: tiles.take(down * side + across) });
    })
}

/// Adds `A^T B` to `c: [rows][columns]`, with the first `depth` rows of `a: [rows / PANEL][DEPTH][PANEL]` and
/// `b: [columns / PANEL][DEPTH][PANEL]`.
pub(super) fn product_update(
    exec: &Exec<'_>,
    c: &mut [f32],
    columns: usize,
    (a, b): (&[f32], &[f32]),
    depth: usize,
) -> Result<(), PoolError> {
    let tiles = Tiles::new(c, columns, 0..columns, TILE, TILE);
    exec.run(tiles.len(), |task| {
        exec.isa.run(Update { a, b, depth, sign: Sign::Plus, tile: tiles.take(task) });
    })
}

/// One tile of C.
struct Update<'a> {
    /// Panels of the rows of C.
    a: &'a [f32],
    /// Panels of the columns of C.
    b: &'a [f32],
    depth: usize,
    sign: Sign,
    tile: Tile<'a, f32>,
}

impl Kernel for Update<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        // Enough independent accumulators to hide the latency of a multiply-add, as far as registers allow.
        if const { S::TILE_ROWS * S::TILE_PANELS >= 16 } {
            self.tile::<S, 8, 2>(simd);
        } else {
            self.tile::<S, 4, 1>(simd);
        }
    }
}

impl Update<'_> {
    /// Updates the whole tile, in register blocks of R rows by P vectors.
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const P: usize>(&mut self, simd: S) {
        let (rows, columns) = (self.tile.rows(), self.tile.columns());
        for column in (0..columns.len()).step_by(P * LANES) {
            for row in (0..rows.len()).step_by(R) {
                let [left, right] = [rows.start + row, columns.start + column];
                let lines = panel(self.a, left).iter().zip(panel(self.b, right)).take(self.depth);
                let mut sums = [[simd.splat(0.0); P]; R];
                for (left_line, right_line) in lines {
                    let left: &[f32; R] = left_line[left % PANEL..].first_chunk().expect("within a panel");
                    let right: &[[f32; LANES]; P] =
                        right_line[right % PANEL..].as_chunks().0.first_chunk().expect("within a panel");
                    let right = simd.load_vectors(right);
                    for (sums, left) in sums.iter_mut().zip(left) {
                        for (sum, right) in sums.iter_mut().zip(right) {
                            *sum = simd.mul_add(simd.splat(*left), right, *sum);
                        }
                    }
                }
                for (index, sums) in sums.into_iter().enumerate() {
                    let out = &mut self.tile.row(row + index)[column..];
                    for (out, sum) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(sums) {
                        let old = simd.load(out);
                        let new = if self.sign == Sign::Plus { simd.add(old, sum) } else { simd.sub(old, sum) };
                        simd.store(new, out);
                    }
                }
            }
        }
    }
}

/// Returns the panel that contains column `column`.
#[inline(always)]
fn panel(a: &[f32], column: usize) -> &[[f32; PANEL]] {
    &a.as_chunks().0[column / PANEL * DEPTH..][..DEPTH]
}
