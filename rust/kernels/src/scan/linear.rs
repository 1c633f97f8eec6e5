//! Linear attention: a matrix S per head, `[key_dim, value_dim]`, that decays, is updated by a key and an update vector of
//! each token, and is read by a query.
//!
//! Columns of S are independent of each other, so a part is 32 columns of one head: with a key dimension of 128 they are
//! 16 KiB, which stay in the first-level cache while all tokens of a segment pass. An element of S is one chain of
//! operations over the tokens; an output is one chain over the rows of S.
//!
//! The delta rule reads S twice for each token: for the prediction, then for the update and the output. Both are one pass
//! here: the output `S^T q` is computed from S before the update and from the update vector u, as `S'^T q + (k q) u`, and
//! the update is added in the pass of the next token. The update of the first token is added in a pass from the old state
//! to the new one, which a step of one token therefore reads and writes once in memory.

// Index loops over small arrays of registers are more readable here than iterators over several arrays.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::{Part, Segment, Step, for_steps, load_vectors, prefetch, store_vectors};
use crate::arch::{Kernel, LANES, Simd};
use crate::math::load_up_to;
use crate::rows::{Rows, RowsMut};
use crate::{Exec, PoolError};

/// Number of vectors of columns of a part.
const PART_VECTORS: usize = 2;

/// Columns of a part.
const PART_COLUMNS: usize = PART_VECTORS * LANES;

/// Decay of a state per token: the factors of its elements.
#[derive(Debug, Clone, Copy)]
pub enum Decay<'a> {
    /// One factor for each head, `[heads]`, the same for all tokens (lightning attention).
    Constant(&'a [f32]),
    /// One factor for each head and token: a view of `heads` columns (gated delta net, Mamba 2).
    Heads(Rows<'a>),
    /// One factor for each row of the state: a view of `heads * key_dim` columns (Kimi delta attention).
    Keys(Rows<'a>),
}

/// Update vector u of a token; the state becomes `S + k u^T` with the key k.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpdateRule {
    /// Value: `u = factor v` (Mamba 2, lightning attention).
    Add,
    /// Error of the prediction: `u = factor (v - S^T k)` (gated delta net, Kimi delta attention).
    Delta,
}

/// Parameters of [`linear_attention`].
#[derive(Debug, Clone, Copy)]
pub struct LinearAttention<'a> {
    /// Number of heads of values, states and outputs.
    pub heads: usize,
    /// Number of heads of keys and queries; head h reads head `h / (heads / key_heads)`, unless `alternating`.
    pub key_heads: usize,
    /// Whether head h reads head `h % key_heads` of keys and queries.
    pub alternating: bool,
    /// Columns of a head of keys and queries; in Mamba 2 the size of the state.
    pub key_dim: usize,
    /// Columns of a head of values and outputs; in Mamba 2 the size of a head.
    pub value_dim: usize,
    /// Decay of the state, before the update.
    pub decay: Decay<'a>,
    /// Update of the state.
    pub rule: UpdateRule,
    /// Factor of the update for each head: a view of `heads` columns; `None` means 1. It is beta of the delta rule, and the
    /// step size of Mamba 2.
    pub factor: Option<Rows<'a>>,
    /// Factor of the values that are added to the outputs, `[heads]`: D of Mamba 2.
    pub skip: Option<&'a [f32]>,
}

impl LinearAttention<'_> {
    /// Returns the number of f32 of a state.
    #[must_use]
    pub fn state_len(&self) -> usize {
        linear_attention_state_len(self.heads, self.key_dim, self.value_dim)
    }

    /// Returns the number of f32 of the state of a head.
    fn head_len(&self) -> usize {
        linear_attention_state_len(1, self.key_dim, self.value_dim)
    }

    /// Returns the parts, by head and column.
    fn parts(&self) -> Vec<Part> {
        let head = |head: usize| {
            (0..self.value_dim).step_by(PART_COLUMNS).map(move |first| {
                let end = self.value_dim.min(first + PART_COLUMNS);
                let state = head * self.head_len() + first * self.key_dim;
                Part {
                    state: state..state + (end - first).next_multiple_of(LANES) * self.key_dim,
                    columns: head * self.value_dim + first..head * self.value_dim + end,
                }
            })
        };
        (0..self.heads).flat_map(head).collect()
    }

    fn check(&self, q: Rows<'_>, k: Rows<'_>, v: Rows<'_>) {
        let Self { heads, key_heads, key_dim, value_dim, decay, factor, skip, .. } = *self;
        assert!(
            key_heads > 0 && heads.is_multiple_of(key_heads),
            "heads must be a multiple of key_heads ({key_heads}), got {heads}"
        );
        assert!(key_dim > 0 && value_dim > 0, "key_dim and value_dim must be > 0, got {key_dim} and {value_dim}");
        let (keys, values) = (key_heads * key_dim, heads * value_dim);
        let mut views = vec![("q", q, keys), ("k", k, keys), ("v", v, values)];
        match decay {
            Decay::Constant(factors) => assert_eq!(factors.len(), heads, "decay must have one element per head"),
            Decay::Heads(factors) => views.push(("decay", factors, heads)),
            Decay::Keys(factors) => views.push(("decay", factors, heads * key_dim)),
        }
        views.extend(factor.map(|factors| ("factor", factors, heads)));
        for (name, Rows { stride, first, .. }, width) in views {
            assert!(
                first + width <= stride,
                "columns {first}..{} of {name} are out of bounds for rows of {stride}",
                first + width
            );
        }
        assert!(skip.is_none_or(|skip| skip.len() == heads), "skip must have one element per head");
    }
}

/// Returns the number of f32 of a state of linear attention; columns are padded to whole vectors.
#[must_use]
pub fn linear_attention_state_len(heads: usize, key_dim: usize, value_dim: usize) -> usize {
    heads * value_dim.next_multiple_of(LANES) * key_dim
}

/// Computes a linear attention layer: for each row and head, with the query q, key k and value v of the row,
///
/// ```text
/// S = decay S;   u = factor v   or   u = factor (v - S^T k);   S = S + k u^T;   out = S^T q + skip v
/// ```
///
/// `q` and `k` have `key_heads * key_dim` columns, `v` and `out` have `heads * value_dim`. Where a model normalizes or
/// scales queries and keys, it does so before. `states` holds a slot per row; the state starts at the first column of the
/// view. Rows of `out` that belong to no segment are unchanged.
///
/// Sources: Yang et al. 2024 (gated delta net), Kimi Team 2025 (Kimi delta attention), Dao and Gu 2024 (Mamba 2), Qin et
/// al. 2024 (lightning attention).
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If shapes do not match, or slots or rows are out of bounds or overlap.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
///
/// use ferrule_kernels::arch::Isa;
/// use ferrule_kernels::scan::{Decay, LinearAttention, Segment, UpdateRule, linear_attention};
/// use ferrule_kernels::{Cancel, Exec, Pool, Rows, RowsMut};
///
/// let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
/// let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
/// let attention = LinearAttention {
///     heads: 1,
///     key_heads: 1,
///     alternating: false,
///     key_dim: 1,
///     value_dim: 1,
///     decay: Decay::Constant(&[0.5]),
///     rule: UpdateRule::Add,
///     factor: None,
///     skip: None,
/// };
/// // Query, key and value of two tokens, side by side.
/// let qkv = [1.0, 2.0, 3.0, 1.0, 1.0, 1.0];
/// let [q, k, v] = [0, 1, 2].map(|first| Rows::new(&qkv, 3, first));
/// let mut states = vec![0.0; 2 * attention.state_len()]; // two slots
/// let states = RowsMut::new(&mut states, attention.state_len(), 0);
/// let mut out = [0.0; 2];
///
/// let start = Segment { first_row: 0, rows: 2, old: None, new: 1 };
/// linear_attention(&exec, q, k, v, &attention, &[start], states, &mut out)?;
/// assert_eq!(out, [6.0, 0.5 * 6.0 + 1.0]);
/// # Ok::<(), ferrule_kernels::PoolError>(())
/// ```
// The arguments of a layer; grouping them would only move them.
#[allow(clippy::too_many_arguments)]
pub fn linear_attention(
    exec: &Exec<'_>,
    q: Rows<'_>,
    k: Rows<'_>,
    v: Rows<'_>,
    attention: &LinearAttention<'_>,
    segments: &[Segment],
    states: RowsMut<'_>,
    out: &mut [f32],
) -> Result<(), PoolError> {
    attention.check(q, k, v);
    let width = attention.heads * attention.value_dim;
    // The work of a row, per element of the state.
    let work = 4;
    for_steps(exec, segments, states, out, width, (&attention.parts(), work), |step| {
        let inputs = Inputs { q, k, v, attention };
        if step.new.len() == PART_COLUMNS * attention.key_dim {
            exec.isa.run(Advance::<PART_VECTORS> { inputs, step });
        } else {
            exec.isa.run(Advance::<1> { inputs, step });
        }
    })
}

/// Inputs of all parts.
struct Inputs<'a> {
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    attention: &'a LinearAttention<'a>,
}

/// Inputs of one row for one part.
#[derive(Clone, Copy)]
struct Token<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    /// One factor, or one for each row of the state.
    decay: &'a [f32],
    /// Factor of the update.
    factor: f32,
}

impl<'a> Inputs<'a> {
    /// Returns the inputs of a row for a head and columns of the outputs.
    #[inline(always)]
    fn token(&self, row: usize, head: usize, columns: &Range<usize>) -> Token<'a> {
        let LinearAttention { heads, key_heads, alternating, key_dim, value_dim, decay, factor, .. } = *self.attention;
        let key_head = if alternating { head % key_heads } else { head / (heads / key_heads) };
        Token {
            q: &self.q.row(row, key_heads * key_dim)[key_head * key_dim..][..key_dim],
            k: &self.k.row(row, key_heads * key_dim)[key_head * key_dim..][..key_dim],
            v: &self.v.row(row, heads * value_dim)[columns.clone()],
            decay: match decay {
                Decay::Constant(factors) => &factors[head..][..1],
                Decay::Heads(factors) => &factors.row(row, heads)[head..][..1],
                Decay::Keys(factors) => &factors.row(row, heads * key_dim)[head * key_dim..][..key_dim],
            },
            factor: factor.map_or(1.0, |factors| factors.row(row, heads)[head]),
        }
    }
}

/// Kernel that advances a part of `P` vectors of columns: its state is `[key_dim, P, LANES]`.
struct Advance<'a, const P: usize> {
    inputs: Inputs<'a>,
    step: Step<'a>,
}

impl<const P: usize> Kernel for Advance<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let LinearAttention { rule, decay, .. } = self.inputs.attention;
        match (rule, decay) {
            (UpdateRule::Add, Decay::Keys(_)) => self.add::<S, true>(simd),
            (UpdateRule::Add, _) => self.add::<S, false>(simd),
            (UpdateRule::Delta, Decay::Keys(_)) => self.delta::<S, true>(simd),
            (UpdateRule::Delta, _) => self.delta::<S, false>(simd),
        }
    }
}

impl<const P: usize> Advance<'_, P> {
    /// Advances the state by the rule [`UpdateRule::Add`], in one pass for each row.
    #[inline(always)]
    fn add<S: Simd, const KEYS: bool>(self, simd: S) {
        let Self { inputs, step: Step { rows, old, new, mut out } } = self;
        let (head, columns) = (out.columns().start / inputs.attention.value_dim, out.columns());
        let (old, new) = (matrix::<P>(old), matrix_mut::<P>(new));
        for (index, row) in rows.clone().enumerate() {
            let token = inputs.token(row, head, &columns);
            if row + 1 < rows.end {
                prefetch_token(simd, &inputs.token(row + 1, head, &columns));
            }
            let v = load_vectors::<S, P>(simd, token.v);
            let mut u = [simd.splat(0.0); P];
            for p in 0..P {
                u[p] = simd.mul(simd.splat(token.factor), v[p]);
            }
            let sums = if index == 0 {
                decay_and_add_to::<S, P, KEYS>(simd, old, new, &token, u, rows.len() == 1)
            } else {
                decay_and_add::<S, P, KEYS>(simd, new, &token, u)
            };
            store_outputs(simd, inputs.attention, head, v, sums, out.row(index));
        }
    }

    /// Advances the state by the rule [`UpdateRule::Delta`]: the first row in two passes, and one pass for each later row,
    /// which also adds the update of the row before; then the last update.
    #[inline(always)]
    fn delta<S: Simd, const KEYS: bool>(self, simd: S) {
        let Self { inputs, step: Step { rows, old, new, mut out } } = self;
        let (head, columns) = (out.columns().start / inputs.attention.value_dim, out.columns());
        let (old, new) = (matrix::<P>(old), matrix_mut::<P>(new));
        // Key and update of the row before, which are not in the state yet.
        let mut pending: Option<(&[f32], [S::F32; P])> = None;
        for (index, row) in rows.clone().enumerate() {
            let token = inputs.token(row, head, &columns);
            if row + 1 < rows.end {
                prefetch_token(simd, &inputs.token(row + 1, head, &columns));
            }
            let [predictions, mut sums] = match pending {
                _ if index == 0 => decay_and_read::<S, P, KEYS>(simd, old, &token),
                None => add_decay_and_read::<S, P, KEYS, false>(simd, new, &token, token.k, [simd.splat(0.0); P]),
                Some((k, u)) => add_decay_and_read::<S, P, KEYS, true>(simd, new, &token, k, u),
            };
            let v = load_vectors::<S, P>(simd, token.v);
            let qk = simd.splat(dot(simd, token.q, token.k));
            let mut u = [simd.splat(0.0); P];
            for p in 0..P {
                u[p] = simd.mul(simd.splat(token.factor), simd.sub(v[p], predictions[p]));
                sums[p] = simd.mul_add(qk, u[p], sums[p]);
            }
            store_outputs(simd, inputs.attention, head, v, sums, out.row(index));
            if index == 0 {
                decay_and_add_to::<S, P, KEYS>(simd, old, new, &token, u, rows.len() == 1);
            } else {
                pending = Some((token.k, u));
            }
        }
        if let Some((k, u)) = pending {
            for (s, k) in new.iter_mut().zip(k) {
                for p in 0..P {
                    let value = simd.mul_add(simd.splat(*k), u[p], simd.load(&s[p]));
                    simd.store(value, &mut s[p]);
                }
            }
        }
    }
}

/// Returns the state of a part by row and vector.
#[inline(always)]
fn matrix<const P: usize>(state: &[f32]) -> &[[[f32; LANES]; P]] {
    state.as_chunks::<LANES>().0.as_chunks::<P>().0
}

/// Returns the state of a part by row and vector, to be written.
#[inline(always)]
fn matrix_mut<const P: usize>(state: &mut [f32]) -> &mut [[[f32; LANES]; P]] {
    state.as_chunks_mut::<LANES>().0.as_chunks_mut::<P>().0
}

/// Decays the state and adds the update `k u^T`. Returns the product of the new state with the query of `token`.
#[inline(always)]
fn decay_and_add<S: Simd, const P: usize, const KEYS: bool>(
    simd: S,
    state: &mut [[[f32; LANES]; P]],
    token: &Token<'_>,
    u: [S::F32; P],
) -> [S::F32; P] {
    let mut sums = [simd.splat(0.0); P];
    let same = simd.splat(token.decay[0]);
    for (i, ((s, k), q)) in state.iter_mut().zip(token.k).zip(token.q).enumerate() {
        let decay = if KEYS { simd.splat(token.decay[i]) } else { same };
        let (k, q) = (simd.splat(*k), simd.splat(*q));
        for p in 0..P {
            let value = simd.mul_add(k, u[p], simd.mul(decay, simd.load(&s[p])));
            simd.store(value, &mut s[p]);
            sums[p] = simd.mul_add(q, value, sums[p]);
        }
    }
    sums
}

/// Decays an `old` state and adds the update `k u^T`, into a `new` one. Returns the product of the new state with the query
/// of `token`. A state that is `complete` is written past the caches: the next step reads it after all weights.
#[inline(always)]
fn decay_and_add_to<S: Simd, const P: usize, const KEYS: bool>(
    simd: S,
    old: &[[[f32; LANES]; P]],
    new: &mut [[[f32; LANES]; P]],
    token: &Token<'_>,
    u: [S::F32; P],
    complete: bool,
) -> [S::F32; P] {
    let mut sums = [simd.splat(0.0); P];
    let same = simd.splat(token.decay[0]);
    for (i, (((old, new), k), q)) in old.iter().zip(new).zip(token.k).zip(token.q).enumerate() {
        let decay = if KEYS { simd.splat(token.decay[i]) } else { same };
        let (k, q) = (simd.splat(*k), simd.splat(*q));
        for p in 0..P {
            let value = simd.mul_add(k, u[p], simd.mul(decay, simd.load(&old[p])));
            if complete {
                simd.store_nontemporal(value, &mut new[p]);
            } else {
                simd.store(value, &mut new[p]);
            }
            sums[p] = simd.mul_add(q, value, sums[p]);
        }
    }
    simd.fence();
    sums
}

/// Returns the products of the decayed state with the key and with the query of `token`.
#[inline(always)]
fn decay_and_read<S: Simd, const P: usize, const KEYS: bool>(
    simd: S,
    state: &[[[f32; LANES]; P]],
    token: &Token<'_>,
) -> [[S::F32; P]; 2] {
    let mut products = [[simd.splat(0.0); P]; 2];
    let same = simd.splat(token.decay[0]);
    for (i, ((s, k), q)) in state.iter().zip(token.k).zip(token.q).enumerate() {
        let decay = if KEYS { simd.splat(token.decay[i]) } else { same };
        let (k, q) = (simd.splat(*k), simd.splat(*q));
        for p in 0..P {
            let value = simd.mul(decay, simd.load(&s[p]));
            products[0][p] = simd.mul_add(k, value, products[0][p]);
            products[1][p] = simd.mul_add(q, value, products[1][p]);
        }
    }
    products
}

/// Adds the update `k u^T` to the state if it is `PENDING`, then decays the state. Returns the products of the decayed
/// state with the key and with the query of `token`.
#[inline(always)]
fn add_decay_and_read<S: Simd, const P: usize, const KEYS: bool, const PENDING: bool>(
    simd: S,
    state: &mut [[[f32; LANES]; P]],
    token: &Token<'_>,
    k: &[f32],
    u: [S::F32; P],
) -> [[S::F32; P]; 2] {
    let mut products = [[simd.splat(0.0); P]; 2];
    let same = simd.splat(token.decay[0]);
    for (i, (((s, k), next_k), next_q)) in state.iter_mut().zip(k).zip(token.k).zip(token.q).enumerate() {
        let decay = if KEYS { simd.splat(token.decay[i]) } else { same };
        let (k, next_k, next_q) = (simd.splat(*k), simd.splat(*next_k), simd.splat(*next_q));
        for p in 0..P {
            let mut value = simd.load(&s[p]);
            if PENDING {
                value = simd.mul_add(k, u[p], value);
            }
            value = simd.mul(decay, value);
            simd.store(value, &mut s[p]);
            products[0][p] = simd.mul_add(next_k, value, products[0][p]);
            products[1][p] = simd.mul_add(next_q, value, products[1][p]);
        }
    }
    products
}

/// Stores the outputs of a row: `sums`, and the values `v` times the head's skip factor.
#[inline(always)]
fn store_outputs<S: Simd, const P: usize>(
    simd: S,
    attention: &LinearAttention<'_>,
    head: usize,
    v: [S::F32; P],
    mut sums: [S::F32; P],
    out: &mut [f32],
) {
    if let Some(skip) = attention.skip {
        let skip = simd.splat(skip[head]);
        for p in 0..P {
            sums[p] = simd.mul_add(skip, v[p], sums[p]);
        }
    }
    store_vectors(simd, sums, out);
}

/// Prefetches what a later row reads: rows are far apart in memory.
#[inline(always)]
fn prefetch_token<S: Simd>(simd: S, token: &Token<'_>) {
    prefetch(simd, token.q);
    prefetch(simd, token.k);
    prefetch(simd, token.v);
    prefetch(simd, token.decay);
}

/// Returns the dot product of two vectors, summed in two chains of vectors.
#[inline(always)]
fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [simd.splat(0.0); 2];
    for (index, (a, b)) in a.chunks(LANES).zip(b.chunks(LANES)).enumerate() {
        let sum = &mut sums[index % 2];
        *sum = simd.mul_add(load_up_to(simd, a), load_up_to(simd, b), *sum);
    }
    simd.reduce_add(simd.add(sums[0], sums[1]))
}
