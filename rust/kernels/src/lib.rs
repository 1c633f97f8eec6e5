//! CPU kernels of ferrule: instruction-set dispatch, thread pool, packed weights, matmul, attention, norms.
//!
//! This is the lowest layer and the only crate with SIMD `unsafe`. It works on tensors and KV pages and does not know
//! models.
//!
//! All kernels are batch invariant: **the sequence of floating-point operations behind an output element depends only
//! on the weight format, the instruction set and K**, not on the number of rows, on tiling, on the number of threads or
//! on the other requests in the batch.

pub mod activation;
pub mod arch;
pub mod attention;
mod cancel;
pub mod disjoint;
pub mod elementwise;
pub mod entries;
mod hessian;
pub mod indexer;
pub mod kv;
pub mod logits;
pub mod machine;
mod math;
mod matmul;
mod matrix;
pub mod memory;
pub mod norm;
mod pool;
pub mod probe;
mod prune;
pub mod quant;
pub mod rope;
mod rows;
pub mod scan;

/// Version of the bits that kernels compute. Keys and values stored outside the process are valid only under the version
/// that computed them. Increment it with every change of any result bit on any instruction set, and with every change
/// of the memory layout of K, V or packed weights.
pub const ARITHMETIC_VERSION: u32 = 6;

pub use cancel::Cancel;
pub use hessian::{Basis, CalibrationError, Hessian, InputNorms, InputStatistics};
pub use matmul::{Product, matmul, matmul_each};
pub use matrix::{BufferError, LAYOUT_VERSION, PackError, PackedMatrix, RowSource};
pub use memory::{AllocError, BytesOwner, Scratch, SharedBytes};
pub use pool::{Binding, Exec, Pool, PoolError};
pub use prune::{CodeGrid, PrunedMatrix, Sparsity, SparsityError};
pub use quant::Format;
pub use rows::{Rows, RowsMut, for_row_chunks};
