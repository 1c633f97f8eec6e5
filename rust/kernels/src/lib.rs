//! What touches the machine: instruction sets, the thread pool, packed weights, matmul, attention, norms.
//!
//! The floor below everything else. The only crate with SIMD `unsafe`; knows tensors and pages, not models.
//!
//! The promise that all of it keeps: **the sequence of floating-point operations behind one output element depends on
//! the weight format, the instruction set and K alone** — not on how many rows are computed together, on tiling, on
//! the number of threads or on who shares the batch.

pub mod arch;
mod cancel;
pub mod disjoint;
pub mod kv;
pub mod machine;
mod matmul;
mod matrix;
pub mod memory;
mod pool;
pub mod probe;
pub mod quant;

pub use cancel::Cancel;
pub use matmul::matmul;
pub use matrix::{PackError, PackedMatrix, RowSource};
pub use memory::AllocError;
pub use pool::{Exec, Pool, PoolError};
pub use quant::Format;
