//! Persistent thread pool.
//!
//! A forward pass consists of hundreds of short parallel runs, so starting a run must cost less than a microsecond, and
//! idle threads must not use processor time. Worker threads therefore spin for some tens of microseconds after a run
//! and then sleep ([`workers`]), and tasks are distributed by work stealing ([`task_ranges`]). On several NUMA nodes
//! each thread stays on one of them ([`placement`]). While threads wait for each other they prefetch what the next run
//! reads ([`read_ahead`]). This module serializes runs, restarts the workers after a fork, and executes runs that are too
//! small to share on the calling thread.

pub(crate) mod affinity;
mod fork;
mod placement;
#[cfg(test)]
mod placement_tests;
mod read_ahead;
mod sync;
mod task_ranges;
#[cfg(test)]
mod task_ranges_tests;
mod workers;

use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::{Cancel, arch::Isa};
use placement::Placement;
use read_ahead::{Predictor, Span};
use sync::IN_TASK;
use task_ranges::share;
use workers::{Job, Workers};

/// Interval at which a waiting thread polls its cancel flag.
const WAIT_INTERVAL: Duration = Duration::from_millis(10);

/// Reason why a parallel run did not finish. The contents of its outputs are unspecified.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The cancel flag was set.
    #[error("cancelled")]
    Cancelled,
    /// A task panicked.
    #[error("worker thread panicked: {0}")]
    Panicked(String),
}

/// Pool of worker threads.
///
/// Any number of threads may call [`Pool::run`]; one run executes at a time. A nested `run`, called from a task,
/// executes on the calling thread. The first run that needs workers starts them; so does the first run in a forked
/// child.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// use ferrule_kernels::{Cancel, Pool};
///
/// let pool = Pool::new(NonZeroUsize::new(2).unwrap());
/// let sum = AtomicUsize::new(0);
/// pool.run(100, &|task| _ = sum.fetch_add(task, Ordering::Relaxed), &Cancel::new())?;
/// assert_eq!(sum.into_inner(), 4950);
/// # Ok::<(), ferrule_kernels::PoolError>(())
/// ```
pub struct Pool {
    threads: NonZeroUsize,
    placement: Placement,
    /// State of the current process; null before the first parallel run. Replaced but never freed after a fork.
    local: AtomicPtr<ProcessState>,
}

/// Part of a pool that a fork invalidates: its threads are gone and may have held its locks.
struct ProcessState {
    /// Value of [`fork::generation`] in the process that created this.
    generation: u32,
    queue: Mutex<Queue>,
    freed: Condvar,
    predictor: Mutex<Predictor>,
    workers: Workers,
}

/// Callers of a pool.
#[derive(Default)]
struct Queue {
    /// Whether a run is executing.
    busy: bool,
    /// Number of callers that wait until it has ended.
    waiting: usize,
}

/// Returns the memory from which a task begins to read, up to its end; tasks that follow it may read further on.
type Reads<'r, 'm> = &'r dyn Fn(usize) -> &'m [u8];

impl Pool {
    /// Creates a pool of `threads` threads, including the caller of [`Pool::run`].
    ///
    /// If the system refuses to start that many, the pool uses those that it could start.
    #[must_use]
    pub fn new(threads: NonZeroUsize) -> Self {
        Self::on_nodes(threads, &[])
    }

    /// Creates a pool whose threads are divided among NUMA nodes, in proportion to their processors, and stay there.
    ///
    /// Nodes are lists of processors, as [`machine::numa_nodes`](crate::machine::numa_nodes) returns them. If there are
    /// fewer than two, or one has enough processors for all threads, the system places the threads. The callers of
    /// [`Pool::run`] work for the first node; see [`Pool::bind_caller`].
    #[must_use]
    pub fn on_nodes(threads: NonZeroUsize, nodes: &[Vec<usize>]) -> Self {
        fork::watch();
        Self { threads, placement: Placement::new(threads.get(), nodes), local: AtomicPtr::new(null_mut()) }
    }

    /// Returns the number of NUMA nodes that the threads are divided among; 1 if the system places them.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.placement.nodes()
    }

    /// Keeps the calling thread on the first node until the result is dropped, for a sequence of runs. Does nothing if
    /// the system places the threads.
    pub fn bind_caller(&self) -> Binding {
        let before = if self.nodes() > 1 { affinity::processors() } else { Vec::new() };
        self.placement.pin(0);
        Binding { before, of_thread: PhantomData }
    }

    /// Returns the number of threads, including the caller.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.get()
    }

    /// Calls `job` once with each number in `0..tasks`, on all threads, in any order.
    ///
    /// All threads check `cancel` before each task; the calling thread also polls it, there and while it waits.
    ///
    /// # Errors
    /// [`PoolError`] if `cancel` was set before the last task started, or if a task panicked. The pool stays usable.
    ///
    /// # Panics
    /// If `tasks` is 2^32 or more.
    pub fn run(&self, tasks: usize, job: &(dyn Fn(usize) + Sync), cancel: &Cancel) -> Result<(), PoolError> {
        self.run_reading(tasks, None, job, cancel)
    }

    /// Calls `job` as [`Pool::run`] does. If a run that reads the same memory was followed by the same run before, waiting
    /// threads prefetch what that run reads first.
    fn run_reading(
        &self,
        tasks: usize,
        reads: Option<Reads<'_, '_>>,
        job: &(dyn Fn(usize) + Sync),
        cancel: &Cancel,
    ) -> Result<(), PoolError> {
        let job = Job::new(tasks, job, cancel);
        if tasks <= 1 || self.threads() == 1 || IN_TASK.get() {
            job.run_inline();
            return job.result();
        }
        let local = self.local();
        let _guard = local.acquire(cancel)?;
        let threads = self.threads().min(tasks);
        if let Some(reads) = reads {
            let spans = (0..threads).map(|thread| {
                let own = share(tasks, threads, thread);
                Span::new(reads(own.start), reads(own.end - 1))
            });
            let mut predictor = local.predictor.lock().unwrap_or_else(PoisonError::into_inner);
            local.workers.read_ahead(predictor.follow(&spans.collect::<Vec<_>>()));
        }
        local.workers.run(&job, threads - 1);
        job.result()
    }

    /// Returns the state of this process, creating it if necessary.
    fn local(&self) -> &ProcessState {
        let generation = fork::generation();
        let found = self.local.load(Ordering::Acquire);
        // SAFETY: null, or a `ProcessState` that was leaked into `self.local`; those are freed in `drop` only.
        if let Some(local) = unsafe { found.as_ref() }.filter(|local| local.generation == generation) {
            return local;
        }
        let fresh = Box::into_raw(Box::new(ProcessState {
            generation,
            queue: Mutex::default(),
            freed: Condvar::new(),
            predictor: Mutex::default(),
            workers: Workers::start(self.threads() - 1, &self.placement),
        }));
        match self.local.compare_exchange(found, fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: `fresh` was just allocated, and from now on is freed in `drop` only. What it replaces, if
            // anything, belongs to the parent process and is never freed.
            Ok(_) => unsafe { &*fresh },
            Err(other) => {
                // SAFETY: no other thread has seen `fresh`; `other` was created by another thread in the same way.
                unsafe {
                    drop(Box::from_raw(fresh));
                    &*other
                }
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let local = *self.local.get_mut();
        if local.is_null() {
            return;
        }
        // SAFETY: created by `Box::into_raw` in `local`; `&mut self` guarantees that no reference to it is left.
        let local = unsafe { Box::from_raw(local) };
        if local.generation != fork::generation() {
            // The threads belong to the parent process: there is nothing to join, and the locks may stay locked.
            std::mem::forget(local);
        }
    }
}

impl ProcessState {
    /// Waits until no other run is executing.
    fn acquire(&self, cancel: &Cancel) -> Result<RunGuard<'_>, PoolError> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        while queue.busy {
            queue.waiting += 1;
            (queue, _) = self.freed.wait_timeout(queue, WAIT_INTERVAL).unwrap_or_else(PoisonError::into_inner);
            queue.waiting -= 1;
            if queue.busy && cancel.poll() {
                return Err(PoolError::Cancelled);
            }
        }
        queue.busy = true;
        Ok(RunGuard(self))
    }
}

/// Exclusive use of the workers, released on drop.
struct RunGuard<'a>(&'a ProcessState);

impl Drop for RunGuard<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.busy = false;
        // A notification is a system call even if nobody waits.
        if queue.waiting > 0 {
            self.0.freed.notify_one();
        }
    }
}

/// Restriction of a thread to the first node of a pool; see [`Pool::bind_caller`].
#[must_use]
pub struct Binding {
    /// Processors on which the thread could run before, or none.
    before: Vec<usize>,
    /// A thread restores its own affinity only.
    of_thread: PhantomData<*const ()>,
}

impl Drop for Binding {
    fn drop(&mut self) {
        if !self.before.is_empty() {
            affinity::restrict(&self.before);
        }
    }
}

/// Execution context of an operation: instruction set, thread pool and cancel flag.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
///
/// use ferrule_kernels::arch::Isa;
/// use ferrule_kernels::{Cancel, Exec, Pool, elementwise};
///
/// let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
/// let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
/// let mut x = [1.0, 2.0];
/// elementwise::add(&exec, &mut x, &[0.5, 0.5])?;
/// assert_eq!(x, [1.5, 2.5]);
/// # Ok::<(), ferrule_kernels::PoolError>(())
/// ```
#[derive(Clone, Copy)]
pub struct Exec<'a> {
    /// Instruction set that kernels use.
    pub isa: Isa,
    /// Threads that kernels run on.
    pub pool: &'a Pool,
    /// Cancel flag, checked between tasks.
    pub cancel: &'a Cancel,
}

impl Exec<'_> {
    /// Calls `job` once with each number in `0..tasks`, on all threads; see [`Pool::run`].
    ///
    /// # Errors
    /// Same as [`Pool::run`].
    pub fn run(&self, tasks: usize, job: impl Fn(usize) + Sync) -> Result<(), PoolError> {
        self.pool.run(tasks, &job, self.cancel)
    }

    /// Executes several runs with one synchronization: calls `job(i, task)` for each `task` in `0..counts[i]`, on all
    /// threads. Neighbouring tasks of a run, then neighbouring runs, go to the same thread. Each NUMA node gets its
    /// share of each run.
    ///
    /// # Errors
    /// Same as [`Pool::run`].
    pub fn run_each(
        &self,
        counts: impl IntoIterator<Item = usize>,
        job: impl Fn(usize, usize) + Sync,
    ) -> Result<(), PoolError> {
        self.run_parts(counts, None::<fn(usize, usize) -> &'static [u8]>, job)
    }

    /// Executes several runs as [`Exec::run_each`] does. `reads(i, task)` returns the memory from which a task begins to
    /// read, up to its end; threads that wait for this run, because it followed the same run before, prefetch the
    /// beginning of that memory.
    ///
    /// # Errors
    /// Same as [`Pool::run`].
    pub(crate) fn run_each_reading<'m>(
        &self,
        counts: impl IntoIterator<Item = usize>,
        reads: impl Fn(usize, usize) -> &'m [u8],
        job: impl Fn(usize, usize) + Sync,
    ) -> Result<(), PoolError> {
        self.run_parts(counts, Some(reads), job)
    }

    fn run_parts<'m>(
        &self,
        counts: impl IntoIterator<Item = usize>,
        reads: Option<impl Fn(usize, usize) -> &'m [u8]>,
        job: impl Fn(usize, usize) + Sync,
    ) -> Result<(), PoolError> {
        let counts: Vec<usize> = counts.into_iter().collect();
        let parts = parts_by_node(&counts, &self.pool.placement);
        let locate = |task| {
            // An empty part has the same first task as its successor; the last one of them owns this task.
            let (first, run, part) = &parts[parts.partition_point(|(first, ..)| *first <= task) - 1];
            (*run, part.start + task - first)
        };
        let reads = reads.map(|reads| {
            move |task| {
                let (run, task) = locate(task);
                reads(run, task)
            }
        });
        let job = |task| {
            let (run, task) = locate(task);
            job(run, task);
        };
        let reads = reads.as_ref().map(|reads| reads as Reads<'_, '_>);
        self.pool.run_reading(counts.iter().sum(), reads, &job, self.cancel)
    }
}

/// Returns the parts of several runs in the order in which their tasks are numbered: the shares of the first node, then
/// those of the next. A part has the number of its first task, its run and its tasks within the run.
fn parts_by_node(counts: &[usize], placement: &Placement) -> Vec<(usize, usize, Range<usize>)> {
    let mut tasks = 0;
    let shares = (0..placement.nodes())
        .flat_map(|node| counts.iter().enumerate().map(move |(run, count)| (run, placement.share(*count, node))));
    let begin = |(run, part): (usize, Range<usize>)| {
        tasks += part.len();
        (tasks - part.len(), run, part)
    };
    shares.map(begin).collect()
}
