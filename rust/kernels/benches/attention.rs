//! How near attention comes to the machine: `cargo bench -p ferrule-kernels --bench attention`.
//!
//! A decode step reads the keys and values of all sequences once; its floor is their bytes at the read bandwidth. A
//! chunk of a prompt meets as many of them with each of its rows; its floor is two products at a peak. The heads are
//! those of a 1B Llama.

mod floor;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ferrule_kernels::attention::{AttentionSequence, AttentionShape, attention};
use ferrule_kernels::kv::{KvFormat, KvRow, KvShape, KvStore, PAGE_TOKENS, PageId};
use ferrule_kernels::{Exec, Rows};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const SHAPE: AttentionShape = AttentionShape {
    heads: HEADS,
    kv_heads: KV_HEADS,
    key_dim: HEAD_DIM,
    value_dim: HEAD_DIM,
    scale: 0.125,
    window: None,
    softcap: None,
};

/// Tokens of a sequence.
const CONTEXT: usize = 8192;

/// Rows of a prompt's chunk, the last of its context.
const CHUNK: usize = 512;

fn decode(criterion: &mut Criterion) {
    let machine = floor::Machine::new();
    let exec = machine.exec();
    let mut group = floor::group(criterion, "decode at 8192 tokens");
    floor::read(&mut group, &exec, floor::beyond_the_cache() as u64);
    for format in KvFormat::ALL {
        let sequence_bytes = page_bytes(*format) * CONTEXT / PAGE_TOKENS;
        let sequences = floor::beyond_the_cache().div_ceil(sequence_bytes);
        let (store, pages) = filled(&exec, *format, sequences * CONTEXT / PAGE_TOKENS);
        let sequences: Vec<_> = pages
            .chunks_exact(CONTEXT / PAGE_TOKENS)
            .enumerate()
            .map(|(row, pages)| AttentionSequence { first_row: row, rows: 1, first_position: CONTEXT - 1, pages })
            .collect();
        group.throughput(Throughput::Bytes((sequences.len() * sequence_bytes) as u64));
        group.bench_function(format.name(), |bencher| run(bencher, &exec, &store, &sequences));
    }
    group.finish();
}

fn prefill(criterion: &mut Criterion) {
    let machine = floor::Machine::new();
    let exec = machine.exec();
    let mut group = floor::group(criterion, "512 rows of a prompt at 8192 tokens");
    // Of each row and head: a product with the keys of the tokens up to it, and one with their values.
    let seen: usize = (CONTEXT - CHUNK..CONTEXT).map(|position| position + 1).sum();
    let operations = (2 * 2 * HEADS * HEAD_DIM * seen) as u64;
    floor::peaks(&mut group, &exec, operations);
    for format in KvFormat::ALL {
        let (store, pages) = filled(&exec, *format, CONTEXT / PAGE_TOKENS);
        let sequence = AttentionSequence { first_row: 0, rows: CHUNK, first_position: CONTEXT - CHUNK, pages: &pages };
        group.throughput(Throughput::Elements(operations));
        group.bench_function(format.name(), |bencher| run(bencher, &exec, &store, &[sequence]));
    }
    group.finish();
}

fn run(bencher: &mut criterion::Bencher<'_>, exec: &Exec<'_>, store: &KvStore, sequences: &[AttentionSequence<'_>]) {
    let rows: usize = sequences.iter().map(|sequence| sequence.rows).sum();
    let q: Vec<f32> = pattern(rows * HEADS * HEAD_DIM);
    let mut out = vec![0.0; q.len()];
    bencher
        .iter(|| attention(exec, Rows::new(&q, HEADS * HEAD_DIM, 0), store, 0, &SHAPE, sequences, &mut out).unwrap());
}

fn page_bytes(format: KvFormat) -> usize {
    KvStore::page_bytes(format, kv_shape()).and_then(|bytes| usize::try_from(bytes).ok()).expect("a page")
}

fn kv_shape() -> KvShape {
    KvShape { layers: 1, kv_heads: KV_HEADS, key_dim: HEAD_DIM, value_dim: HEAD_DIM }
}

/// A store whose pages all hold the same tokens, each page in memory of its own.
fn filled(exec: &Exec<'_>, format: KvFormat, pages: usize) -> (KvStore, Vec<PageId>) {
    let mut store = KvStore::new(format, kv_shape(), pages).expect("memory");
    let rows: Vec<_> = (0..PAGE_TOKENS).map(|slot| KvRow { page: 0, slot }).collect();
    let tokens = pattern(PAGE_TOKENS * KV_HEADS * HEAD_DIM);
    let tokens = Rows::new(&tokens, KV_HEADS * HEAD_DIM, 0);
    store.write(exec, 0, &rows, tokens, tokens).unwrap();
    let pages: Vec<PageId> = (0..).take(pages).collect();
    pages[1..].iter().for_each(|page| store.copy_page(0, *page));
    (store, pages)
}

fn pattern(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i * 17 % 255) as f32 / 128.0 - 1.0).collect()
}

criterion_group!(benches, decode, prefill);
criterion_main!(benches);
