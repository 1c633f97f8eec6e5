//! Loom's atomics, locks and threads in place of `src/pool/sync.rs`.
//!
//! Loom executes sequentially consistent loads and stores like acquire and release, which would report lost wake-ups
//! that cannot happen. The types here add what a processor adds: a full fence after each sequentially consistent write.

pub use loom::sync::Mutex;

/// Whether this thread is running a task.
pub static IN_TASK: InTask = InTask;

/// The thread-local flag, with the functions of a `Cell`.
pub struct InTask;

loom::thread_local! {
    static FLAG: std::cell::Cell<bool> = std::cell::Cell::new(false);
}

impl InTask {
    pub fn replace(&self, value: bool) -> bool {
        FLAG.with(|flag| flag.replace(value))
    }

    pub fn set(&self, value: bool) {
        FLAG.with(|flag| flag.set(value));
    }
}

/// Checks once, so that the model explores both a thread that sleeps and one that does not.
pub fn spin_until(mut done: impl FnMut() -> bool) -> bool {
    done()
}

pub mod thread {
    pub use loom::thread::{Builder, JoinHandle, Thread, current, park};

    /// Waits for ever: a wake-up that only the timeout replaces is a deadlock in the model.
    pub fn park_timeout(_: std::time::Duration) {
        park();
    }
}

pub mod atomic {
    pub use loom::sync::atomic::{AtomicPtr, Ordering};
    use loom::sync::atomic::{Ordering::SeqCst, fence};

    fn fence_after_write(order: Ordering) {
        if order == SeqCst {
            fence(SeqCst);
        }
    }

    macro_rules! atomic {
        ($name:ident, $value:ty, $($update:ident),*) => {
            #[derive(Default)]
            pub struct $name(loom::sync::atomic::$name);

            #[allow(dead_code)]
            impl $name {
                pub fn new(value: $value) -> Self {
                    Self(loom::sync::atomic::$name::new(value))
                }

                pub fn into_inner(self) -> $value {
                    self.0.into_inner()
                }

                pub fn load(&self, order: Ordering) -> $value {
                    self.0.load(order)
                }

                pub fn store(&self, value: $value, order: Ordering) {
                    self.0.store(value, order);
                    fence_after_write(order);
                }

                $(pub fn $update(&self, value: $value, order: Ordering) -> $value {
                    let previous = self.0.$update(value, order);
                    fence_after_write(order);
                    previous
                })*

                pub fn fetch_update(
                    &self,
                    set: Ordering,
                    fetch: Ordering,
                    update: impl FnMut($value) -> Option<$value>,
                ) -> Result<$value, $value> {
                    let result = self.0.fetch_update(set, fetch, update);
                    fence_after_write(set);
                    result
                }

                pub fn compare_exchange_weak(
                    &self,
                    current: $value,
                    new: $value,
                    set: Ordering,
                    fetch: Ordering,
                ) -> Result<$value, $value> {
                    let result = self.0.compare_exchange_weak(current, new, set, fetch);
                    fence_after_write(set);
                    result
                }
            }
        };
    }

    atomic!(AtomicBool, bool, fetch_and);
    atomic!(AtomicU64, u64, fetch_and, fetch_sub);
}
