//! Cooperative cancellation, checked between tasks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// Minimum interval between two calls of the hook: acquiring the GIL more often would slow down short engine steps.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

type Hook = Box<dyn Fn() -> bool + Send + Sync>;

/// Cancel flag that any thread may set, with an optional hook that is polled to decide whether to set it.
///
/// # Examples
/// ```
/// use ferrule_kernels::Cancel;
///
/// let cancel = Cancel::new();
/// cancel.cancel();
/// assert!(cancel.is_cancelled());
/// cancel.reset();
/// assert!(!cancel.is_cancelled());
/// ```
#[derive(Default)]
pub struct Cancel {
    flag: AtomicBool,
    hook: Option<(Hook, Mutex<Instant>)>,
}

impl Cancel {
    /// Creates a flag without a hook.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a flag that is set as soon as `hook` returns true. Threads that call [`Cancel::poll`] call the hook.
    #[must_use]
    pub fn with_poll(hook: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { flag: AtomicBool::new(false), hook: Some((Box::new(hook), Mutex::new(Instant::now()))) }
    }

    /// Sets the flag.
    pub fn cancel(&self) {
        self.flag.store(true, Ordering::Release);
    }

    /// Clears the flag.
    pub fn reset(&self) {
        self.flag.store(false, Ordering::Release);
    }

    /// Returns whether the flag is set.
    #[inline]
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.flag.load(Ordering::Acquire)
    }

    /// Calls the hook if at least 20 ms have passed since its last call, and returns whether the flag is set.
    pub fn poll(&self) -> bool {
        if let Some((hook, last)) = &self.hook
            && let Some(mut last) = try_lock(last)
            && last.elapsed() >= POLL_INTERVAL
        {
            if hook() {
                self.cancel();
            }
            *last = Instant::now();
        }
        self.is_cancelled()
    }
}

/// Locks `mutex` unless another thread holds it. Poisoning is ignored: a hook that panics leaves no broken state.
fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn a_hook_that_panicked_is_called_again() {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let cancel = Cancel::with_poll(|| match CALLS.fetch_add(1, Ordering::Relaxed) {
            0 => panic!("first call"),
            _ => true,
        });
        std::thread::sleep(2 * POLL_INTERVAL);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cancel.poll())).is_err());
        assert!(cancel.poll());
    }
}
