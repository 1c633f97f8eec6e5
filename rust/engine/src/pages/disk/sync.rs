//! Atomics, locks and threads of the writer. `tests/writer_model` compiles the writer with a replacement of this module,
//! which explores all interleavings.

pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};
pub use std::thread;
