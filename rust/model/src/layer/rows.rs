//! Rows of a batch with the tables that layers need.

use ferrule_kernels::attention::AttentionSequence;
use ferrule_kernels::kv::{KvRow, PAGE_TOKENS};
use ferrule_kernels::{Exec, PoolError, for_row_chunks};

use crate::batch::Batch;
use crate::rope::{RopeRows, RopeSpec};

/// Rows of a batch with the tables that layers need, computed once per step.
pub(crate) struct RaggedRows<'a> {
    /// Number of rows of all sequences.
    pub count: usize,
    /// Angles of the rows for each rotary embedding of the spec.
    pub ropes: &'a [RopeRows],
    /// Destination of each row's key and value, by KV cache group.
    pub places: Vec<Vec<KvRow>>,
    /// Sequences with their pages, by KV cache group.
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

/// Calls `job` with the index of each row of `out: [rows, width]` and the row. Uses all threads if there are many rows;
/// the rows of a single token are too short to be worth it.
pub(crate) fn for_rows(
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
