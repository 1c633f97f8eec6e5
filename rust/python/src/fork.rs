//! What makes `os.fork` safe beside engines: a fork waits until no thread is inside one.
//!
//! Every call into an engine holds the gate's reading side. Python's fork hooks hold its writing side across the fork,
//! so that in the child every engine is whole and every lock free; the child's first step starts fresh workers.
//!
//! A logits processor is Python in the middle of a step. A fork in there would wait for its own thread, and cannot be
//! refused: what a hook raises Python prints and forgets. So it goes on, and the child, to which the gate's readers were
//! copied but not their threads, does without the gate. The engines that had a step are refused there by their drivers
//! (`python/ferrule/_engine/driver.py`), others and new ones work.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use pyo3::prelude::*;
use pyo3::types::PyDict;

static GATE: RwLock<()> = RwLock::new(());

/// Whether this process, or one that it comes from, was forked in the middle of a step.
static TORN: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Held from before a fork until after it, by the thread that forks: the one thread that the child has.
    static FORKING: RefCell<Option<RwLockWriteGuard<'static, ()>>> = const { RefCell::new(None) };
    /// Calls that this thread is in, one within the other: a logits processor may use another engine. The first one
    /// holds the gate for all; a second time it could wait behind a fork that waits for the first.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Keeps forks out while it lives, on the thread that has it.
pub(crate) struct KeptOut {
    _gate: Option<RwLockReadGuard<'static, ()>>,
    _thread: PhantomData<*const ()>,
}

impl Drop for KeptOut {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Keeps forks out while its result lives. Taken with Python's lock released.
pub(crate) fn keep_out() -> KeptOut {
    let is_first = DEPTH.get() == 0 && !TORN.load(Ordering::Relaxed);
    let gate = is_first.then(|| GATE.read().unwrap_or_else(PoisonError::into_inner));
    DEPTH.set(DEPTH.get() + 1);
    KeptOut { _gate: gate, _thread: PhantomData }
}

#[pyfunction]
fn before_fork(py: Python<'_>) {
    if DEPTH.get() > 0 || TORN.load(Ordering::Relaxed) {
        return;
    }
    // The guard must stay on this thread, so it is taken inside.
    py.detach(|| FORKING.with_borrow_mut(|held| *held = Some(GATE.write().unwrap_or_else(PoisonError::into_inner))));
}

#[pyfunction]
fn after_fork() {
    FORKING.with_borrow_mut(|held| *held = None);
}

#[pyfunction]
fn after_fork_in_child() {
    if DEPTH.get() > 0 {
        TORN.store(true, Ordering::Relaxed);
    }
    after_fork();
}

/// Tells Python to call the hooks.
pub(crate) fn register(py: Python<'_>) -> PyResult<()> {
    let hooks = PyDict::new(py);
    hooks.set_item("before", wrap_pyfunction!(before_fork, py)?)?;
    hooks.set_item("after_in_parent", wrap_pyfunction!(after_fork, py)?)?;
    hooks.set_item("after_in_child", wrap_pyfunction!(after_fork_in_child, py)?)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&hooks))?;
    Ok(())
}
