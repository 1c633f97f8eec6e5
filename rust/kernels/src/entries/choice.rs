//! Choosing entries by the products of small keys with queries.

use std::cell::RefCell;

use super::{PagedRows, products};
use crate::arch::{Kernel, Simd};
use crate::attention::AttentionSequence;
use crate::disjoint::Tiles;
use crate::indexer::ascending;
use crate::kv::PageId;
use crate::rows::Rows;
use crate::{Exec, PoolError};

/// Number of entries that one task scores for a row.
const TASK_ENTRIES: usize = 256;

/// Maximum number of scores that are computed before entries are chosen by them.
const MAX_SCORES: usize = 1 << 21;

/// Indexer of entries.
#[derive(Debug, Clone, Copy)]
pub struct EntryIndex<'a> {
    /// Number of heads of the queries; all of them read the same key.
    pub heads: usize,
    /// One key per entry.
    pub keys: PagedRows<'a>,
    /// Number of entries that are chosen, or all if there are fewer.
    pub count: usize,
}

/// Entries that each row of a batch attends to.
#[derive(Debug, Default)]
pub struct EntryChoice {
    /// `[rows, count]`
    entries: Vec<u32>,
    /// Number of entries of each row.
    lengths: Vec<usize>,
    count: usize,
}

impl EntryChoice {
    /// Returns the entries of a row, in ascending order.
    pub fn entries(&self, row: usize) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.entries[row * self.count..][..self.lengths[row]].iter().map(|entry| *entry as usize)
    }
}

/// Returns the bytes of buffers to choose `count` of up to `entries` entries for each of `rows` rows.
#[must_use]
pub fn buffer_bytes(rows: usize, count: usize, entries: usize) -> u64 {
    let scores = rows.saturating_mul(entries).min(MAX_SCORES.max(entries));
    let chosen = rows.saturating_mul(count.min(entries));
    [(chosen, size_of::<u32>()), (rows, size_of::<usize>()), (scores, size_of::<f32>())]
        .into_iter()
        .fold(0, |bytes: u64, (len, size)| bytes.saturating_add(len.saturating_mul(size) as u64))
}

/// A row that chooses among more entries than it attends to.
#[derive(Clone, Copy)]
struct ChoosingRow<'a> {
    row: usize,
    /// Number of entries whose blocks are complete.
    entries: usize,
    pages: &'a [PageId],
}

/// Chooses the entries with the highest scores for each row, among those whose blocks are complete; where scores tie, those
/// at lower positions. A score is the sum over heads of `weight * relu(query . key)`, with `queries: [m, heads * dim]` and
/// `weights: [m, heads]`. Overwrites `choice`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If shapes do not match, or a page that must be read is out of bounds.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
///
/// use ferrule_kernels::arch::Isa;
/// use ferrule_kernels::attention::AttentionSequence;
/// use ferrule_kernels::entries::{EntryChoice, EntryIndex, PagedRows, choose_entries};
/// use ferrule_kernels::{Cancel, Exec, Pool, Rows};
///
/// let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
/// let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
/// // Keys of four blocks of four tokens, three of which are complete at position 13.
/// let keys = PagedRows { pages: Rows::new(&[2.0, 1.0, 3.0, 9.0], 4, 0), dim: 1, block: 4 };
/// let sequence = AttentionSequence { first_row: 0, rows: 1, first_position: 13, pages: &[0] };
/// let (one, mut choice) = (Rows::new(&[1.0], 1, 0), EntryChoice::default());
/// choose_entries(&exec, one, one, &EntryIndex { heads: 1, keys, count: 2 }, &[sequence], &mut choice)?;
/// assert_eq!(choice.entries(0).collect::<Vec<_>>(), [0, 2]);
/// # Ok::<(), ferrule_kernels::PoolError>(())
/// ```
pub fn choose_entries(
    exec: &Exec<'_>,
    queries: Rows<'_>,
    weights: Rows<'_>,
    index: &EntryIndex<'_>,
    sequences: &[AttentionSequence<'_>],
    choice: &mut EntryChoice,
) -> Result<(), PoolError> {
    let EntryIndex { heads, keys, .. } = *index;
    let rows = sequences.iter().map(|sequence| sequence.first_row + sequence.rows).max().unwrap_or(0);
    let most = sequences.iter().map(|sequence| (sequence.first_position + sequence.rows) / keys.block).max();
    let count = index.count.min(most.unwrap_or(0));
    let EntryChoice { entries: chosen, lengths, count: stride } = choice;
    chosen.resize(rows * count, 0);
    lengths.clear();
    lengths.resize(rows, 0);
    *stride = count;
    let mut choosing = Vec::new();
    for sequence in sequences {
        for offset in 0..sequence.rows {
            let (row, entries) = (sequence.first_row + offset, (sequence.first_position + offset + 1) / keys.block);
            lengths[row] = entries.min(count);
            if entries > count {
                choosing.push(ChoosingRow { row, entries, pages: sequence.pages });
            } else {
                chosen[row * count..].iter_mut().zip(0..entries as u32).for_each(|(to, entry)| *to = entry);
            }
        }
    }
    let longest = choosing.iter().map(|row| row.entries).max().unwrap_or(0);
    let mut scores = Vec::new();
    let chosen = Tiles::row_blocks(chosen, count.max(1), 1);
    for rows in choosing.chunks((MAX_SCORES / longest.max(1)).max(1)) {
        scores.resize(rows.len() * longest, 0.0);
        let tiles = Tiles::new(&mut scores, longest, 0..longest, 1, TASK_ENTRIES);
        exec.run(tiles.len(), |task| {
            let mut tile = tiles.take_column_major(task);
            let (ChoosingRow { row, entries, pages }, columns) = (rows[tile.rows().start], tile.columns());
            exec.isa.run(Score {
                keys: (columns.start..columns.end.min(entries)).map(|entry| keys.row(pages, entry)),
                queries: queries.row(row, heads * keys.dim),
                weights: weights.row(row, heads),
                out: tile.contiguous(),
            });
        })?;
        drop(tiles);
        exec.run(rows.len(), |task| {
            let ChoosingRow { row, entries, .. } = rows[task];
            choose(&scores[task * longest..][..entries], chosen.take(row).contiguous());
        })?;
    }
    Ok(())
}

/// Scores of keys for one row.
struct Score<'a, K> {
    keys: K,
    /// `[heads, dim]`
    queries: &'a [f32],
    /// `[heads]`
    weights: &'a [f32],
    /// One element per key, or more.
    out: &'a mut [f32],
}

impl<'k, K: Iterator<Item = &'k [f32]>> Kernel for Score<'_, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { keys, queries, weights, out } = self;
        for (key, out) in keys.zip(out) {
            let mut score = 0.0;
            let mut head = 0;
            while head < weights.len() {
                let (queries, weights) = (&queries[head * key.len()..], &weights[head..]);
                if weights.len() >= 4 {
                    score = add_heads(products::<S, 4>(simd, key, queries), weights, score);
                    head += 4;
                } else {
                    score = add_heads(products::<S, 1>(simd, key, queries), weights, score);
                    head += 1;
                }
            }
            *out = score;
        }
    }
}

/// Adds the weighted products of some heads to a score, head by head.
#[inline(always)]
fn add_heads<const H: usize>(products: [f32; H], weights: &[f32], score: f32) -> f32 {
    // A NaN is kept.
    let relu = |x: f32| if x < 0.0 { 0.0 } else { x };
    products.iter().zip(weights).fold(score, |score, (product, weight)| score + weight * relu(*product))
}

thread_local! {
    /// Scores with the indices of their entries, as integers in the order of the choice.
    static KEYS: RefCell<Vec<u64>> = RefCell::default();
}

/// Writes the indices of the highest scores to `chosen`, which is shorter than `scores`, in ascending order.
fn choose(scores: &[f32], chosen: &mut [u32]) {
    KEYS.with_borrow_mut(|keys| {
        keys.clear();
        keys.extend((0..).zip(scores).map(|(index, score)| u64::from(!ascending(*score)) << 32 | index));
        let (before, last, _) = keys.select_nth_unstable(chosen.len() - 1);
        let highest = before.iter().chain([&*last]).map(|key| *key as u32);
        chosen.iter_mut().zip(highest).for_each(|(to, entry)| *to = entry);
        chosen.sort_unstable();
    });
}
