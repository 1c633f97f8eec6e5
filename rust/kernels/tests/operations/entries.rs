//! Attention to entries and their choice against f64, at any shape, on guarded buffers, and against themselves under
//! different partitions of the work.

use std::num::NonZeroUsize;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::attention::AttentionSequence;
use ferrule_kernels::entries::{
    Entries, EntryAttention, EntryBuffers, EntryChoice, EntryIndex, PagedRows, attend_entries, choose_entries,
    rows_per_page,
};
use ferrule_kernels::kv::{PAGE_TOKENS, PageId};
use ferrule_kernels::{Cancel, Exec, Pool, Rows};
use proptest::prelude::*;

use crate::guard::Guarded;
use crate::integers::integers;

/// A sequence with the vectors, keys and queries of all its tokens and entries.
#[derive(Debug, Clone)]
struct Case {
    heads: usize,
    dim: usize,
    block: usize,
    window: usize,
    /// Number of entries that a row attends to; `None` for all.
    count: Option<usize>,
    tokens: usize,
    seed: u32,
}

/// Floats of a page before and after those of the view, which belong to other layers.
const OTHERS: [usize; 2] = [3, 5];

impl Case {
    fn integers(&self, count: usize, salt: u32) -> Vec<f32> {
        integers(self.seed.wrapping_add(salt)).take(count).collect()
    }

    fn vectors(&self) -> Vec<f32> {
        self.integers(self.tokens * self.dim, 1)
    }

    fn entries(&self) -> Vec<f32> {
        self.integers(self.tokens / self.block * self.dim, 2)
    }

    fn queries(&self) -> Vec<f32> {
        self.integers(self.tokens * self.heads * self.dim, 3)
    }

    fn weights(&self) -> Vec<f32> {
        self.integers(self.tokens * self.heads, 4)
    }

    fn sinks(&self) -> Vec<f32> {
        self.integers(self.heads, 5)
    }

    /// Returns the entries that a row attends to, by sorting scores of the entries as keys.
    fn chosen(&self, row: usize) -> Vec<usize> {
        let (queries, weights, entries) = (self.queries(), self.weights(), self.entries());
        let score = |entry: usize| -> f32 {
            let of_head = |head: usize| {
                let query = &queries[(row * self.heads + head) * self.dim..][..self.dim];
                let product: f32 = query.iter().zip(&entries[entry * self.dim..]).map(|(q, k)| q * k).sum();
                weights[row * self.heads + head] * product.max(0.0)
            };
            (0..self.heads).map(of_head).sum()
        };
        let mut order: Vec<_> = (0..(row + 1) / self.block).collect();
        if let Some(count) = self.count {
            // Adding 0 makes -0 equal to 0.
            order.sort_by(|a, b| (score(*b) + 0.0).total_cmp(&(score(*a) + 0.0)));
            order.truncate(count);
            order.sort_unstable();
        }
        order
    }

    /// Returns the output of a row.
    fn attended(&self, row: usize) -> Vec<f64> {
        let (queries, sinks, vectors, entries) = (self.queries(), self.sinks(), self.vectors(), self.entries());
        let of = |from: &[f32], index: usize| from[index * self.dim..][..self.dim].to_vec();
        let seen = (row + 1).saturating_sub(self.window)..row + 1;
        let seen = seen.map(|token| of(&vectors, token));
        let seen: Vec<_> = seen.chain(self.chosen(row).into_iter().map(|entry| of(&entries, entry))).collect();
        let mut out = Vec::new();
        for (head, sink) in sinks.iter().enumerate() {
            let query = of(&queries, row * self.heads + head);
            let weight = |vector: &Vec<f32>| {
                let product: f64 = query.iter().zip(vector).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                (product * f64::from(SCALE)).exp()
            };
            let total = seen.iter().map(weight).sum::<f64>() + f64::from(*sink).exp();
            let column = |column: usize| seen.iter().map(|v| weight(v) * f64::from(v[column])).sum::<f64>() / total;
            out.extend((0..self.dim).map(column));
        }
        out
    }

    /// Writes rows to pages, in the order of a page table.
    fn paged(&self, rows: &[f32], block: usize, table: &[PageId]) -> (Guarded<f32>, usize) {
        let stride = OTHERS[0] + rows_per_page(block) * self.dim + OTHERS[1];
        let mut pages = vec![f32::NAN; table.len() * stride];
        for (index, row) in rows.chunks_exact(self.dim).enumerate() {
            let last = (index + 1) * block - 1;
            let slot = last % PAGE_TOKENS / block;
            let at = table[last / PAGE_TOKENS] as usize * stride + OTHERS[0] + slot * self.dim;
            pages[at..at + self.dim].copy_from_slice(row);
        }
        (Guarded::new(&pages), stride)
    }

    /// Returns the entries that each row attends to, and the outputs, of the sequence in chunks, beside another one.
    fn run(&self, isa: Isa, threads: usize, chunk: usize) -> (Vec<Vec<usize>>, Vec<f32>) {
        let (pool, cancel) = (Pool::new(NonZeroUsize::new(threads).expect("some")), Cancel::new());
        let exec = Exec { isa, pool: &pool, cancel: &cancel };
        let table: Vec<PageId> = (0..self.tokens.div_ceil(PAGE_TOKENS) as u32).rev().collect();
        let [tokens, entries] = [(self.vectors(), 1), (self.entries(), self.block)]
            .map(|(rows, block)| (self.paged(&rows, block, &table), block));
        let [tokens, entries] = [&tokens, &entries].map(|((pages, stride), block)| PagedRows {
            pages: Rows::new(pages, *stride, OTHERS[0]),
            dim: self.dim,
            block: *block,
        });
        let (width, sinks) = (self.heads * self.dim, self.sinks());
        let (mut chosen, mut outputs) = (Vec::new(), Vec::new());
        let (mut choice, mut buffers) = (EntryChoice::default(), EntryBuffers::default());
        for first in (0..self.tokens).step_by(chunk) {
            let rows = chunk.min(self.tokens - first);
            let twice = |numbers: &[f32], width: usize| {
                let rows = &numbers[first * width..][..rows * width];
                Guarded::new(&[rows, rows].concat())
            };
            let (queries, weights) = (twice(&self.queries(), width), twice(&self.weights(), self.heads));
            let sequences =
                [0, rows].map(|first_row| AttentionSequence { first_row, rows, first_position: first, pages: &table });
            let queries = Rows::new(&queries, width, 0);
            if let Some(count) = self.count {
                let index = EntryIndex { heads: self.heads, keys: entries, count };
                let weights = Rows::new(&weights, self.heads, 0);
                choose_entries(&exec, queries, weights, &index, &sequences, &mut choice).expect("runs");
            }
            let attention = EntryAttention {
                heads: self.heads,
                scale: SCALE,
                window: self.window,
                sinks: &sinks,
                tokens,
                entries: Some(Entries { rows: entries, sequences: &sequences, choice: self.count.map(|_| &choice) }),
            };
            let mut out = Guarded::new(&vec![f32::NAN; 2 * rows * width]);
            attend_entries(&exec, queries, &attention, &sequences, &mut buffers, &mut out).expect("runs");
            let (own, other) = out.split_at(rows * width);
            assert_eq!(own, other, "both sequences are the same");
            outputs.extend_from_slice(own);
            if self.count.is_some() {
                chosen.extend((0..rows).map(|row| choice.entries(row).collect::<Vec<_>>()));
            }
        }
        (chosen, outputs)
    }

    fn check(&self) {
        for isa in Isa::available() {
            let (chosen, out) = self.run(isa, 2, self.tokens);
            if self.count.is_some() {
                assert_eq!(chosen, (0..self.tokens).map(|row| self.chosen(row)).collect::<Vec<_>>());
            }
            let wanted = (0..self.tokens).flat_map(|row| self.attended(row));
            for (index, (got, wanted)) in out.iter().zip(wanted).enumerate() {
                assert!((f64::from(*got) - wanted).abs() < 2e-5, "{} {index}: {got} for {wanted}", isa.name());
            }
            for (threads, chunk) in [(1, 1), (3, 7)] {
                assert_eq!(self.run(isa, threads, chunk), (chosen.clone(), out.clone()), "{}", isa.name());
            }
        }
    }
}

const SCALE: f32 = 0.25;

#[test]
fn many_entries_are_scored_and_chosen_in_parallel() {
    Case { heads: 9, dim: 17, block: 1, window: 3, count: Some(5), tokens: 300, seed: 1 }.check();
    Case { heads: 4, dim: 16, block: 32, window: 20, count: None, tokens: 100, seed: 2 }.check();
}

proptest! {
    #[test]
    fn attention_to_entries_at_any_shape(
        heads in 1..11_usize,
        dim in 1..40_usize,
        block in prop::sample::select(vec![1, 2, 4, 16, 32]),
        window in 1..40_usize,
        count in prop::option::of(1..12_usize),
        tokens in 1..50_usize,
        seed: u32,
    ) {
        Case { heads, dim, block, window, count, tokens, seed: seed % 1000 }.check();
    }
}
