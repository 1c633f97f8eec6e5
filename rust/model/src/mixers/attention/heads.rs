//! Multi-head attention with grouped keys and values (MHA, GQA, MQA).

use ferrule_kernels::elementwise::clip;
use ferrule_kernels::indexer::Selection;
use ferrule_kernels::kv::{KvShape, KvStore};
use ferrule_kernels::{PackedMatrix, PoolError, Rows, RowsMut};
use serde::{Deserialize, Serialize};

use super::{AttentionPass, InnerBuffers};
use crate::layer::{adapted, norm_heads};
use crate::limits::{SpecError, positive, require, size};
use crate::spec::{HeadNormSpec, NormSpec, NormedOver, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};

/// Multi-head or grouped-query attention: queries, keys and values are projected from the input.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct HeadProjections {
    /// Number of key-value heads, a divisor of the number of query heads.
    pub kv_heads: usize,
    /// Length of a query or key head.
    pub key_dim: usize,
    /// Length of a value head.
    pub value_dim: usize,
    /// Whether the projections add a bias.
    pub bias: bool,
    /// Whether the values are the projected keys, before their norm and rotation; there is no projection to values.
    pub values_are_keys: bool,
    /// Norms of queries and keys.
    pub qk_norm: Option<HeadNormSpec>,
    /// Norm of each value head.
    pub v_norm: Option<NormSpec>,
    /// Largest magnitude of queries, keys and values after their norms.
    pub clip: Option<f32>,
}

/// Weights of multi-head attention.
pub(crate) struct Heads<M = PackedMatrix> {
    /// Rows: all query heads; all key heads, and all value heads unless the values are the keys, unless keys and values
    /// are another layer's.
    qkv: Linear<M>,
    /// Norms of queries and, unless they are another layer's, of keys.
    norms: Vec<Norm>,
    /// Norm of each value head.
    v_norm: Option<Norm>,
}

impl HeadProjections {
    /// Checks the projections of an attention with `heads` query heads, which reads the keys and values of another layer
    /// if `shared`.
    pub(super) fn check(&self, path: &str, heads: usize, shared: bool) -> Result<(), SpecError> {
        let Self { kv_heads, key_dim, value_dim, .. } = *self;
        let path = format!("{path}.projections");
        size(&format!("{path}.kv_heads"), kv_heads)?;
        for (name, dim) in [("key_dim", key_dim), ("value_dim", value_dim)] {
            size(&format!("{path}.{name}"), dim)?;
            size(&format!("heads * {path}.{name}"), heads * dim)?;
        }
        require(&format!("{path}.kv_heads"), kv_heads, heads.is_multiple_of(kv_heads), || {
            format!("a divisor of heads ({heads})")
        })?;
        require(&format!("{path}.value_dim"), value_dim, !self.values_are_keys || value_dim == key_dim, || {
            format!("key_dim ({key_dim}) where the values are the keys")
        })?;
        for (name, given) in [("values_are_keys", self.values_are_keys), ("v_norm", self.v_norm.is_some())] {
            require(&format!("{path}.{name}"), given, !(given && shared), || {
                "absent where keys and values are another layer's".to_owned()
            })?;
        }
        positive(&format!("{path}.clip"), self.clip)?;
        check_norm(&format!("{path}.v_norm"), self.v_norm)?;
        check_norm(&format!("{path}.qk_norm"), self.qk_norm.map(|qk_norm| qk_norm.norm))
    }

    /// Returns the shape of what the KV cache stores per token.
    pub(super) fn kv_shape(&self) -> KvShape {
        KvShape { layers: 1, kv_heads: self.kv_heads, key_dim: self.key_dim, value_dim: self.value_dim, index_dim: 0 }
    }

    /// Returns the floats per row in buffers, of an attention with `heads` query heads.
    pub(super) fn floats(&self, heads: usize) -> usize {
        (heads + self.kv_heads) * self.key_dim + self.kv_heads * self.value_dim + heads * self.value_dim
    }

    /// Loads the projections of an attention with `heads` query heads from an input of `columns`; only that to queries if
    /// `shared`.
    pub(super) fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        (at, columns): (&str, usize),
        heads: usize,
        shared: bool,
    ) -> Result<Heads<P::Matrix>, LoadError> {
        let HeadProjections { kv_heads, key_dim, value_dim, bias, values_are_keys, qk_norm, .. } = *self;
        let (usual, values) = (loader.usual(), loader.values());
        let parts = [
            ("q", heads * key_dim, usual),
            ("k", kv_heads * key_dim, if values_are_keys { values } else { usual }),
            ("v", kv_heads * value_dim, values),
        ];
        let parts = match (shared, values_are_keys) {
            (true, _) => &parts[..1],
            (false, true) => &parts[..2],
            (false, false) => &parts[..],
        };
        let qkv = loader.linear(packer, at, parts, columns, bias)?;
        let norms = match qk_norm {
            None => Vec::new(),
            Some(HeadNormSpec { norm, over, .. }) => {
                let width = |heads| if over == NormedOver::Head { key_dim } else { heads * key_dim };
                let roles = [("q_norm", heads), ("k_norm", kv_heads)];
                let roles = roles.into_iter().take(if shared { 1 } else { 2 });
                let norms = roles.map(|(role, heads)| loader.norm(&format!("{at}{role}"), norm, width(heads)));
                norms.collect::<Result<_, _>>()?
            }
        };
        Ok(Heads { qkv, norms, v_norm: loader.optional_norm(&format!("{at}v_norm"), self.v_norm, value_dim)? })
    }
}

impl<M> Heads<M> {
    pub(super) fn list<'a>(&'a self, tensors: &mut Tensors<'a, M>) {
        tensors.linear(&self.qkv);
        self.norms.iter().chain(&self.v_norm).for_each(|norm| tensors.norm(norm));
    }
}

impl AttentionPass<'_> {
    /// Runs multi-head attention and returns `[rows, heads * value_dim]`.
    pub(super) fn heads<'b>(
        &self,
        (store, selection): (&mut KvStore, &mut Selection),
        weights: &Heads,
        spec: &HeadProjections,
        x: &[f32],
        buffers: &'b mut InnerBuffers,
    ) -> Result<&'b mut [f32], PoolError> {
        let HeadProjections { kv_heads, key_dim, value_dim, values_are_keys, .. } = *spec;
        let (exec, heads, width) = (&self.pass.exec, self.spec.heads, weights.qkv.outputs);
        let InnerBuffers { qkv, values, mixed, indexer, .. } = buffers;
        let qkv = qkv.take(self.pass.rows.count * width);
        adapted(exec, &weights.qkv, self.pass.adapters, x, qkv)?;
        let (first_key, first_value) = (heads * key_dim, (heads + kv_heads) * key_dim);
        let shared = self.spec.kv_layer.is_some();
        let values_width = if values_are_keys { kv_heads * value_dim } else { 0 };
        let values = values.take(self.pass.rows.count * values_width);
        if values_are_keys {
            let keys = qkv.chunks_exact(width).map(|row| &row[first_key..]);
            values.chunks_exact_mut(values_width).zip(keys).for_each(|(values, keys)| values.copy_from_slice(keys));
        }
        let rotated = [(0, heads), (first_key, kv_heads)];
        let rotated = if shared { &rotated[..1] } else { &rotated[..] };
        let rotate = |qkv: &mut [f32]| {
            rotated.iter().try_for_each(|&(first, heads)| {
                self.rotate(self.spec.rope, RowsMut::new(qkv, width, first), heads, key_dim)
            })
        };
        let after_rope = spec.qk_norm.is_some_and(|qk_norm| qk_norm.after_rope);
        if after_rope {
            rotate(qkv)?;
        }
        if let Some(qk_norm) = spec.qk_norm {
            for (&(first, heads), norm) in rotated.iter().zip(&weights.norms) {
                let (heads, dim) =
                    if qk_norm.over == NormedOver::Heads { (1, heads * key_dim) } else { (heads, key_dim) };
                norm_heads(exec, norm, RowsMut::new(qkv, width, first), heads, dim)?;
            }
        }
        if let Some(norm) = &weights.v_norm {
            let rows = match values_are_keys {
                true => RowsMut::new(values, values_width, 0),
                false => RowsMut::new(qkv, width, first_value),
            };
            norm_heads(exec, norm, rows, kv_heads, value_dim)?;
        }
        if let Some(limit) = spec.clip {
            clip(exec, RowsMut::new(qkv, width, 0), width, limit)?;
            if values_are_keys {
                clip(exec, RowsMut::new(values, values_width, 0), values_width, limit)?;
            }
        }
        if !after_rope {
            rotate(qkv)?;
        }
        self.choose(store, selection, x, None, indexer)?;
        self.grow(RowsMut::new(qkv, width, 0), first_key)?;
        let view = |first| Rows::new(qkv, width, first);
        let values = || if values_are_keys { Rows::new(values, values_width, 0) } else { view(first_value) };
        let own = (!shared).then(|| [view(first_key), values()]);
        self.attend((store, selection), view(0), own, mixed)
    }
}
