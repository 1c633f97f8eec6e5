//! A step of linear attention relative to the memory bandwidth: `cargo bench -p ferrule-kernels --bench scan`.
//!
//! A step reads the old state of a sequence and writes the new one, in all layers: more than fits in the caches. Both
//! directions count as bytes, so that what a step reaches is bounded by the read bandwidth.

mod bandwidth;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ferrule_kernels::memory::PageSlice;
use ferrule_kernels::scan::{Decay, LinearAttention, Segment, UpdateRule, linear_attention};
use ferrule_kernels::{Rows, RowsMut};

fn scan(criterion: &mut Criterion) {
    let machine = bandwidth::Machine::new();
    let exec = machine.exec();
    let mut group = bandwidth::group(criterion, "step");
    bandwidth::read(&mut group, &exec, bandwidth::uncached_bytes() as u64);
    // Heads of Granite 4 tiny (Mamba 2) and of Qwen3.5 4B (gated delta net).
    for (name, rule, heads, key_heads, key_dim, value_dim) in
        [("mamba2", UpdateRule::Add, 48, 1, 128, 64), ("delta net", UpdateRule::Delta, 32, 16, 128, 128)]
    {
        let decays = vec![0.9; heads];
        let attention = LinearAttention {
            heads,
            key_heads,
            alternating: false,
            key_dim,
            value_dim,
            decay: Decay::Heads(Rows::new(&decays, heads, 0)),
            rule,
            factor: None,
            skip: None,
        };
        let layer = attention.state_len();
        let layers = bandwidth::uncached_bytes() / (2 * size_of::<f32>() * layer);
        let mut states = PageSlice::zeroed_in_huge_pages(2 * layers * layer).expect("memory");
        states.fill(0.5);
        let (keys, values) = (vec![0.1; key_heads * key_dim], vec![0.5; heads * value_dim]);
        let mut out = vec![0.0; heads * value_dim];
        let mut slots = [0, 1];
        group.throughput(Throughput::Bytes((2 * layers * layer * size_of::<f32>()) as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                slots.reverse();
                let step = Segment { first_row: 0, rows: 1, old: Some(slots[0]), new: slots[1] };
                let key = Rows::new(&keys, keys.len(), 0);
                let value = Rows::new(&values, values.len(), 0);
                for first in (0..layers).map(|index| index * layer) {
                    let states = RowsMut::new(&mut states, layers * layer, first);
                    linear_attention(&exec, key, key, value, &attention, &[step], states, &mut out).unwrap();
                }
            });
        });
    }
}

criterion_group!(benches, scan);
criterion_main!(benches);
