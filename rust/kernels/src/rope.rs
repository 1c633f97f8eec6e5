//! Rotary position embedding: pairs of columns are rotated by an angle that grows with the position.

use crate::arch::{Kernel, Simd};
use crate::rows::{RowsMut, for_row_chunks, whole_rows};
use crate::{Exec, PoolError};

/// How the rows of a matrix of heads are rotated.
#[derive(Debug, Clone, Copy)]
pub struct Rope<'a> {
    /// Heads, side by side in a row.
    pub heads: usize,
    /// Columns of a head.
    pub head_dim: usize,
    /// Leading columns of a head that are rotated; even. The others stay as they are.
    pub rotary_dim: usize,
    /// Pairs are columns 2i and 2i + 1, as in the paper; otherwise i and i + `rotary_dim` / 2, as in GPT-NeoX and
    /// Llama checkpoints of Hugging Face.
    pub interleaved: bool,
    /// `[m, rotary_dim / 2]`: cosine of each row's angles.
    pub cos: &'a [f32],
    /// `[m, rotary_dim / 2]`: sine of each row's angles.
    pub sin: &'a [f32],
}

/// Rotates every head of every row of `x` in place: `(a, b)` becomes `(a cos - b sin, b cos + a sin)`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not fit.
pub fn rope_in_place(exec: &Exec<'_>, x: RowsMut<'_>, rope: &Rope<'_>) -> Result<(), PoolError> {
    let RowsMut { data, stride, first: column } = x;
    let rows = whole_rows(data.len(), stride);
    let half = rope.rotary_dim / 2;
    let width = rope.heads * rope.head_dim;
    assert!(column + width <= stride, "the heads end beyond the row");
    assert!(rope.rotary_dim.is_multiple_of(2) && rope.rotary_dim <= rope.head_dim, "pairs of columns of a head");
    assert!(rope.cos.len() == rows * half && rope.sin.len() == rows * half, "an angle for every row and pair");
    if half == 0 {
        return Ok(());
    }
    for_row_chunks(exec, data, stride, width, &|first, rows| {
        let angles = rope.cos[first * half..].chunks_exact(half).zip(rope.sin[first * half..].chunks_exact(half));
        for (row, (cos, sin)) in rows.chunks_exact_mut(stride).zip(angles) {
            exec.isa.run(Rotate { row: &mut row[column..][..width], rope, cos, sin });
        }
    })
}

struct Rotate<'a> {
    row: &'a mut [f32],
    rope: &'a Rope<'a>,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    /// Plain loops: the compiler makes vectors of them, and no row's width needs a tail.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for head in self.row.chunks_exact_mut(self.rope.head_dim) {
            let rotated = &mut head[..self.rope.rotary_dim];
            if self.rope.interleaved {
                let (pairs, _) = rotated.as_chunks_mut::<2>();
                for ((pair, cos), sin) in pairs.iter_mut().zip(self.cos).zip(self.sin) {
                    *pair = [pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin];
                }
            } else {
                let (low, high) = rotated.split_at_mut(self.cos.len());
                for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(self.cos).zip(self.sin) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    }
}
