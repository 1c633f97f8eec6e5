//! What kernels stand beside: the machine's ceilings as benchmarks of their own, in the same group and the same unit.

use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput};
use ferrule_kernels::arch::Isa;
use ferrule_kernels::probe::ReadProbe;
use ferrule_kernels::{Cancel, Exec, Pool, machine, probe};

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
    group.throughput(Throughput::Bytes(bytes));
    ceiling(group, "floor: read bandwidth", bytes, || probe.pass(exec, streams).expect("not cancelled"));
}

/// Runs `pass`, which says how much is done in a second, as a benchmark of doing `amount`.
pub fn ceiling(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, amount: u64, mut pass: impl FnMut() -> f64) {
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|count| (0..count).map(|_| Duration::from_secs_f64(amount as f64 / pass())).sum());
    });
}

/// The times that it takes to compute `operations` at the machine's peaks.
#[allow(dead_code, reason = "not every kernel is bound by arithmetic")]
pub fn peaks(group: &mut BenchmarkGroup<'_, WallTime>, exec: &Exec<'_>, operations: u64) {
    group.throughput(Throughput::Elements(operations));
    ceiling(group, "floor: f32 peak", operations, || probe::f32_pass(exec).expect("not cancelled"));
    ceiling(group, "floor: int8 peak", operations, || probe::int8_pass(exec).expect("not cancelled"));
}
