//! Recurrences over the tokens of sequences: layers that keep a state of fixed size instead of keys and values.
//!
//! [`linear_attention`] keeps a matrix per head (gated delta net, Kimi delta attention, Mamba 2, lightning attention),
//! [`selective_scan`] a row per channel (Mamba 1), [`wkv`] a mean of values per channel (RWKV 4),
//! [`softmax_pooling`] the mean of a block so far (DeepSeek-V4), and [`causal_convolution`] the last few tokens.
//! [`gates`] computes the step sizes, decay factors and update factors that they take. All of them compute a ragged batch
//! of [`Segment`]s in parallel over sequences and parts of the state.
//!
//! The recurrences run token by token: an element of the state is one chain of operations over the tokens, in f32, and
//! an output is one chain over the state. A result therefore depends only on the tokens before it, the shape and the
//! instruction set, not on how sequences are divided into segments, on other sequences or on the number of threads.
//! Registers hold an element of the state while several tokens pass, where the update of a token does not depend on the
//! state. There is no form by products of keys with keys of a chunk: its bits would depend on where a chunk begins, or a
//! step would keep the inputs of its chunk, and it would take as many multiply-adds. A task advances a part of the state
//! that stays in the first-level cache ([`linear`]), so that arithmetic is the limit for many tokens, and memory bandwidth,
//! with one pass over the state, for one token.
//!
//! The layout of a state in its slot is that of the parts, each of them contiguous. It is part of
//! [`ARITHMETIC_VERSION`](crate::ARITHMETIC_VERSION).

mod convolution;
mod gates;
mod linear;
mod matrix;
mod pooling;
mod selective;
mod wkv;

use std::ops::Range;

pub use convolution::{CausalConvolution, InputOutputGates, causal_convolution};
pub use gates::{Gate, gates};
pub use linear::{Decay, LinearAttention, UpdateRule, linear_attention, linear_attention_state_len};
pub use pooling::{SoftmaxPooling, softmax_pooling, softmax_pooling_state_len};
pub use selective::{SelectiveScan, selective_scan, selective_scan_state_len};
pub use wkv::{Wkv, wkv, wkv_state_len};

use crate::arch::{LANES, Simd};
use crate::disjoint::{Regions, Tile};
use crate::math::{load_up_to, store_up_to};
use crate::rows::{RowsMut, whole_rows};
use crate::{Exec, PoolError};

/// Number of multiply-adds below which waking worker threads costs more than it saves.
const INLINE_WORK: usize = 32 * 1024;

/// Consecutive rows of one sequence, and the slots of its state before and after them.
///
/// Several segments can belong to one sequence: a segment whose `old` is the `new` of the segment before it in the batch
/// continues that segment. This leaves the states at the boundaries in their slots, as snapshots of a prompt, or as
/// places to return to when speculative tokens are rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// First row of the segment in inputs and outputs.
    pub first_row: usize,
    /// Number of rows; may be 0, which copies the state.
    pub rows: usize,
    /// Slot of the state before the first row; `None` at the start of a sequence, where the state is zero. The slot is
    /// not changed unless it is also `new`.
    pub old: Option<usize>,
    /// Slot of the state after the last row; may be `old`. No other segment may have it as `new`, and only the next one
    /// as `old`.
    pub new: usize,
}

/// Part of a state and of the columns of the output that one task computes.
struct Part {
    /// Elements of the state, counted from its start.
    state: Range<usize>,
    /// Columns of the output.
    columns: Range<usize>,
}

/// A part of a segment: the task is to advance the state by the rows of the segment and to write their outputs.
struct Step<'a> {
    /// Rows in the inputs; at least one.
    rows: Range<usize>,
    /// Part of the state before the first row.
    old: &'a [f32],
    /// Part of the state after the last row, to be written.
    new: &'a mut [f32],
    /// Part of the outputs of the rows.
    out: Tile<'a, f32>,
}

/// Calls `advance` for every part of every segment, in parallel over sequences and parts. `work` is the number of
/// multiply-adds per row and element of the state.
///
/// # Panics
/// If slots or rows are out of bounds or overlap, or the view of the states is too narrow for the parts.
fn for_steps(
    exec: &Exec<'_>,
    segments: &[Segment],
    states: RowsMut<'_>,
    out: &mut [f32],
    width: usize,
    (parts, work): (&[Part], usize),
    advance: impl Fn(Step<'_>) + Sync,
) -> Result<(), PoolError> {
    let rows = whole_rows(out.len(), width);
    let mut next_row = 0;
    for segment in segments {
        assert!(segment.first_row >= next_row, "rows of segments must be ascending and must not overlap");
        next_row = segment.first_row + segment.rows;
    }
    assert!(next_row <= rows, "out must have the {next_row} rows of the segments, got {rows}");
    let continues = |index: usize| index > 0 && segments[index].old == Some(segments[index - 1].new);
    let mut sequences: Vec<Range<usize>> = Vec::new();
    for index in 0..segments.len() {
        match sequences.last_mut() {
            Some(sequence) if continues(index) => sequence.end += 1,
            _ => sequences.push(index..index + 1),
        }
    }
    let RowsMut { data, stride, first } = states;
    let of_states = |part: &Part| first + part.state.start..first + part.state.end;
    let slots = segments.iter().map(|segment| segment.new..segment.new + 1).collect();
    let states = Regions::new(data, stride, slots, parts.iter().map(of_states).collect());
    let of_rows = |segment: &Segment| segment.first_row..segment.first_row + segment.rows;
    let columns = parts.iter().map(|part| part.columns.clone()).collect();
    let out = Regions::new(out, width, segments.iter().map(of_rows).collect(), columns);
    for (index, segment) in segments.iter().enumerate() {
        if let Some(old) = segment.old.filter(|old| *old != segment.new && !continues(index) && !parts.is_empty()) {
            // Panics here rather than in a task if another segment writes to the slot.
            let _ = states.shared(old, 0);
        }
    }

    let longest = parts.iter().map(|part| part.state.len()).max().unwrap_or(0);
    let zeros = vec![0.0; if segments.iter().any(|segment| segment.old.is_none()) { longest } else { 0 }];
    let run = |task: usize| {
        let (sequence, part) = (&sequences[task / parts.len()], task % parts.len());
        let mut previous: Option<Tile<'_, f32>> = None;
        for index in sequence.clone() {
            let segment = &segments[index];
            let mut tile = states.take(index, part);
            let new = tile.contiguous();
            let in_place: Vec<f32>;
            let old = match (segment.old, &mut previous) {
                (None, _) => &zeros[..new.len()],
                (Some(_), Some(previous)) => previous.contiguous(),
                (Some(old), None) if old == segment.new => {
                    in_place = new.to_vec();
                    &in_place
                }
                (Some(old), None) => states.shared(old, part),
            };
            match of_rows(segment) {
                rows if rows.is_empty() => new.copy_from_slice(old),
                rows => advance(Step { rows, old, new, out: out.take(index, part) }),
            }
            previous = Some(tile);
        }
    };
    let elements = parts.iter().map(|part| part.state.len()).sum::<usize>();
    let all_rows: usize = segments.iter().map(|segment| segment.rows).sum();
    if (all_rows * work + segments.len()) * elements < INLINE_WORK {
        (0..sequences.len() * parts.len()).for_each(run);
        return Ok(());
    }
    exec.run(sequences.len() * parts.len(), run)
}

/// Loads the numbers of `P` vectors, zero-padded if there are fewer.
#[inline(always)]
fn load_vectors<S: Simd, const P: usize>(simd: S, from: &[f32]) -> [S::F32; P] {
    if let ([whole], []) = from.as_chunks::<LANES>().0.as_chunks::<P>()
        && from.len() == P * LANES
    {
        return simd.load_vectors(whole);
    }
    let mut vectors = [simd.splat(0.0); P];
    for (vector, from) in vectors.iter_mut().zip(from.chunks(LANES)) {
        *vector = load_up_to(simd, from);
    }
    vectors
}

/// Stores as many numbers of `P` vectors as `to` has.
#[inline(always)]
fn store_vectors<S: Simd, const P: usize>(simd: S, vectors: [S::F32; P], to: &mut [f32]) {
    for (vector, to) in vectors.into_iter().zip(to.chunks_mut(LANES)) {
        store_up_to(simd, vector, to);
    }
}

/// Prefetches the cache lines of `numbers`.
#[inline(always)]
fn prefetch<S: Simd>(simd: S, numbers: &[f32]) {
    let (lines, rest) = numbers.as_chunks::<LANES>();
    for line in lines {
        simd.prefetch(line.as_ptr().cast());
    }
    if !rest.is_empty() {
        simd.prefetch(rest.as_ptr().cast());
    }
}
