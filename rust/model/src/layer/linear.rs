//! Linear layers and lookups of rows: products with matrices that this process has, or whose rows several workers have.

use std::ops::Range;

use ferrule_kernels::elementwise::add_bias;
use ferrule_kernels::{Exec, PoolError, Product, matmul_each};

use crate::stage::TensorParallelGroup;
use crate::weights::Linear;

/// Computes `out = x W^T + b`.
pub(crate) fn linear(exec: &Exec<'_>, linear: &Linear, x: &[f32], out: &mut [f32]) -> Result<(), PoolError> {
    linear_each(exec, &[linear], &mut [Product { x, w: &linear.weight, out }])
}

/// Computes several linear layers together: each product has the weights of the layer at its place. If their rows are
/// divided among workers, one all-gather has the outputs of all of them.
///
/// # Panics
/// If there is not one product for each layer, or the rows of only some of the layers are divided.
pub(crate) fn linear_each(exec: &Exec<'_>, layers: &[&Linear], products: &mut [Product<'_>]) -> Result<(), PoolError> {
    assert_eq!(layers.len(), products.len(), "there must be one product for each layer");
    let group = layers.first().and_then(|layer| layer.group.as_deref());
    assert!(layers.iter().all(|layer| layer.group.is_some() == group.is_some()), "all or no matrices are divided");
    match group {
        None => matmul_each(exec, products)?,
        Some(group) => gather_each(exec, group, layers, products)?,
    }
    layers
        .iter()
        .zip(products)
        .try_for_each(|(layer, product)| layer.bias.iter().try_for_each(|bias| add_bias(exec, product.out, bias)))
}

/// Multiplies with the rows that this worker has, and gathers the outputs of all workers.
fn gather_each(
    exec: &Exec<'_>,
    group: &TensorParallelGroup,
    layers: &[&Linear],
    products: &mut [Product<'_>],
) -> Result<(), PoolError> {
    let outputs: Vec<usize> = layers.iter().map(|layer| layer.outputs).collect();
    let sizes = |rank: usize, products: &[Product<'_>]| -> Vec<usize> {
        let size = |(outputs, product): (&usize, &Product<'_>)| {
            product.out.len() / outputs * group.rows_of(rank, *outputs).len()
        };
        outputs.iter().zip(products).map(size).collect()
    };
    let counts: Vec<usize> = (0..group.ranks()).map(|rank| sizes(rank, products).iter().sum()).collect();
    let mut gather = group.gather();
    let gathered = gather.all_gather(&counts, exec.cancel, |mut left| {
        let mut own = Vec::with_capacity(products.len());
        for (product, size) in products.iter().zip(sizes(group.rank(), products)) {
            let (out, rest) = left.split_at_mut(size);
            left = rest;
            own.push(Product { x: product.x, w: product.w, out });
        }
        matmul_each(exec, &mut own)
    })?;
    for (rank, mut part) in gathered.into_iter().enumerate() {
        for (product, outputs) in products.iter_mut().zip(&outputs) {
            part = place_columns(part, group.rows_of(rank, *outputs), *outputs, product.out);
        }
    }
    Ok(())
}

/// Has each worker compute columns of `out: [rows, width]`, and gathers all of them. `columns` returns those of a rank,
/// and `compute` writes those of this worker: `[rows, columns]`.
pub(crate) fn gather_columns(
    exec: &Exec<'_>,
    group: &TensorParallelGroup,
    (width, columns): (usize, impl Fn(usize) -> Range<usize>),
    out: &mut [f32],
    compute: impl FnOnce(&mut [f32]) -> Result<(), PoolError>,
) -> Result<(), PoolError> {
    let counts: Vec<usize> = (0..group.ranks()).map(|rank| out.len() / width * columns(rank).len()).collect();
    let mut gather = group.gather();
    for (rank, part) in gather.all_gather(&counts, exec.cancel, compute)?.into_iter().enumerate() {
        place_columns(part, columns(rank), width, out);
    }
    Ok(())
}

/// Copies the beginning of `part` to columns of `out: [rows, width]`, and returns the rest.
fn place_columns<'a>(mut part: &'a [f32], columns: Range<usize>, width: usize, out: &mut [f32]) -> &'a [f32] {
    for out in out.chunks_exact_mut(width) {
        let (now, rest) = part.split_at(columns.len());
        out[columns.clone()].copy_from_slice(now);
        part = rest;
    }
    part
}

/// Reads the rows of `tokens` in a matrix that is all in this process: `out: [tokens, inputs]`.
pub(crate) fn read_rows(table: &Linear, tokens: impl Iterator<Item = u32>, out: &mut [f32]) {
    for (token, out) in tokens.zip(out.chunks_exact_mut(table.weight.cols())) {
        table.weight.read_row(token as usize, out);
    }
}

/// Looks up the rows of `tokens` in a matrix: `out: [tokens, inputs]`.
pub(crate) fn look_up(
    exec: &Exec<'_>,
    table: &Linear,
    tokens: impl Iterator<Item = u32> + Clone,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let width = table.weight.cols();
    let Some(group) = table.group.as_deref() else {
        read_rows(table, tokens, out);
        return Ok(());
    };
    let rows: Vec<_> = (0..group.ranks()).map(|rank| group.rows_of(rank, table.outputs)).collect();
    let among = |rows: &Range<usize>| {
        let rows = rows.clone();
        tokens.clone().map(|token| token as usize).filter(move |token| rows.contains(token))
    };
    let counts: Vec<usize> = rows.iter().map(|rows| among(rows).count() * width).collect();
    let mut gather = group.gather();
    let gathered = gather.all_gather(&counts, exec.cancel, |own| {
        let rows = &rows[group.rank()];
        for (token, out) in among(rows).zip(own.chunks_exact_mut(width)) {
            table.weight.read_row(token - rows.start, out);
        }
        Ok(())
    })?;
    for (rows, part) in rows.iter().zip(gathered) {
        let places =
            tokens.clone().zip(out.chunks_exact_mut(width)).filter(|(token, _)| rows.contains(&(*token as usize)));
        for ((_, out), found) in places.zip(part.chunks_exact(width)) {
            out.copy_from_slice(found);
        }
    }
    Ok(())
}
