//! Mixture of experts: each token is processed by the experts that the router chooses for it.
//!
//! Rows are gathered by expert, so that the weights of an expert are read once for all of its rows. Results are added
//! in the router's order, so that a row's result does not depend on the choices of other rows.

use ferrule_kernels::disjoint::Tiles;
use ferrule_kernels::elementwise::{add_bias, add_scaled};
use ferrule_kernels::{Exec, PoolError, Product, Scratch, for_row_chunks, matmul_each};

use super::ffn::{self, apply_gate, dense};
use super::router::{Choice, choose};
use super::rows::for_rows;
use super::{AdapterRows, Observer, adapted, linear};
use crate::spec::ExpertsSpec;
use crate::weights::{Experts, Linear};

/// Rows that are processed at a time: enough that each expert has several, few enough to bound the intermediate
/// buffers.
pub(crate) const EXPERTS_ROWS: usize = 512;

/// Buffers of a mixture of experts.
#[derive(Default)]
pub(crate) struct Buffers {
    /// `[rows, experts]`
    logits: Scratch<f32>,
    /// `[rows]`
    gates: Scratch<f32>,
    /// Rows grouped by expert, one per choice: `[rows * experts_per_token, hidden_size]`.
    gathered: Scratch<f32>,
    /// Outputs of the experts for `gathered`.
    outputs: Scratch<f32>,
    chosen: Vec<Choice>,
    /// Row of each choice in `gathered`.
    places: Vec<usize>,
    /// Row in the batch of each row of `gathered`.
    sources: Vec<usize>,
}

/// A mixture of experts over a batch.
pub(super) struct ExpertsPass<'a> {
    pub exec: &'a Exec<'a>,
    pub weights: &'a Experts,
    pub spec: &'a ExpertsSpec,
    /// Adapters of the shared expert and its gate. An observer sees the rows of routed experts too.
    pub adapters: AdapterRows<'a>,
}

impl ExpertsPass<'_> {
    /// Computes `out` from `x`, both `[rows, hidden_size]`.
    pub fn run(&self, x: &[f32], buffers: &mut ffn::Buffers, out: &mut [f32]) -> Result<(), PoolError> {
        let width = self.weights.router.weight.cols();
        let rows = x.len() / width;
        let chunk_rows = rows.div_ceil(rows.div_ceil(EXPERTS_ROWS).max(1)).max(1);
        for (x, out) in x.chunks(chunk_rows * width).zip(out.chunks_mut(chunk_rows * width)) {
            self.chunk(x, width, buffers, out)?;
        }
        self.add_shared(x, width, buffers, out)
    }

    /// Adds the output of the shared expert.
    fn add_shared(
        &self,
        x: &[f32],
        width: usize,
        buffers: &mut ffn::Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let (Some(weights), Some(spec)) = (&self.weights.shared, &self.spec.shared) else { return Ok(()) };
        let mut outputs = std::mem::take(&mut buffers.experts.outputs);
        let shared = outputs.take(x.len());
        dense(self.exec, weights, spec, self.adapters, x, buffers, shared)?;
        match &self.weights.shared_gate {
            None => add_scaled(self.exec, out, shared, 1.0)?,
            Some(gate) => {
                let gates = buffers.experts.gates.take(x.len() / width);
                adapted(self.exec, gate, self.adapters, x, gates)?;
                for_rows(self.exec, gates.len(), out, width, |row, out| {
                    add_weighted(out, &shared[row * width..][..width], 1.0 / (1.0 + (-gates[row]).exp()));
                })?;
            }
        }
        buffers.experts.outputs = outputs;
        Ok(())
    }

    /// Chooses the experts of every row, and places the rows of each expert side by side, in the order of the batch.
    /// Returns the number of rows of each expert.
    fn choose(&self, x: &[f32], width: usize, buffers: &mut Buffers) -> Result<Vec<usize>, PoolError> {
        let Self { exec, weights, spec, .. } = self;
        let Buffers { logits, chosen, places, sources, .. } = buffers;
        let ExpertsSpec { experts, experts_per_token, .. } = **spec;
        let rows = x.len() / width;
        let logits = logits.take(rows * experts);
        linear(exec, &weights.router, x, logits)?;
        chosen.clear();
        chosen.resize(rows * experts_per_token, Choice::default());
        let choices = Tiles::row_blocks(chosen, experts_per_token, 1);
        for_row_chunks(exec, logits, experts, experts * experts_per_token, &|first, logits| {
            for (logits, row) in logits.chunks_exact_mut(experts).zip(first..) {
                choose(spec, logits, weights.correction.as_deref(), choices.take(row).contiguous());
            }
        })?;
        drop(choices);
        let mut counts = vec![0; spec.experts];
        chosen.iter().for_each(|choice| counts[choice.expert] += 1);
        let mut next: Vec<usize> = counts
            .iter()
            .scan(0, |first, count| {
                *first += count;
                Some(*first - count)
            })
            .collect();
        places.clear();
        places.extend(chosen.iter().map(|choice| {
            let place = &mut next[choice.expert];
            *place += 1;
            *place - 1
        }));
        sources.clear();
        sources.resize(chosen.len(), 0);
        places.iter().enumerate().for_each(|(choice, &place)| sources[place] = choice / experts_per_token);
        Ok(counts)
    }

    fn chunk(&self, x: &[f32], width: usize, buffers: &mut ffn::Buffers, out: &mut [f32]) -> Result<(), PoolError> {
        let Self { exec, weights, spec, .. } = self;
        let ffn::Buffers { inner, activated, experts: buffers } = buffers;
        let counts = self.choose(x, width, buffers)?;
        let Buffers { gathered, outputs, chosen, places, sources, .. } = buffers;
        let rows = x.len() / width;
        // A single row is read and quantized in place, once for all of its experts.
        let gathered = if rows == 1 {
            Gathered::One(x)
        } else {
            let gathered = gathered.take(chosen.len() * width);
            for_rows(exec, rows, gathered, width, |place, row| {
                row.copy_from_slice(&x[sources[place] * width..][..width]);
            })?;
            Gathered::Each(gathered)
        };
        let active = || weights.experts.iter().zip(&counts).filter(|(_, count)| **count > 0);
        let inner = inner.take(chosen.len() * spec.expert.inner_rows());
        let observer = self.adapters.observer;
        multiply(exec, active().map(|(expert, &count)| (&expert.inner, count)), observer, gathered, inner)?;
        let activated = apply_gate(exec, &spec.expert, inner, activated)?;
        let outputs = outputs.take(chosen.len() * width);
        let activated = Gathered::Each(activated);
        multiply(exec, active().map(|(expert, &count)| (&expert.down, count)), observer, activated, outputs)?;

        let each = spec.experts_per_token;
        for_rows(exec, rows, out, width, |row, out| {
            out.fill(0.0);
            for (choice, place) in chosen[row * each..][..each].iter().zip(&places[row * each..]) {
                add_weighted(out, &outputs[place * width..][..width], choice.weight);
            }
        })
    }
}

/// Inputs of the experts.
#[derive(Clone, Copy)]
enum Gathered<'a> {
    /// Each expert has its own rows, after those of the expert before it.
    Each(&'a [f32]),
    /// All experts read the same row.
    One(&'a [f32]),
}

/// Multiplies rows of `x` with the matrices of the experts; each expert has the outputs number of rows.
fn multiply<'a>(
    exec: &Exec<'_>,
    experts: impl Iterator<Item = (&'a Linear, usize)> + Clone,
    observer: Option<&dyn Observer>,
    mut x: Gathered<'_>,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let mut products = Vec::new();
    let mut left = &mut *out;
    for (linear, rows) in experts.clone() {
        let x_rows = match x {
            Gathered::One(row) => row,
            Gathered::Each(all) => {
                let (rows, others) = all.split_at(rows * linear.weight.cols());
                x = Gathered::Each(others);
                rows
            }
        };
        observer.map_or(Ok(()), |observer| observer.see(exec, linear.site, x_rows))?;
        let (out_rows, out_left) = left.split_at_mut(rows * linear.weight.rows());
        left = out_left;
        products.push(Product { x: x_rows, w: &linear.weight, out: out_rows });
    }
    matmul_each(exec, &mut products)?;
    let mut left = out;
    for (linear, rows) in experts {
        let (out_rows, out_left) = left.split_at_mut(rows * linear.weight.rows());
        left = out_left;
        linear.bias.iter().try_for_each(|bias| add_bias(exec, out_rows, bias))?;
    }
    Ok(())
}

/// `out += weight * x`
fn add_weighted(out: &mut [f32], x: &[f32], weight: f32) {
    for (out, x) in out.iter_mut().zip(x) {
        *out += weight * x;
    }
}
