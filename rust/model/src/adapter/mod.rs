//! Low-rank adapters (Hu et al. 2021), as PEFT saves them: a linear map gives `x W^T + b + scale * (x A^T) B^T`.
//!
//! An adapter belongs to whoever holds it: a request that has one keeps it to its end, whatever becomes of its name. It
//! knows its places by the numbers of [`crate::weights::Site`]s, so that it fits the model that it was loaded for alone.

mod config;
mod error;
mod load;
mod names;

use std::collections::BTreeMap;
use std::fmt;

use ferrule_kernels::PackedMatrix;

pub use config::AdapterConfig;
pub use error::{AdapterError, TensorFault};
pub use load::AdapterLoader;

use crate::fingerprint::Parts;

/// What is added to some outputs of a linear map: `scale * (x A^T) B^T`.
pub(crate) struct LowRank<M = PackedMatrix> {
    /// `[rank, inputs]`
    pub a: M,
    /// `[outputs, rank]`
    pub b: M,
    /// The first of these outputs among the map's.
    pub first_output: usize,
    pub scale: f32,
}

/// The same for the matrix that leads from a latent to each head's keys and values, which queries go through the other
/// way round; see [`crate::weights::Projections::Latent`].
pub(crate) struct HeadsLowRank<M = PackedMatrix> {
    /// `[rank, kv_rank]`
    pub a: M,
    /// `[kv_rank, rank]`
    pub a_turned: M,
    /// For each head what leads from its query to the rank: `[rank, nope_dim]`.
    pub keys: Vec<M>,
    /// For each head what leads from the rank to its values: `[value_dim, rank]`.
    pub values: Vec<M>,
    pub scale: f32,
}

/// All that an adapter adds, by the numbers of sites.
pub(crate) struct Updates<M = PackedMatrix> {
    pub linear: BTreeMap<usize, Vec<LowRank<M>>>,
    pub heads: BTreeMap<usize, HeadsLowRank<M>>,
}

/// An adapter for one model, loaded.
pub struct Adapter {
    pub(crate) updates: Updates,
    fingerprint: [u8; 32],
    rank: usize,
    modules: Vec<String>,
}

impl Adapter {
    /// One that adds nothing, under a fingerprint: for fakes of a model, which have nothing else to tell two apart by.
    #[must_use]
    pub fn of_nothing(fingerprint: [u8; 32]) -> Self {
        let updates = Updates { linear: BTreeMap::new(), heads: BTreeMap::new() };
        Self { updates, fingerprint, rank: 0, modules: Vec::new() }
    }

    /// Names all that it adds, whatever it is called and wherever it came from: keys and values are exchanged between
    /// sequences of one fingerprint only.
    #[must_use]
    pub fn fingerprint(&self) -> &[u8; 32] {
        &self.fingerprint
    }

    /// The largest rank of its matrices.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The base's modules that it changes, sorted, as its file names them.
    #[must_use]
    pub fn modules(&self) -> &[String] {
        &self.modules
    }

    /// Bytes of its packed matrices.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.updates.matrices().iter().map(|matrix| matrix.bytes() as u64).sum()
    }
}

/// Adapters are the same where they add the same.
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
    /// Every matrix, in one order.
    fn matrices(&self) -> Vec<&PackedMatrix> {
        let linear = self.linear.values().flatten().flat_map(|update| [&update.a, &update.b]);
        let heads = self.heads.values().flat_map(|update| {
            let HeadsLowRank { a, a_turned, keys, values, .. } = update;
            [a, a_turned].into_iter().chain(keys).chain(values)
        });
        linear.chain(heads).collect()
    }

    /// Hashes places, factors and matrices.
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
