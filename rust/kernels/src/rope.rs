//! Rotary position embedding (RoPE): rotates pairs of columns by an angle that grows with the position.

use crate::arch::{Kernel, Simd};
use crate::rows::{RowsMut, for_row_chunks, whole_rows};
use crate::{Exec, PoolError};

/// Parameters of a rotary embedding of a matrix of heads.
#[derive(Debug, Clone, Copy)]
pub struct Rope<'a> {
    /// Number of heads in a row.
    pub heads: usize,
    /// Columns of a head.
    pub head_dim: usize,
    /// First column of a head that is rotated.
    pub first: usize,
    /// Number of columns of a head that are rotated; even. The other columns are unchanged.
    pub rotary_dim: usize,
    /// Whether pairs are columns 2i and 2i + 1, as in the paper (GPT-J style), rather than i and i + `rotary_dim` / 2,
    /// as in GPT-NeoX and in Llama checkpoints of Hugging Face.
    pub interleaved: bool,
    /// Cosines of the angles of each row, `[m, rotary_dim / 2]`.
    pub cos: &'a [f32],
    /// Sines of the angles of each row, `[m, rotary_dim / 2]`.
    pub sin: &'a [f32],
}

/// Rotates every head of every row of `x` in place: `(a, b)` becomes `(a cos - b sin, b cos + a sin)`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not match.
pub fn rope_in_place(exec: &Exec<'_>, x: RowsMut<'_>, rope: &Rope<'_>) -> Result<(), PoolError> {
    let RowsMut { data, stride, first: column } = x;
    let rows = whole_rows(data.len(), stride);
    let half = rope.rotary_dim / 2;
    let width = rope.heads * rope.head_dim;
    assert!(column + width <= stride, "columns {column}..{} are out of bounds for rows of {stride}", column + width);
    assert!(
        rope.rotary_dim.is_multiple_of(2) && rope.first + rope.rotary_dim <= rope.head_dim,
        "rotary_dim must be even and <= head_dim - first ({} - {}), got {}",
        rope.head_dim,
        rope.first,
        rope.rotary_dim
    );
    assert!(
        rope.cos.len() == rows * half && rope.sin.len() == rows * half,
        "cos and sin must have {} elements, got {} and {}",
        rows * half,
        rope.cos.len(),
        rope.sin.len()
    );
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

    /// Plain loops, which the compiler vectorizes.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for head in self.row.chunks_exact_mut(self.rope.head_dim) {
            let rotated = &mut head[self.rope.first..][..self.rope.rotary_dim];
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
