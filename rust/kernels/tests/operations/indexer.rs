//! The choice of tokens against sorting in f64, and against itself under different partitions of the work.
//!
//! Queries, keys and weights are small integers, whose products and sums are exact in every format: scores tie often, and
//! the reference must choose the same tokens.

use std::cmp::Reverse;
use std::num::NonZeroUsize;
use std::ops::Range;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::attention::AttentionSequence;
use ferrule_kernels::indexer::{BlockScore, IndexShape, Selection, buffer_bytes, choose_tokens, mean_key};
use ferrule_kernels::kv::{KvFormat, KvRow, KvShape, PAGE_TOKENS};
use ferrule_kernels::{Cancel, Exec, Pool, Rows};
use proptest::prelude::*;

use crate::guard::Guarded;
use crate::integers::integers;
use crate::kv::poisoned;

/// A sequence with the keys and queries of all its tokens.
#[derive(Debug, Clone)]
struct Case {
    shape: IndexShape,
    dim: usize,
    format: KvFormat,
    is_combined: bool,
    /// `[tokens, heads * dim]`
    queries: Vec<f32>,
    /// `[tokens, heads]`
    weights: Vec<f32>,
    /// `[tokens, dim]`
    keys: Vec<f32>,
}

impl Case {
    fn new(shape: IndexShape, dim: usize, tokens: usize, is_combined: bool, format: KvFormat, seed: u32) -> Self {
        let mut integers = integers(seed);
        let mut numbers = |count| integers.by_ref().take(count).collect();
        let heads = shape.heads;
        let (queries, weights, keys) = (numbers(tokens * heads * dim), numbers(tokens * heads), numbers(tokens * dim));
        Self { shape, dim, format, is_combined, queries, weights, keys }
    }

    fn tokens(&self) -> usize {
        self.keys.len() / self.dim
    }

    fn sets(&self) -> usize {
        if self.is_combined { 1 } else { self.shape.heads }
    }

    /// Returns the tokens of each set of each row, sorted.
    fn reference(&self) -> Vec<Vec<usize>> {
        let IndexShape { heads, block, blocks, local_blocks, score: kind } = self.shape;
        let product = |row: usize, head: usize, token: usize| -> f64 {
            let query = &self.queries[(row * heads + head) * self.dim..][..self.dim];
            let key = &self.keys[token * self.dim..][..self.dim];
            query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum()
        };
        let combined = |row: usize, token: usize| -> f64 {
            (0..heads).map(|h| f64::from(self.weights[row * heads + h]) * product(row, h, token).max(0.0)).sum()
        };
        let set = |row: usize, set: usize| {
            let score = |token| if self.is_combined { combined(row, token) } else { product(row, set, token) };
            // The blocks that are chosen from, and the tokens behind them.
            let end = if kind == BlockScore::Highest { row + 1 } else { (row + 1) / block * block };
            let count = end.div_ceil(block);
            let tokens_of = |index: usize| index * block..end.min((index + 1) * block);
            let mut order: Vec<_> = (0..count).collect();
            let of_block = |index: usize| match kind {
                BlockScore::Highest => tokens_of(index).map(score).fold(f64::NEG_INFINITY, f64::max),
                BlockScore::Last => score(tokens_of(index).end - 1),
            };
            let rank = |index: &usize| {
                let score = if *index + local_blocks >= count { f64::INFINITY } else { of_block(*index) };
                Reverse((score * 1e6) as i64)
            };
            order.sort_by_key(rank);
            order.truncate(blocks);
            order.sort_unstable();
            order.into_iter().flat_map(tokens_of).chain(end..=row).collect()
        };
        (0..self.tokens()).flat_map(|row| (0..self.sets()).map(move |s| (row, s))).map(|(r, s)| set(r, s)).collect()
    }
}

const LAYER: usize = 1;

/// Returns the tokens of each set of each row of a sequence that is run in chunks, beside another one.
fn run(isa: Isa, threads: usize, case: &Case, chunk: usize) -> Vec<Vec<usize>> {
    let (pool, cancel) = (Pool::new(NonZeroUsize::new(threads).expect("some")), Cancel::new());
    let exec = Exec { isa, pool: &pool, cancel: &cancel };
    let (dim, heads, tokens) = (case.dim, case.shape.heads, case.tokens());
    let pages = tokens.div_ceil(PAGE_TOKENS) as u32;
    let tables = [(0..pages).rev().collect::<Vec<_>>(), (pages..2 * pages).collect()];
    let shape = KvShape { layers: 2, kv_heads: 2, key_dim: 3, value_dim: 5, index_dim: dim };
    let mut store = poisoned(case.format, shape, 2 * pages as usize);
    let mut chosen = Vec::new();
    let mut selection = Selection::default();
    for start in (0..tokens).step_by(chunk) {
        let rows = start..tokens.min(start + chunk);
        let twice = |numbers: &[f32], width: usize| {
            let rows: &[f32] = &numbers[rows.start * width..rows.end * width];
            Guarded::new(&[rows, rows].concat())
        };
        let place =
            |table: &Vec<u32>, token: usize| KvRow { page: table[token / PAGE_TOKENS], slot: token % PAGE_TOKENS };
        let places: Vec<_> = tables.iter().flat_map(|table| rows.clone().map(|token| place(table, token))).collect();
        let keys = twice(&case.keys, dim);
        store.write_index(isa, LAYER, &places, Rows::new(&keys, dim, 0));
        let sequence = |index: usize| AttentionSequence {
            first_row: index * rows.len(),
            rows: rows.len(),
            first_position: start,
            pages: &tables[index],
        };
        let (queries, weights) = (twice(&case.queries, heads * dim), twice(&case.weights, heads));
        let weights = case.is_combined.then(|| Rows::new(&weights, heads, 0));
        let queries = Rows::new(&queries, heads * dim, 0);
        let sequences = [sequence(0), sequence(1)];
        choose_tokens(&exec, queries, weights, &store, LAYER, &case.shape, &sequences, &mut selection).expect("runs");
        let of = |rows: Range<usize>| -> Vec<Vec<usize>> {
            let sets = rows.flat_map(|row| (0..case.sets()).map(move |set| (row, set)));
            sets.map(|(row, set)| selection.tokens(row, set).collect()).collect()
        };
        let first = of(0..rows.len());
        assert_eq!(first, of(rows.len()..2 * rows.len()), "the pages of a sequence have no effect");
        chosen.extend(first);
    }
    chosen
}

fn check(case: &Case) {
    let wanted = case.reference();
    for isa in Isa::available() {
        for (threads, chunk) in [(1, case.tokens()), (3, 1), (2, 7), (3, 64)] {
            let what = format!("{} in chunks of {chunk} on {threads} threads", isa.name());
            let (shape, format) = (case.shape, case.format);
            for (index, (got, wanted)) in run(isa, threads, case, chunk).iter().zip(&wanted).enumerate() {
                assert_eq!(got, wanted, "{what}, set {index}: {shape:?} {format:?}");
            }
        }
    }
}

#[test]
fn the_highest_scores_are_chosen_and_the_first_of_equal_ones() {
    let single = IndexShape { heads: 13, block: 1, blocks: 20, local_blocks: 0, score: BlockScore::Highest };
    check(&Case::new(single, 24, 300, true, KvFormat::F32, 1));
    check(&Case::new(IndexShape { blocks: 1, heads: 8, ..single }, 1, 70, true, KvFormat::Int8, 2));
    let blocks = IndexShape { heads: 2, block: 16, blocks: 3, local_blocks: 1, score: BlockScore::Highest };
    check(&Case::new(blocks, 16, 300, false, KvFormat::Bf16, 3));
    check(&Case::new(IndexShape { block: 5, local_blocks: 3, ..blocks }, 7, 90, false, KvFormat::F16, 4));
    let last = IndexShape { block: 4, local_blocks: 0, score: BlockScore::Last, ..blocks };
    check(&Case::new(last, 16, 150, true, KvFormat::F32, 7));
}

/// The scores of these rows do not fit in memory at once.
#[test]
fn long_sequences_are_chosen_from_in_parts() {
    let shape = IndexShape { heads: 1, block: 1, blocks: 3, local_blocks: 0, score: BlockScore::Highest };
    let case = Case::new(shape, 2, 1600, true, KvFormat::Int8, 5);
    let scores = 1600 * 1600 * size_of::<f32>();
    assert!(buffer_bytes(1600, 1, 1600) < scores as u64, "all scores fit in memory");
    assert_eq!(run(Isa::best(), 2, &case, 1600), case.reference());
}

/// A score that is not finite changes no choice of earlier rows.
#[test]
fn later_tokens_do_not_affect_earlier_rows() {
    let shape = IndexShape { heads: 5, block: 1, blocks: 9, local_blocks: 0, score: BlockScore::Highest };
    let mut case = Case::new(shape, 6, 60, true, KvFormat::F32, 6);
    for isa in Isa::available() {
        let clean = run(isa, 1, &case, 60);
        for bad in [f32::NAN, f32::INFINITY] {
            case.keys[40 * 6..41 * 6].fill(bad);
            assert_eq!(run(isa, 1, &case, 60)[..40], clean[..40]);
        }
        case = Case::new(shape, 6, 60, true, KvFormat::F32, 6);
    }
}

/// Positions cross pages, which are in any order.
#[test]
fn means_are_those_of_stored_keys() {
    const DIM: usize = 5;
    let keys: Vec<f32> = (0..40 * DIM).map(|i| (i * i % 23) as f32).collect();
    let pages = [2, 0, 1];
    let places: Vec<_> = (0..40).map(|token| KvRow { page: pages[token / 16], slot: token % 16 }).collect();
    for (isa, format) in
        Isa::available().into_iter().flat_map(|isa| KvFormat::ALL.iter().map(move |format| (isa, *format)))
    {
        let shape = KvShape { layers: 2, kv_heads: 1, key_dim: 3, value_dim: 3, index_dim: DIM };
        let mut store = poisoned(format, shape, 3);
        store.write_index(isa, LAYER, &places, Rows::new(&keys, DIM, 0));
        for positions in [0..1, 3..7, 12..20, 15..16, 14..39, 0..40] {
            let mut out = Guarded::new(&[f32::NAN; DIM]);
            mean_key(isa, &store, LAYER, &pages, positions.clone(), &mut out);
            let sum = |column: usize| positions.clone().map(|token| keys[token * DIM + column]).sum::<f32>();
            // The keys are small integers, whose sums are exact.
            let wanted: Vec<_> = (0..DIM).map(|column| sum(column) / positions.len() as f32).collect();
            assert_eq!(out[..], wanted, "{} {format:?} {positions:?}", isa.name());
        }
    }
}

#[test]
#[should_panic(expected = "blocks must be >= 1, got 0")]
fn an_indexer_that_chooses_nothing_is_refused() {
    let shape = IndexShape { heads: 1, block: 1, blocks: 0, local_blocks: 0, score: BlockScore::Highest };
    run(Isa::best(), 1, &Case::new(shape, 2, 3, true, KvFormat::F32, 1), 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_shape_agrees_with_sorting(
        (heads, dim, tokens) in (1usize..18, 1usize..40, 1usize..150),
        (block, blocks, local_blocks) in (1usize..20, 1usize..30, 0usize..4),
        (is_combined, is_last) in any::<(bool, bool)>(),
        format in prop::sample::select(KvFormat::ALL.to_vec()),
        seed in 1u32..1000,
    ) {
        let score = if is_last { BlockScore::Last } else { BlockScore::Highest };
        let shape = IndexShape { heads, block, blocks, local_blocks: local_blocks.min(blocks), score };
        check(&Case::new(shape, dim, tokens, is_combined, format, seed));
    }
}
