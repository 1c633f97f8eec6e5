//! Attention over the pages of the key-value cache: one recurrence for prefill, decode and verification.
//!
//! A row attends in blocks of [`ATTENTION_BLOCK`] tokens at absolute positions. Each block starts from a fresh
//! (maximum, sum, accumulator) and the blocks that the row sees are merged from left to right ([`record`]). Inside a
//! block ([`block`]) a page's scores are the lanes of a vector; a score is one chain of multiply-adds over the columns
//! of K and an output column is one chain over the tokens ([`float`]), or both are exact sums of integers ([`codes`]).
//! A sink joins a row's sum when its blocks are merged. So the operations behind a row's output depend on its position,
//! the shape and the data alone: how rows are cut into tiles and tasks ([`plan`]) changes none of them.

mod block;
mod codes;
mod float;
mod plan;
mod record;
mod shape;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::f32::consts::LOG2_E;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use block::{Arithmetic, BLOCK_PAGES, Bias, BlockPages, Digits, Room, Sight, TileBlock};
use codes::Codes;
use float::Float;
use plan::{Plan, Task};
use record::{Finish, Line, Merge};
pub use shape::{AttentionSequence, AttentionShape};

use crate::arch::{Kernel, Simd};
use crate::disjoint::Tiles;
use crate::kv::{Bf16, F16, F32, KvFormat, KvShape, KvStore, PAGE_TOKENS, value_vectors};
use crate::rows::Rows;
use crate::{Exec, PoolError};

/// Tokens of a block, counted from position 0: part of what a row's output is, not a matter of speed.
pub const ATTENTION_BLOCK: usize = 256;

const _: () = assert!(ATTENTION_BLOCK.is_multiple_of(PAGE_TOKENS), "a page lies in one block");

/// Attention of `q: [m, heads * key_dim]` over one layer of `store`, into `out: [m, heads * value_dim]`. Rows of `out`
/// that belong to no sequence are left as they are.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If shapes do not fit each other or the store, the sequences' rows overlap or are not in ascending order, or a page
/// that must be read does not exist.
pub fn attention(
    exec: &Exec<'_>,
    q: Rows<'_>,
    store: &KvStore,
    layer: usize,
    shape: &AttentionShape<'_>,
    sequences: &[AttentionSequence<'_>],
    out: &mut [f32],
) -> Result<(), PoolError> {
    let KvShape { layers, kv_heads, key_dim, value_dim } = store.shape();
    assert!(layer < layers, "layer {layer} of {layers}");
    assert_eq!((shape.kv_heads, shape.key_dim, shape.value_dim), (kv_heads, key_dim, value_dim), "the store's shape");
    assert!(shape.heads.is_multiple_of(kv_heads), "{} heads share {kv_heads} of K and V", shape.heads);
    assert!(shape.window != Some(0), "a row sees itself");
    for (what, of_heads) in [("slopes", shape.slopes), ("sinks", shape.sinks)] {
        assert!(of_heads.is_none_or(|of| of.len() == shape.heads), "{what} of {} heads", shape.heads);
    }
    let mut next_row = 0;
    for sequence in sequences {
        assert!(sequence.first_row >= next_row, "sequences in ascending order of rows");
        next_row = sequence.first_row + sequence.rows;
        let tokens = sequence.tokens();
        assert!(sequence.pages.len() * PAGE_TOKENS >= tokens, "a page for each of {tokens} tokens");
    }
    assert!(next_row <= q.rows() && next_row * shape.heads * value_dim <= out.len(), "rows of the sequences");

    let call = Call { exec, q, store, layer, shape, sequences };
    match store.format() {
        KvFormat::F32 => call.run::<Float<F32>>(out),
        KvFormat::F16 => call.run::<Float<F16>>(out),
        KvFormat::Bf16 => call.run::<Float<Bf16>>(out),
        KvFormat::Int8 => call.run::<Codes>(out),
    }
}

/// Buffers of a thread, kept from call to call.
#[derive(Default)]
struct Buffers {
    /// Q of each tile.
    q: Vec<f32>,
    /// `[tile's row][page of the block]`: scores and then probabilities.
    scores: Vec<Line>,
    /// `[tile's row]`
    digits: Vec<Digits>,
    /// `[tile's row]`: records of the block at hand.
    block: Vec<Line>,
    /// `[row]`: records of all blocks so far.
    state: Vec<Line>,
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
    /// Records of tasks that were cut into spans of blocks; at most [`plan::PARTIAL_BYTES`].
    static PARTIALS: RefCell<Vec<Line>> = RefCell::default();
}

/// The first `len` elements of a buffer that only grows. What they hold is left over from earlier calls.
fn grown<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}

/// Arguments of [`attention`].
struct Call<'a> {
    exec: &'a Exec<'a>,
    q: Rows<'a>,
    store: &'a KvStore,
    layer: usize,
    shape: &'a AttentionShape<'a>,
    sequences: &'a [AttentionSequence<'a>],
}

/// Rows of a task that are computed together: they share every load of K and V.
struct Tile {
    /// Rows of those that share a head of K and V; those past the end of the last tile repeat its last row.
    rows: Range<usize>,
    /// Rows that the kernel computes: 1, 2, 4 or 8.
    width: usize,
}

/// Asks an instruction set for the most rows of a tile.
struct WidestTile;

impl Kernel for WidestTile {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        block::widest_tile::<S>()
    }
}

impl Call<'_> {
    fn run<A: Arithmetic>(&self, out: &mut [f32]) -> Result<(), PoolError> {
        let shape = self.shape;
        let plan = Plan::new(shape, self.sequences, self.exec.pool.threads());
        let width = shape.heads * shape.value_dim;
        let cells = Tiles::new(out, width, 0..width, 1, shape.value_dim);
        let mut partials = PARTIALS.take();
        let result = self.run_tasks::<A>(&plan, grown(&mut partials, plan.partial_lines), &cells);
        PARTIALS.set(partials);
        result
    }

    fn run_tasks<A: Arithmetic>(
        &self,
        plan: &Plan,
        mut partials: &mut [Line],
        cells: &Tiles<'_, f32>,
    ) -> Result<(), PoolError> {
        let Self { exec, shape, .. } = self;
        let mut spans = Vec::with_capacity(plan.spans);
        for task in &plan.tasks[..plan.spans] {
            let (span, rest) = partials.split_at_mut(task.partial_lines(shape));
            partials = rest;
            // One task writes it and one, in the next run, reads it: the lock is never contended.
            spans.push(Mutex::new(span));
        }
        let attend = |index: usize| {
            let task = &plan.tasks[index];
            BUFFERS.with_borrow_mut(|buffers| match spans.get(index).map(|span| span.lock()) {
                Some(Ok(mut span)) => self.attend::<A>(task, buffers, Some(&mut span)),
                // A lock is poisoned by a panic in its task, which ends the run.
                Some(Err(_)) => {}
                None => {
                    self.attend::<A>(task, buffers, None);
                    self.finish(task, 0..task.rows(shape), &buffers.state, cells);
                }
            });
        };
        exec.pool.run(plan.tasks.len(), &attend, exec.cancel)?;
        if plan.splits.is_empty() {
            return Ok(());
        }
        // A poisoned lock would have ended the run.
        let spans: Vec<_> =
            spans.into_iter().map(|span| span.into_inner().unwrap_or_else(PoisonError::into_inner)).collect();
        // One head of K and V at a time, so that there is work for every thread.
        let head = |index: usize| {
            let split = plan.splits[index / shape.kv_heads].clone();
            let task = &plan.tasks[split.start];
            let head = index % shape.kv_heads;
            if head < task.kv_heads.len() {
                BUFFERS.with_borrow_mut(|buffers| {
                    let rows = head * task.head_rows(shape)..(head + 1) * task.head_rows(shape);
                    self.merge(task, rows.clone(), &spans[split], buffers);
                    self.finish(task, rows, &buffers.state, cells);
                });
            }
        };
        exec.pool.run(plan.splits.len() * shape.kv_heads, &head, exec.cancel)
    }

    /// Computes the blocks of `task`: merged into `buffers.state`, or each on its own into `span`.
    fn attend<A: Arithmetic>(&self, task: &Task, buffers: &mut Buffers, mut span: Option<&mut [Line]>) {
        let record_lines = record::lines(self.shape.value_dim);
        let (rows, head_rows) = (task.rows(self.shape), task.head_rows(self.shape));
        let tiles = self.tiles(head_rows);
        let q = self.pack_q::<A>(task, &tiles, &mut buffers.q);
        let scores = grown(&mut buffers.scores, 8 * BLOCK_PAGES);
        let digits = grown(&mut buffers.digits, 8);
        let records = grown(&mut buffers.block, 8 * record_lines);
        let state = grown(&mut buffers.state, rows * record_lines);
        record::clear(state, record_lines);
        let mut pages = self.block_pages::<A>(task, task.blocks.start, task.kv_heads.start);
        for (index, block) in task.blocks.clone().enumerate() {
            let mut q = q;
            for (head, first_row) in task.kv_heads.clone().zip((0..).step_by(head_rows)) {
                let next = if head + 1 < task.kv_heads.end {
                    self.block_pages::<A>(task, block, head + 1)
                } else if block + 1 < task.blocks.end {
                    self.block_pages::<A>(task, block + 1, task.kv_heads.start)
                } else {
                    pages
                };
                for (number, tile) in tiles.iter().enumerate() {
                    let (tile_q, others) = q.split_at(A::query_words(self.shape.key_dim) * tile.width);
                    q = others;
                    let records = &mut records[..tile.width * record_lines];
                    let room = Room { scores: scores.as_chunks_mut().0, digits };
                    let tile_block = TileArguments {
                        block,
                        kv_head: head,
                        pages: &pages,
                        next: &next,
                        q: tile_q,
                        room,
                        records,
                        prefetch: number == 0,
                    };
                    match tile.width {
                        1 => self.tile_block::<A, 1>(task, tile, tile_block),
                        2 => self.tile_block::<A, 2>(task, tile, tile_block),
                        4 => self.tile_block::<A, 4>(task, tile, tile_block),
                        _ => self.tile_block::<A, 8>(task, tile, tile_block),
                    }
                    let records = &records[..tile.rows.len() * record_lines];
                    let first = (first_row + tile.rows.start) * record_lines;
                    let place = first..first + records.len();
                    match &mut span {
                        Some(span) => span[index * rows * record_lines..][place].copy_from_slice(records),
                        None => self.exec.isa.run(Merge { state: &mut state[place], block: records, record_lines }),
                    }
                }
                pages = next;
            }
        }
    }

    /// Merges the blocks of some rows of a task that was cut into `spans`, in the order of the blocks, into
    /// `buffers.state`.
    fn merge(&self, task: &Task, rows: Range<usize>, spans: &[&mut [Line]], buffers: &mut Buffers) {
        let record_lines = record::lines(self.shape.value_dim);
        let state = grown(&mut buffers.state, rows.len() * record_lines);
        record::clear(state, record_lines);
        for span in spans {
            for block in span.chunks_exact(task.rows(self.shape) * record_lines) {
                let block = &block[rows.start * record_lines..rows.end * record_lines];
                self.exec.isa.run(Merge { state, block, record_lines });
            }
        }
    }

    /// Writes the output of some rows of a task from their records.
    fn finish(&self, task: &Task, rows: Range<usize>, state: &[Line], cells: &Tiles<'_, f32>) {
        let records = state.chunks_exact(record::lines(self.shape.value_dim));
        for (row, record) in rows.zip(records) {
            let head_rows = task.head_rows(self.shape);
            let (query, head) = self.query_and_head(task, task.kv_heads.start + row / head_rows, row % head_rows);
            let cell = (self.sequences[task.sequence].first_row + query) * self.shape.heads + head;
            let mut cell = cells.take(cell);
            let sink = self.shape.sinks.map(|sinks| sinks[head] * LOG2_E);
            self.exec.isa.run(Finish { record, sink, out: cell.contiguous() });
        }
    }

    /// Row `row` of those that share a head of K and V: which query of the sequence and which head it is. The heads of
    /// a query lie side by side.
    fn query_and_head(&self, task: &Task, kv_head: usize, row: usize) -> (usize, usize) {
        let group = self.shape.heads / self.shape.kv_heads;
        (task.queries.start + row / group, kv_head * group + row % group)
    }

    fn tiles(&self, rows: usize) -> Vec<Tile> {
        let widest = self.exec.isa.run(WidestTile);
        let tile = |start: usize| {
            let rows = start..rows.min(start + widest);
            Tile { width: rows.len().next_power_of_two(), rows }
        };
        (0..rows).step_by(widest).map(tile).collect()
    }

    /// Q of each head's tiles, scaled so that 2^score is what the softmax adds up.
    fn pack_q<'q, A: Arithmetic>(&self, task: &Task, tiles: &[Tile], q: &'q mut Vec<f32>) -> &'q [f32] {
        let key_dim = self.shape.key_dim;
        let words = A::query_words(key_dim);
        // A cap is on the score itself.
        let base = if self.shape.softcap.is_some() { 1.0 } else { LOG2_E };
        let q = grown(q, task.kv_heads.len() * tiles.iter().map(|tile| tile.width * words).sum::<usize>());
        let mut rest = &mut *q;
        for (kv_head, tile) in task.kv_heads.clone().flat_map(|head| tiles.iter().map(move |tile| (head, tile))) {
            let (packed, others) = rest.split_at_mut(tile.width * words);
            rest = others;
            for lane in 0..tile.width {
                let (query, head) = self.query_and_head(task, kv_head, (tile.rows.start + lane).min(tile.rows.end - 1));
                let row = self.sequences[task.sequence].first_row + query;
                self.exec.isa.run(Pack::<A> {
                    query: &self.q.row(row, (head + 1) * key_dim)[head * key_dim..],
                    scale: self.shape.scale * base,
                    row: lane,
                    rows: tile.width,
                    tile: packed,
                    arithmetic: PhantomData,
                });
            }
        }
        q
    }

    /// The pages of a block that any row of the task sees, in one head.
    fn block_pages<A: Arithmetic>(&self, task: &Task, block: usize, kv_head: usize) -> BlockPages<'_, A> {
        let sequence = &self.sequences[task.sequence];
        let visible = |query| self.shape.visible(sequence, query);
        let seen = visible(task.queries.start).start..visible(task.queries.end - 1).end;
        let seen = seen.start / PAGE_TOKENS..seen.end.div_ceil(PAGE_TOKENS);
        let first = block * BLOCK_PAGES;
        let mut pages = [A::Page::default(); BLOCK_PAGES];
        for page in seen.start.max(first)..seen.end.min(first + BLOCK_PAGES) {
            pages[page - first] = A::page(self.store, self.layer, sequence.pages[page], kv_head);
        }
        pages
    }

    fn tile_block<A: Arithmetic, const R: usize>(&self, task: &Task, tile: &Tile, arguments: TileArguments<'_, '_, A>) {
        let TileArguments { block, kv_head, pages, next, q, room, records, prefetch } = arguments;
        let sequence = &self.sequences[task.sequence];
        let start = block * ATTENTION_BLOCK;
        let rows: [(usize, usize); R] = std::array::from_fn(|lane| {
            self.query_and_head(task, kv_head, (tile.rows.start + lane).min(tile.rows.end - 1))
        });
        let visible = rows.map(|(query, _)| {
            let Range { start: from, end: to } = self.shape.visible(sequence, query);
            // Empty ranges, of rows that see nothing of this block, are 0..0.
            let to = to.saturating_sub(start).min(ATTENTION_BLOCK);
            let from = from.saturating_sub(start);
            if from < to { from..to } else { 0..0 }
        });
        let bias = self.shape.slopes.map(|slopes| Bias {
            slopes: rows.map(|(_, head)| slopes[head] * LOG2_E),
            starts: rows.map(|(query, _)| (start as isize - (sequence.first_position + query) as isize) as f32),
        });
        self.exec.isa.run(TileBlock::<A, R> {
            pages,
            next,
            q,
            key_dim: self.shape.key_dim,
            sight: Sight::new(visible),
            softcap: self.shape.softcap,
            bias,
            value_vectors: value_vectors(self.shape.value_dim),
            room,
            records,
            prefetch,
        });
    }
}

/// Lays out a row of a tile's Q.
struct Pack<'a, A> {
    query: &'a [f32],
    scale: f32,
    row: usize,
    rows: usize,
    tile: &'a mut [f32],
    arithmetic: PhantomData<A>,
}

impl<A: Arithmetic> Kernel for Pack<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        A::pack(simd, self.query, self.scale, self.row, self.rows, self.tile);
    }
}

/// What [`Call::tile_block`] hands through.
struct TileArguments<'a, 's, A: Arithmetic> {
    block: usize,
    kv_head: usize,
    pages: &'a BlockPages<'s, A>,
    next: &'a BlockPages<'s, A>,
    q: &'a [f32],
    room: Room<'a>,
    records: &'a mut [Line],
    prefetch: bool,
}
