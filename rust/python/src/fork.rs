//! What makes `os.fork` safe beside engines: a fork waits until no thread is inside one.
//!
//! Every call into an engine holds the gate's reading side. Python's fork hooks hold its writing side across the fork,
//! so that in the child every engine is whole and every lock free; the child's first step starts fresh workers.

use std::cell::RefCell;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use pyo3::prelude::*;
use pyo3::types::PyDict;

static GATE: RwLock<()> = RwLock::new(());

thread_local! {
    /// Held from before a fork until after it, by the thread that forks: the one thread that the child has.
    static FORKING: RefCell<Option<RwLockWriteGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// Keeps forks out while it lives. Taken with Python's lock released.
pub(crate) fn keep_out() -> RwLockReadGuard<'static, ()> {
    GATE.read().unwrap_or_else(PoisonError::into_inner)
}

#[pyfunction]
fn before_fork(py: Python<'_>) {
    // The guard must stay on this thread, so it is taken inside.
    py.detach(|| FORKING.with_borrow_mut(|held| *held = Some(GATE.write().unwrap_or_else(PoisonError::into_inner))));
}

#[pyfunction]
fn after_fork() {
    FORKING.with_borrow_mut(|held| *held = None);
}

/// Tells Python to call the hooks.
pub(crate) fn register(py: Python<'_>) -> PyResult<()> {
    let hooks = PyDict::new(py);
    hooks.set_item("before", wrap_pyfunction!(before_fork, py)?)?;
    hooks.set_item("after_in_parent", wrap_pyfunction!(after_fork, py)?)?;
    hooks.set_item("after_in_child", wrap_pyfunction!(after_fork, py)?)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&hooks))?;
    Ok(())
}
