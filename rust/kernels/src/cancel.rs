//! A request to stop, seen between blocks of work.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// How often the hook is asked at the most; taking Python's lock more often would slow short steps down.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

type Hook = Box<dyn Fn() -> bool + Send + Sync>;

/// A flag that any thread may raise, and optionally a hook that is asked now and then whether to raise it.
#[derive(Default)]
pub struct Cancel {
    flag: AtomicBool,
    hook: Option<(Hook, Mutex<Instant>)>,
}

impl Cancel {
    /// A flag without a hook.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A flag that is raised as soon as `hook` says so. The hook runs on threads that call [`Cancel::poll`].
    #[must_use]
    pub fn with_poll(hook: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { flag: AtomicBool::new(false), hook: Some((Box::new(hook), Mutex::new(Instant::now()))) }
    }

    /// Raises the flag.
    pub fn cancel(&self) {
        self.flag.store(true, Ordering::Release);
    }

    /// Lowers the flag.
    pub fn reset(&self) {
        self.flag.store(false, Ordering::Release);
    }

    /// Whether the flag is up.
    #[inline]
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.flag.load(Ordering::Acquire)
    }

    /// Asks the hook if the last time is long enough ago, and says whether the flag is up.
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

/// The lock, unless another thread has it; a hook that panicked leaves nothing half done.
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
    fn a_hook_that_panicked_is_asked_again() {
        static ASKED: AtomicUsize = AtomicUsize::new(0);
        let cancel = Cancel::with_poll(|| match ASKED.fetch_add(1, Ordering::Relaxed) {
            0 => panic!("the first time"),
            _ => true,
        });
        std::thread::sleep(2 * POLL_INTERVAL);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cancel.poll())).is_err());
        assert!(cancel.poll());
    }
}
