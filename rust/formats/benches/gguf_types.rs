//! Speed of dequantizing GGUF block types on one thread: `cargo bench -p ferrule-formats --bench gguf_types`.
//!
//! Throughput is in bytes of the f32 output. The baseline is reading f32, which only copies. Rows are read one at a
//! time, as when weights are packed.

#[path = "../tests/support/gguf.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod gguf;

use std::fs;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ferrule_formats::gguf::BlockType;
use ferrule_formats::{Checkpoint, WeightTensor};
use gguf::{Gguf, Tensor};

/// Row length of an 8B Llama.
const COLUMNS: usize = 4096;
const ROWS: usize = 512;

fn read(weight: &WeightTensor<'_>) -> f32 {
    let mut row = vec![0.0; COLUMNS];
    let mut sum = 0.0;
    for index in 0..ROWS {
        weight.read_f32(index * COLUMNS, &mut row);
        sum += row[index];
    }
    sum
}

fn types(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("gguf types");
    group.throughput(Throughput::Bytes((ROWS * COLUMNS * size_of::<f32>()) as u64));
    let dir = tempfile::TempDir::new().expect("a temporary folder");
    let mut bench = |name: &str, tensor: Tensor| {
        let path = dir.path().join("model.gguf");
        fs::write(&path, Gguf::new(&[], &[tensor]).bytes()).expect("a written file");
        let checkpoint = Checkpoint::open(&path).expect("a valid file");
        let weight = checkpoint.weight("w").expect("the only tensor");
        group.bench_function(name, |bencher| bencher.iter(|| read(&weight)));
    };
    let dimensions = [COLUMNS as u64, ROWS as u64];
    bench("F32", Tensor::new("w", 0, &dimensions, vec![0; ROWS * COLUMNS * 4]));
    for &ty in BlockType::ALL {
        bench(ty.name(), Tensor::in_blocks(ty, ROWS, COLUMNS / ty.inputs()));
    }
}

criterion_group!(benches, types);
criterion_main!(benches);
