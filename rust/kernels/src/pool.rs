//! The persistent thread pool.

use std::num::NonZeroUsize;

use crate::{Cancel, arch::Isa};

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
pub struct Pool {
    threads: NonZeroUsize,
}

impl Pool {
    /// A pool in which `threads` threads work, the caller of [`Pool::run`] among them.
    #[must_use]
    pub fn new(threads: NonZeroUsize) -> Self {
        Self { threads }
    }

    /// How many threads work, the caller's among them.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.get()
    }

    /// Calls `job` once with each number below `tasks`, on all threads.
    ///
    /// # Errors
    /// [`PoolError`] if `cancel` was raised before the last task began, or a task panicked.
    pub fn run(&self, tasks: usize, job: &(dyn Fn(usize) + Sync), cancel: &Cancel) -> Result<(), PoolError> {
        for task in 0..tasks {
            if cancel.poll() {
                return Err(PoolError::Cancelled);
            }
            job(task);
        }
        Ok(())
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
}
