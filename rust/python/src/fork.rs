//! Fork safety: `os.fork` waits until no thread is inside an engine.
//!
//! Every call into an engine holds the gate's read lock. Python's fork hooks hold its write lock across the fork, so that
//! in the child every engine is consistent and every lock free; the child's first step starts new worker threads.
//!
//! A logits processor is Python code that runs within a step. A fork in it would wait for its own thread, and the hook
//! cannot refuse the fork, because Python prints and ignores exceptions of hooks. So the fork happens without the write
//! lock. The child has the locks of the gate's readers but not their threads, so it does not use the gate. Drivers
//! (`python/ferrule/_engine/driver.py`) refuse engines that were in a step; other engines and new engines work.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use pyo3::prelude::*;
use pyo3::types::PyDict;

static GATE: RwLock<()> = RwLock::new(());

/// Whether this process or an ancestor of it was forked within a step.
static FORKED_IN_STEP: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Write lock that the forking thread, the only thread of the child, holds during a fork.
    static FORK_LOCK: RefCell<Option<RwLockWriteGuard<'static, ()>>> = const { RefCell::new(None) };
    /// Number of nested calls of this thread: a logits processor may call another engine. The outermost call holds the
    /// read lock; taking it again could wait for a fork that waits for the outermost call.
    static CALL_DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Guard of the current thread: a fork waits until it is dropped.
pub(crate) struct ForkGuard {
    _gate: Option<RwLockReadGuard<'static, ()>>,
    _thread: PhantomData<*const ()>,
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        CALL_DEPTH.set(CALL_DEPTH.get() - 1);
    }
}

/// Lets forks wait until the guard is dropped. Called without the GIL.
pub(crate) fn hold_off_forks() -> ForkGuard {
    let is_first = CALL_DEPTH.get() == 0 && !FORKED_IN_STEP.load(Ordering::Relaxed);
    let gate = is_first.then(|| GATE.read().unwrap_or_else(PoisonError::into_inner));
    CALL_DEPTH.set(CALL_DEPTH.get() + 1);
    ForkGuard { _gate: gate, _thread: PhantomData }
}

#[pyfunction]
fn before_fork(py: Python<'_>) {
    if CALL_DEPTH.get() > 0 || FORKED_IN_STEP.load(Ordering::Relaxed) {
        return;
    }
    // The write lock belongs to this thread, so it is taken inside the closure.
    py.detach(|| FORK_LOCK.with_borrow_mut(|held| *held = Some(GATE.write().unwrap_or_else(PoisonError::into_inner))));
}

#[pyfunction]
fn after_fork() {
    FORK_LOCK.with_borrow_mut(|held| *held = None);
}

#[pyfunction]
fn after_fork_in_child() {
    if CALL_DEPTH.get() > 0 {
        FORKED_IN_STEP.store(true, Ordering::Relaxed);
    }
    after_fork();
}

/// Registers the hooks with Python.
pub(crate) fn register(py: Python<'_>) -> PyResult<()> {
    let hooks = PyDict::new(py);
    hooks.set_item("before", wrap_pyfunction!(before_fork, py)?)?;
    hooks.set_item("after_in_parent", wrap_pyfunction!(after_fork, py)?)?;
    hooks.set_item("after_in_child", wrap_pyfunction!(after_fork_in_child, py)?)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&hooks))?;
    Ok(())
}
