//! The persistent thread pool.
//!
//! A forward pass is some hundred short parallel runs in a row, so starting one must cost less than a microsecond, and
//! nothing may burn a core while no run is going on. Threads therefore spin for some tens of microseconds after each
//! run and then sleep ([`team`]), and share tasks out by stretches ([`shares`]). Here is what surrounds that: one run at a time, fresh threads after a fork, runs
//! too small to share done on the spot.

mod fork;
mod shares;
mod team;

use std::cell::Cell;
use std::num::NonZeroUsize;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::{Cancel, arch::Isa};
use team::{Job, Team};

/// How often a thread that waits for others looks whether it was cancelled.
const WAIT_INTERVAL: Duration = Duration::from_millis(10);

/// Why a parallel run did not finish. What it should have written is unspecified.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The cancel flag was up.
    #[error("cancelled")]
    Cancelled,
    /// A task panicked.
    #[error("a worker panicked: {0}")]
    Panicked(String),
}

/// Threads that wait for work.
///
/// Any number of threads may call [`Pool::run`]; one run goes on at a time. A task that itself calls `run` does that
/// work alone. Threads are started by the first run that needs them, and again by the first in a forked child.
pub struct Pool {
    threads: NonZeroUsize,
    /// What belongs to this process; null before the first parallel run. Replaced, never freed, after a fork.
    local: AtomicPtr<Local>,
}

/// The part of a pool that a fork makes useless: its threads are gone and its locks may be held by them.
struct Local {
    /// The process, as [`fork::generation`] counts.
    generation: u32,
    busy: Mutex<bool>,
    freed: Condvar,
    team: Team,
}

thread_local! {
    /// Whether this thread is in the middle of a task.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

impl Pool {
    /// A pool in which `threads` threads work, the caller of [`Pool::run`] among them.
    ///
    /// Where the system refuses to start that many, those that it grants do the work.
    #[must_use]
    pub fn new(threads: NonZeroUsize) -> Self {
        fork::watch();
        Self { threads, local: AtomicPtr::new(null_mut()) }
    }

    /// How many threads work, the caller's among them.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.get()
    }

    /// Calls `job` once with each number below `tasks`, on all threads, in any order.
    ///
    /// All threads look at `cancel` before each task; the caller's also polls it, there and while it waits.
    ///
    /// # Errors
    /// [`PoolError`] if `cancel` was up before the last task began, or a task panicked. The pool stays usable.
    ///
    /// # Panics
    /// If there are 2^32 tasks or more.
    pub fn run(&self, tasks: usize, job: &(dyn Fn(usize) + Sync), cancel: &Cancel) -> Result<(), PoolError> {
        let job = Job::new(tasks, job, cancel);
        if tasks <= 1 || self.threads() == 1 || IN_TASK.get() {
            job.work_alone();
            return job.result();
        }
        let local = self.local();
        let _turn = local.take_turn(cancel)?;
        local.team.run(&job, self.threads().min(tasks) - 1);
        job.result()
    }

    /// What belongs to this process, started if need be.
    fn local(&self) -> &Local {
        let generation = fork::generation();
        let found = self.local.load(Ordering::Acquire);
        // SAFETY: either null or a `Local` that was leaked into `self.local`; those are freed in `drop` only.
        if let Some(local) = unsafe { found.as_ref() }.filter(|local| local.generation == generation) {
            return local;
        }
        let fresh = Box::into_raw(Box::new(Local {
            generation,
            busy: Mutex::new(false),
            freed: Condvar::new(),
            team: Team::start(self.threads() - 1),
        }));
        match self.local.compare_exchange(found, fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: `fresh` was just made, and from now on is freed in `drop` only. What it replaces, if anything,
            // belongs to a process that is not this one and is never freed.
            Ok(_) => unsafe { &*fresh },
            Err(other) => {
                // SAFETY: nobody else has seen `fresh`; `other` was made by another thread in the same way.
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
        // SAFETY: made by `Box::into_raw` in `local`; `&mut self` says that no reference to it is left.
        let local = unsafe { Box::from_raw(local) };
        if local.generation != fork::generation() {
            // Threads of the parent process: there is nothing to join here, and its locks may never open.
            std::mem::forget(local);
        }
    }
}

impl Local {
    /// Waits until no other run goes on.
    fn take_turn(&self, cancel: &Cancel) -> Result<Turn<'_>, PoolError> {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        while *busy {
            (busy, _) = self.freed.wait_timeout(busy, WAIT_INTERVAL).unwrap_or_else(PoisonError::into_inner);
            if *busy && cancel.poll() {
                return Err(PoolError::Cancelled);
            }
        }
        *busy = true;
        Ok(Turn(self))
    }
}

/// The right to use the team; given back when dropped.
struct Turn<'a>(&'a Local);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.busy.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.freed.notify_one();
    }
}

/// What an operation needs of its surroundings.
#[derive(Clone, Copy)]
pub struct Exec<'a> {
    /// The instructions to use.
    pub isa: Isa,
    /// The threads to use.
    pub pool: &'a Pool,
    /// Looked at between blocks of work.
    pub cancel: &'a Cancel,
}

impl Exec<'_> {
    /// Calls `job` once with each number below `tasks`, on all threads; see [`Pool::run`].
    ///
    /// # Errors
    /// As [`Pool::run`].
    pub fn run(&self, tasks: usize, job: impl Fn(usize) + Sync) -> Result<(), PoolError> {
        self.pool.run(tasks, &job, self.cancel)
    }

    /// Calls `job` once with the number of each part and each number below that part's count, on all threads: several
    /// runs at the price of one. Neighbouring tasks of a part, and then parts, go to the same thread.
    ///
    /// # Errors
    /// As [`Pool::run`].
    pub fn run_each(
        &self,
        counts: impl IntoIterator<Item = usize>,
        job: impl Fn(usize, usize) + Sync,
    ) -> Result<(), PoolError> {
        let mut tasks = 0;
        let begin = |count| {
            tasks += count;
            tasks - count
        };
        let firsts: Vec<usize> = counts.into_iter().map(begin).collect();
        self.run(tasks, |task| {
            // Of parts without tasks, which begin where others do, the last to begin here has this one.
            let part = firsts.partition_point(|first| *first <= task) - 1;
            job(part, task - firsts[part]);
        })
    }
}
