//! Atomics, locks and threads of the workers. `tests/pool_model` compiles the workers with a replacement of this module,
//! which explores all interleavings.

use std::cell::Cell;
use std::time::{Duration, Instant};

pub use std::sync::{Mutex, atomic};
pub use std::thread;

thread_local! {
    /// Whether this thread is running a task.
    pub static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// Time that a thread spins before it sleeps: longer than the gap between two operations of a forward pass (a few
/// microseconds), about the cost of going to sleep and waking up.
const SPIN: Duration = Duration::from_micros(50);

/// Spins until `done` returns true, for at most [`SPIN`]. Returns the last result of `done`.
pub fn spin_until(mut done: impl FnMut() -> bool) -> bool {
    /// Checks between two reads of the clock, which are more expensive.
    const CHECKS: u32 = 16;
    let mut start = None;
    loop {
        for _ in 0..CHECKS {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.get_or_insert_with(Instant::now).elapsed() > SPIN {
            return done();
        }
    }
}
