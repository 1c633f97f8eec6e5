//! What touches the machine: instruction sets, the thread pool, packed weights, matmul, attention, norms.
//!
//! The floor below everything else. The only crate with SIMD `unsafe`; knows tensors and pages, not models.
//!
//! The promise that all of it keeps: **the sequence of floating-point operations behind one output element depends on
//! the weight format, the instruction set and K alone** — not on how many rows are computed together, on tiling, on
//! the number of threads or on who shares the batch.

pub mod activation;
pub mod arch;
pub mod attention;
mod cancel;
pub mod disjoint;
pub mod elementwise;
#[cfg(test)]
#[path = "../tests/guard/mod.rs"]
mod guard;
mod hessian;
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
pub mod quant;
pub mod rope;
mod rows;
#[cfg(test)]
mod rowwise_tests;

/// Names the bits that kernels give: keys and values that were kept outside the process are good only under the number
/// under which they were computed. Whoever changes what any kernel computes, in any bit on any instruction set, or how
/// K, V or packed weights lie in memory, raises it.
pub const ARITHMETIC_VERSION: u32 = 3;

pub use cancel::Cancel;
pub use hessian::{CalibrationError, Hessian, InputStatistics};
pub use matmul::{Product, matmul, matmul_each};
pub use matrix::{BufferError, LAYOUT_VERSION, PackError, PackedMatrix, RowSource};
pub use memory::{AllocError, BytesOwner, Scratch, SharedBytes};
pub use pool::{Exec, Pool, PoolError};
pub use quant::Format;
pub use rows::{Rows, RowsMut, for_row_chunks};
