//! Row-wise operations relative to the memory bandwidth: `cargo bench -p ferrule-kernels --bench rows`.
//!
//! Each operation reads and writes its elements once, so its bytes per second are bounded by the read bandwidth. Rows
//! have the widths of Llama 1B. There are more rows than fit in all caches, or 512 as in a prefill chunk, which fit in a
//! cache and may exceed the memory bandwidth.

mod bandwidth;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use ferrule_kernels::activation::{Activation, Gating, gated};
use ferrule_kernels::elementwise::add;
use ferrule_kernels::norm::{NormWeights, rms_norm};
use ferrule_kernels::rope::{Rope, rope_in_place};
use ferrule_kernels::{Exec, RowsMut};

const HIDDEN: usize = 2048;
const FFN: usize = 8192;
const HEAD_DIM: usize = 64;

fn rows(criterion: &mut Criterion) {
    let machine = bandwidth::Machine::new();
    let exec = machine.exec();
    let uncached = bandwidth::uncached_bytes();
    let mut group = bandwidth::group(criterion, "512 rows");
    bandwidth::read(&mut group, &exec, uncached as u64);
    all(&mut group, &exec, |_| 512);
    group.finish();
    let mut group = bandwidth::group(criterion, "uncached rows");
    bandwidth::read(&mut group, &exec, uncached as u64);
    all(&mut group, &exec, |row_bytes| uncached / row_bytes);
    group.finish();
}

/// Measures each operation. `count` returns the number of rows, given the bytes that are read and written per row.
fn all(group: &mut BenchmarkGroup<'_, WallTime>, exec: &Exec<'_>, count: impl Fn(usize) -> usize) {
    let mut bench = |name: &str, bytes: usize, operation: &mut dyn FnMut()| {
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(name, |bencher| bencher.iter(&mut *operation));
    };
    let bytes_of = |numbers: usize| numbers * size_of::<f32>();

    let n = count(bytes_of(2 * HIDDEN));
    let (x, weight, mut out) = (vec![0.5; n * HIDDEN], [1.0; HIDDEN], vec![1.0; n * HIDDEN]);
    let weights = NormWeights { weight: Some(&weight), bias: None, weight_offset: 0.0, eps: 1e-5 };
    bench("rms_norm", bytes_of(2 * n * HIDDEN), &mut || rms_norm(exec, &x, HIDDEN, &weights, &mut out).unwrap());
    drop((x, out));

    let n = count(bytes_of(3 * HIDDEN));
    let (mut x, y) = (vec![0.5; n * HIDDEN], vec![1e-9; n * HIDDEN]);
    bench("add", bytes_of(3 * n * HIDDEN), &mut || add(exec, &mut x, &y).unwrap());
    drop((x, y));

    let n = count(bytes_of(2 * HIDDEN + HEAD_DIM));
    let (mut x, cos, sin) = (vec![0.5; n * HIDDEN], vec![0.8; n * HEAD_DIM / 2], vec![0.6; n * HEAD_DIM / 2]);
    let (heads, head_dim) = (HIDDEN / HEAD_DIM, HEAD_DIM);
    let rope = Rope { heads, head_dim, first: 0, rotary_dim: head_dim, interleaved: false, cos: &cos, sin: &sin };
    bench("rope", bytes_of(n * (2 * HIDDEN + HEAD_DIM)), &mut || {
        rope_in_place(exec, RowsMut::new(&mut x, HIDDEN, 0), &rope).unwrap();
    });
    drop(x);

    let n = count(bytes_of(3 * FFN));
    let (gate_up, mut out) = (vec![0.5; n * 2 * FFN], vec![1.0; n * FFN]);
    for (name, gating) in [
        ("silu, gated", Gating::Plain(Activation::Silu)),
        ("gelu, gated", Gating::Plain(Activation::Gelu)),
        ("silu, clamped", Gating::Clamped { alpha: 1.702, gate_limit: 7.0, limit: 7.0, offset: 1.0 }),
    ] {
        bench(name, bytes_of(3 * n * FFN), &mut || gated(exec, &gate_up, FFN, gating, &mut out).unwrap());
    }
}

criterion_group!(benches, rows);
criterion_main!(benches);
