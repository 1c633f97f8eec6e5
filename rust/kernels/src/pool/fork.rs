//! Fork detection. A forked child has only the thread that called `fork`, and copies of all pools without their threads.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Returns the number of forks between the process that first called [`watch`] and this one.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Starts counting forks. Later calls do nothing.
pub fn watch() {
    extern "C" fn in_child() {
        GENERATION.fetch_add(1, Ordering::Relaxed);
    }
    static WATCH: Once = Once::new();
    // Miri does not support forks.
    if cfg!(miri) {
        return;
    }
    WATCH.call_once(|| {
        // SAFETY: the handler only increments an atomic, which is allowed in a child right after a fork.
        // Registration fails only when memory is exhausted. Forks then go undetected; there is no other remedy.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}
