//! Attention against a naive f64 oracle, and bitwise against itself under different partitions of the work.

mod options;
mod oracle;

use std::num::NonZeroUsize;
use std::ops::Range;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::attention::{ATTENTION_BLOCK, AttentionSequence, AttentionShape, attention};
use ferrule_kernels::indexer::Selection;
use ferrule_kernels::kv::{KvFormat, KvRow, KvShape, KvStore, PAGE_NONE, PAGE_TOKENS, PageId};
use ferrule_kernels::{Cancel, Exec, Pool, PoolError, Rows};
use oracle::{assert_close, oracle};

use crate::guard::Guarded;
use crate::kv::poisoned;

/// Test case: one sequence of `tokens` tokens with random Q, K and V.
#[derive(Debug, Clone)]
struct Case {
    /// Shape without slopes and sinks, which the case owns.
    shape: AttentionShape<'static>,
    slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    /// Number of sets of chosen tokens of each row, see [`Case::chosen`].
    sets: Option<usize>,
    format: KvFormat,
    tokens: usize,
    seed: u32,
}

impl Case {
    fn new(group: usize, dim: usize, window: Option<usize>, format: KvFormat, tokens: usize) -> Self {
        let shape = AttentionShape {
            heads: 2 * group,
            kv_heads: 2,
            key_dim: dim,
            value_dim: dim,
            scale: (dim as f32).sqrt().recip(),
            bidirectional: false,
            window,
            chunk: None,
            softcap: None,
            slopes: None,
            sinks: None,
            selection: None,
        };
        Self { shape, slopes: None, sinks: None, sets: None, format, tokens, seed: 1 }
    }

    fn shape(&self) -> AttentionShape<'_> {
        AttentionShape { slopes: self.slopes.as_deref(), sinks: self.sinks.as_deref(), ..self.shape }
    }

    /// Returns the tokens that a row may attend to in a set: its own, and some others, in runs and without them in some
    /// blocks.
    fn chosen(&self, set: usize, position: usize) -> Vec<usize> {
        let hash = |x: usize| (x + 31 * set + 7 * position).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let is_chosen =
            |token: &usize| *token == position || hash(token / ATTENTION_BLOCK) % 3 > 0 && hash(token / 5) % 4 == 0;
        (0..=position).filter(is_chosen).collect()
    }

    /// Returns the tokens that the rows at some positions may attend to.
    fn selection(&self, positions: &[usize]) -> Option<Selection> {
        let sets = self.sets?;
        let chosen = positions.iter().flat_map(|position| (0..sets).map(move |set| self.chosen(set, *position)));
        let pages = positions.iter().max().map_or(0, |last| last / PAGE_TOKENS + 1);
        Some(Selection::from_tokens(sets, pages, chosen))
    }

    fn widths(&self) -> [usize; 3] {
        let AttentionShape { heads, kv_heads, key_dim, value_dim, .. } = self.shape;
        [heads * key_dim, kv_heads * key_dim, kv_heads * value_dim]
    }

    /// Returns Q, K and V side by side, as a fused projection computes them: `[tokens, sum of widths]`.
    fn qkv(&self) -> Vec<f32> {
        let width: usize = self.widths().iter().sum();
        numbers(self.seed, self.tokens * width)
    }

    fn store(&self, pages: usize) -> KvStore {
        let AttentionShape { kv_heads, key_dim, value_dim, .. } = self.shape;
        poisoned(self.format, KvShape { layers: 2, kv_heads, key_dim, value_dim, index_dim: 0 }, pages)
    }
}

/// Returns pseudorandom numbers in [-2, 2).
fn numbers(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 22) as f32 - 2.0
    };
    (0..len).map(|_| next()).collect()
}

/// Sequence in a store, with its page table.
struct Cached<'a> {
    case: &'a Case,
    qkv: Vec<f32>,
    table: Vec<PageId>,
}

impl<'a> Cached<'a> {
    /// Creates a sequence on the pages from `first` on, in shuffled order.
    fn new(case: &'a Case, first: PageId) -> Self {
        let count = case.tokens.div_ceil(PAGE_TOKENS) as u32;
        let step = (1..).map(|n| 5 * n + 2).find(|step| gcd(*step, count) == 1).expect("some number is coprime");
        Self { case, qkv: case.qkv(), table: (0..count).map(|i| first + (i * step) % count).collect() }
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

const LAYER: usize = 1;

/// Returns Q, K and V of the tokens of the chunks: `[tokens, sum of widths]`.
fn gather(chunks: &[(&Cached<'_>, Range<usize>)]) -> Vec<f32> {
    let stride: usize = chunks[0].0.case.widths().iter().sum();
    let mut data = Vec::new();
    for (cached, tokens) in chunks {
        data.extend_from_slice(&cached.qkv[tokens.start * stride..tokens.end * stride]);
    }
    data
}

/// Writes K and V of the tokens of the chunks.
fn write(exec: &Exec<'_>, store: &mut KvStore, chunks: &[(&Cached<'_>, Range<usize>)]) {
    let [q_width, k_width, v_width] = chunks[0].0.case.widths();
    let stride = q_width + k_width + v_width;
    let place =
        |cached: &Cached<'_>, token| KvRow { page: cached.table[token / PAGE_TOKENS], slot: token % PAGE_TOKENS };
    let rows: Vec<_> =
        chunks.iter().flat_map(|(cached, tokens)| tokens.clone().map(|token| place(cached, token))).collect();
    let data = Guarded::new(&gather(chunks));
    let (keys, values) = (Rows::new(&data, stride, q_width), Rows::new(&data, stride, q_width + k_width));
    store.write(exec, LAYER, &rows, keys, values).expect("write");
}

/// Calls attention once for the tokens of the chunks and returns the output of each chunk.
fn attend(exec: &Exec<'_>, store: &KvStore, chunks: &[(&Cached<'_>, Range<usize>)]) -> Vec<Vec<f32>> {
    let case = chunks[0].0.case;
    let (mut tables, mut sequences, mut first_row) = (Vec::new(), Vec::new(), 0);
    for (cached, tokens) in chunks {
        let mut table = cached.table.clone();
        let seen = case.shape.window.map_or(0, |window| (tokens.start + 1).saturating_sub(window));
        table[..seen / PAGE_TOKENS].fill(PAGE_NONE);
        tables.push(table);
    }
    for ((_, tokens), pages) in chunks.iter().zip(&tables) {
        sequences.push(AttentionSequence { first_row, rows: tokens.len(), first_position: tokens.start, pages });
        first_row += tokens.len();
    }
    let data = Guarded::new(&gather(chunks));
    let q = Rows::new(&data, case.widths().iter().sum(), 0);
    let width = case.shape.heads * case.shape.value_dim;
    let mut out = Guarded::new(&vec![f32::NAN; first_row * width]);
    let positions: Vec<_> = chunks.iter().flat_map(|(_, tokens)| tokens.clone()).collect();
    let selection = case.selection(&positions);
    let shape = AttentionShape { selection: selection.as_ref(), ..case.shape() };
    attention(exec, q, store, LAYER, &shape, &sequences, &mut out).expect("attention");
    let output = |s: &AttentionSequence<'_>| out[s.first_row * width..(s.first_row + s.rows) * width].to_vec();
    sequences.iter().map(output).collect()
}

/// Writes K and V of the tokens of the chunks, then calls attention.
fn step(exec: &Exec<'_>, store: &mut KvStore, chunks: &[(&Cached<'_>, Range<usize>)]) -> Vec<Vec<f32>> {
    write(exec, store, chunks);
    attend(exec, store, chunks)
}

fn run_chunks(isa: Isa, threads: usize, case: &Case, chunk: usize) -> Vec<f32> {
    let pool = Pool::new(NonZeroUsize::new(threads).expect("some"));
    let cancel = Cancel::new();
    let exec = Exec { isa, pool: &pool, cancel: &cancel };
    let cached = Cached::new(case, 3);
    let mut store = case.store(cached.table.len() + 3);
    let mut out = Vec::new();
    for start in (0..case.tokens).step_by(chunk) {
        out.extend(step(&exec, &mut store, &[(&cached, start..case.tokens.min(start + chunk))]).remove(0));
    }
    out
}

/// Runs the sequence in a batch between two sequences of other lengths and chunk sizes.
fn run_in_batch(isa: Isa, threads: usize, case: &Case, chunk: usize) -> Vec<f32> {
    let pool = Pool::new(NonZeroUsize::new(threads).expect("some"));
    let cancel = Cancel::new();
    let exec = Exec { isa, pool: &pool, cancel: &cancel };
    let before = Case { tokens: case.tokens / 3 + 1, seed: 77, ..case.clone() };
    let after = Case { tokens: case.tokens + 41, seed: 99, ..case.clone() };
    let (mut cached, mut first) = (Vec::new(), 0);
    for case in [&before, case, &after] {
        cached.push(Cached::new(case, first));
        first += cached[cached.len() - 1].table.len() as u32;
    }
    let mut store = case.store(first as usize);
    let chunks = [chunk + 9, chunk, 2 * chunk + 1];
    let mut done = [0; 3];
    let mut out = Vec::new();
    while done[1] < case.tokens {
        let mut batch = Vec::new();
        for (index, cached) in cached.iter().enumerate() {
            let end = (done[index] + chunks[index]).min(cached.case.tokens);
            batch.push((cached, done[index]..end));
            done[index] = end;
        }
        out.extend(step(&exec, &mut store, &batch).swap_remove(1));
    }
    out
}

fn assert_same_bits(got: &[f32], wanted: &[f32], what: &str) {
    assert_eq!(got.len(), wanted.len());
    if let Some(index) = (0..got.len()).find(|i| got[*i].to_bits() != wanted[*i].to_bits()) {
        panic!("{what}: element {index} is {} instead of {}", got[index], wanted[index]);
    }
}

/// Checks that chunks, threads and other sequences change no bit, and that the output agrees with the oracle.
fn check_invariance(case: &Case) {
    let wanted = oracle(case, 0..case.tokens);
    for isa in Isa::available() {
        let whole = run_chunks(isa, 1, case, case.tokens);
        assert_close(&whole, &wanted, &format!("{} {case:?}", isa.name()));
        for (threads, chunk) in [(1, 1), (2, 7), (3, 16), (2, 64), (3, case.tokens)] {
            let what = format!("{} {case:?} in chunks of {chunk} on {threads} threads", isa.name());
            assert_same_bits(&run_chunks(isa, threads, case, chunk), &whole, &what);
        }
        for (threads, chunk) in [(1, 64), (3, 19)] {
            let what = format!("{} {case:?} in a batch in chunks of {chunk} on {threads} threads", isa.name());
            assert_same_bits(&run_in_batch(isa, threads, case, chunk), &whole, &what);
        }
    }
}

#[test]
fn partitioning_changes_no_bit_without_a_window() {
    check_invariance(&Case::new(1, 16, None, KvFormat::F32, 1190));
    check_invariance(&Case::new(2, 20, None, KvFormat::F16, 700));
    check_invariance(&Case::new(4, 64, None, KvFormat::Bf16, 530));
    check_invariance(&Case::new(7, 16, None, KvFormat::F16, 600));
    check_invariance(&Case::new(1, 128, None, KvFormat::F16, 300));
    check_invariance(&Case::new(1, 16, None, KvFormat::Int8, 1190));
    check_invariance(&Case::new(4, 64, None, KvFormat::Int8, 530));
    check_invariance(&Case::new(7, 18, None, KvFormat::Int8, 600));
}

#[test]
fn partitioning_changes_no_bit_with_a_window() {
    check_invariance(&Case::new(2, 16, Some(1), KvFormat::F16, 600));
    check_invariance(&Case::new(7, 20, Some(16), KvFormat::F32, 540));
    check_invariance(&Case::new(4, 64, Some(300), KvFormat::F16, 620));
    check_invariance(&Case::new(1, 128, Some(300), KvFormat::Bf16, 580));
    check_invariance(&Case::new(2, 16, Some(300), KvFormat::F32, 1200));
    check_invariance(&Case::new(2, 16, Some(1), KvFormat::Int8, 600));
    check_invariance(&Case::new(3, 34, Some(300), KvFormat::Int8, 900));
}

/// Head dimensions of other models, different widths of K and V, softcap.
#[test]
fn odd_shapes_agree_with_f64() {
    let dims = [(32, 80), (80, 32), (1, 1), (17, 33), (256, 256), (192, 128), (270, 16)];
    for ((key_dim, value_dim), format) in dims.into_iter().flat_map(|d| [(d, KvFormat::F16), (d, KvFormat::Int8)]) {
        let mut case = Case::new(3, key_dim, None, format, 290);
        case.shape.value_dim = value_dim;
        case.shape.softcap = Some(1.5);
        let wanted = oracle(&case, 0..case.tokens);
        for isa in Isa::available() {
            assert_close(&run_chunks(isa, 2, &case, 100), &wanted, &format!("{} {case:?}", isa.name()));
        }
    }
}

/// Later rows of the same tile and page do not affect a row, even if they are infinite or NaN.
#[test]
fn later_tokens_do_not_affect_earlier_rows() {
    for (isa, format) in Isa::available().into_iter().flat_map(|isa| KvFormat::ALL.iter().map(move |f| (isa, *f))) {
        let case = Case::new(2, 20, None, format, 40);
        let [q_width, k_width, v_width] = case.widths();
        let stride = q_width + k_width + v_width;
        let pool = Pool::new(NonZeroUsize::MIN);
        let cancel = Cancel::new();
        let exec = Exec { isa, pool: &pool, cancel: &cancel };
        let clean = run_chunks(isa, 1, &case, case.tokens);
        for (bad, token) in [(f32::NAN, 21), (f32::INFINITY, 22), (f32::NAN, 39)] {
            let mut cached = Cached::new(&case, 0);
            cached.qkv[token * stride + q_width..(token + 1) * stride].fill(bad);
            let mut store = case.store(3);
            let out = step(&exec, &mut store, &[(&cached, 0..case.tokens)]).remove(0);
            let width = case.shape.heads * case.shape.value_dim;
            assert_same_bits(&out[..token * width], &clean[..token * width], isa.name());
            assert!(out[token * width..].iter().all(|x| x.is_nan()), "rows that attend to a non-finite token are NaN");
        }
    }
}

/// A non-finite element of K, V or Q in an int8 cache makes only the rows of its own head NaN.
#[test]
fn int8_propagates_non_finite_elements() {
    let case = Case::new(2, 20, None, KvFormat::Int8, 40);
    let [q_width, k_width, v_width] = case.widths();
    let (stride, width) = (q_width + k_width + v_width, case.shape.heads * 20);
    for isa in Isa::available() {
        let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
        let exec = Exec { isa, pool: &pool, cancel: &cancel };
        let clean = run_chunks(isa, 1, &case, case.tokens);
        // The second head of K and of V serves the last two of four; a column of Q belongs to one row.
        let places = [(q_width + 25, 40..80, 18..40), (q_width + k_width + 39, 40..80, 18..40), (21, 20..40, 18..19)];
        for (bad, (place, columns, rows)) in
            [f32::NAN, f32::NEG_INFINITY].into_iter().flat_map(|x| places.clone().map(|p| (x, p)))
        {
            let mut cached = Cached::new(&case, 0);
            cached.qkv[18 * stride + place] = bad;
            let mut store = case.store(3);
            let out = step(&exec, &mut store, &[(&cached, 0..case.tokens)]).remove(0);
            for (index, (got, clean)) in out.iter().zip(&clean).enumerate() {
                let is_bad = rows.contains(&(index / width)) && columns.contains(&(index % width));
                assert_eq!(got.is_nan(), is_bad, "{}: {bad} at {place}, element {index}", isa.name());
                assert!(is_bad || got.to_bits() == clean.to_bits(), "{}: element {index}", isa.name());
            }
        }
    }
}

/// Many tokens whose weight is a thousandth of the largest still count: with the largest alone the output would be 1.
#[test]
fn tokens_of_low_weight_are_not_lost() {
    let mut case = Case::new(1, 16, None, KvFormat::Int8, 256);
    case.shape.kv_heads = 1;
    case.shape.heads = 1;
    case.shape.scale = 1.0;
    for isa in Isa::available() {
        let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
        let exec = Exec { isa, pool: &pool, cancel: &cancel };
        let mut cached = Cached::new(&case, 0);
        for (token, row) in cached.qkv.chunks_exact_mut(48).enumerate() {
            row.fill(1.0);
            row[16..32].fill(if token == 3 { 1000f32.ln() / 16.0 } else { 0.0 });
            row[32..].fill(if token == 3 { 1.0 } else { -1.0 });
        }
        let mut store = case.store(16);
        let out = step(&exec, &mut store, &[(&cached, 0..256)]).remove(0);
        let wanted = (1000.0 - 255.0) / (1000.0 + 255.0);
        assert!((out[255 * 16] - wanted).abs() < 0.01, "{}: {} for {wanted}", isa.name(), out[255 * 16]);
    }
}

/// Bounds the mean square error of an int8 cache against exact attention.
#[test]
fn int8_is_close_to_exact_attention() {
    let exact = oracle(&Case::new(4, 64, None, KvFormat::F32, 700), 0..700);
    let got = run_chunks(Isa::best(), 2, &Case::new(4, 64, None, KvFormat::Int8, 700), 700);
    let square = |x: f64| x * x;
    let error: f64 = got.iter().zip(&exact).map(|(got, (exact, _))| square(f64::from(*got) - exact)).sum();
    let size: f64 = exact.iter().map(|(exact, _)| square(*exact)).sum();
    let relative = (error / size).sqrt();
    assert!(relative < 0.02, "{relative}");
}

#[test]
fn a_set_cancel_flag_is_an_error() {
    let case = Case::new(2, 16, None, KvFormat::F32, 40);
    let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
    cancel.cancel();
    let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
    let data = case.qkv();
    let q = Rows::new(&data, case.widths().iter().sum(), 0);
    let sequence = AttentionSequence { first_row: 0, rows: 40, first_position: 0, pages: &[0, 1, 2] };
    let mut out = vec![0.0; 40 * 4 * 16];
    let result = attention(&exec, q, &case.store(3), LAYER, &case.shape, &[sequence], &mut out);
    assert_eq!(result, Err(PoolError::Cancelled));
}

#[test]
fn rows_without_a_sequence_are_unchanged() {
    let case = Case::new(1, 16, None, KvFormat::F32, 8);
    let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
    let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
    let data = case.qkv();
    let q = Rows::new(&data, case.widths().iter().sum(), 0);
    let pages = [0];
    let sequence = |first_row, rows| AttentionSequence { first_row, rows, first_position: 0, pages: &pages };
    let mut out = vec![7.0; 8 * 32];
    let store = case.store(1);
    attention(&exec, q, &store, LAYER, &case.shape, &[sequence(1, 2), sequence(4, 0)], &mut out).expect("runs");
    assert!(out[..32].iter().chain(&out[3 * 32..]).all(|x| *x == 7.0));
    attention(&exec, q, &store, LAYER, &case.shape, &[], &mut out).expect("runs");
}
