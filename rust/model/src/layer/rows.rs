//! The rows of a batch as layers need them.

use ferrule_kernels::attention::AttentionSequence;
use ferrule_kernels::kv::{KvRow, PAGE_TOKENS};
use ferrule_kernels::{Exec, PoolError, for_row_chunks};

use crate::batch::Batch;
use crate::rope::{RopeRows, RopeSpec};

/// The rows of a batch as layers need them; the same for all layers.
pub(crate) struct RaggedRows<'a> {
    /// Rows of all sequences together.
    pub count: usize,
    /// Angles of the rows, for each rotation of the spec.
    pub ropes: &'a [RopeRows],
    /// For each group of layers, where each row's key and value go.
    pub places: Vec<Vec<KvRow>>,
    /// For each group of layers, the sequences with their pages.
    pub sequences: Vec<Vec<AttentionSequence<'a>>>,
}

impl<'a> RaggedRows<'a> {
    pub fn new(batch: Batch<'a>, ropes: &[RopeSpec], groups: usize, tables: &'a mut Vec<RopeRows>) -> Self {
        tables.resize_with(ropes.len(), RopeRows::default);
        for (rope, table) in ropes.iter().zip(&mut *tables) {
            table.fill(
                rope,
                batch
                    .sequences
                    .iter()
                    .flat_map(|sequence| sequence.positions().map(|position| (position, sequence.prompt_len))),
            );
        }
        let places = (0..groups).map(|group| {
            let rows = batch.sequences.iter().flat_map(|sequence| {
                let pages = &sequence.pages[group];
                sequence
                    .positions()
                    .map(|position| KvRow { page: pages[position / PAGE_TOKENS], slot: position % PAGE_TOKENS })
            });
            rows.collect()
        });
        let sequences = (0..groups).map(|group| {
            let mut end = 0;
            let sequences = batch.sequences.iter().map(|sequence| {
                let rows = sequence.tokens.len();
                end += rows;
                let first_position = sequence.first_position;
                AttentionSequence { first_row: end - rows, rows, first_position, pages: &sequence.pages[group] }
            });
            sequences.collect()
        });
        Self { count: batch.tokens().count(), places: places.collect(), sequences: sequences.collect(), ropes: tables }
    }
}

/// Calls `job` with the number of each row of `out: [rows, width]` and the row: on all threads where there are many, but
/// for those of a token alone, whose way is short and ought to have as few forks as can be.
pub(super) fn for_rows(
    exec: &Exec<'_>,
    tokens: usize,
    out: &mut [f32],
    width: usize,
    job: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<(), PoolError> {
    let run =
        |first, out: &mut [f32]| out.chunks_exact_mut(width).zip(first..).for_each(|(row, index)| job(index, row));
    if tokens == 1 {
        run(0, out);
        return Ok(());
    }
    for_row_chunks(exec, out, width, width, &run)
}
