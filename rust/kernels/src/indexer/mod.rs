//! Indexer of sparse attention: chooses the tokens that each row attends to (DeepSeek Sparse Attention; DeepSeek-V3.2,
//! 2025).
//!
//! Each token has one small key in the cache ([`KvStore::write_index`]), and each row has a query for each of a few heads.
//! The score of a key is either the sum over heads of `weight * relu(query . key)`, or separate for each head. Tokens are
//! chosen one by one or in blocks, whose score is their highest. A row gets the blocks with the highest scores among the
//! tokens up to its own; where scores tie, those at lower positions. The score of a block may instead be that of its last
//! token, whose key then stands for the block, such as the mean of the keys ([`mean_key`]); tokens of a block that is not
//! complete at the row are chosen besides.
//!
//! A product is one chain of multiply-adds over the columns of a key, and a score is one chain over the heads. The choice
//! of a row depends only on its query and on the keys up to its position, not on how rows are partitioned into tasks.

mod mean;
mod scores;
mod selection;

pub use mean::mean_key;
pub use selection::Selection;
pub(crate) use selection::{ascending, token_bits};

use scores::{Combined, Scores};
use selection::{Chosen, choose};

use crate::attention::AttentionSequence;
use crate::disjoint::Tiles;
use crate::kv::{Bf16, F16, F32, KvElement, KvFormat, KvStore, PAGE_TOKENS, PageId};
use crate::rows::Rows;
use crate::{Exec, PoolError};

/// Shape of an indexer.
#[derive(Debug, Clone, Copy)]
pub struct IndexShape {
    /// Number of heads of the queries; all of them read the same key.
    pub heads: usize,
    /// Number of consecutive tokens that are chosen together, counted from position 0.
    pub block: usize,
    /// Number of blocks that are chosen.
    pub blocks: usize,
    /// Number of blocks up to that of the row that are always among them.
    pub local_blocks: usize,
    /// Score of a block.
    pub score: BlockScore,
}

/// Score of a block of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockScore {
    /// The highest score of its tokens.
    Highest,
    /// The score of its last token. Tokens of a block that is not complete at the row are chosen besides the blocks.
    Last,
}

impl IndexShape {
    /// Returns the number of tokens, from the first on, that are in the blocks from which a row at `position` chooses.
    fn scored_tokens(&self, position: usize) -> usize {
        match self.score {
            BlockScore::Highest => position + 1,
            BlockScore::Last => (position + 1) / self.block * self.block,
        }
    }

    /// Returns whether a row at `position` attends to all tokens up to its own.
    fn chooses_all(&self, position: usize) -> bool {
        self.scored_tokens(position).div_ceil(self.block) <= self.blocks
    }
}

/// Number of pages whose keys one task multiplies with a query: few enough to be cached while the next rows read them.
const TASK_PAGES: usize = 16;

/// Maximum number of scores that are computed before tokens are chosen by them.
const MAX_SCORES: usize = 1 << 21;

/// Returns the bytes of buffers to choose `sets` sets for each of `rows` rows of sequences of up to `tokens` tokens: the
/// selection, and scores.
#[must_use]
pub fn buffer_bytes(rows: usize, sets: usize, tokens: usize) -> u64 {
    let (sets, pages) = (rows.saturating_mul(sets), tokens.div_ceil(PAGE_TOKENS));
    let scores = sets.saturating_mul(tokens).min(MAX_SCORES.max(tokens));
    (sets.saturating_mul(pages * size_of::<u16>()) + scores * size_of::<f32>()) as u64
}

/// A row, and the pages with the keys up to its position.
#[derive(Clone, Copy)]
struct IndexRow<'a> {
    row: usize,
    position: usize,
    pages: &'a [PageId],
}

/// Chooses tokens for the rows of `queries: [m, heads * index_dim]`: one choice for each row by the sum of the heads'
/// scores if there are `weights: [m, heads]`, else one for each of its heads. Overwrites `selection`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If shapes do not match each other or the store, a size is 0, or a page that must be read is out of bounds.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
///
/// use ferrule_kernels::arch::Isa;
/// use ferrule_kernels::attention::AttentionSequence;
/// use ferrule_kernels::indexer::{BlockScore, IndexShape, Selection, choose_tokens};
/// use ferrule_kernels::kv::{KvFormat, KvRow, KvShape, KvStore};
/// use ferrule_kernels::{Cancel, Exec, Pool, Rows};
///
/// let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
/// let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
/// let shape = KvShape { layers: 1, kv_heads: 1, key_dim: 2, value_dim: 2, index_dim: 1 };
/// let mut store = KvStore::new(KvFormat::F32, shape, 1).unwrap();
/// let places = [0, 1, 2].map(|slot| KvRow { page: 0, slot });
/// store.write_index(exec.isa, 0, &places, Rows::new(&[0.5, 2.0, 1.0], 1, 0));
///
/// // The third row, whose query and weight are 1, attends to two tokens.
/// let shape = IndexShape { heads: 1, block: 1, blocks: 2, local_blocks: 0, score: BlockScore::Highest };
/// let sequence = AttentionSequence { first_row: 0, rows: 1, first_position: 2, pages: &[0] };
/// let (one, mut selection) = (Rows::new(&[1.0], 1, 0), Selection::default());
/// choose_tokens(&exec, one, Some(one), &store, 0, &shape, &[sequence], &mut selection)?;
/// assert_eq!(selection.tokens(0, 0).collect::<Vec<_>>(), [1, 2]);
/// # Ok::<(), ferrule_kernels::PoolError>(())
/// ```
#[allow(clippy::too_many_arguments)]
pub fn choose_tokens(
    exec: &Exec<'_>,
    queries: Rows<'_>,
    weights: Option<Rows<'_>>,
    store: &KvStore,
    layer: usize,
    shape: &IndexShape,
    sequences: &[AttentionSequence<'_>],
    selection: &mut Selection,
) -> Result<(), PoolError> {
    let IndexShape { heads, block, blocks, .. } = *shape;
    assert!(store.shape().index_dim > 0, "the store must have keys of an indexer");
    for (name, size) in [("heads", heads), ("block", block), ("blocks", blocks)] {
        assert!(size > 0, "{name} must be >= 1, got 0");
    }
    let rows = sequences.iter().flat_map(|sequence| {
        (0..sequence.rows).map(|row| IndexRow {
            row: sequence.first_row + row,
            position: sequence.first_position + row,
            pages: sequence.pages,
        })
    });
    let rows: Vec<_> = rows.collect();
    let count = rows.iter().map(|row| row.row + 1).max().unwrap_or(0);
    let pages = rows.iter().map(|row| row.position / PAGE_TOKENS + 1).max().unwrap_or(0);
    assert!(
        count <= queries.rows() && weights.is_none_or(|weights| count <= weights.rows()),
        "queries and weights must have the {count} rows of the sequences"
    );
    selection.clear(count, if weights.is_some() { 1 } else { heads }, pages);
    let call = Call { exec, queries, weights, store, layer, shape };
    match store.format() {
        KvFormat::F32 => call.run::<F32>(&rows, selection),
        KvFormat::F16 => call.run::<F16>(&rows, selection),
        KvFormat::Bf16 | KvFormat::Int8 => call.run::<Bf16>(&rows, selection),
    }
}

/// Arguments of [`choose_tokens`].
struct Call<'a> {
    exec: &'a Exec<'a>,
    queries: Rows<'a>,
    weights: Option<Rows<'a>>,
    store: &'a KvStore,
    layer: usize,
    shape: &'a IndexShape,
}

impl Call<'_> {
    /// Chooses tokens for some rows at a time, so that there is a limit for the memory of scores.
    fn run<E: KvElement>(&self, rows: &[IndexRow<'_>], selection: &mut Selection) -> Result<(), PoolError> {
        let (sets, stride) = (selection.sets(), selection.pages() * PAGE_TOKENS);
        let mut scores = Vec::new();
        for rows in rows.chunks((MAX_SCORES / (sets * stride).max(1)).max(1)) {
            scores.resize(rows.len() * sets * stride, 0.0);
            self.score::<E>(rows, sets, stride, &mut scores)?;
            let (words, scores) = (selection.rows_mut(), &scores);
            self.exec.run(rows.len() * sets, |index| {
                let IndexRow { row, position, .. } = rows[index / sets];
                let mut words = words.take(row * sets + index % sets);
                let scores = &scores[index * stride..][..stride];
                choose(Chosen { words: words.contiguous(), scores, position, shape: self.shape });
            })?;
        }
        Ok(())
    }

    /// Computes the scores of rows that do not attend to all tokens up to their own: `[rows, sets, tokens]`.
    fn score<E: KvElement>(
        &self,
        rows: &[IndexRow<'_>],
        sets: usize,
        stride: usize,
        scores: &mut [f32],
    ) -> Result<(), PoolError> {
        let heads = self.shape.heads;
        let dim = self.store.shape().index_dim;
        let tiles = Tiles::new(scores, stride, 0..stride, sets, TASK_PAGES * PAGE_TOKENS);
        // Neighbouring tasks are different rows of the same pages, whose keys stay cached.
        self.exec.run(tiles.len(), |index| {
            let mut tile = tiles.take_column_major(index);
            let IndexRow { row, position, pages } = rows[tile.rows().start / sets];
            let first = tile.columns().start / PAGE_TOKENS;
            let end = (tile.columns().end / PAGE_TOKENS).min(position / PAGE_TOKENS + 1);
            if self.shape.chooses_all(position) || first >= end {
                return;
            }
            let queries = self.queries.row(row, heads * dim);
            for (offset, page) in pages[first..end].iter().enumerate() {
                let keys = self.store.index_keys::<E>(self.layer, *page);
                let columns = offset * PAGE_TOKENS..(offset + 1) * PAGE_TOKENS;
                match self.weights {
                    Some(weights) => {
                        let weights = weights.row(row, heads);
                        let out = self.exec.isa.run(Combined::<E> { keys, queries, weights });
                        tile.row(0)[columns].copy_from_slice(&out);
                    }
                    None => {
                        for (head, query) in queries.chunks_exact(dim).enumerate() {
                            let out = self.exec.isa.run(Scores::<E> { keys, query });
                            tile.row(head)[columns.clone()].copy_from_slice(&out);
                        }
                    }
                }
            }
        })
    }
}
