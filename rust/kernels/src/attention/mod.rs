//! Paged attention with online softmax: one recurrence for prefill, decode and verification of draft tokens.
//!
//! A row attends to blocks of [`ATTENTION_BLOCK`] tokens at absolute positions. Each block starts from a new online
//! softmax state (maximum, sum, accumulator), and the states of the visible blocks are merged from left to right
//! ([`softmax_state`]). Inside a block ([`block`]) the lanes of a score vector are the tokens of a page. A score is one
//! chain of multiply-adds over the columns of K, and an output column is one chain over the tokens ([`float`]); with an
//! int8 cache both are exact integer sums ([`int8`]). An attention sink is added to the sum when the blocks are merged.
//! The operations behind a row's output therefore depend only on its position, the shape and the data, not on how rows
//! are partitioned into tiles and tasks ([`plan`]).

mod block;
mod float;
mod int8;
mod plan;
mod shape;
mod softmax_state;

use std::cell::RefCell;
use std::f32::consts::LOG2_E;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use block::{
    AlibiBias, Arithmetic, BLOCK_PAGES, BlockMask, BlockPages, Digits, Softcap, TileBlock, TileBuffers, TokenBits,
};
use float::Float;
use int8::Int8;
use plan::{Plan, Task};
pub use shape::{AttentionSequence, AttentionShape};
use softmax_state::{Finalize, Line, Merge};

use crate::arch::{Kernel, Simd};
use crate::disjoint::Tiles;
use crate::indexer::token_bits;
use crate::kv::{Bf16, F16, F32, KvFormat, KvShape, KvStore, PAGE_TOKENS, value_vectors};
use crate::rows::Rows;
use crate::{Exec, PoolError};

/// Number of tokens of a block, counted from position 0. Changing it changes result bits.
pub const ATTENTION_BLOCK: usize = 256;

/// Number of lines of softmax states below which waking worker threads costs more than merging them in one thread.
const INLINE_LINES: usize = 512;

const _: () = assert!(ATTENTION_BLOCK.is_multiple_of(PAGE_TOKENS), "a block is a whole number of pages");

/// Computes the attention of `q: [m, heads * key_dim]` over one layer of `store` into `out: [m, heads * value_dim]`.
/// Rows of `out` that belong to no sequence are unchanged.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If shapes do not match each other or the store, the rows of sequences overlap or are not in ascending order, or a
/// page that must be read is out of bounds.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
///
/// use ferrule_kernels::arch::Isa;
/// use ferrule_kernels::attention::{AttentionSequence, AttentionShape, attention};
/// use ferrule_kernels::kv::{KvFormat, KvRow, KvShape, KvStore};
/// use ferrule_kernels::{Cancel, Exec, Pool, Rows};
///
/// let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
/// let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
/// let kv_shape = KvShape { layers: 1, kv_heads: 1, key_dim: 2, value_dim: 2, index_dim: 0 };
/// let mut store = KvStore::new(KvFormat::F32, kv_shape, 1).unwrap();
///
/// // Q, K and V of one token, side by side, as a fused projection computes them.
/// let qkv = [1.0, 0.0, 0.5, 0.5, 3.0, 4.0];
/// let (keys, values) = (Rows::new(&qkv, 6, 2), Rows::new(&qkv, 6, 4));
/// store.write(&exec, 0, &[KvRow { page: 0, slot: 0 }], keys, values)?;
///
/// let shape = AttentionShape {
///     heads: 1,
///     kv_heads: 1,
///     key_dim: 2,
///     value_dim: 2,
///     scale: 1.0,
///     bidirectional: false,
///     window: None,
///     chunk: None,
///     softcap: None,
///     slopes: None,
///     sinks: None,
///     selection: None,
/// };
/// let sequence = AttentionSequence { first_row: 0, rows: 1, first_position: 0, pages: &[0] };
/// let mut out = [0.0; 2];
/// attention(&exec, Rows::new(&qkv, 6, 0), &store, 0, &shape, &[sequence], &mut out)?;
/// assert_eq!(out, [3.0, 4.0]); // the only visible token has weight 1
/// # Ok::<(), ferrule_kernels::PoolError>(())
/// ```
pub fn attention(
    exec: &Exec<'_>,
    q: Rows<'_>,
    store: &KvStore,
    layer: usize,
    shape: &AttentionShape<'_>,
    sequences: &[AttentionSequence<'_>],
    out: &mut [f32],
) -> Result<(), PoolError> {
    let KvShape { layers, kv_heads, key_dim, value_dim, .. } = store.shape();
    assert!(layer < layers, "layer {layer} is out of bounds for {layers} layers");
    assert_eq!(
        (shape.kv_heads, shape.key_dim, shape.value_dim),
        (kv_heads, key_dim, value_dim),
        "kv_heads, key_dim and value_dim must be those of the store"
    );
    assert!(
        shape.heads.is_multiple_of(kv_heads),
        "heads must be a multiple of kv_heads ({kv_heads}), got {}",
        shape.heads
    );
    assert!(shape.window != Some(0), "window must be >= 1, got 0");
    assert!(shape.chunk != Some(0), "chunk must be >= 1, got 0");
    for (name, values) in [("slopes", shape.slopes), ("sinks", shape.sinks)] {
        if let Some(values) = values {
            assert_eq!(values.len(), shape.heads, "{name} must have one element per head");
        }
    }
    if let Some(selection) = shape.selection {
        selection.check(kv_heads);
        assert!(shape.slopes.is_none(), "slopes are not defined for a selection of tokens");
    }
    let mut next_row = 0;
    for sequence in sequences {
        assert!(sequence.first_row >= next_row, "rows of sequences must be ascending and must not overlap");
        next_row = sequence.first_row + sequence.rows;
        let tokens = sequence.tokens();
        let pages = sequence.pages.len();
        assert!(pages * PAGE_TOKENS >= tokens, "page table of {pages} pages is too short for {tokens} tokens");
    }
    assert!(
        next_row <= q.rows() && next_row * shape.heads * value_dim <= out.len(),
        "q and out must have the {next_row} rows of the sequences"
    );

    let call = Call { exec, q, store, layer, shape, sequences };
    match store.format() {
        KvFormat::F32 => call.run::<Float<F32>>(out),
        KvFormat::F16 => call.run::<Float<F16>>(out),
        KvFormat::Bf16 => call.run::<Float<Bf16>>(out),
        KvFormat::Int8 => call.run::<Int8>(out),
    }
}

/// Buffers of a thread, reused between calls.
#[derive(Default)]
struct Buffers {
    /// Packed Q of each tile.
    q: Vec<f32>,
    /// Scores, later probabilities, `[row of the tile][page of the block]`.
    scores: Vec<Line>,
    /// Quantized probabilities, `[row of the tile]`.
    digits: Vec<Digits>,
    /// Softmax states of the current block, `[row of the tile]`.
    block: Vec<Line>,
    /// Merged softmax states of all blocks so far, `[row]`.
    state: Vec<Line>,
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
    /// Softmax states of tasks that are split over KV blocks; at most [`plan::PARTIAL_BYTES`].
    static PARTIALS: RefCell<Vec<Line>> = RefCell::default();
}

/// Returns the first `len` elements of a buffer, growing it if necessary. Their contents are unspecified.
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

/// Rows of a task that are computed together and share every load of K and V.
struct Tile {
    /// Rows, among those that share a head of K and V.
    rows: Range<usize>,
    /// Number of rows that the kernel computes: 1, 2, 4 or 8. Rows past the end repeat the last row.
    width: usize,
}

/// Query of the maximum number of rows of a tile for an instruction set.
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
            // One task writes a span, and one task of the next run reads it, so the lock is never contended.
            spans.push(Mutex::new(span));
        }
        let attend = |index: usize| {
            let task = &plan.tasks[index];
            BUFFERS.with_borrow_mut(|buffers| match spans.get(index).map(|span| span.lock()) {
                Some(Ok(mut span)) => self.attend::<A>(task, buffers, Some(&mut span)),
                // Only a panic in the task poisons its lock, and the panic already ends the run.
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
        // No lock is poisoned: a panic would have ended the run.
        let spans: Vec<_> =
            spans.into_iter().map(|span| span.into_inner().unwrap_or_else(PoisonError::into_inner)).collect();
        // One task per head of K and V, so that every thread has work.
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
        let heads = plan.splits.len() * shape.kv_heads;
        if plan.partial_lines < INLINE_LINES {
            return exec.pool.run(1, &|_| (0..heads).for_each(&head), exec.cancel);
        }
        exec.pool.run(heads, &head, exec.cancel)
    }

    /// Computes the softmax states of the blocks of `task`: merged into `buffers.state`, or separately into `span`.
    fn attend<A: Arithmetic>(&self, task: &Task, buffers: &mut Buffers, mut span: Option<&mut [Line]>) {
        let state_lines = softmax_state::lines(self.shape.value_dim);
        let (rows, head_rows) = (task.rows(self.shape), task.head_rows(self.shape));
        let tiles = self.tiles(head_rows);
        let q = self.pack_q::<A>(task, &tiles, &mut buffers.q);
        let scores = grown(&mut buffers.scores, 8 * BLOCK_PAGES);
        let digits = grown(&mut buffers.digits, 8);
        let states = grown(&mut buffers.block, 8 * state_lines);
        let state = grown(&mut buffers.state, rows * state_lines);
        softmax_state::clear(state, state_lines);
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
                    let states = &mut states[..tile.width * state_lines];
                    let buffers = TileBuffers { scores: scores.as_chunks_mut().0, digits };
                    let tile_block = TileArguments {
                        block,
                        kv_head: head,
                        pages: &pages,
                        next: &next,
                        q: tile_q,
                        buffers,
                        states,
                        prefetch: number == 0,
                    };
                    match tile.width {
                        1 => self.tile_block::<A, 1>(task, tile, tile_block),
                        2 => self.tile_block::<A, 2>(task, tile, tile_block),
                        4 => self.tile_block::<A, 4>(task, tile, tile_block),
                        _ => self.tile_block::<A, 8>(task, tile, tile_block),
                    }
                    let states = &states[..tile.rows.len() * state_lines];
                    let first = (first_row + tile.rows.start) * state_lines;
                    let place = first..first + states.len();
                    match &mut span {
                        Some(span) => span[index * rows * state_lines..][place].copy_from_slice(states),
                        None => self.exec.isa.run(Merge { state: &mut state[place], block: states, state_lines }),
                    }
                }
                pages = next;
            }
        }
    }

    /// Merges the blocks of `rows` of a task that was split into `spans`, in block order, into `buffers.state`.
    fn merge(&self, task: &Task, rows: Range<usize>, spans: &[&mut [Line]], buffers: &mut Buffers) {
        let state_lines = softmax_state::lines(self.shape.value_dim);
        let state = grown(&mut buffers.state, rows.len() * state_lines);
        softmax_state::clear(state, state_lines);
        for span in spans {
            for block in span.chunks_exact(task.rows(self.shape) * state_lines) {
                let block = &block[rows.start * state_lines..rows.end * state_lines];
                self.exec.isa.run(Merge { state, block, state_lines });
            }
        }
    }

    /// Writes the output of `rows` of a task from their softmax states.
    fn finish(&self, task: &Task, rows: Range<usize>, state: &[Line], cells: &Tiles<'_, f32>) {
        let states = state.chunks_exact(softmax_state::lines(self.shape.value_dim));
        for (row, state) in rows.zip(states) {
            let head_rows = task.head_rows(self.shape);
            let (query, head) = self.query_and_head(task, task.kv_heads.start + row / head_rows, row % head_rows);
            let cell = (self.sequences[task.sequence].first_row + query) * self.shape.heads + head;
            let mut cell = cells.take(cell);
            let sink = self.shape.sinks.map(|sinks| sinks[head] * LOG2_E);
            self.exec.isa.run(Finalize { state, sink, out: cell.contiguous() });
        }
    }

    /// Returns the query and the head of row `row` among the rows that share a head of K and V. Rows are ordered by query,
    /// then by head.
    fn query_and_head(&self, task: &Task, kv_head: usize, row: usize) -> (usize, usize) {
        let group = self.shape.heads / self.shape.kv_heads;
        (task.queries.start + row / group, kv_head * group + row % group)
    }

    /// Partitions rows into tiles.
    fn tiles(&self, rows: usize) -> Vec<Tile> {
        let widest = self.exec.isa.run(WidestTile);
        let tile = |start: usize| {
            let rows = start..rows.min(start + widest);
            Tile { width: rows.len().next_power_of_two(), rows }
        };
        (0..rows).step_by(widest).map(tile).collect()
    }

    /// Packs Q for the tiles of each head. Q is scaled so that the softmax sums 2^score.
    fn pack_q<'q, A: Arithmetic>(&self, task: &Task, tiles: &[Tile], q: &'q mut Vec<f32>) -> &'q [f32] {
        let key_dim = self.shape.key_dim;
        let words = A::query_words(key_dim);
        // A softcap applies to the unscaled score; the factor log2(e) follows after it.
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

    /// Returns the pages of a block, for one head, that any row of the task attends to.
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
        let TileArguments { block, kv_head, pages, next, q, buffers, states, prefetch } = arguments;
        let sequence = &self.sequences[task.sequence];
        let start = block * ATTENTION_BLOCK;
        let rows: [(usize, usize); R] = std::array::from_fn(|lane| {
            self.query_and_head(task, kv_head, (tile.rows.start + lane).min(tile.rows.end - 1))
        });
        let visible = rows.map(|(query, _)| {
            let Range { start: from, end: to } = self.shape.visible(sequence, query);
            // Rows that see no token of this block have the range 0..0.
            let to = to.saturating_sub(start).min(ATTENTION_BLOCK);
            let from = from.saturating_sub(start);
            if from < to { from..to } else { 0..0 }
        });
        let bias = self.shape.slopes.map(|slopes| AlibiBias {
            slopes: rows.map(|(_, head)| slopes[head] * LOG2_E),
            starts: rows.map(|(query, _)| (start as isize - (sequence.first_position + query) as isize) as f32),
        });
        let (pages, mask) = match self.shape.selection {
            None => (*pages, BlockMask::new(visible)),
            Some(selection) => {
                let first_page = block * BLOCK_PAGES;
                let tokens = std::array::from_fn(|lane| {
                    let row = sequence.first_row + rows[lane].0;
                    let words = selection.words(row, kv_head, self.shape.kv_heads);
                    visible_words(words.get(first_page..).unwrap_or_default(), &visible[lane])
                });
                chosen_pages::<A, R>(pages, tokens)
            }
        };
        let block = TileBlock::<A, R> {
            pages: &pages,
            next,
            q,
            key_dim: self.shape.key_dim,
            mask,
            softcap: self.shape.softcap.map(Softcap::new),
            bias,
            value_vectors: value_vectors(self.shape.value_dim),
            buffers,
            states,
            prefetch,
        };
        A::run(self.exec.isa, block);
    }
}

/// Returns the tokens of a block that are both chosen and visible. `words` starts with those of the block.
fn visible_words(words: &[u16], visible: &Range<usize>) -> TokenBits {
    let mut tokens = [0; BLOCK_PAGES];
    for (page, (bits, word)) in tokens.iter_mut().zip(words).enumerate() {
        *bits = word & token_bits(page, visible);
    }
    tokens
}

/// Moves the pages of a block that some row attends to in front of the others, and returns them with their mask. Leaving
/// out pages of which no token is visible changes no bit: they would add zeros to sums.
fn chosen_pages<'s, A: Arithmetic, const R: usize>(
    pages: &BlockPages<'s, A>,
    tokens: [TokenBits; R],
) -> (BlockPages<'s, A>, BlockMask<R>) {
    let (mut chosen, mut chosen_tokens, mut count) = ([A::Page::default(); BLOCK_PAGES], [[0; BLOCK_PAGES]; R], 0);
    for page in (0..BLOCK_PAGES).filter(|page| tokens.iter().any(|tokens| tokens[*page] != 0)) {
        chosen[count] = pages[page];
        for (to, from) in chosen_tokens.iter_mut().zip(&tokens) {
            to[count] = from[page];
        }
        count += 1;
    }
    (chosen, BlockMask::chosen(chosen_tokens, count))
}

/// Packs one row of Q into a tile.
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

/// Arguments of [`Call::tile_block`].
struct TileArguments<'a, 's, A: Arithmetic> {
    block: usize,
    kv_head: usize,
    pages: &'a BlockPages<'s, A>,
    next: &'a BlockPages<'s, A>,
    q: &'a [f32],
    buffers: TileBuffers<'a>,
    states: &'a mut [Line],
    prefetch: bool,
}
