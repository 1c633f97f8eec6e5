//! Softmax attention of rows over tokens and entries.

use std::ops::Range;

use super::{EntryChoice, PagedRows, Vectors, products};
use crate::arch::{Kernel, LANES, Simd};
use crate::attention::AttentionSequence;
use crate::disjoint::Tiles;
use crate::math::{exp, load_up_to, store_up_to};
use crate::rows::Rows;
use crate::{Exec, PoolError, Scratch};

/// Number of heads of a task, which share every load of a vector in cache.
const TASK_HEADS: usize = 8;

/// Maximum number of vectors that tasks attend to at once, unless one row attends to more.
const MAX_VECTORS: usize = 1 << 19;

/// Number of scores of a task for each vector that it attends to, one for each of the heads that are computed together.
const SCORES: usize = 4;

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

/// Buffers of [`attend_entries`], reused between calls.
#[derive(Debug, Default)]
pub struct EntryBuffers {
    /// Places of the vectors that tasks attend to: `[tasks, vectors]`.
    starts: Scratch<usize>,
    /// `[tasks, SCORES * vectors]`
    scores: Scratch<f32>,
}

/// Returns the bytes of [`EntryBuffers`] for `rows` rows of `heads` heads, each of which attends to up to `vectors` tokens
/// and entries.
#[must_use]
pub fn attention_bytes(rows: usize, heads: usize, vectors: usize) -> u64 {
    let of_row = heads.div_ceil(TASK_HEADS).saturating_mul(vectors);
    let vectors = rows.saturating_mul(of_row).min(MAX_VECTORS.max(of_row));
    (vectors as u64).saturating_mul((size_of::<usize>() + SCORES * size_of::<f32>()) as u64)
}

/// A row that attends to vectors.
struct AttendingRow {
    row: usize,
    position: usize,
    /// Index of its sequence.
    sequence: usize,
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
/// use ferrule_kernels::entries::{EntryAttention, EntryBuffers, PagedRows, attend_entries};
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
/// let mut buffers = EntryBuffers::default();
/// attend_entries(&exec, Rows::new(&[0.0], 1, 0), &attention, &[sequence], &mut buffers, &mut out)?;
/// assert_eq!(out, [4.0]);
/// # Ok::<(), ferrule_kernels::PoolError>(())
/// ```
pub fn attend_entries(
    exec: &Exec<'_>,
    q: Rows<'_>,
    attention: &EntryAttention<'_>,
    sequences: &[AttentionSequence<'_>],
    EntryBuffers { starts, scores }: &mut EntryBuffers,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let EntryAttention { heads, window, sinks, tokens, .. } = *attention;
    let dim = tokens.dim;
    assert!(window > 0, "window must be >= 1, got 0");
    assert_eq!(sinks.len(), heads, "sinks must have one element per head");
    let entries_fit = attention.entries.is_none_or(|entries| entries.rows.dim == dim);
    assert!(entries_fit, "entries must be as long as the vectors of tokens");
    let of_sequence = |(number, sequence): (usize, &AttentionSequence<'_>)| {
        let (first_row, first_position) = (sequence.first_row, sequence.first_position);
        (0..sequence.rows).map(move |row| AttendingRow {
            row: first_row + row,
            position: first_position + row,
            sequence: number,
        })
    };
    let rows: Vec<_> = sequences.iter().enumerate().flat_map(of_sequence).collect();
    let longest = rows.iter().map(|row| attention.vectors(row)).max().unwrap_or(0);
    let tasks = heads.div_ceil(TASK_HEADS);
    let tiles = Tiles::new(out, heads * dim, 0..heads * dim, 1, TASK_HEADS * dim);
    for rows in rows.chunks((MAX_VECTORS / (tasks * longest).max(1)).max(1)) {
        let count = rows.len() * tasks;
        let starts = Tiles::row_blocks(starts.take(count * longest), longest, 1);
        let scores = Tiles::row_blocks(scores.take(count * SCORES * longest), SCORES * longest, 1);
        exec.run(count, |task| {
            let row = &rows[task / tasks];
            let mut tile = tiles.take(row.row * tasks + task % tasks);
            let (columns, mut starts) = (tile.columns(), starts.take(task));
            exec.isa.run(Attend {
                vectors: attention.find(row, sequences, starts.contiguous()),
                queries: &q.row(row.row, heads * dim)[columns.clone()],
                sinks: &sinks[columns.start / dim..columns.end / dim],
                scale: attention.scale,
                scores: scores.take(task).contiguous(),
                out: tile.contiguous(),
            });
        })?;
    }
    Ok(())
}

impl<'a> EntryAttention<'a> {
    /// Returns the tokens that a row attends to.
    fn seen(&self, position: usize) -> Range<usize> {
        (position + 1).saturating_sub(self.window)..position + 1
    }

    /// Returns the number of tokens and entries that a row attends to.
    fn vectors(&self, &AttendingRow { row, position, .. }: &AttendingRow) -> usize {
        let entries = self.entries.map_or(0, |Entries { rows, choice, .. }| match choice {
            None => (position + 1) / rows.block,
            Some(choice) => choice.entries(row).len(),
        });
        self.seen(position).len() + entries
    }

    /// Finds the tokens, and the entries, that a row attends to. `starts` has room for their places.
    fn find<'s>(
        &self,
        &AttendingRow { row, position, sequence }: &AttendingRow,
        sequences: &[AttentionSequence<'_>],
        starts: &'s mut [usize],
    ) -> [Vectors<'s>; 2]
    where
        'a: 's,
    {
        let (tokens, starts) = self.tokens.find(sequences[sequence].pages, self.seen(position), starts);
        let entries = self.entries.map(|Entries { rows, sequences, choice }| {
            let pages = sequences[sequence].pages;
            match choice {
                None => rows.find(pages, 0..(position + 1) / rows.block, starts).0,
                Some(choice) => rows.find(pages, choice.entries(row), starts).0,
            }
        });
        [tokens, entries.unwrap_or_default()]
    }
}

/// Attention of some heads of one row.
struct Attend<'a> {
    /// Tokens, then entries, which are keys and values.
    vectors: [Vectors<'a>; 2],
    /// `[heads, dim]`
    queries: &'a [f32],
    /// `[heads]`
    sinks: &'a [f32],
    scale: f32,
    /// [`SCORES`] elements, or more, for each vector.
    scores: &'a mut [f32],
    /// `[heads, dim]`
    out: &'a mut [f32],
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { vectors, queries, sinks, scale, scores, out } = self;
        let dim = out.len() / sinks.len();
        let mut head = 0;
        while head < sinks.len() {
            let (queries, sinks, out) = (&queries[head * dim..], &sinks[head..], &mut out[head * dim..]);
            if sinks.len() >= SCORES {
                attend_heads::<S, SCORES>(simd, vectors, (queries, scale), sinks, scores, &mut out[..SCORES * dim]);
                head += SCORES;
            } else {
                attend_heads::<S, 1>(simd, vectors, (queries, scale), sinks, scores, &mut out[..dim]);
                head += 1;
            }
        }
    }
}

/// Computes the outputs of the first `H` heads: `out: [H, dim]`.
#[inline(always)]
fn attend_heads<S: Simd, const H: usize>(
    simd: S,
    vectors: [Vectors<'_>; 2],
    (queries, scale): (&[f32], f32),
    sinks: &[f32],
    scores: &mut [f32],
    out: &mut [f32],
) {
    let (count, dim) = (vectors.iter().map(|vectors| vectors.starts.len()).sum(), out.len() / H);
    let scores = &mut scores[..H * count];
    let mut index = 0;
    for vectors in &vectors {
        for vector in vectors.rows(0..dim) {
            for (head, product) in products::<S, H>(simd, vector, queries).into_iter().enumerate() {
                scores[head * count + index] = product * scale;
            }
            index += 1;
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
        let mut index = 0;
        for vectors in &vectors {
            for vector in vectors.rows(first..end) {
                let vector = load_up_to(simd, vector);
                for (head, sum) in sums.iter_mut().enumerate() {
                    *sum = simd.mul_add(simd.splat(scores[head * count + index]), vector, *sum);
                }
                index += 1;
            }
        }
        for (head, sum) in sums.into_iter().enumerate() {
            store_up_to(simd, simd.div(sum, simd.splat(totals[head])), &mut out[head * dim..][first..end]);
        }
    }
}
