//! What kernels stand beside: the read bandwidth as a benchmark of its own, in the same group and the same unit.

use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput};
use ferrule_kernels::arch::Isa;
use ferrule_kernels::probe::ReadProbe;
use ferrule_kernels::{Cancel, Exec, Pool, machine};

/// Threads and instructions as a model has them; `THREADS` and `FERRULE_ISA` choose others.
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

/// Bytes of which little is left in a cache when their turn comes again.
pub fn beyond_the_cache() -> usize {
    2 * machine::last_cache_bytes().max(128 << 20)
}

/// A group of few and long samples.
pub fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(10).sampling_mode(SamplingMode::Flat).measurement_time(Duration::from_secs(3));
    group
}

/// The time that it takes to read `bytes` from memory.
pub fn read(group: &mut BenchmarkGroup<'_, WallTime>, exec: &Exec<'_>, bytes: u64) {
    let probe = ReadProbe::new(beyond_the_cache()).expect("memory");
    let streams = probe.fastest_streams(exec).expect("not cancelled");
    let pass = || Duration::from_secs_f64(bytes as f64 / probe.pass(exec, streams).expect("not cancelled"));
    group.throughput(Throughput::Bytes(bytes));
    group.bench_function("floor: read bandwidth", |bencher| {
        bencher.iter_custom(|count| (0..count).map(|_| pass()).sum());
    });
}
