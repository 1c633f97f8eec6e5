//! Linear attention: a matrix S per head, `[key_dim, value_dim]`, that decays, is updated by a key and an update vector of
//! each token, and is read by a query.
//!
//! Columns of S are independent of each other, so a part is 32 columns of one head: with a key dimension of 128 they are
//! 16 KiB, which stay in the first-level cache while all tokens of a segment pass. An element of S is one chain of
//! operations over the tokens; an output is one chain over the rows of S.
//!
//! A decay of the whole head does not touch S: it is multiplied into a scale that is stored beside S, updates are divided by
//! the scale, and outputs multiplied. When the scale leaves its range, S is multiplied by it in the pass of the next token.
//! An element then takes two multiply-adds for each token, and three with the delta rule, as many as in a form over chunks
//! of tokens.
//!
//! By the rule [`UpdateRule::Add`] several tokens pass together, as a product of small matrices: an element of S is loaded
//! once, updated by all of them in registers and stored once.
//!
//! The delta rule reads S twice for each token: for the prediction, then for the update and the output. Both are one pass
//! here: the output `S^T q` is computed from S before the update and from the update vector u, as `S'^T q + (k q) u`, and
//! the update is added in the pass of the next token. The update of the first token is added in a pass from the old state
//! to the new one, which a step of one token therefore reads and writes once in memory.

// Index loops over small arrays of registers are more readable here than iterators over several arrays.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::matrix::{Scale, Token, add_decay_and_read, decay_and_add, decay_and_add_to, decay_and_read, dot, scaled};
use super::{Part, Segment, Step, for_steps, load_vectors, prefetch, store_vectors};
use crate::arch::{Kernel, LANES, Simd};
use crate::rows::{Rows, RowsMut};
use crate::{Exec, PoolError};

/// Number of vectors of columns of a part.
const PART_VECTORS: usize = 2;

/// Columns of a part.
const PART_COLUMNS: usize = PART_VECTORS * LANES;

/// Maximum number of tokens that pass together.
const MAX_TOKENS: usize = 4;

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

    /// Returns the parts, by head and column.
    fn parts(&self) -> Vec<Part> {
        let len = |columns| linear_attention_state_len(1, self.key_dim, columns);
        let head = |head: usize| {
            (0..self.value_dim).step_by(PART_COLUMNS).map(move |first| {
                let end = self.value_dim.min(first + PART_COLUMNS);
                let state = head * len(self.value_dim) + len(first);
                Part {
                    state: state..state + len(end - first),
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

/// Returns the number of f32 of a state of linear attention; columns are padded to whole vectors, and each part has a
/// vector with its scale.
#[must_use]
pub fn linear_attention_state_len(heads: usize, key_dim: usize, value_dim: usize) -> usize {
    heads * (value_dim.next_multiple_of(LANES) * key_dim + value_dim.div_ceil(PART_COLUMNS) * LANES)
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
        if step.out.columns().len() > LANES {
            exec.isa.run(Advance::<PART_VECTORS>::new(inputs, step));
        } else {
            exec.isa.run(Advance::<1>::new(inputs, step));
        }
    })
}

/// Inputs of all parts.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    attention: &'a LinearAttention<'a>,
}

/// Kernel that advances a part of `P` vectors of columns: its state is the scale and `[key_dim, P, LANES]`.
struct Advance<'a, const P: usize> {
    inputs: Inputs<'a>,
    head: usize,
    /// First columns of the head in queries and keys, in outputs of decays by key, and of the part in values.
    first_key: usize,
    first_decay: usize,
    first_value: usize,
    /// Number of columns of the part.
    width: usize,
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

/// Returns how many tokens pass together: as many as fit the registers with their updates and outputs.
const fn tokens_at_once<S: Simd>() -> usize {
    if S::TILE_ROWS * S::TILE_PANELS < 3 * PART_VECTORS * MAX_TOKENS { 1 } else { MAX_TOKENS }
}

impl<'a, const P: usize> Advance<'a, P> {
    fn new(inputs: Inputs<'a>, step: Step<'a>) -> Self {
        let LinearAttention { heads, key_heads, alternating, key_dim, value_dim, .. } = *inputs.attention;
        let Range { start, end } = step.out.columns();
        let head = start / value_dim;
        let key_head = if alternating { head % key_heads } else { head / (heads / key_heads) };
        let (first_key, first_decay) = (key_head * key_dim, head * key_dim);
        Self { inputs, head, first_key, first_decay, first_value: start, width: end - start, step }
    }

    /// Returns the number of rows.
    #[inline(always)]
    fn len(&self) -> usize {
        self.step.rows.len()
    }

    /// Returns the inputs of row `index` of the segment.
    #[inline(always)]
    fn token(&self, index: usize) -> Token<'a> {
        let Inputs { q, k, v, attention } = self.inputs;
        let LinearAttention { heads, key_heads, key_dim, value_dim, decay, factor, .. } = *attention;
        let row = self.step.rows.start + index;
        Token {
            q: &q.row(row, key_heads * key_dim)[self.first_key..][..key_dim],
            k: &k.row(row, key_heads * key_dim)[self.first_key..][..key_dim],
            v: &v.row(row, heads * value_dim)[self.first_value..][..self.width],
            decay: match decay {
                Decay::Constant(factors) => &factors[self.head..][..1],
                Decay::Heads(factors) => &factors.row(row, heads)[self.head..][..1],
                Decay::Keys(factors) => &factors.row(row, heads * key_dim)[self.first_decay..][..key_dim],
            },
            factor: factor.map_or(1.0, |factors| factors.row(row, heads)[self.head]),
        }
    }

    /// Prefetches the inputs of some rows of the segment: rows are far apart in memory.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, simd: S, rows: Range<usize>) {
        for index in rows.start..rows.end.min(self.len()) {
            let Token { q, k, v, decay, .. } = self.token(index);
            for numbers in [q, k, v, decay] {
                prefetch(simd, numbers);
            }
        }
    }

    /// Stores the outputs of row `index` of the segment: `sums`, and the values times the head's skip factor.
    #[inline(always)]
    fn store_outputs<S: Simd>(&mut self, simd: S, index: usize, token: &Token<'_>, mut sums: [S::F32; P]) {
        if let Some(skip) = self.inputs.attention.skip {
            let (skip, v) = (simd.splat(skip[self.head]), load_vectors::<S, P>(simd, token.v));
            for p in 0..P {
                sums[p] = simd.mul_add(skip, v[p], sums[p]);
            }
        }
        store_vectors(simd, sums, self.step.out.row(index));
    }

    /// Advances the state by the rule [`UpdateRule::Add`]: the first row from the old state to the new one, then several
    /// rows in each pass.
    #[inline(always)]
    fn add<S: Simd, const KEYS: bool>(mut self, simd: S) {
        let ((old, mut scale), token) = (Scale::split::<P>(self.step.old), self.token(0));
        let many = tokens_at_once::<S>();
        self.prefetch(simd, 1..1 + many);
        let factor = scale.decay::<KEYS>(&token);
        let u = token.added(simd, scale);
        let (new, _) = Scale::split_mut::<P>(self.step.new);
        let factors = token.factors::<KEYS>(&factor);
        let sums = decay_and_add_to::<S, P, KEYS>(simd, old, new, &token, factors, u, self.step.rows.len() == 1);
        self.store_outputs(simd, 0, &token, scaled(simd, scale, sums));
        let mut index = 1;
        while index < self.len() {
            self.prefetch(simd, index + many..index + 2 * many);
            if many == MAX_TOKENS && self.add_together::<S, KEYS, MAX_TOKENS>(simd, index, &mut scale) {
                index += MAX_TOKENS;
            } else {
                self.add_together::<S, KEYS, 1>(simd, index, &mut scale);
                index += 1;
            }
        }
        Scale::split_mut::<P>(self.step.new).1.fill(scale.0);
    }

    /// Advances the state by `T` rows from row `index` on. Does nothing and returns false if fewer are left, or if elements
    /// must be multiplied by the scale between two of them.
    #[inline(always)]
    fn add_together<S: Simd, const KEYS: bool, const T: usize>(
        &mut self,
        simd: S,
        index: usize,
        scale: &mut Scale,
    ) -> bool {
        if self.len() - index < T {
            return false;
        }
        let mut tokens = [self.token(index); T];
        let mut scales = [*scale; T];
        let factor = scales[0].decay::<KEYS>(&tokens[0]);
        for t in 1..T {
            (tokens[t], scales[t]) = (self.token(index + t), scales[t - 1]);
            if scales[t].decay::<KEYS>(&tokens[t]).is_some() {
                return false;
            }
        }
        *scale = scales[T - 1];
        let mut u = [[simd.splat(0.0); P]; T];
        for t in 0..T {
            u[t] = tokens[t].added(simd, scales[t]);
        }
        let (new, _) = Scale::split_mut::<P>(self.step.new);
        let sums = match factor {
            None => decay_and_add::<S, P, KEYS, false, T>(simd, new, 1.0, &tokens, &u),
            Some(factor) => decay_and_add::<S, P, KEYS, true, T>(simd, new, factor, &tokens, &u),
        };
        for t in 0..T {
            self.store_outputs(simd, index + t, &tokens[t], scaled(simd, scales[t], sums[t]));
        }
        true
    }

    /// Advances the state by the rule [`UpdateRule::Delta`]: a single row in two passes, from the old state to the new one;
    /// several rows in one pass each, which also adds the update of the row before, and then the last update.
    #[inline(always)]
    fn delta<S: Simd, const KEYS: bool>(mut self, simd: S) {
        let ((old, mut scale), mut token) = (Scale::split::<P>(self.step.old), self.token(0));
        let factor = scale.decay::<KEYS>(&token);
        let factors = token.factors::<KEYS>(&factor);
        if self.len() == 1 {
            let products = decay_and_read::<S, P, KEYS>(simd, old, &token, factors);
            let u = self.correct(simd, 0, &token, scale, products);
            let (new, scale_after) = Scale::split_mut::<P>(self.step.new);
            decay_and_add_to::<S, P, KEYS>(simd, old, new, &token, factors, u, true);
            return scale_after.fill(scale.0);
        }
        self.prefetch(simd, 1..2);
        let (new, _) = Scale::split_mut::<P>(self.step.new);
        new.copy_from_slice(old);
        let none = (token.k, [simd.splat(0.0); P]);
        let products = add_decay_and_read::<S, P, KEYS, true, false>(simd, new, &token, factors, none);
        // Update of the row before, which is not in the state yet.
        let mut u = self.correct(simd, 0, &token, scale, products);
        for index in 1..self.len() {
            let pending = (token.k, u);
            token = self.token(index);
            self.prefetch(simd, index + 1..index + 2);
            let factor = scale.decay::<KEYS>(&token);
            let factors = token.factors::<KEYS>(&factor);
            let (new, _) = Scale::split_mut::<P>(self.step.new);
            let products = if KEYS || factor.is_some() {
                add_decay_and_read::<S, P, KEYS, true, true>(simd, new, &token, factors, pending)
            } else {
                add_decay_and_read::<S, P, KEYS, false, true>(simd, new, &token, factors, pending)
            };
            u = self.correct(simd, index, &token, scale, products);
        }
        let (new, scale_after) = Scale::split_mut::<P>(self.step.new);
        for (s, k) in new.iter_mut().zip(token.k) {
            for p in 0..P {
                let value = simd.mul_add(simd.splat(*k), u[p], simd.load(&s[p]));
                simd.store(value, &mut s[p]);
            }
        }
        scale_after.fill(scale.0);
    }

    /// Stores the outputs of row `index` of the segment, given the products of the state before its update with its key and
    /// with its query. Returns the update, divided by the scale of the state.
    #[inline(always)]
    fn correct<S: Simd>(
        &mut self,
        simd: S,
        index: usize,
        token: &Token<'_>,
        scale: Scale,
        products: [[S::F32; P]; 2],
    ) -> [S::F32; P] {
        let (v, mut sums) = (load_vectors::<S, P>(simd, token.v), scaled(simd, scale, products[1]));
        let (predictions, mut u) = (scaled(simd, scale, products[0]), [simd.splat(0.0); P]);
        let (qk, inverse) = (simd.splat(dot(simd, token.q, token.k)), simd.splat(1.0 / scale.0));
        for p in 0..P {
            let update = simd.mul(simd.splat(token.factor), simd.sub(v[p], predictions[p]));
            sums[p] = simd.mul_add(qk, update, sums[p]);
            u[p] = simd.mul(inverse, update);
        }
        self.store_outputs(simd, index, token, sums);
        u
    }
}
