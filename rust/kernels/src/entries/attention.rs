//! Softmax attention of rows over tokens and entries.

use super::{EntryChoice, PagedRows, products};
use crate::arch::{Kernel, LANES, Simd};
use crate::attention::AttentionSequence;
use crate::disjoint::Tiles;
use crate::math::{exp, load_up_to, store_up_to};
use crate::rows::Rows;
use crate::{Exec, PoolError};

/// Number of heads of a task, which share every load of a vector in cache.
const TASK_HEADS: usize = 8;

/// Attention to a window of tokens and to entries.
#[derive(Debug, Clone, Copy)]
pub struct EntryAttention<'a> {
    /// Number of heads of the queries; all of them read the same vectors.
    pub heads: usize,
    /// Factor that scores are multiplied by.
    pub scale: f32,
    /// Number of tokens up to its own that a row attends to.
    pub window: usize,
    /// Attention sinks, `[heads]`: a logit per head that takes part in the softmax and adds no value to the output.
    pub sinks: &'a [f32],
    /// Vectors of the tokens.
    pub tokens: PagedRows<'a>,
    /// Entries, if there are any.
    pub entries: Option<Entries<'a>>,
}

/// Entries that rows attend to.
#[derive(Debug, Clone, Copy)]
pub struct Entries<'a> {
    /// Vectors of the entries.
    pub rows: PagedRows<'a>,
    /// The sequences with the pages of the entries.
    pub sequences: &'a [AttentionSequence<'a>],
    /// The entries that each row attends to; `None` for all whose blocks are complete.
    pub choice: Option<&'a EntryChoice>,
}

/// Computes the attention of `q: [m, heads * dim]` into `out: [m, heads * dim]`. `sequences` have the pages of the tokens.
/// Rows of `out` that belong to no sequence are unchanged.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If shapes do not match, the window is 0, or a page that must be read is out of bounds.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
///
/// use ferrule_kernels::arch::Isa;
/// use ferrule_kernels::attention::AttentionSequence;
/// use ferrule_kernels::entries::{EntryAttention, PagedRows, attend_entries};
/// use ferrule_kernels::{Cancel, Exec, Pool, Rows};
///
/// let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
/// let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
/// // The last of two tokens, with equal scores for both; vectors have one element.
/// let mut page = vec![0.0; 16];
/// page[..2].copy_from_slice(&[3.0, 5.0]);
/// let tokens = PagedRows { pages: Rows::new(&page, 16, 0), dim: 1, block: 1 };
/// let sequence = AttentionSequence { first_row: 0, rows: 1, first_position: 1, pages: &[0] };
/// let attention = EntryAttention { heads: 1, scale: 1.0, window: 2, sinks: &[-1e9], tokens, entries: None };
/// let mut out = [0.0];
/// attend_entries(&exec, Rows::new(&[0.0], 1, 0), &attention, &[sequence], &mut out)?;
/// assert_eq!(out, [4.0]);
/// # Ok::<(), ferrule_kernels::PoolError>(())
/// ```
pub fn attend_entries(
    exec: &Exec<'_>,
    q: Rows<'_>,
    attention: &EntryAttention<'_>,
    sequences: &[AttentionSequence<'_>],
    out: &mut [f32],
) -> Result<(), PoolError> {
    let EntryAttention { heads, window, sinks, tokens, entries, .. } = *attention;
    let dim = tokens.dim;
    assert!(window > 0, "window must be >= 1, got 0");
    assert_eq!(sinks.len(), heads, "sinks must have one element per head");
    assert!(entries.is_none_or(|entries| entries.rows.dim == dim), "entries must be as long as the vectors of tokens");
    let rows: Vec<_> = sequences
        .iter()
        .enumerate()
        .flat_map(|(number, sequence)| {
            (0..sequence.rows).map(move |row| (number, sequence.first_row + row, sequence.first_position + row))
        })
        .collect();
    let tasks = heads.div_ceil(TASK_HEADS);
    let tiles = Tiles::new(out, heads * dim, 0..heads * dim, 1, TASK_HEADS * dim);
    exec.run(rows.len() * tasks, |task| {
        let (number, row, position) = rows[task / tasks];
        let mut tile = tiles.take(row * tasks + task % tasks);
        let columns = tile.columns();
        let first = (position + 1).saturating_sub(window);
        let mut vectors: Vec<_> =
            (first..position + 1).map(|token| tokens.row(sequences[number].pages, token)).collect();
        if let Some(Entries { rows, sequences, choice }) = entries {
            let pages = sequences[number].pages;
            match choice {
                None => vectors.extend((0..(position + 1) / rows.block).map(|entry| rows.row(pages, entry))),
                Some(choice) => vectors.extend(choice.entries(row).map(|entry| rows.row(pages, entry))),
            }
        }
        exec.isa.run(Attend {
            vectors: &vectors,
            queries: &q.row(row, heads * dim)[columns.clone()],
            sinks: &sinks[columns.start / dim..columns.end / dim],
            scale: attention.scale,
            out: tile.contiguous(),
        });
    })
}

/// Attention of some heads of one row.
struct Attend<'a> {
    /// Vectors that are keys and values, each of `dim` elements.
    vectors: &'a [&'a [f32]],
    /// `[heads, dim]`
    queries: &'a [f32],
    /// `[heads]`
    sinks: &'a [f32],
    scale: f32,
    /// `[heads, dim]`
    out: &'a mut [f32],
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { vectors, queries, sinks, scale, out } = self;
        let dim = out.len() / sinks.len();
        let mut scores = vec![0.0; vectors.len() * 4];
        let mut head = 0;
        while head < sinks.len() {
            let (queries, sinks, out) = (&queries[head * dim..], &sinks[head..], &mut out[head * dim..]);
            if sinks.len() >= 4 {
                attend_heads::<S, 4>(simd, vectors, (queries, scale), sinks, &mut scores, out);
                head += 4;
            } else {
                attend_heads::<S, 1>(simd, vectors, (queries, scale), sinks, &mut scores, out);
                head += 1;
            }
        }
    }
}

/// Computes the outputs of the first `H` heads.
#[inline(always)]
fn attend_heads<S: Simd, const H: usize>(
    simd: S,
    vectors: &[&[f32]],
    (queries, scale): (&[f32], f32),
    sinks: &[f32],
    scores: &mut [f32],
    out: &mut [f32],
) {
    let (count, dim) = (vectors.len(), vectors[0].len());
    for (index, vector) in vectors.iter().enumerate() {
        for (head, product) in products::<S, H>(simd, vector, queries).into_iter().enumerate() {
            scores[head * count + index] = product * scale;
        }
    }
    let mut totals = [0.0; H];
    for ((total, scores), sink) in totals.iter_mut().zip(scores.chunks_exact_mut(count)).zip(sinks) {
        let max = scores.iter().copied().fold(*sink, f32::max);
        let weight = |score| exp(simd, simd.sub(score, simd.splat(max)));
        for scores in scores.chunks_mut(LANES) {
            let weights = weight(load_up_to(simd, scores));
            store_up_to(simd, weights, scores);
        }
        let [sink, ..] = simd.to_array(weight(simd.splat(*sink)));
        *total = scores.iter().sum::<f32>() + sink;
    }
    for first in (0..dim).step_by(LANES) {
        let end = dim.min(first + LANES);
        let mut sums = [simd.splat(0.0); H];
        for (index, vector) in vectors.iter().enumerate() {
            let vector = load_up_to(simd, &vector[first..end]);
            for (head, sum) in sums.iter_mut().enumerate() {
                *sum = simd.mul_add(simd.splat(scores[head * count + index]), vector, *sum);
            }
        }
        for (head, sum) in sums.into_iter().enumerate() {
            store_up_to(simd, simd.div(sum, simd.splat(totals[head])), &mut out[head * dim..][first..end]);
        }
    }
}
