//! Read bandwidth as a benchmark in the same group and unit as the kernels that are compared with it.

use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput};
use ferrule_kernels::arch::Isa;
use ferrule_kernels::probe::ReadProbe;
use ferrule_kernels::{Cancel, Exec, Pool, machine};

/// Thread pool and instruction set of a model. `THREADS` and `FERRULE_ISA` override them.
pub struct Machine {
    pool: Pool,
    cancel: Cancel,
    isa: Isa,
}

impl Machine {
    pub fn new() -> Self {
        let threads = std::env::var("THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or_else(machine::cpu_count);
        Self { pool: Pool::new(threads), cancel: Cancel::new(), isa: Isa::from_environment().expect("FERRULE_ISA") }
    }

    pub fn exec(&self) -> Exec<'_> {
        Exec { isa: self.isa, pool: &self.pool, cancel: &self.cancel }
    }
}

/// Returns a number of bytes of which little remains cached between two passes.
pub fn uncached_bytes() -> usize {
    2 * machine::last_cache_bytes().max(128 << 20)
}

/// Creates a benchmark group of few, long samples.
pub fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(10).sampling_mode(SamplingMode::Flat).measurement_time(Duration::from_secs(3));
    group
}

/// Measures the time to read `bytes` from memory.
pub fn read(group: &mut BenchmarkGroup<'_, WallTime>, exec: &Exec<'_>, bytes: u64) {
    let probe = ReadProbe::new(uncached_bytes()).expect("memory");
    let streams = probe.fastest_streams(exec).expect("not cancelled");
    let pass = || Duration::from_secs_f64(bytes as f64 / probe.pass(exec, streams).expect("not cancelled"));
    group.throughput(Throughput::Bytes(bytes));
    group.bench_function("read bandwidth", |bencher| {
        bencher.iter_custom(|count| (0..count).map(|_| pass()).sum());
    });
}
