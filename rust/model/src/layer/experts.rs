//! Mixtures of experts: every token goes through the few that its router chooses, and through those alone.
//!
//! Rows are gathered by expert, so that an expert's weights are read once for all of its rows, and added up in the
//! router's order, so that a row's result does not depend on what others chose.

use ferrule_kernels::disjoint::Tiles;
use ferrule_kernels::elementwise::{add_bias, add_scaled};
use ferrule_kernels::{Exec, PoolError, Product, Scratch, for_row_chunks, matmul_each};

use super::ffn::{self, dense, let_through};
use super::router::{Choice, choose};
use super::rows::for_rows;
use super::{AdapterRows, Observer, adapted, linear};
use crate::spec::ExpertsSpec;
use crate::weights::{Experts, Linear};

/// Rows that go through a mixture at a time: enough for each expert to have several, few enough for what lies between
/// the matrices.
pub(crate) const MIXTURE_ROWS: usize = 512;

/// Buffers of a mixture.
#[derive(Default)]
pub(crate) struct Buffers {
    /// `[rows, experts]`
    logits: Scratch<f32>,
    /// `[rows]`
    gates: Scratch<f32>,
    /// Rows by expert, once for each choice: `[rows * experts_per_token, hidden_size]`.
    gathered: Scratch<f32>,
    /// What experts give for them.
    given: Scratch<f32>,
    chosen: Vec<Choice>,
    /// For each choice its row in `gathered`.
    places: Vec<usize>,
    /// For each row of `gathered` the row that it is.
    sources: Vec<usize>,
}

/// A mixture over rows.
pub(super) struct MixturePass<'a> {
    pub exec: &'a Exec<'a>,
    pub weights: &'a Experts,
    pub spec: &'a ExpertsSpec,
    /// They change the network that all tokens go through, and its gate; whoever sees rows sees those of experts too.
    pub adapters: AdapterRows<'a>,
}

impl MixturePass<'_> {
    /// From `x` to `out`, both `[rows, hidden_size]`.
    pub fn run(&self, x: &[f32], buffers: &mut ffn::Buffers, out: &mut [f32]) -> Result<(), PoolError> {
        let width = self.weights.router.weight.cols();
        let rows = x.len() / width;
        let piece = rows.div_ceil(rows.div_ceil(MIXTURE_ROWS).max(1)).max(1);
        for (x, out) in x.chunks(piece * width).zip(out.chunks_mut(piece * width)) {
            self.piece(x, width, buffers, out)?;
        }
        self.add_shared(x, width, buffers, out)
    }

    /// Adds what the network for every token gives.
    fn add_shared(
        &self,
        x: &[f32],
        width: usize,
        buffers: &mut ffn::Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let (Some(weights), Some(spec)) = (&self.weights.shared, &self.spec.shared) else { return Ok(()) };
        let mut given = std::mem::take(&mut buffers.experts.given);
        let shared = given.take(x.len());
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
        buffers.experts.given = given;
        Ok(())
    }

    /// The experts of every row, and the places of their rows: an expert's lie side by side, in the order of the batch.
    /// Returns how many rows each expert has.
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

    fn piece(&self, x: &[f32], width: usize, buffers: &mut ffn::Buffers, out: &mut [f32]) -> Result<(), PoolError> {
        let Self { exec, weights, spec, .. } = self;
        let ffn::Buffers { inner, activated, experts: buffers } = buffers;
        let counts = self.choose(x, width, buffers)?;
        let Buffers { gathered, given, chosen, places, sources, .. } = buffers;
        let rows = x.len() / width;
        // A row alone is read, and quantized, where it lies: once for all of its experts.
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
        let activated = let_through(exec, &spec.expert, inner, activated)?;
        let given = given.take(chosen.len() * width);
        let activated = Gathered::Each(activated);
        multiply(exec, active().map(|(expert, &count)| (&expert.down, count)), observer, activated, given)?;

        let each = spec.experts_per_token;
        for_rows(exec, rows, out, width, |row, out| {
            out.fill(0.0);
            for (choice, place) in chosen[row * each..][..each].iter().zip(&places[row * each..]) {
                add_weighted(out, &given[place * width..][..width], choice.weight);
            }
        })
    }
}

/// What experts multiply.
#[derive(Clone, Copy)]
enum Gathered<'a> {
    /// Each its own rows, which follow those of the expert before it.
    Each(&'a [f32]),
    /// All of them one row.
    One(&'a [f32]),
}

/// Rows of `x` times the matrices of the experts, each of which has so many.
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
