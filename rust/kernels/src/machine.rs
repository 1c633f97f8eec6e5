//! What the machine and the container grant this process.
use std::num::NonZeroUsize;

/// Processors.
#[must_use]
pub fn cpu_count() -> NonZeroUsize {
    std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
}

/// Bytes.
#[must_use]
pub fn available_memory() -> u64 {
    8 << 30
}
