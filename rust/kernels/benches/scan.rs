//! Linear attention relative to its ceilings: `cargo bench -p ferrule-kernels --bench scan`.
//!
//! A step reads the old state of a sequence and writes the new one, in all layers: more than fits in the caches. Both
//! directions count as bytes, so that what a step reaches is bounded by the read bandwidth. A prefill advances one layer by
//! many tokens. Its unit is a multiply-add of an element of the state, two for each token, or three with the delta rule, so
//! that it is bounded by the multiply-adds of the processor.

mod bandwidth;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ferrule_kernels::memory::PageSlice;
use ferrule_kernels::scan::{Decay, LinearAttention, Segment, UpdateRule, linear_attention};
use ferrule_kernels::{Rows, RowsMut};

/// Heads of Granite 4 tiny (Mamba 2), of Qwen3.5 4B (gated delta net) and of Kimi Linear, which decays each key.
const LAYERS: [(&str, UpdateRule, [usize; 4], bool); 3] = [
    ("mamba2", UpdateRule::Add, [48, 1, 128, 64], false),
    ("delta net", UpdateRule::Delta, [32, 16, 128, 128], false),
    ("kimi delta attention", UpdateRule::Delta, [32, 32, 128, 128], true),
];

/// Number of tokens of a prefill: a usual chunk.
const TOKENS: usize = 512;

/// Inputs of a layer, which are the same for all tokens.
struct Layer {
    rule: UpdateRule,
    sizes: [usize; 4],
    by_key: bool,
    decays: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Layer {
    fn new(rule: UpdateRule, [heads, key_heads, key_dim, value_dim]: [usize; 4], by_key: bool, tokens: usize) -> Self {
        Self {
            rule,
            sizes: [heads, key_heads, key_dim, value_dim],
            by_key,
            decays: vec![0.9; tokens * heads * if by_key { key_dim } else { 1 }],
            // Of unit length.
            keys: vec![(key_dim as f32).sqrt().recip(); tokens * key_heads * key_dim],
            values: vec![0.5; tokens * heads * value_dim],
        }
    }

    fn attention(&self) -> LinearAttention<'_> {
        let [heads, key_heads, key_dim, value_dim] = self.sizes;
        let decay = if self.by_key {
            Decay::Keys(Rows::new(&self.decays, heads * key_dim, 0))
        } else {
            Decay::Heads(Rows::new(&self.decays, heads, 0))
        };
        let rule = self.rule;
        LinearAttention {
            heads,
            key_heads,
            alternating: false,
            key_dim,
            value_dim,
            decay,
            rule,
            factor: None,
            skip: None,
        }
    }

    /// Returns keys, which are the queries too, and values.
    fn inputs(&self) -> [Rows<'_>; 2] {
        let [heads, key_heads, key_dim, value_dim] = self.sizes;
        [Rows::new(&self.keys, key_heads * key_dim, 0), Rows::new(&self.values, heads * value_dim, 0)]
    }
}

fn step(criterion: &mut Criterion) {
    let machine = bandwidth::Machine::new();
    let exec = machine.exec();
    let mut group = bandwidth::group(criterion, "step");
    bandwidth::read(&mut group, &exec, bandwidth::uncached_bytes() as u64);
    for (name, rule, sizes, by_key) in LAYERS {
        let layer = Layer::new(rule, sizes, by_key, 1);
        let (attention, [key, value]) = (layer.attention(), layer.inputs());
        let floats = attention.state_len();
        let layers = bandwidth::uncached_bytes() / (2 * size_of::<f32>() * floats);
        let mut states = PageSlice::zeroed_in_huge_pages(2 * layers * floats).expect("memory");
        let mut out = vec![0.0; layer.values.len()];
        let mut slots = [0, 1];
        // All pages of memory are in use.
        states.fill(0.0);
        group.throughput(Throughput::Bytes((2 * layers * floats * size_of::<f32>()) as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                slots.reverse();
                let step = Segment { first_row: 0, rows: 1, old: Some(slots[0]), new: slots[1] };
                for first in (0..layers).map(|index| index * floats) {
                    let states = RowsMut::new(&mut states, layers * floats, first);
                    linear_attention(&exec, key, key, value, &attention, &[step], states, &mut out).unwrap();
                }
            });
        });
    }
}

fn prefill(criterion: &mut Criterion) {
    let machine = bandwidth::Machine::new();
    let exec = machine.exec();
    let mut group = bandwidth::group(criterion, "prefill");
    for (name, rule, sizes, by_key) in LAYERS {
        let layer = Layer::new(rule, sizes, by_key, TOKENS);
        let (attention, [key, value]) = (layer.attention(), layer.inputs());
        let (mut states, mut out) = (vec![0.0; attention.state_len()], vec![0.0; layer.values.len()]);
        let operations = if rule == UpdateRule::Add { 2 } else { 3 };
        group.throughput(Throughput::Elements((operations * TOKENS * sizes[0] * sizes[2] * sizes[3]) as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let chunk = Segment { first_row: 0, rows: TOKENS, old: None, new: 0 };
                let states = RowsMut::new(&mut states, attention.state_len(), 0);
                linear_attention(&exec, key, key, value, &attention, &[chunk], states, &mut out).unwrap();
            });
        });
    }
}

criterion_group!(benches, step, prefill);
criterion_main!(benches);
