//! Attention, recurrences and row-wise operations against plain loops, on every instruction set of this machine.
//!
//! These tests see only the public interface: as unit tests, every kernel that they run would be compiled a second time.

mod attention;
mod entries;
#[path = "../guard/mod.rs"]
mod guard;
mod indexer;
mod integers;
mod kv;
mod logits;
mod rowwise;
mod scan;
