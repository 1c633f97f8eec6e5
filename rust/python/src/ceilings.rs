//! Limits of the machine: memory bandwidth and operations per second, measured between the runs of a model.

use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use ferrule_kernels::arch::Isa;
use ferrule_kernels::probe::{ReadProbe, add_pass, f32_pass, int8_pass};
use ferrule_kernels::{Cancel, Exec, Pool, PoolError, machine};
use pyo3::prelude::*;

use crate::errors::{self, EngineError, InsufficientMemoryError};
use crate::fork;
use crate::interrupt::Interrupt;

/// Minimum number of bytes that a pass reads, so that it takes long enough to be timed.
const MIN_READ_BYTES: u64 = 512 << 20;

/// Divisor of the free memory for the maximum number of bytes that a pass reads.
const READ_SHARE: u64 = 4;

/// Probes that run on as many threads as a model, or on one thread.
#[pyclass(frozen, module = "ferrule._native")]
pub(crate) struct Ceilings {
    isa: Isa,
    team: Team,
    alone: Team,
    read: Mutex<ReadProbe>,
    interrupt: Interrupt,
}

/// Threads, and the number of streams with which each thread reads fastest.
struct Team {
    pool: Pool,
    streams: OnceLock<usize>,
}

impl Team {
    fn new(threads: NonZeroUsize) -> Self {
        Self { pool: Pool::new(threads), streams: OnceLock::new() }
    }

    fn measure(&self, isa: Isa, read: &ReadProbe, cancel: &Cancel) -> Result<(f64, f64, f64, f64), PoolError> {
        let exec = Exec { isa, pool: &self.pool, cancel };
        let streams = match self.streams.get() {
            Some(&streams) => streams,
            None => {
                let fastest = read.fastest_streams(&exec)?;
                *self.streams.get_or_init(|| fastest)
            }
        };
        Ok((read.pass(&exec, streams)?, int8_pass(&exec)?, f32_pass(&exec)?, add_pass(&exec)?))
    }
}

#[pymethods]
impl Ceilings {
    #[new]
    fn new(threads: usize) -> PyResult<Self> {
        let threads = NonZeroUsize::new(threads).ok_or_else(|| errors::invalid("threads", 0, ">= 1"))?;
        let wanted = MIN_READ_BYTES.max(2 * machine::last_cache_bytes() as u64);
        let bytes = wanted.min(machine::available_memory() / READ_SHARE) as usize;
        let read = ReadProbe::new(bytes).map_err(|error| InsufficientMemoryError::new_err(error.to_string()))?;
        let isa = errors::chosen_isa()?;
        let (team, alone) = (Team::new(threads), Team::new(NonZeroUsize::MIN));
        Ok(Self { isa, team, alone, read: Mutex::new(read), interrupt: Interrupt::new() })
    }

    /// Returns the bytes of memory that a pass reads.
    #[getter]
    fn read_bytes(&self) -> usize {
        self.read().bytes()
    }

    /// Runs one pass of each probe: bytes read, int8 operations, f32 operations and integer additions per second.
    #[pyo3(signature = (*, alone=false))]
    fn measure(&self, py: Python<'_>, alone: bool) -> PyResult<(f64, f64, f64, f64)> {
        let team = if alone { &self.alone } else { &self.team };
        let measured = py.detach(|| {
            let _guard = fork::hold_off_forks();
            team.measure(self.isa, &self.read(), &self.interrupt.cancel)
        });
        let measured = measured.map_err(|error| match error {
            PoolError::Cancelled => self.interrupt.take(),
            PoolError::Panicked(message) => EngineError::new_err(message),
        })?;
        self.interrupt.settle(py);
        Ok(measured)
    }
}

impl Ceilings {
    fn read(&self) -> MutexGuard<'_, ReadProbe> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
