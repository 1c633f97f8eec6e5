//! Model of the thread pool: loom runs the code of its workers in all interleavings of a few threads, with all values
//! that the memory orderings allow a load to return.
//!
//! A lost wake-up is a deadlock, and a task whose effects the caller does not see, or that runs after the caller has
//! left, is an access without synchronization; loom reports both. A test fails if a weaker ordering is used where a run
//! is opened, where a worker leaves it, or where a thread sets its sleep flag.
//!
//! `LOOM_MAX_PREEMPTIONS` sets the number of preemptions per execution; each additional one multiplies the time.

use std::sync::Arc;

use ferrule_kernels::{Cancel, PoolError};
use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::sync::{Condvar, Mutex};

#[allow(dead_code)] // runs on the calling thread and names and places of threads are not part of the model
mod pool {
    use std::time::Duration;

    use super::PoolError;

    #[path = "../../../src/pool/affinity.rs"]
    pub mod affinity;
    #[path = "../../../src/pool/placement.rs"]
    pub mod placement;
    #[path = "../../../src/pool/read_ahead.rs"]
    pub mod read_ahead;
    pub mod sync;
    #[path = "../../../src/pool/task_ranges.rs"]
    pub mod task_ranges;
    #[path = "../../../src/pool/workers.rs"]
    pub mod workers;

    pub mod fork {
        pub fn generation() -> u32 {
            0
        }
    }

    const WAIT_INTERVAL: Duration = Duration::from_millis(10);
}

use pool::placement::Placement;
use pool::workers::{Job, Workers};

/// Memory that tasks access without atomics or locks. Loom checks that accesses are ordered.
struct Cells(Vec<UnsafeCell<usize>>);

// SAFETY: loom reports concurrent accesses before they happen, and runs one thread at a time.
unsafe impl Sync for Cells {}

impl Cells {
    fn zeroed(len: usize) -> Self {
        Self((0..len).map(|_| UnsafeCell::new(0)).collect())
    }

    fn get(&self, index: usize) -> usize {
        // SAFETY: the pointer is valid; see `Sync`.
        self.0[index].with(|value| unsafe { *value })
    }

    fn add(&self, index: usize, more: usize) {
        // SAFETY: the pointer is valid; see `Sync`.
        self.0[index].with_mut(|value| unsafe { *value += more });
    }
}

/// Threads that the system places.
fn anywhere() -> Placement {
    Placement::new(1, &[])
}

/// Runs `check` in all interleavings with at most `preemptions` preemptions.
fn explore(preemptions: usize, check: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound.get_or_insert(preemptions);
    builder.max_branches = 10_000;
    builder.check(check);
}

/// Runs `tasks` tasks on `workers`, each of which reads what the caller wrote before the run and writes what the caller
/// reads after it.
fn run(workers: &Workers, tasks: usize, wanted: usize) {
    let (input, outputs, cancel) = (Cells::zeroed(1), Cells::zeroed(tasks), Cancel::new());
    input.add(0, 7);
    let task = |task| outputs.add(task, input.get(0));
    let job = Job::new(tasks, &task, &cancel);
    workers.run(&job, wanted);
    assert_eq!(job.result(), Ok(()));
    input.add(0, 1);
    assert!((0..tasks).all(|task| outputs.get(task) == 7), "each task runs once");
}

#[test]
fn a_worker_joins_runs_and_ends() {
    explore(3, || {
        let workers = Workers::start(1, &anywhere());
        run(&workers, 2, 1);
        run(&workers, 2, 1);
    });
}

#[test]
fn a_run_wakes_its_workers() {
    explore(2, || {
        let (workers, cancel) = (Workers::start(1, &anywhere()), Cancel::new());
        let (started, changed) = (Mutex::new(0), Condvar::new());
        // Each task waits until the other one has started, so the caller cannot run both.
        let task = |_| {
            let mut count = started.lock().unwrap();
            *count += 1;
            changed.notify_all();
            while *count < 2 {
                count = changed.wait(count).unwrap();
            }
        };
        let job = Job::new(2, &task, &cancel);
        workers.run(&job, 1);
        assert_eq!(job.result(), Ok(()));
    });
}

#[test]
fn two_workers_join_a_run() {
    explore(1, || run(&Workers::start(2, &anywhere()), 3, 2));
}

#[test]
fn workers_that_a_run_does_not_want_may_join_it() {
    explore(1, || {
        let workers = Workers::start(2, &anywhere());
        run(&workers, 2, 1);
    });
}

#[test]
fn a_cancelled_run_ends() {
    explore(3, || {
        let workers = Workers::start(1, &anywhere());
        let cancel = Arc::new(Cancel::new());
        let task = |_| cancel.cancel();
        let job = Job::new(3, &task, &cancel);
        workers.run(&job, 1);
        // The caller or the worker may have started its task before the other one cancelled.
        let _ = job.result();
        run(&workers, 2, 1);
    });
}
