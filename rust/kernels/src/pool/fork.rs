//! Notices forks. A child has only the thread that called `fork`, and a copy of every pool without its threads.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static GENERATION: AtomicU32 = AtomicU32::new(0);

/// How many forks lie between this process and the one in which counting began.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Begins to count.
pub fn watch() {
    extern "C" fn in_child() {
        GENERATION.fetch_add(1, Ordering::Relaxed);
    }
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler only increments an atomic, which a child may do right after a fork.
        // Where memory for the handler is short, forks go unnoticed, and nothing else can be done about it.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}
