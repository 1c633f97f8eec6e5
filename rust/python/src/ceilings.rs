//! What the machine can give, measured beside what a model gets.

use std::num::NonZeroUsize;
use std::sync::Mutex;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::probe::{ReadProbe, add_pass, f32_pass};
use ferrule_kernels::{Exec, Pool, PoolError};
use pyo3::prelude::*;

use crate::errors::{self, EngineError, InsufficientMemoryError, InvalidParameterError};
use crate::fork;
use crate::interrupt::Interrupt;

/// Several times the last cache of any machine that this is built for.
const READ_BYTES: usize = 512 << 20;

/// Probes that run on as many threads as a model does.
#[pyclass(frozen, module = "ferrule._native")]
pub(crate) struct Ceilings {
    isa: Isa,
    pool: Pool,
    read: Mutex<ReadProbe>,
    interrupt: Interrupt,
}

#[pymethods]
impl Ceilings {
    #[new]
    fn new(threads: usize) -> PyResult<Self> {
        let threads = NonZeroUsize::new(threads)
            .ok_or_else(|| InvalidParameterError::new_err("threads is 0; it must be at least 1"))?;
        let read = ReadProbe::new(READ_BYTES).map_err(|error| InsufficientMemoryError::new_err(error.to_string()))?;
        let isa = errors::chosen_isa()?;
        Ok(Self { isa, pool: Pool::new(threads), read: Mutex::new(read), interrupt: Interrupt::new() })
    }

    /// Bytes read, f32 operations and integer additions per second, one pass of each.
    fn measure(&self, py: Python<'_>) -> PyResult<(f64, f64, f64)> {
        let exec = Exec { isa: self.isa, pool: &self.pool, cancel: &self.interrupt.cancel };
        let measured = py.detach(|| {
            let _gate = fork::keep_out();
            let read = self.read.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            Ok((read.pass(&exec)?, f32_pass(&exec)?, add_pass(&exec)?))
        });
        let measured = measured.map_err(|error| match error {
            PoolError::Cancelled => self.interrupt.take(),
            PoolError::Panicked(message) => EngineError::new_err(message),
        })?;
        self.interrupt.settle(py);
        Ok(measured)
    }
}
