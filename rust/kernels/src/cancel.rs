//! Cooperative cancellation, checked between tasks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

/// Minimum interval between two calls of the hook: acquiring the GIL more often would slow down short engine steps.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Function that is polled.
struct Hook {
    call: Box<dyn Fn() -> bool + Send + Sync>,
    /// Time of the next call, as [`coarse_millis`] returns it.
    due: AtomicU64,
    /// Locked during a call.
    calling: Mutex<()>,
}

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
    hook: Option<Hook>,
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
        let hook = Hook { call: Box::new(hook), due: AtomicU64::new(next_call()), calling: Mutex::default() };
        Self { flag: AtomicBool::new(false), hook: Some(hook) }
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

    /// Calls the hook if about 20 ms have passed since its last call, and returns whether the flag is set.
    pub fn poll(&self) -> bool {
        if let Some(Hook { call, due, calling }) = &self.hook {
            let is_due = || due.load(Ordering::Relaxed) <= coarse_millis();
            if is_due()
                && let Some(_calling) = try_lock(calling)
                && is_due()
            {
                if call() {
                    self.cancel();
                }
                due.store(next_call(), Ordering::Relaxed);
            }
        }
        self.is_cancelled()
    }
}

/// Returns the time of a call after the interval.
fn next_call() -> u64 {
    coarse_millis() + POLL_INTERVAL.as_millis() as u64
}

/// Returns the milliseconds of a clock that is a few milliseconds behind, and costs a tenth of the precise one: a task
/// may take no more than a microsecond, and the flag is polled before each.
fn coarse_millis() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call only writes the time. It cannot fail: Linux has this clock since 2.6.32.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
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
