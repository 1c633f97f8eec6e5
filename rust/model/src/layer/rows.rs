//! Rows of a batch with the tables that layers need.

use ferrule_kernels::attention::AttentionSequence;
use ferrule_kernels::kv::{KvRow, PAGE_TOKENS, PageId};
use ferrule_kernels::scan::Segment;
use ferrule_kernels::{Exec, PoolError, for_row_chunks};

use crate::batch::{Batch, KvGroup};
use crate::rope::{RopeRows, RopeSpec};

/// Rows of a batch with the tables that layers need, computed once per step.
pub(crate) struct RaggedRows<'a> {
    /// Number of rows of all sequences.
    pub count: usize,
    /// Token of each row.
    pub tokens: Vec<u32>,
    /// Angles of the rows for each rotary embedding of the spec.
    pub ropes: &'a [RopeRows],
    /// Destination of each row's key and value, by group; empty for a group of state.
    pub places: Vec<Vec<KvRow>>,
    /// Sequences with their pages, by group; empty for a group of state.
    pub sequences: Vec<Vec<AttentionSequence<'a>>>,
    /// Segments with the pages of the states before and after them, by group; empty for a group of pages.
    pub segments: Vec<Vec<Segment>>,
}

impl<'a> RaggedRows<'a> {
    pub fn new(batch: Batch<'a>, ropes: &[RopeSpec], groups: &[KvGroup], tables: &'a mut Vec<RopeRows>) -> Self {
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
        let paged = |group: usize| if groups[group].is_state() { &[][..] } else { batch.sequences };
        let places = (0..groups.len()).map(|group| {
            let rows = paged(group).iter().flat_map(|sequence| {
                let pages = &sequence.pages[group];
                sequence
                    .positions()
                    .map(|position| KvRow { page: pages[position / PAGE_TOKENS], slot: position % PAGE_TOKENS })
            });
            rows.collect()
        });
        let sequences = (0..groups.len()).map(|group| {
            let mut end = 0;
            let sequences = paged(group).iter().map(|sequence| {
                let rows = sequence.tokens.len();
                end += rows;
                let first_position = sequence.first_position;
                AttentionSequence { first_row: end - rows, rows, first_position, pages: &sequence.pages[group] }
            });
            sequences.collect()
        });
        let segments = groups.iter().enumerate();
        let segments =
            segments.map(|(index, group)| if group.is_state() { segments_of(batch, index) } else { Vec::new() });
        Self {
            count: batch.tokens().count(),
            tokens: batch.tokens().collect(),
            places: places.collect(),
            sequences: sequences.collect(),
            segments: segments.collect(),
            ropes: tables,
        }
    }
}

/// Returns the segments of a batch in a group of state: one for each sequence, or two around its snapshot.
fn segments_of(batch: Batch<'_>, group: usize) -> Vec<Segment> {
    let mut segments = Vec::with_capacity(batch.sequences.len());
    let mut first_row = 0;
    for sequence in batch.sequences {
        let (positions, pages) = (sequence.positions(), &sequence.pages[group]);
        let (mut old, mut rows) = ((positions.start > 0).then(|| slot(pages[0])), positions.len());
        let boundary = positions.end / PAGE_TOKENS * PAGE_TOKENS;
        if let Some(&page) = pages.get(2)
            && (positions.start + 1..positions.end).contains(&boundary)
        {
            let snapshot = Segment { first_row, rows: boundary - positions.start, old, new: slot(page) };
            segments.push(snapshot);
            (old, rows) = (Some(snapshot.new), rows - snapshot.rows);
            first_row += snapshot.rows;
        }
        segments.push(Segment { first_row, rows, old, new: slot(pages[1]) });
        first_row += rows;
    }
    segments
}

/// Returns the slot of a page among the states of its group.
fn slot(page: PageId) -> usize {
    page as usize
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
