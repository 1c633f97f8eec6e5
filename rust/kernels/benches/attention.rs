//! Attention at short and long contexts: `cargo bench -p ferrule-kernels --bench attention [-- FORMAT... CASE...]`.
//! Pages hold all layers of a model and are shuffled, as in a long-running server.
//!
//! Decode is compared with the read bandwidth, prefill chunks with the peak arithmetic throughput. Probes and kernels are
//! interleaved, and the best and the median of all rounds are reported, because the machine may be shared.

use std::time::Instant;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::attention::{AttentionSequence, AttentionShape, attention};
use ferrule_kernels::kv::{KvFormat, KvRow, KvShape, KvStore, PAGE_TOKENS, PageId};
use ferrule_kernels::{Cancel, Exec, Pool, Rows, machine, probe};

/// Attention shape of Llama 1B.
const SHAPE: AttentionShape<'_> = AttentionShape {
    heads: 32,
    kv_heads: 8,
    key_dim: 64,
    value_dim: 64,
    scale: 0.125,
    bidirectional: false,
    window: None,
    chunk: None,
    softcap: None,
    slopes: None,
    sinks: None,
    selection: None,
};

const WIDTH: usize = SHAPE.heads * SHAPE.key_dim;
const KV_WIDTH: usize = SHAPE.kv_heads * SHAPE.key_dim;

/// Number of layers that share a page, as in a model of this size. A measurement runs all of them once.
const LAYERS: usize = 16;

/// Longest context.
const TOKENS: usize = 32768;

const ROUNDS: usize = 7;

/// Benchmark case: the last rows of sequences of `context` tokens.
struct Case {
    name: &'static str,
    sequences: usize,
    /// Rows of each sequence.
    rows: usize,
    context: usize,
}

const CASES: [Case; 8] = [
    Case { name: "decode-512", sequences: 1, rows: 1, context: 512 },
    Case { name: "decode-8k", sequences: 1, rows: 1, context: 8192 },
    Case { name: "decode-32k", sequences: 1, rows: 1, context: 32768 },
    Case { name: "decode-8k-x4", sequences: 4, rows: 1, context: 8192 },
    Case { name: "verify-8k", sequences: 1, rows: 5, context: 8192 },
    Case { name: "prefill-512", sequences: 1, rows: 512, context: 512 },
    Case { name: "prefill-4k", sequences: 1, rows: 512, context: 4096 },
    Case { name: "prefill-8k", sequences: 1, rows: 512, context: 8192 },
];

struct Figure {
    name: String,
    unit: &'static str,
    /// Index of the roofline to compare with.
    roofline: Option<usize>,
    rounds: Vec<f64>,
    /// Milliseconds per row in all layers, by round.
    milliseconds: Vec<f64>,
}

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let chosen = |name: &str, all: &[&str]| {
        let some = arguments.iter().any(|argument| all.contains(&argument.as_str()));
        !some || arguments.iter().any(|argument| argument == name)
    };
    let formats: Vec<_> = KvFormat::ALL.iter().map(|format| format.name()).collect();
    let cases = CASES.map(|case| case.name);
    let threads = std::env::var("THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or_else(machine::cpu_count);
    let (pool, cancel) = (Pool::new(threads), Cancel::new());
    let isa = Isa::from_environment().expect("FERRULE_ISA");
    let exec = Exec { isa, pool: &pool, cancel: &cancel };
    println!("{threads} threads, {}", isa.name());
    let read = probe::ReadProbe::new(256 << 20).expect("memory");
    let streams = read.fastest_streams(&exec).unwrap();
    for format in KvFormat::ALL.iter().filter(|format| chosen(format.name(), &formats)) {
        let store = filled(&exec, *format);
        let peak = if *format == KvFormat::Int8 { probe::int8_pass } else { probe::f32_pass };
        let cases: Vec<_> = CASES.iter().filter(|case| chosen(case.name, &cases)).collect();
        let mut figures =
            vec![figure("read", "GB/s", None), figure("peak", "Gop/s", None), figure("integer adds", "G/s", None)];
        for case in &cases {
            let name = format!("{} {}", format.name(), case.name);
            figures.push(if case.rows < 16 { figure(&name, "GB/s", Some(0)) } else { figure(&name, "Gop/s", Some(1)) });
        }
        for _ in 0..ROUNDS {
            figures[0].rounds.push(read.pass(&exec, streams).unwrap() / 1e9);
            figures[1].rounds.push(peak(&exec).unwrap() / 1e9);
            figures[2].rounds.push(probe::add_pass(&exec).unwrap() / 1e9);
            for (figure, case) in figures[3..].iter_mut().zip(&cases) {
                let seconds = seconds(&exec, &store, case);
                figure.rounds.push(case.work(&store, figure.unit) / seconds / 1e9);
                figure.milliseconds.push(seconds * 1e3 / (case.rows * case.sequences) as f64);
            }
        }
        report(&figures);
    }
}

impl Case {
    /// Returns the bytes of K and V that are read, or the number of operations, in all layers.
    fn work(&self, store: &KvStore, unit: &str) -> f64 {
        if unit == "GB/s" {
            let page = KvStore::page_bytes(store.format(), store.shape()).expect("no overflow");
            return page as f64 * (self.sequences * self.context / PAGE_TOKENS) as f64;
        }
        let before = self.context - self.rows;
        let pairs = self.sequences * (self.rows * before + self.rows * (self.rows + 1) / 2);
        (2 * 2 * LAYERS * SHAPE.heads * SHAPE.key_dim * pairs) as f64
    }
}

/// Returns pseudorandom numbers in [-2, 2).
fn numbers(len: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 22) as f32 - 2.0
    };
    (0..len).map(|_| next()).collect()
}

/// Creates a store in which every token of every layer is written.
fn filled(exec: &Exec<'_>, format: KvFormat) -> KvStore {
    let pages = TOKENS / PAGE_TOKENS;
    let (kv_heads, key_dim, value_dim) = (SHAPE.kv_heads, SHAPE.key_dim, SHAPE.value_dim);
    let shape = KvShape { layers: LAYERS, kv_heads, key_dim, value_dim, index_dim: 0 };
    let mut store = KvStore::new(format, shape, pages).expect("memory");
    let data = numbers(512 * 2 * KV_WIDTH);
    let (keys, values) = (Rows::new(&data, 2 * KV_WIDTH, 0), Rows::new(&data, 2 * KV_WIDTH, KV_WIDTH));
    for first in (0..pages * PAGE_TOKENS).step_by(512) {
        let place = |i: usize| KvRow { page: (i / PAGE_TOKENS) as PageId, slot: i % PAGE_TOKENS };
        let rows: Vec<_> = (first..first + 512).map(place).collect();
        for layer in 0..LAYERS {
            store.write(exec, layer, &rows, keys, values).unwrap();
        }
    }
    store
}

/// Measures the seconds for all layers.
fn seconds(exec: &Exec<'_>, store: &KvStore, case: &Case) -> f64 {
    let rows = case.sequences * case.rows;
    let q = numbers(rows * WIDTH);
    let mut out = vec![0.0; rows * WIDTH];
    // Pages in shuffled order, as in a long-running server; an odd step visits each page.
    let pages = store.pages();
    let table: Vec<_> = (0..pages).map(|i| (i * 37 % pages) as PageId).collect();
    let sequence = |index: usize| AttentionSequence {
        first_row: index * case.rows,
        rows: case.rows,
        first_position: case.context - case.rows,
        pages: &table[index * case.context / PAGE_TOKENS..][..case.context / PAGE_TOKENS],
    };
    let sequences: Vec<_> = (0..case.sequences).map(sequence).collect();
    let start = Instant::now();
    for layer in 0..LAYERS {
        attention(exec, Rows::new(&q, WIDTH, 0), store, layer, &SHAPE, &sequences, &mut out).unwrap();
    }
    start.elapsed().as_secs_f64()
}

fn figure(name: &str, unit: &'static str, roofline: Option<usize>) -> Figure {
    Figure { name: name.to_owned(), unit, roofline, rounds: Vec::new(), milliseconds: Vec::new() }
}

fn report(figures: &[Figure]) {
    let sorted = |rounds: &[f64]| {
        let mut rounds = rounds.to_vec();
        rounds.sort_by(f64::total_cmp);
        rounds
    };
    let summary = |figure: &Figure| {
        let rounds = sorted(&figure.rounds);
        (rounds[rounds.len() - 1], rounds[rounds.len() / 2])
    };
    println!("{:<18} {:>8} {:>8}         of the roofline, best and median; ms per row", "", "best", "median");
    for figure in figures {
        let (best, median) = summary(figure);
        let share = figure.roofline.map_or(String::new(), |roofline| {
            let roofline = summary(&figures[roofline]);
            let milliseconds = sorted(&figure.milliseconds)[ROUNDS / 2];
            format!("{:>5.0} % {:>5.0} % {milliseconds:>8.3}", 100.0 * best / roofline.0, 100.0 * median / roofline.1)
        });
        println!("{:<18} {best:>8.1} {median:>8.1} {:<7} {share}", figure.name, figure.unit);
    }
}
