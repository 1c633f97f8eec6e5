//! Worker threads of a pool, and how they synchronize with the caller.
//!
//! One atomic word holds the run state: the number of the current run, whether workers may still join it, and how many
//! have joined. The caller opens the run, takes tasks itself, closes the run when no tasks are left, and waits only for
//! the workers that joined. A worker that wakes late finds the run closed, so on a busy machine a run takes no longer
//! than its tasks.
//!
//! Between runs a worker spins for some tens of microseconds and then sleeps. A wake-up must not be lost: the worker
//! first sets its sleep flag and then checks the run state again; the caller first opens the run and then checks the
//! sleep flags. All four operations are sequentially consistent, so at least one side sees the other.
//! `tests/pool_model` explores the interleavings.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::{Arc, PoisonError};

use super::placement::Placement;
use super::read_ahead::{PrefetchLines, Span};
use super::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use super::sync::thread::{self, JoinHandle, Thread};
use super::sync::{IN_TASK, Mutex, spin_until};
use super::task_ranges::TaskRanges;
use super::{PoolError, WAIT_INTERVAL, fork};
use crate::Cancel;

/// A parallel run: its tasks and its outcome.
pub struct Job<'a> {
    tasks: usize,
    task: &'a (dyn Fn(usize) + Sync),
    cancel: &'a Cancel,
    /// Set when a task was skipped because of `cancel`.
    cancelled: AtomicBool,
    panicked: AtomicBool,
    /// Message of the first panic.
    panic: Mutex<Option<String>>,
}

impl<'a> Job<'a> {
    pub fn new(tasks: usize, task: &'a (dyn Fn(usize) + Sync), cancel: &'a Cancel) -> Self {
        Self {
            tasks,
            task,
            cancel,
            cancelled: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
        }
    }

    /// Runs all tasks on the calling thread.
    pub fn run_inline(&self) {
        let mut tasks = 0..self.tasks;
        self.work(|| tasks.next(), || self.cancel.poll());
    }

    /// Runs tasks until `next` returns `None`, a task panics, or `cancelled` returns true.
    fn work(&self, mut next: impl FnMut() -> Option<usize>, cancelled: impl Fn() -> bool) {
        self.catch(|| {
            while let Some(task) = next() {
                if self.panicked.load(Ordering::Relaxed) {
                    break;
                }
                if cancelled() {
                    self.cancelled.store(true, Ordering::Relaxed);
                    break;
                }
                (self.task)(task);
            }
        });
    }

    /// Runs `work` and records its panic, if any, as the job's outcome.
    fn catch(&self, work: impl FnOnce()) {
        let was_in_task = IN_TASK.replace(true);
        let outcome = catch_unwind(AssertUnwindSafe(work));
        IN_TASK.set(was_in_task);
        if let Err(payload) = outcome {
            self.fail(panic_message(payload));
        }
    }

    fn fail(&self, message: String) {
        self.panicked.store(true, Ordering::Relaxed);
        self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(message);
    }

    /// Returns the outcome. Call it after all threads have left the job.
    pub fn result(self) -> Result<(), PoolError> {
        match self.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(message) => Err(PoolError::Panicked(message)),
            None if self.cancelled.into_inner() => Err(PoolError::Cancelled),
            None => Ok(()),
        }
    }
}

/// Returns the message of a panic.
fn panic_message(payload: Box<dyn Any + Send>) -> String {
    let payload = match payload.downcast::<String>() {
        Ok(text) => return *text,
        Err(payload) => payload,
    };
    match payload.downcast::<&str>() {
        Ok(text) => (*text).to_owned(),
        Err(payload) => {
            // Dropping the payload may panic again, where nothing would catch it.
            std::mem::forget(payload);
            "panic payload is not a string".to_owned()
        }
    }
}

/// Worker threads that run tasks beside the caller.
pub struct Workers {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    state: RunState,
    /// Tasks of the current run, by worker.
    ranges: TaskRanges,
    /// Lines that each thread prefetches while it waits, those of the caller first.
    ahead: Vec<PrefetchLines>,
    /// Job of the current run.
    job: AtomicPtr<Job<'static>>,
    shutdown: AtomicBool,
    /// Whether the caller sleeps.
    caller_sleeps: AtomicBool,
    /// Thread that called [`Workers::run`] and sleeps.
    caller: Mutex<Option<Thread>>,
    /// Whether each worker sleeps.
    asleep: Vec<AtomicBool>,
}

/// Run number in the upper 32 bits, the [`OPEN`] bit, and the number of workers that have joined in the lower 31 bits.
#[repr(align(128))]
struct RunState(AtomicU64);

const OPEN: u64 = 1 << 31;
const ACTIVE: u64 = OPEN - 1;

const fn run_number(state: u64) -> u64 {
    state >> 32
}

impl Workers {
    /// Starts up to `workers` threads, each on its node; fewer if the system refuses to create them.
    pub fn start(workers: usize, placement: &Placement) -> Self {
        let shared = Arc::new(Shared {
            state: RunState(AtomicU64::new(0)),
            ranges: TaskRanges::new((0..=workers).map(|thread| placement.node_of(thread))),
            ahead: (0..=workers).map(|_| PrefetchLines::default()).collect(),
            job: AtomicPtr::new(null_mut()),
            shutdown: AtomicBool::new(false),
            caller_sleeps: AtomicBool::new(false),
            caller: Mutex::new(None),
            asleep: (0..workers).map(|_| AtomicBool::new(false)).collect(),
        });
        let start = |index| {
            let (shared, placement) = (Arc::clone(&shared), placement.clone());
            // The caller is worker 0.
            let builder = thread::Builder::new().name(format!("ferrule-{}", index + 1));
            let work = move || {
                placement.pin(index + 1);
                shared.worker_loop(index);
            };
            builder.spawn(work).ok()
        };
        Self { workers: (0..workers).map_while(start).collect(), shared }
    }

    /// Sets what each thread prefetches while it waits: the lines that it will probably read first in the run after the
    /// next one.
    pub fn read_ahead(&self, spans: Option<&[Span]>) {
        let mut spans = spans.into_iter().flatten();
        self.shared.ahead.iter().for_each(|ahead| ahead.set(spans.next().copied()));
    }

    /// Runs `job` on the caller and up to `wanted` workers, and returns when all of them have left it. Runs must not
    /// overlap.
    pub fn run(&self, job: &Job<'_>, wanted: usize) {
        let shared = &*self.shared;
        let generation = fork::generation();
        shared.job.store(std::ptr::from_ref(job).cast_mut().cast(), Ordering::Relaxed);
        shared.ranges.partition(job.tasks, wanted.min(self.workers.len()) + 1);
        // No run is open and no worker has joined, so the word holds the run number only.
        let number = run_number(shared.state.0.load(Ordering::Relaxed)).wrapping_add(1) << 32;
        shared.state.0.store(number | OPEN, Ordering::SeqCst);
        for (worker, asleep) in self.workers.iter().zip(&shared.asleep).take(wanted) {
            if asleep.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        // Nothing may unwind from here on: workers hold references to the job, which lives on the caller's stack.
        job.work(|| shared.ranges.take(0), || job.cancel.poll());
        shared.state.0.fetch_and(!OPEN, Ordering::SeqCst);
        shared.wait_for_workers(job, generation);
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // Workers catch the panics of tasks, so there is no error to report.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Main loop of a worker: waits for runs, joins them and takes tasks.
    fn worker_loop(&self, index: usize) {
        let mut last = 0;
        while let Some(number) = self.wait_for_run(index, last) {
            last = number;
            if self.enter(number) {
                // SAFETY: `enter` counted this thread while the run was open. The caller of `Workers::run` stored the
                // job before it opened the run, and does not return, so that the job lives, until all workers left.
                let job = unsafe { &*self.job.load(Ordering::Relaxed) };
                job.work(|| self.ranges.take(index + 1), || job.cancel.is_cancelled());
                self.leave();
            }
        }
    }

    /// Waits for a run other than `last` and returns its number. Returns `None` when the pool is being dropped.
    fn wait_for_run(&self, index: usize, last: u64) -> Option<u64> {
        let open = || {
            let state = self.state.0.load(Ordering::SeqCst);
            (state & OPEN != 0 && run_number(state) != last).then(|| run_number(state))
        };
        let shutdown = || self.shutdown.load(Ordering::SeqCst);
        let mut found = None;
        spin_until(|| {
            found = open();
            let done = found.is_some() || shutdown();
            if !done {
                self.ahead[index + 1].prefetch_next();
            }
            done
        });
        let asleep = &self.asleep[index];
        while found.is_none() && !shutdown() {
            asleep.store(true, Ordering::SeqCst);
            found = open();
            if found.is_none() && !shutdown() {
                thread::park();
            }
            asleep.store(false, Ordering::SeqCst);
        }
        found
    }

    /// Joins run `number`. Returns false if the run is closed.
    fn enter(&self, number: u64) -> bool {
        let count_in = |state: u64| (state & OPEN != 0 && run_number(state) == number).then_some(state + 1);
        self.state.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, count_in).is_ok()
    }

    fn leave(&self) {
        let state = self.state.0.fetch_sub(1, Ordering::SeqCst) - 1;
        if state & (OPEN | ACTIVE) == 0
            && self.caller_sleeps.load(Ordering::SeqCst)
            && let Some(caller) = &*self.caller.lock().unwrap_or_else(PoisonError::into_inner)
        {
            caller.unpark();
        }
    }

    /// Waits until all workers have left the run. Polls the job's cancel flag, so that they can stop early.
    fn wait_for_workers(&self, job: &Job<'_>, generation: u32) {
        let left = || self.state.0.load(Ordering::SeqCst) & ACTIVE == 0;
        let waited = spin_until(|| {
            let done = left();
            if !done {
                self.ahead[0].prefetch_next();
            }
            done
        });
        if waited {
            return;
        }
        *self.caller.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
        self.caller_sleeps.store(true, Ordering::SeqCst);
        while !left() {
            job.catch(|| {
                job.cancel.poll();
            });
            if fork::generation() != generation {
                // The polled hook forked, and this is the child: the workers exist only in the parent.
                job.fail("the process was forked during a parallel run".to_owned());
                break;
            }
            thread::park_timeout(WAIT_INTERVAL);
        }
        self.caller_sleeps.store(false, Ordering::SeqCst);
    }
}
