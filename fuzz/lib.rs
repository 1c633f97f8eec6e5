//! Fuzz targets as functions, which `tests/fuzz_seeds.rs` of the crates call too.

pub mod formats;
pub mod grammar;
