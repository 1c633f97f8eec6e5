//! Sums of matrices and of a matrix and a row.

use crate::arch::{Kernel, Simd};
use crate::rows::{for_row_runs, whole_rows};
use crate::{Exec, PoolError};

/// `x += y`, element by element.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the lengths differ.
pub fn add(exec: &Exec<'_>, x: &mut [f32], y: &[f32]) -> Result<(), PoolError> {
    assert_eq!(x.len(), y.len(), "summands have the same shape");
    for_row_runs(exec, x, 1, 1, &|first, x| exec.isa.run(Add { x, y: &y[first..] }))
}

/// `x += bias` on every row of `x: [m, n]`, with `bias: [n]`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If `x` is not made of whole rows.
pub fn add_bias(exec: &Exec<'_>, x: &mut [f32], bias: &[f32]) -> Result<(), PoolError> {
    let width = bias.len();
    whole_rows(x.len(), width);
    for_row_runs(exec, x, width, width, &|_, rows| {
        for row in rows.chunks_exact_mut(width) {
            exec.isa.run(Add { x: row, y: bias });
        }
    })
}

struct Add<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    /// A plain loop: the compiler makes vectors of it.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x += y;
        }
    }
}
