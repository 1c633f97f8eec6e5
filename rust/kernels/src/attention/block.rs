//! One block of tokens for a tile of rows, all accumulators in registers.

// Plain counting loops over small arrays of registers: iterators over several arrays at once hide what is computed.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::ATTENTION_BLOCK;
use super::record::{self, Line};
use crate::arch::{Kernel, LANES, Simd};
use crate::kv::{KvElement, PAGE_TOKENS};
use crate::math::{exp, tanh};

/// Pages of a block.
pub(super) const BLOCK_PAGES: usize = ATTENTION_BLOCK / PAGE_TOKENS;

/// Vectors that accumulators may take, so that operands still find registers.
pub(super) const fn registers<S: Simd>() -> usize {
    S::TILE_ROWS * S::TILE_PANELS
}

/// A page's K or V of one head.
type Page<'a, E> = &'a [[<E as KvElement>::Stored; LANES]];

/// K and V of one head in the pages of a block; empty where no row of the task looks.
pub(super) struct BlockPages<'a, E: KvElement> {
    /// `[key_dim][token]`
    pub(super) keys: [Page<'a, E>; BLOCK_PAGES],
    /// `[token][value_vectors]`
    pub(super) values: [Page<'a, E>; BLOCK_PAGES],
    /// K of the next block, to be fetched while V of this one is worked on.
    pub(super) next: [Page<'a, E>; BLOCK_PAGES],
}

/// Computes the records of `R` rows over one block.
pub(super) struct TileBlock<'a, E: KvElement, const R: usize> {
    pub(super) pages: &'a BlockPages<'a, E>,
    /// `[key_dim]`: a column of the rows' scaled Q.
    pub(super) q: &'a [[f32; R]],
    /// Tokens of the block that each row sees; 0..0 where it sees none.
    pub(super) visible: [Range<usize>; R],
    pub(super) softcap: Option<f32>,
    pub(super) value_vectors: usize,
    /// At least `R` rows of scratch.
    pub(super) scores: &'a mut [[Line; BLOCK_PAGES]],
    /// `R` records, overwritten.
    pub(super) records: &'a mut [Line],
    /// Whether this tile is the first to touch the block.
    pub(super) prefetch: bool,
}

impl<E: KvElement, const R: usize> Kernel for TileBlock<'_, E, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (mut first_start, mut last_start) = (ATTENTION_BLOCK, 0);
        let (mut first_end, mut last_end) = (ATTENTION_BLOCK, 0);
        for row in &self.visible {
            if !row.is_empty() {
                first_start = first_start.min(row.start);
            }
            last_start = last_start.max(row.start);
            first_end = first_end.min(row.end);
            last_end = last_end.max(row.end);
        }
        // Pages that some row sees, and those that every row sees in full.
        let seen = first_start / PAGE_TOKENS..last_end.div_ceil(PAGE_TOKENS);
        let shared = last_start.div_ceil(PAGE_TOKENS)..first_end / PAGE_TOKENS;

        let max = self.all_scores(simd, seen.clone(), &shared);
        self.softmax(simd, seen.clone(), max);
        let mut vector = 0;
        let mut prefetch = self.prefetch;
        while vector < self.value_vectors {
            let left = self.value_vectors - vector;
            if R * 8 <= registers::<S>() && left >= 8 {
                self.values::<S, 8>(simd, seen.clone(), &shared, vector, prefetch);
                vector += 8;
            } else if R * 4 <= registers::<S>() && left >= 4 {
                self.values::<S, 4>(simd, seen.clone(), &shared, vector, prefetch);
                vector += 4;
            } else if R * 2 <= registers::<S>() && left >= 2 {
                self.values::<S, 2>(simd, seen.clone(), &shared, vector, prefetch);
                vector += 2;
            } else {
                self.values::<S, 1>(simd, seen.clone(), &shared, vector, prefetch);
                vector += 1;
            }
            prefetch = false;
        }
    }
}

impl<E: KvElement, const R: usize> TileBlock<'_, E, R> {
    /// Scores of all pages that some row sees, -inf where a row does not see a token, and each row's largest by lanes.
    #[inline(always)]
    fn all_scores<S: Simd>(&mut self, simd: S, seen: Range<usize>, shared: &Range<usize>) -> [S::F32; R] {
        let mut max = [simd.splat(f32::NEG_INFINITY); R];
        let mut page = seen.start;
        while page < seen.end {
            let left = seen.end - page;
            if R * 4 <= registers::<S>() && left >= 4 {
                self.scores::<S, 4>(simd, page, shared, &mut max);
                page += 4;
            } else if R * 2 <= registers::<S>() && left >= 2 {
                self.scores::<S, 2>(simd, page, shared, &mut max);
                page += 2;
            } else {
                self.scores::<S, 1>(simd, page, shared, &mut max);
                page += 1;
            }
        }
        max
    }

    /// Scores of `P` pages.
    #[inline(always)]
    fn scores<S: Simd, const P: usize>(&mut self, simd: S, first: usize, shared: &Range<usize>, max: &mut [S::F32; R]) {
        let mut keys: [Page<'_, E>; P] = [&[]; P];
        let mut ahead: [Page<'_, E>; P] = [&[]; P];
        for p in 0..P {
            keys[p] = &self.pages.keys[first + p][..self.q.len()];
            ahead[p] = self.pages.values[first + p];
        }
        let mut sums = [[simd.splat(0.0); P]; R];
        for (column, q) in self.q.iter().enumerate() {
            let mut key = [simd.splat(0.0); P];
            for p in 0..P {
                key[p] = E::widen(simd, &keys[p][column]);
                if self.prefetch {
                    prefetch_vector::<S, E>(simd, ahead[p], column);
                }
            }
            for r in 0..R {
                let q = simd.splat(q[r]);
                for p in 0..P {
                    sums[r][p] = simd.mul_add(q, key[p], sums[r][p]);
                }
            }
        }
        let masked = first < shared.start || first + P > shared.end;
        for r in 0..R {
            for p in 0..P {
                let mut score = sums[r][p];
                if let Some(cap) = self.softcap {
                    let cap = simd.splat(cap);
                    score = simd.mul(cap, tanh(simd, simd.div(score, cap)));
                }
                // A bias by position, such as ALiBi's slope, would be added here.
                if masked {
                    let start = (first + p) * PAGE_TOKENS;
                    let from = self.visible[r].start.saturating_sub(start);
                    let to = self.visible[r].end.saturating_sub(start);
                    score = simd.select_range(from, to, score, simd.splat(f32::NEG_INFINITY));
                }
                // The maximum second: it is kept where the score is NaN, and the score makes the sum NaN.
                max[r] = simd.max(score, max[r]);
                simd.store(score, &mut self.scores[r][first + p].0);
            }
        }
    }

    /// Turns scores into e^(score - maximum) and writes the heads of the records.
    #[inline(always)]
    fn softmax<S: Simd>(&mut self, simd: S, seen: Range<usize>, max: [S::F32; R]) {
        let record_lines = 1 + self.value_vectors;
        for r in 0..R {
            if self.visible[r].is_empty() {
                self.records[r * record_lines] = record::head(f32::NEG_INFINITY, 0.0);
                continue;
            }
            let max = simd.reduce_max(max[r]);
            let mut sum = simd.splat(0.0);
            // An attention sink would begin the sum here.
            for line in &mut self.scores[r][seen.clone()] {
                let probability = exp(simd, simd.sub(simd.load(&line.0), simd.splat(max)));
                sum = simd.add(sum, probability);
                simd.store(probability, &mut line.0);
            }
            self.records[r * record_lines] = record::head(max, simd.reduce_add(sum));
        }
    }

    /// `C` vectors of output columns from `first` on: token by token, so that every row adds its tokens in order.
    #[inline(always)]
    fn values<S: Simd, const C: usize>(
        &mut self,
        simd: S,
        seen: Range<usize>,
        shared: &Range<usize>,
        first: usize,
        prefetch: bool,
    ) {
        let mut sums = [[simd.splat(0.0); C]; R];
        for page in seen {
            let tokens = self.pages.values[page].chunks_exact(self.value_vectors);
            let ahead = self.pages.next[page];
            let per_token = if prefetch { ahead.len().div_ceil(PAGE_TOKENS) } else { 0 };
            let all = shared.contains(&page);
            for (token, values) in tokens.enumerate() {
                for index in 0..per_token {
                    prefetch_vector::<S, E>(simd, ahead, token * per_token + index);
                }
                let Some((values, _)) = values[first..].split_first_chunk::<C>() else { break };
                let mut value = [simd.splat(0.0); C];
                for c in 0..C {
                    value[c] = E::widen(simd, &values[c]);
                }
                for r in 0..R {
                    // What a row does not see must not be multiplied by 0 either: it may be infinite or NaN.
                    if all || self.visible[r].contains(&(page * PAGE_TOKENS + token)) {
                        let probability = simd.splat(self.scores[r][page].0[token]);
                        for c in 0..C {
                            sums[r][c] = simd.mul_add(probability, value[c], sums[r][c]);
                        }
                    }
                }
            }
        }
        let record_lines = 1 + self.value_vectors;
        for r in 0..R {
            for c in 0..C {
                simd.store(sums[r][c], &mut self.records[r * record_lines + 1 + first + c].0);
            }
        }
    }
}

/// Asks for vector `index` of a page, if it has that many.
#[inline(always)]
fn prefetch_vector<S: Simd, E: KvElement>(simd: S, page: Page<'_, E>, index: usize) {
    if let Some(vector) = page.get(index) {
        simd.prefetch(vector.as_ptr().cast());
    }
}
