//! LoRA adapters in the forward pass: adds to each linear layer what the adapters of the rows' sequences add.
//!
//! The result of a row depends only on the row and its adapter: both products have the fixed order of every matmul, and
//! their result is scaled and added once. Rows without an adapter are not touched.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

use ferrule_kernels::elementwise::add_scaled_columns;
use ferrule_kernels::{Exec, PackedMatrix, PoolError, Product, RowsMut, Scratch, matmul_each};

use super::{Observer, StreamRows, linear_each};
use crate::adapter::{Adapter, HeadsLowRank, LowRank};
use crate::batch::{Batch, SequenceChunk};
use crate::weights::Linear;

/// Largest number of outputs that are computed before they are added, so that they stay in the cache.
const CHUNK: usize = 1 << 18;

/// Buffers, reused from step to step.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Outputs of the first products (A), term by term.
    inner: Scratch<f32>,
    /// Outputs of the second products (B), term by term.
    updates: Scratch<f32>,
}

/// Consecutive rows of a batch that have the same adapter.
pub(crate) struct AdapterRun<'a> {
    rows: Range<usize>,
    adapter: &'a Adapter,
}

/// Returns the runs of a batch in which each sequence has the number of rows that `rows_of` returns.
pub(crate) fn adapter_runs<'a>(batch: Batch<'a>, rows_of: impl Fn(&SequenceChunk<'a>) -> usize) -> Vec<AdapterRun<'a>> {
    let mut runs: Vec<AdapterRun<'a>> = Vec::new();
    let mut end = 0;
    for chunk in batch.sequences {
        let first = end;
        end += rows_of(chunk);
        let Some(adapter) = chunk.adapter else { continue };
        match runs.last_mut() {
            Some(last) if std::ptr::eq(last.adapter, adapter) && last.rows.end == first => last.rows.end = end,
            _ => runs.push(AdapterRun { rows: first..end, adapter }),
        }
    }
    runs
}

/// The adapters of the rows that enter linear layers, and the observer of those rows.
#[derive(Clone, Copy)]
pub(crate) struct AdapterRows<'a> {
    runs: &'a [AdapterRun<'a>],
    /// Number of rows of the batch before the first of these.
    skipped: usize,
    buffers: &'a RefCell<Buffers>,
    /// Additions that belong to the block and apply to all rows, by site.
    own: Option<&'a BTreeMap<usize, Vec<LowRank>>>,
    observer: Option<&'a dyn Observer>,
    /// Residual stream of all rows of the batch, if the outputs of the mixer are added to it as they are.
    stream: Option<StreamRows<'a>>,
}

impl<'a> AdapterRows<'a> {
    pub fn new(runs: &'a [AdapterRun<'a>], buffers: &'a RefCell<Buffers>) -> Self {
        Self { runs, skipped: 0, buffers, own: None, observer: None, stream: None }
    }

    /// Returns the same adapters with an observer.
    pub fn observed(self, observer: Option<&'a dyn Observer>) -> Self {
        Self { observer, ..self }
    }

    /// Returns the same adapters with the residual stream that the outputs of the mixer are added to.
    pub fn with_stream(self, stream: Option<StreamRows<'a>>) -> Self {
        Self { stream, ..self }
    }

    /// Shows the observer the rows that enter a linear layer, with those of the residual stream that its outputs are added
    /// to.
    pub fn observe(
        self,
        exec: &Exec<'_>,
        layer: &Linear,
        x: &[f32],
        stream: Option<StreamRows<'_>>,
    ) -> Result<(), PoolError> {
        self.observer.map_or(Ok(()), |observer| observer.see(exec, layer, x, stream))
    }

    /// Returns the matrix of a linear layer, or the replacement that the observer has for it.
    pub fn matrix<'m>(self, layer: &'m Linear) -> &'m PackedMatrix
    where
        'a: 'm,
    {
        self.observer.and_then(|observer| observer.replacement(layer.site)).unwrap_or(&layer.weight)
    }

    /// Returns the same adapters with the additions of a block.
    pub fn with_own(self, own: &'a BTreeMap<usize, Vec<LowRank>>) -> Self {
        Self { own: Some(own).filter(|own| !own.is_empty()), ..self }
    }

    /// Returns the adapters of the rows from `first` on.
    pub fn skip(self, first: usize) -> Self {
        Self { skipped: self.skipped + first, ..self }
    }

    /// Returns the runs of rows with an adapter among the next `rows` rows.
    fn within(self, rows: usize) -> impl Iterator<Item = (Range<usize>, &'a Adapter)> {
        let local = move |run: &'a AdapterRun<'a>| {
            let first = run.rows.start.saturating_sub(self.skipped);
            (first..run.rows.end.saturating_sub(self.skipped).min(rows), run.adapter)
        };
        self.runs.iter().map(local).filter(|(rows, _)| !rows.is_empty())
    }
}

/// Computes `out = x W^T + b` and adds the rows' adapters.
pub(crate) fn adapted(
    exec: &Exec<'_>,
    map: &Linear,
    adapters: AdapterRows<'_>,
    x: &[f32],
    out: &mut [f32],
) -> Result<(), PoolError> {
    adapted_to_stream(exec, map, adapters, (x, None), out)
}

/// Computes the outputs of a mixer as [`adapted`] does.
pub(crate) fn adapted_output(
    exec: &Exec<'_>,
    map: &Linear,
    adapters: AdapterRows<'_>,
    x: &[f32],
    out: &mut [f32],
) -> Result<(), PoolError> {
    let stream = adapters.observer.and(adapters.stream).filter(|stream| stream.width == map.outputs);
    let stream = stream.map(|stream| {
        let rows = &stream.rows[adapters.skipped * stream.width..][..out.len()];
        StreamRows { rows, ..stream }
    });
    adapted_to_stream(exec, map, adapters, (x, stream), out)
}

/// Same as [`adapted`], for outputs that are added to rows of the residual stream, or to none.
fn adapted_to_stream(
    exec: &Exec<'_>,
    map: &Linear,
    adapters: AdapterRows<'_>,
    (x, stream): (&[f32], Option<StreamRows<'_>>),
    out: &mut [f32],
) -> Result<(), PoolError> {
    adapters.observe(exec, map, x, stream)?;
    linear_each(exec, &[map], &mut [Product { x, w: adapters.matrix(map), out }])?;
    add_adapters(exec, map, adapters, x, out)
}

/// Adds the rows' adapters to the outputs of a linear layer.
pub(crate) fn add_adapters(
    exec: &Exec<'_>,
    map: &Linear,
    adapters: AdapterRows<'_>,
    x: &[f32],
    out: &mut [f32],
) -> Result<(), PoolError> {
    let (columns, width) = (map.weight.cols(), map.outputs);
    let all_rows = 0..out.len() / width;
    let own = adapters.own.and_then(|own| own.get(&map.site));
    let adapted = adapters.within(all_rows.end).map(|(rows, adapter)| (rows, adapter.updates.linear.get(&map.site)));
    let mut terms = Vec::new();
    for (rows, updates) in std::iter::once((all_rows, own)).chain(adapted) {
        terms.extend(updates.into_iter().flatten().map(|LowRank { a, b, first_output, scale }| Term {
            x: &x[rows.start * columns..rows.end * columns],
            rows: rows.clone(),
            first_output: *first_output,
            matrices: [a, b],
            scale: *scale,
        }));
    }
    add(exec, &terms, out, width, &mut adapters.buffers.borrow_mut())
}

/// The per-head matrix of latent attention that rows are multiplied with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeadSide {
    /// Matrices from queries to the latent.
    Keys,
    /// Matrices from latents to values.
    Values,
}

/// Adds the rows' adapters to the outputs of per-head matrices. `x` and `out` are grouped by head: `[heads, rows,
/// columns]` and `[heads, rows, width]`.
pub(crate) fn add_to_heads(
    exec: &Exec<'_>,
    (site, side): (usize, HeadSide),
    adapters: AdapterRows<'_>,
    x: &[f32],
    out: &mut [f32],
    (heads, rows): (usize, usize),
) -> Result<(), PoolError> {
    let (columns, width) = (x.len() / (heads * rows), out.len() / (heads * rows));
    let mut terms = Vec::new();
    for (run, adapter) in adapters.within(rows) {
        let Some(HeadsLowRank { a, a_transposed, keys, values, scale }) = adapter.updates.heads.get(&site) else {
            continue;
        };
        for head in 0..heads {
            let rows = head * rows + run.start..head * rows + run.end;
            terms.push(Term {
                x: &x[rows.start * columns..rows.end * columns],
                rows,
                first_output: 0,
                matrices: match side {
                    HeadSide::Keys => [&keys[head], a_transposed],
                    HeadSide::Values => [a, &values[head]],
                },
                scale: *scale,
            });
        }
    }
    add(exec, &terms, out, width, &mut adapters.buffers.borrow_mut())
}

/// One addition: `out[rows, first_output ..] += scale * (x A^T) B^T`.
struct Term<'a> {
    x: &'a [f32],
    rows: Range<usize>,
    first_output: usize,
    /// The matrices A and B.
    matrices: [&'a PackedMatrix; 2],
    scale: f32,
}

/// Some rows of a term, with their outputs of the first product.
struct Chunk<'a> {
    term: &'a Term<'a>,
    rows: Range<usize>,
    inner: &'a [f32],
}

impl Chunk<'_> {
    /// Returns the number of outputs.
    fn size(&self) -> usize {
        self.rows.len() * self.term.matrices[1].rows()
    }
}

/// Adds all terms to `out: [rows, width]`.
fn add(
    exec: &Exec<'_>,
    terms: &[Term<'_>],
    out: &mut [f32],
    width: usize,
    buffers: &mut Buffers,
) -> Result<(), PoolError> {
    if terms.is_empty() {
        return Ok(());
    }
    let size = |Term { rows, matrices: [a, _], .. }: &Term<'_>| rows.len() * a.rows();
    let inner = buffers.inner.take(terms.iter().map(size).sum());
    let mut rest = &mut *inner;
    let products = terms.iter().map(|term| {
        let (out, after) = std::mem::take(&mut rest).split_at_mut(size(term));
        rest = after;
        Product { x: term.x, w: term.matrices[0], out }
    });
    multiply(exec, products.collect())?;

    let chunks = chunks(terms, inner);
    let mut left = chunks.as_slice();
    while !left.is_empty() {
        let mut total = 0;
        let fit = left.iter().take_while(|chunk| {
            total += chunk.size();
            total <= CHUNK
        });
        let (now, later) = left.split_at(fit.count().max(1));
        left = later;
        add_chunks(exec, now, out, width, &mut buffers.updates)?;
    }
    Ok(())
}

/// Splits terms into chunks of at most [`CHUNK`] outputs, but at least one row.
fn chunks<'a>(terms: &'a [Term<'a>], mut inner: &'a [f32]) -> Vec<Chunk<'a>> {
    let mut chunks = Vec::with_capacity(terms.len());
    for term in terms {
        let [a, b] = term.matrices;
        let most = (CHUNK / b.rows()).max(1);
        for first in term.rows.clone().step_by(most) {
            let rows = first..term.rows.end.min(first + most);
            let (own, after) = inner.split_at(rows.len() * a.rows());
            inner = after;
            chunks.push(Chunk { term, rows, inner: own });
        }
    }
    chunks
}

fn add_chunks(
    exec: &Exec<'_>,
    chunks: &[Chunk<'_>],
    out: &mut [f32],
    width: usize,
    updates: &mut Scratch<f32>,
) -> Result<(), PoolError> {
    let updates = updates.take(chunks.iter().map(Chunk::size).sum());
    let mut rest = &mut *updates;
    let products = chunks.iter().map(|chunk| {
        let (out, after) = std::mem::take(&mut rest).split_at_mut(chunk.size());
        rest = after;
        Product { x: chunk.inner, w: chunk.term.matrices[1], out }
    });
    multiply(exec, products.collect())?;
    let mut rest = &*updates;
    for Chunk { term, rows, .. } in chunks {
        let outputs = term.matrices[1].rows();
        let (updates, after) = rest.split_at(rows.len() * outputs);
        rest = after;
        let out = RowsMut::new(&mut out[rows.start * width..rows.end * width], width, term.first_output);
        add_scaled_columns(exec, out, updates, outputs, term.scale)?;
    }
    Ok(())
}

/// Multiplies matrices of any formats: adapters keep the format of their file.
fn multiply(exec: &Exec<'_>, mut products: Vec<Product<'_>>) -> Result<(), PoolError> {
    while let Some(first) = products.first() {
        let format = first.w.formats().next();
        let (mut alike, others) = products.into_iter().partition::<Vec<_>, _>(|it| it.w.formats().next() == format);
        matmul_each(exec, &mut alike)?;
        products = others;
    }
    Ok(())
}
