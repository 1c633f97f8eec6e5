//! LoRA adapters (Hu et al. 2021), as PEFT saves them: a linear layer computes `x W^T + b + scale * (x A^T) B^T`.
//!
//! An adapter is reference-counted: a request keeps its adapter until it ends, even if the name is unloaded meanwhile.
//! An adapter refers to linear layers by the numbers of [`crate::weights::Site`]s, so it fits only the model that it
//! was loaded for.

mod config;
mod error;
mod load;
mod names;

use std::collections::BTreeMap;
use std::fmt;

use ferrule_kernels::PackedMatrix;

pub use config::AdapterConfig;
pub use error::{AdapterError, TensorError};
pub use load::AdapterLoader;

use crate::fingerprint::Parts;

/// Low-rank update of some outputs of a linear layer: `scale * (x A^T) B^T`.
pub(crate) struct LowRank<M = PackedMatrix> {
    /// `[rank, inputs]`
    pub a: M,
    /// `[outputs, rank]`
    pub b: M,
    /// First of these outputs in the linear layer.
    pub first_output: usize,
    pub scale: f32,
}

/// Low-rank update of the projection from a latent to each head's keys and values, which queries are multiplied
/// with transposed; see [`crate::weights::Projections::Latent`].
pub(crate) struct HeadsLowRank<M = PackedMatrix> {
    /// `[rank, kv_rank]`
    pub a: M,
    /// A transposed: `[kv_rank, rank]`.
    pub a_transposed: M,
    /// For each head, from its query to the rank: `[rank, nope_dim]`.
    pub keys: Vec<M>,
    /// For each head, from the rank to its values: `[value_dim, rank]`.
    pub values: Vec<M>,
    pub scale: f32,
}

/// Everything that an adapter adds, by site number.
pub(crate) struct Updates<M = PackedMatrix> {
    pub linear: BTreeMap<usize, Vec<LowRank<M>>>,
    pub heads: BTreeMap<usize, HeadsLowRank<M>>,
}

/// An adapter that is loaded for one model.
pub struct Adapter {
    pub(crate) updates: Updates,
    fingerprint: [u8; 32],
    rank: usize,
    modules: Vec<String>,
}

impl Adapter {
    /// Creates an adapter that adds nothing, with a given fingerprint, for fake models in tests.
    #[must_use]
    pub fn of_nothing(fingerprint: [u8; 32]) -> Self {
        let updates = Updates { linear: BTreeMap::new(), heads: BTreeMap::new() };
        Self { updates, fingerprint, rank: 0, modules: Vec::new() }
    }

    /// Returns the fingerprint of everything that the adapter adds, whatever its name and file. Sequences share pages
    /// of the KV cache only if their fingerprints are equal.
    #[must_use]
    pub fn fingerprint(&self) -> &[u8; 32] {
        &self.fingerprint
    }

    /// Returns the largest rank of its matrices.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the names of the modules that it changes, sorted, as its file names them.
    #[must_use]
    pub fn modules(&self) -> &[String] {
        &self.modules
    }

    /// Returns the bytes of its packed matrices.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.updates.matrices().iter().map(|matrix| matrix.bytes() as u64).sum()
    }
}

/// Adapters are equal if they add the same.
impl PartialEq for Adapter {
    fn eq(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint
    }
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapter")
            .field("rank", &self.rank)
            .field("modules", &self.modules.len())
            .finish_non_exhaustive()
    }
}

impl Updates {
    /// Returns all matrices, in a fixed order.
    fn matrices(&self) -> Vec<&PackedMatrix> {
        let linear = self.linear.values().flatten().flat_map(|update| [&update.a, &update.b]);
        let heads = self.heads.values().flat_map(|update| {
            let HeadsLowRank { a, a_transposed, keys, values, .. } = update;
            [a, a_transposed].into_iter().chain(keys).chain(values)
        });
        linear.chain(heads).collect()
    }

    /// Hashes places, scales and matrices.
    fn fingerprint(&self) -> [u8; 32] {
        let mut hasher = Parts::new("ferrule fingerprint of an adapter");
        hasher.number(self.linear.values().map(Vec::len).sum());
        for (site, updates) in &self.linear {
            for LowRank { first_output, scale, .. } in updates {
                hasher.number(*site);
                hasher.number(*first_output);
                hasher.floats(&[*scale]);
            }
        }
        for (site, HeadsLowRank { scale, .. }) in &self.heads {
            hasher.number(*site);
            hasher.floats(&[*scale]);
        }
        for matrix in self.matrices() {
            hasher.shape(matrix);
            matrix.buffers().for_each(|bytes| hasher.bytes(bytes));
        }
        hasher.finish()
    }
}
