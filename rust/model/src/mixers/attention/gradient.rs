//! Gradients through multi-head attention.

use std::sync::{Mutex, PoisonError};

use ferrule_kernels::rope::{Rope, rope_in_place};
use ferrule_kernels::{Exec, PoolError, RowsMut};

use super::{Attention, AttentionSpec, Heads, Projections, ProjectionsSpec};
use crate::layer::{SeeGradients, linear, linear_gradient, norm_gradient, norm_heads};
use crate::mixers::MixerPass;
use crate::rope::{RopeRows, RopeSpec};
use crate::spec::{HeadNormSpec, NormedOver};
use crate::weights::LoadError;

/// Rows of all heads of one kind.
struct View {
    /// First column in the rows of the projections.
    first: usize,
    heads: usize,
    dim: usize,
}

/// Gradients with respect to the queries, keys and values of one head of keys: `[rows, columns]` each.
type HeadGradients = [Vec<f32>; 3];

impl AttentionSpec {
    /// Returns whether [`AttentionSpec::gradient_of`] can compute the gradients.
    pub(super) fn is_plain(&self) -> bool {
        let ProjectionsSpec::Heads(heads) = &self.projections else { return false };
        let is_known = |norm: HeadNormSpec| !norm.after_rope && norm.over != NormedOver::EachHead;
        let plain_heads = !heads.values_are_keys && heads.v_norm.is_none() && heads.clip.is_none();
        let chooses = self.indexer.is_some() || self.selection_layer.is_some() || self.kv_layer.is_some();
        let plain_scores = self.chunk.is_none() && self.alibi_slopes.is_none() && !self.sinks && !chooses;
        let plain_outputs = self.output_gate.is_none() && self.output_norm.is_none() && self.query_growth.is_none();
        plain_heads && heads.qk_norm.is_none_or(is_known) && plain_scores && plain_outputs
    }

    /// Returns the gradient with respect to `x`; see [`Mixer::gradient`](crate::mixers::Mixer::gradient).
    pub(super) fn gradient_of(
        &self,
        weights: &Attention,
        pass: &MixerPass<'_>,
        x: &[f32],
        gradient: &[f32],
        see: &mut SeeGradients<'_>,
    ) -> Result<Vec<f32>, LoadError> {
        let (Projections::Heads(projections), ProjectionsSpec::Heads(spec)) = (&weights.projections, &self.projections)
        else {
            unreachable!("only plain attention has gradients")
        };
        let (exec, width, count) = (&pass.exec, projections.qkv.outputs, pass.rows.count);
        let (queries, keys) = (self.heads * spec.key_dim, spec.kv_heads * spec.key_dim);
        let rotated = [
            View { first: 0, heads: self.heads, dim: spec.key_dim },
            View { first: queries, heads: spec.kv_heads, dim: spec.key_dim },
        ];
        let mut projected = vec![0.0; count * width];
        linear(exec, &projections.qkv, x, &mut projected)?;
        let mut qkv = projected.clone();
        for (view, norm) in rotated.iter().zip(&projections.norms) {
            let (heads, dim) = view.normed(spec.qk_norm);
            norm_heads(exec, norm, RowsMut::new(&mut qkv, width, view.first), heads, dim)?;
        }
        self.rotate_views(pass, &rotated, &mut qkv, width, 1.0)?;

        see(exec, &weights.output, gradient)?;
        let mixed = linear_gradient(exec, &weights.output, gradient)?;
        let found: Vec<_> = (0..spec.kv_heads).map(|_| Mutex::new(None)).collect();
        let causal = pass.causal;
        exec.run(spec.kv_heads, |head| {
            let gradients = self.head_gradients((causal, count), (head, &qkv, width), &mixed);
            *found[head].lock().unwrap_or_else(PoisonError::into_inner) = Some(gradients);
        })?;

        let mut gradients = vec![0.0; count * width];
        let group = self.heads / spec.kv_heads;
        for (head, found) in found.into_iter().enumerate() {
            let found = found.into_inner().unwrap_or_else(PoisonError::into_inner).expect("each head was computed");
            let places = [
                (head * group * spec.key_dim, group * spec.key_dim),
                (queries + head * spec.key_dim, spec.key_dim),
                (queries + keys + head * spec.value_dim, spec.value_dim),
            ];
            for ((first, columns), of_part) in places.into_iter().zip(found) {
                let rows = gradients.chunks_exact_mut(width).zip(of_part.chunks_exact(columns));
                rows.for_each(|(row, from)| row[first..first + columns].copy_from_slice(from));
            }
        }
        self.rotate_views(pass, &rotated, &mut gradients, width, -1.0)?;
        norms_gradient(exec, projections, spec.qk_norm, &rotated, (&projected, width), &mut gradients)?;
        see(exec, &projections.qkv, &gradients)?;
        linear_gradient(exec, &projections.qkv, &gradients)
    }

    /// Rotates queries and keys forwards, or backwards if `sign` is -1.
    fn rotate_views(
        &self,
        pass: &MixerPass<'_>,
        views: &[View],
        x: &mut [f32],
        width: usize,
        sign: f32,
    ) -> Result<(), PoolError> {
        let Some(index) = self.rope else { return Ok(()) };
        let RopeSpec { rotary_dim, interleaved, .. } = pass.ropes[index];
        let RopeRows { cos, sin } = &pass.rows.ropes[index];
        let sin: Vec<f32> = sin.iter().map(|sin| sign * sin).collect();
        views.iter().try_for_each(|&View { first, heads, dim }| {
            let rope = Rope { heads, head_dim: dim, first: 0, rotary_dim, interleaved, cos, sin: &sin };
            rope_in_place(&pass.exec, RowsMut::new(x, width, first), &rope)
        })
    }

    /// Returns the gradients of one head of keys from those of the outputs of attention, `[rows, heads * value_dim]`.
    fn head_gradients(
        &self,
        (causal, count): (bool, usize),
        (head, qkv, width): (usize, &[f32], usize),
        mixed: &[f32],
    ) -> HeadGradients {
        let ProjectionsSpec::Heads(spec) = &self.projections else {
            unreachable!("only plain attention has gradients")
        };
        let (group, key_dim, value_dim) = (self.heads / spec.kv_heads, spec.key_dim, spec.value_dim);
        let first_key = (self.heads + head) * key_dim;
        let first_value = (self.heads + spec.kv_heads) * key_dim + head * value_dim;
        let key = |row: usize| &qkv[row * width + first_key..][..key_dim];
        let value = |row: usize| &qkv[row * width + first_value..][..value_dim];
        let mut queries = vec![0.0; count * group * key_dim];
        let (mut keys, mut values) = (vec![0.0; count * key_dim], vec![0.0; count * value_dim]);
        let (mut shares, mut slopes) = (Vec::new(), Vec::new());
        for row in 0..count {
            let window = self.window.unwrap_or(count);
            let first = (row + 1).saturating_sub(window);
            let end = if causal { row + 1 } else { count.min(row + window) };
            for query_head in 0..group {
                let number = head * group + query_head;
                let query = &qkv[row * width + number * key_dim..][..key_dim];
                let output = &mixed[(row * self.heads + number) * value_dim..][..value_dim];
                shares.clear();
                slopes.clear();
                for other in first..end {
                    let score = self.scale * dot(query, key(other));
                    let (score, slope) = match self.softcap {
                        Some(cap) => {
                            let capped = (score / cap).tanh();
                            (cap * capped, self.scale * (1.0 - capped * capped))
                        }
                        None => (score, self.scale),
                    };
                    shares.push(score);
                    slopes.push(slope);
                }
                let most = shares.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                shares.iter_mut().for_each(|share| *share = (*share - most).exp());
                let total = shares.iter().sum::<f32>();
                shares.iter_mut().for_each(|share| *share /= total);
                // Gradients with respect to the shares, and then to the products of queries and keys.
                let of_shares: Vec<f32> = (first..end).map(|other| dot(output, value(other))).collect();
                let mean = dot(&shares, &of_shares);
                let query_gradient = &mut queries[(row * group + query_head) * key_dim..][..key_dim];
                for (index, other) in (first..end).enumerate() {
                    let of_product = shares[index] * (of_shares[index] - mean) * slopes[index];
                    add(query_gradient, of_product, key(other));
                    add(&mut keys[other * key_dim..][..key_dim], of_product, query);
                    add(&mut values[other * value_dim..][..value_dim], shares[index], output);
                }
            }
        }
        [queries, keys, values]
    }
}

impl View {
    /// Returns the number of heads that are normed, and the columns of each.
    fn normed(&self, norm: Option<HeadNormSpec>) -> (usize, usize) {
        match norm {
            Some(HeadNormSpec { over: NormedOver::Heads, .. }) => (1, self.heads * self.dim),
            _ => (self.heads, self.dim),
        }
    }
}

/// Turns the gradients with respect to normed queries and keys into those with respect to the projections.
fn norms_gradient(
    exec: &Exec<'_>,
    projections: &Heads,
    norm: Option<HeadNormSpec>,
    views: &[View],
    (projected, width): (&[f32], usize),
    gradients: &mut [f32],
) -> Result<(), PoolError> {
    for (view, weights) in views.iter().zip(&projections.norms) {
        let columns = view.first..view.first + view.heads * view.dim;
        let take = |rows: &[f32]| -> Vec<f32> {
            rows.chunks_exact(width).flat_map(|row| &row[columns.clone()]).copied().collect()
        };
        let (x, mut of_view) = (take(projected), take(gradients));
        norm_gradient(exec, Some(weights), &x, view.normed(norm).1, &mut of_view)?;
        let rows = gradients.chunks_exact_mut(width).zip(of_view.chunks_exact(columns.len()));
        rows.for_each(|(row, from)| row[columns.clone()].copy_from_slice(from));
    }
    Ok(())
}

/// Returns the product of two vectors, in eight sums, which vector instructions add at once.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; 8];
    for (a, b) in a.chunks(sums.len()).zip(b.chunks(sums.len())) {
        sums.iter_mut().zip(a).zip(b).for_each(|((sum, a), b)| *sum += a * b);
    }
    sums.iter().sum()
}

/// Computes `to += factor * x`.
fn add(to: &mut [f32], factor: f32, x: &[f32]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
}
