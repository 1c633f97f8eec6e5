//! The candidate tokens of a row, filtered without touching every token.
//!
//! A filter that keeps the most likely tokens keeps a prefix of the order by likelihood, which is determined by its last
//! token. So filters only move that cutoff, a temperature is only recorded, and the logits are not copied. The maxima of
//! blocks show which blocks can contain remaining tokens. When there are few such blocks, the remaining tokens are copied
//! into a sparse row, which later stages process like a small vocabulary.

use std::cmp::Ordering;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::logits::{self, BLOCK};

use crate::structured::TokenMask;

/// A candidate token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub id: u32,
    pub logit: f32,
}

/// Orders by likelihood, most likely first; among equal logits the lower id first. A total order.
pub(super) fn by_likelihood(a: &Candidate, b: &Candidate) -> Ordering {
    // Adding zero turns -0 into +0, which the total order distinguishes.
    (b.logit + 0.0).total_cmp(&(a.logit + 0.0)).then(a.id.cmp(&b.id))
}

/// Cutoff that keeps every token that is not forbidden.
const NO_CUTOFF: Candidate = Candidate { id: u32::MAX, logit: -f32::MAX };

/// The row becomes sparse once at most one in this many blocks can contain remaining tokens.
const SPARSE_RATIO: usize = 8;

/// Buffers reused from row to row.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    logits: Vec<f32>,
    ids: Vec<u32>,
    maxima: Vec<f32>,
    weights: Vec<f64>,
    sums: Vec<f64>,
    other_logits: Vec<f32>,
    other_ids: Vec<u32>,
}

/// Representation of the current row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Row {
    /// The model's logits, unmodified. Indices are token ids.
    Raw,
    /// Logits of all tokens, in the buffers. Indices are token ids.
    Dense,
    /// Logits and ids (ascending) of selected tokens, in the buffers.
    Sparse,
}

/// The candidates that the stages modify. A token is dropped if it is less likely than `last`, or not in a sparse row.
#[derive(Debug)]
pub(super) struct Candidates<'a> {
    pub isa: Isa,
    raw_logits: &'a [f32],
    buffers: &'a mut Buffers,
    row: Row,
    /// Pending temperature with the highest logit of the row.
    temperature: Option<(f32, f64)>,
    /// Cutoff: the least likely remaining token, or a position in the order. In logits before the pending temperature.
    last: Candidate,
    /// Whether the weights in the buffers belong to the row, and the sums to the remaining tokens.
    weighted: bool,
    /// Total weight when a stage recorded it.
    recorded_total: Option<f64>,
}

/// Returns the logits of the current row.
fn logits_of<'b>(row: Row, raw_logits: &'b [f32], own: &'b [f32]) -> &'b [f32] {
    if row == Row::Raw { raw_logits } else { own }
}

impl<'a> Candidates<'a> {
    /// Starts with all tokens of a row; `None` if a logit is NaN or positive infinity.
    pub fn new(isa: Isa, raw_logits: &'a [f32], buffers: &'a mut Buffers) -> Option<Self> {
        let is_valid = logits::block_maxima(isa, raw_logits, &mut buffers.maxima);
        is_valid.then_some(Self {
            isa,
            raw_logits,
            buffers,
            row: Row::Raw,
            temperature: None,
            last: NO_CUTOFF,
            weighted: false,
            recorded_total: None,
        })
    }

    fn logits(&self) -> &[f32] {
        logits_of(self.row, self.raw_logits, &self.buffers.logits)
    }

    /// Applies the pending temperature to a logit.
    fn scaled(&self, logit: f32) -> f32 {
        self.temperature.map_or(logit, |(highest, temperature)| logits::scaled(logit, highest, temperature))
    }

    fn id_at(&self, index: usize) -> u32 {
        if self.row == Row::Sparse { self.buffers.ids[index] } else { index as u32 }
    }

    /// Returns the first index whose id is not below `id`.
    fn index_of(&self, id: u32) -> usize {
        match self.row {
            Row::Sparse => self.buffers.ids.partition_point(|&other| other < id),
            Row::Raw | Row::Dense => id as usize,
        }
    }

    fn is_remaining(&self, id: u32, logit: f32) -> bool {
        by_likelihood(&Candidate { id, logit }, &self.last).is_le()
    }

    /// Returns the index ranges of the blocks that can contain remaining tokens.
    fn remaining_blocks(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        let len = self.logits().len();
        let reach = |&(_, maximum): &(usize, &f32)| *maximum >= self.last.logit;
        let maxima = self.buffers.maxima.iter().enumerate().filter(reach);
        maxima.map(move |(block, _)| block * BLOCK..((block + 1) * BLOCK).min(len))
    }

    fn highest_in_row(&self) -> f32 {
        highest(&self.buffers.maxima)
    }

    /// Returns the highest logit; negative infinity if no token remains.
    pub fn highest_logit(&self) -> f32 {
        self.scaled(self.highest_in_row())
    }

    /// Returns the logit of a token, if it has not been dropped.
    pub fn logit(&self, id: u32) -> Option<f32> {
        let index = self.index_of(id);
        let logit = *self.logits().get(index)?;
        (self.id_at(index) == id && self.is_remaining(id, logit)).then(|| self.scaled(logit))
    }

    /// Changes the logit of a token, if it has not been dropped.
    pub fn change(&mut self, id: u32, change: impl FnOnce(f32) -> f32) {
        if self.is_pending() {
            self.compact();
        }
        let Some(old) = self.logit(id) else { return };
        if self.row == Row::Raw {
            self.buffers.logits.clear();
            self.buffers.logits.extend_from_slice(self.raw_logits);
            self.row = Row::Dense;
        }
        let index = self.index_of(id);
        let new = change(old);
        self.buffers.logits[index] = new;
        let block = index / BLOCK;
        let maximum = &mut self.buffers.maxima[block];
        if new >= *maximum {
            *maximum = new;
        } else if old == *maximum {
            *maximum = highest(self.buffers.logits.chunks(BLOCK).nth(block).unwrap_or_default());
        }
        self.weighted = false;
    }

    /// Keeps only the tokens of a mask.
    pub fn keep_allowed(&mut self, mask: &TokenMask) {
        if self.is_pending() {
            self.compact();
        }
        let mut logits = std::mem::take(&mut self.buffers.other_logits);
        let mut ids = std::mem::take(&mut self.buffers.other_ids);
        logits.clear();
        ids.clear();
        let row = self.logits();
        if self.row == Row::Sparse {
            let kept = self.buffers.ids.iter().zip(row).filter(|(id, _)| mask.allows(**id));
            (ids, logits) = kept.map(|(&id, &logit)| (id, logit)).unzip();
        } else if SPARSE_RATIO * mask.count() <= row.len() {
            let kept = mask.tokens().filter_map(|id| Some((id, *row.get(id as usize)?)));
            for (id, logit) in kept.filter(|(_, logit)| *logit > f32::NEG_INFINITY) {
                ids.push(id);
                logits.push(logit);
            }
            self.row = Row::Sparse;
        } else {
            logits.resize(row.len(), f32::NEG_INFINITY);
            for ((kept, row), &word) in logits.chunks_mut(32).zip(row.chunks(32)).zip(mask.words()) {
                match word {
                    0 => {}
                    u32::MAX => kept.copy_from_slice(row),
                    _ => {
                        for (bit, (kept, &logit)) in kept.iter_mut().zip(row).enumerate() {
                            *kept = if word >> bit & 1 == 1 { logit } else { f32::NEG_INFINITY };
                        }
                    }
                }
            }
            self.row = Row::Dense;
        }
        self.buffers.other_logits = std::mem::replace(&mut self.buffers.logits, logits);
        self.buffers.other_ids = std::mem::replace(&mut self.buffers.ids, ids);
        self.reset_pending();
    }

    /// Divides the distances from the highest logit by the temperature; the highest logit becomes 0.
    pub fn divide(&mut self, temperature: f64) {
        self.apply_temperature();
        self.temperature = Some((self.highest_in_row(), temperature));
        self.weighted = false;
        // Tokens at infinite distance are dropped.
        self.keep_down_to(|logit| logit > f32::NEG_INFINITY);
    }

    /// Drops the tokens that do not pass. `passes` must be monotonic in likelihood and true for the highest logit.
    pub fn keep_down_to(&mut self, passes: impl Fn(f32) -> bool) {
        let lowest = lowest_passing(self.highest_in_row(), |logit| passes(self.scaled(logit)));
        if lowest > self.last.logit {
            self.last = Candidate { logit: lowest, ..NO_CUTOFF };
            self.weighted = false;
        }
    }

    /// Keeps the `count` most likely tokens, and all that are as likely as the last of them.
    pub fn keep_most_likely(&mut self, count: usize) {
        // At least `count` tokens reach the `count`-th highest block maximum, so the cutoff is not lower.
        let maxima = &mut self.buffers.other_logits;
        maxima.clear();
        maxima.extend(self.buffers.maxima.iter().filter(|maximum| **maximum >= self.last.logit));
        if let Some(lowest) = nth_highest(maxima, count) {
            let lowest = self.scaled(lowest);
            self.keep_down_to(|logit| logit >= lowest);
        }
        self.compact_if_sparse();
        let mut left = std::mem::take(&mut self.buffers.other_logits);
        left.clear();
        for block in self.remaining_blocks() {
            left.extend(self.logits()[block].iter().filter(|logit| **logit >= self.last.logit));
        }
        if let Some(lowest) = nth_highest(&mut left, count) {
            let lowest = self.scaled(lowest);
            self.keep_down_to(|logit| logit >= lowest);
        }
        self.buffers.other_logits = left;
    }

    /// Keeps the most likely token, the lowest id among equals.
    pub fn keep_best(&mut self) {
        self.apply_temperature();
        let highest = self.highest_in_row();
        let block = self.buffers.maxima.iter().position(|maximum| *maximum == highest).unwrap_or_default();
        let equal = self.logits().iter().skip(block * BLOCK).position(|logit| *logit == highest).unwrap_or_default();
        self.last = Candidate { id: self.id_at(block * BLOCK + equal), logit: highest };
        self.weighted = false;
    }

    /// Drops tokens less likely than `last`, which remains.
    pub fn keep_through(&mut self, last: Candidate) {
        self.apply_temperature();
        self.last = last;
        if self.weighted {
            self.sum_remaining();
        }
    }

    /// Returns the `count` most likely tokens, most likely first.
    pub fn most_likely(mut self, count: usize) -> Vec<Candidate> {
        self.keep_most_likely(count);
        self.compact();
        let entries = self.buffers.ids.iter().zip(&self.buffers.logits);
        let mut top: Vec<Candidate> = entries.map(|(&id, &logit)| Candidate { id, logit }).collect();
        top.sort_unstable_by(by_likelihood);
        top.truncate(count);
        top
    }

    /// Returns the remaining tokens with their weights (unnormalized probabilities).
    pub fn weigh(&mut self) -> Weighted<'_> {
        self.compact_if_sparse();
        self.apply_temperature();
        let highest = self.highest_in_row();
        let buffers = &mut *self.buffers;
        let logits = logits_of(self.row, self.raw_logits, &buffers.logits);
        if !self.weighted {
            logits::weigh(self.isa, logits, highest, &mut buffers.weights, &mut buffers.sums);
            self.weighted = true;
            if self.last != NO_CUTOFF {
                self.sum_remaining();
            }
        }
        let ids = (self.row == Row::Sparse).then_some(&self.buffers.ids[..]);
        let logits = logits_of(self.row, self.raw_logits, &self.buffers.logits);
        let (weights, sums) = (&self.buffers.weights[..], &self.buffers.sums[..]);
        let recorded_total = self.recorded_total;
        Weighted { isa: self.isa, ids, logits, highest, weights, sums, last: self.last, recorded_total }
    }

    /// Sums the weights of the remaining tokens per block.
    fn sum_remaining(&mut self) {
        let cut = self.last.id.checked_add(1).map_or(usize::MAX, |id| self.index_of(id));
        let Buffers { logits, weights, sums, .. } = &mut *self.buffers;
        let logits = logits_of(self.row, self.raw_logits, logits);
        logits::sum_blocks(self.isa, logits, weights, self.last.logit, cut, sums);
    }

    /// Returns whether a temperature or cutoff is pending.
    fn is_pending(&self) -> bool {
        self.temperature.is_some() || self.last != NO_CUTOFF
    }

    /// Applies the pending temperature to the row.
    fn apply_temperature(&mut self) {
        let Some((highest, temperature)) = self.temperature else { return };
        if self.last.id != NO_CUTOFF.id {
            // Division can make different logits equal, and then the cutoff's id decides which tokens remain.
            return self.compact();
        }
        let buffers = &mut *self.buffers;
        let logits = logits_of(self.row, self.raw_logits, &buffers.logits);
        logits::scale(self.isa, logits, highest, temperature, self.last.logit, &mut buffers.other_logits);
        std::mem::swap(&mut buffers.logits, &mut buffers.other_logits);
        if self.row == Row::Raw {
            self.row = Row::Dense;
        }
        self.reset_pending();
    }

    /// Compacts the row if few tokens remain.
    fn compact_if_sparse(&mut self) {
        if self.is_pending()
            && SPARSE_RATIO * self.remaining_blocks().count() <= self.buffers.maxima.len().max(SPARSE_RATIO)
        {
            self.compact();
        }
    }

    /// Copies the remaining tokens into a sparse row.
    fn compact(&mut self) {
        let mut logits = std::mem::take(&mut self.buffers.other_logits);
        let mut ids = std::mem::take(&mut self.buffers.other_ids);
        logits.clear();
        ids.clear();
        for block in self.remaining_blocks() {
            for index in block {
                let (id, logit) = (self.id_at(index), self.logits()[index]);
                if self.is_remaining(id, logit) {
                    ids.push(id);
                    logits.push(self.scaled(logit));
                }
            }
        }
        self.buffers.other_logits = std::mem::replace(&mut self.buffers.logits, logits);
        self.buffers.other_ids = std::mem::replace(&mut self.buffers.ids, ids);
        self.row = Row::Sparse;
        self.reset_pending();
    }

    /// Resets pending state after the whole row has changed.
    fn reset_pending(&mut self) {
        logits::block_maxima(self.isa, &self.buffers.logits, &mut self.buffers.maxima);
        (self.temperature, self.last, self.weighted) = (None, NO_CUTOFF, false);
    }
}

/// The remaining tokens with weights relative to the most likely one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weighted<'a> {
    pub isa: Isa,
    /// Ids of a sparse row, ascending; `None` if indices are ids.
    ids: Option<&'a [u32]>,
    pub logits: &'a [f32],
    /// The highest logit.
    pub highest: f32,
    /// Weights of all indices, including dropped tokens.
    pub weights: &'a [f64],
    /// Sums of the remaining weights per block.
    pub sums: &'a [f64],
    /// Cutoff: the least likely remaining token, or a position in the order.
    pub last: Candidate,
    /// Total weight when a stage recorded it.
    pub recorded_total: Option<f64>,
}

impl<'a> Weighted<'a> {
    /// Returns the candidate at an index.
    pub fn candidate(&self, index: usize) -> Candidate {
        Candidate { id: self.ids.map_or(index as u32, |ids| ids[index]), logit: self.logits[index] }
    }

    /// Returns the sum of all weights.
    pub fn total(&self) -> f64 {
        self.sums.iter().sum()
    }

    /// Returns the weight at an index; zero if its token was dropped.
    pub fn weight(&self, index: usize) -> f64 {
        if by_likelihood(&self.candidate(index), &self.last).is_le() { self.weights[index] } else { 0.0 }
    }

    /// Returns the weight of a token; zero if it was dropped.
    pub fn weight_of(&self, id: u32) -> f64 {
        let index = self.ids.map_or(Some(id as usize), |ids| ids.binary_search(&id).ok());
        index.map_or(0.0, |index| self.weight(index))
    }

    /// Returns ids (ascending) and weights of the remaining tokens.
    pub fn remaining(self) -> impl Iterator<Item = (u32, f64)> + use<'a> {
        self.remaining_with_logits().map(|(id, _, weight)| (id, weight))
    }
}

/// Returns the highest logit, negative infinity if there are none. Several maxima run in parallel lanes, because each
/// comparison waits for the previous one; the result does not depend on the lanes.
pub(super) fn highest(logits: &[f32]) -> f32 {
    let higher = |a: f32, b: f32| if a > b { a } else { b };
    let mut lanes = [f32::NEG_INFINITY; 16];
    for chunk in logits.chunks(16) {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = higher(logit, *lane);
        }
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, higher)
}

/// Returns the `count`-th highest number, if there are that many.
fn nth_highest(logits: &mut [f32], count: usize) -> Option<f32> {
    let index = count.checked_sub(1).filter(|index| *index < logits.len())?;
    Some(*logits.select_nth_unstable_by(index, |a, b| b.total_cmp(a)).1)
}

/// Returns the lowest number that passes, by bisection over all f32 values up to `highest`.
fn lowest_passing(highest: f32, passes: impl Fn(f32) -> bool) -> f32 {
    // These integers are ordered like the floats; the mapping is its own inverse.
    let flip = |bits: i32| bits ^ ((bits >> 31) as u32 >> 1) as i32;
    let key = |number: f32| i64::from(flip(number.to_bits() as i32));
    let number = |key: i64| f32::from_bits(flip(key as i32) as u32);
    let (mut fails, mut lowest) = (key(f32::NEG_INFINITY) - 1, key(highest));
    while lowest - fails > 1 {
        let middle = fails + (lowest - fails) / 2;
        if passes(number(middle)) { lowest = middle } else { fails = middle }
    }
    number(lowest)
}

/// Returns the ids of the `count` most likely tokens of a valid row, most likely first; forbidden ones come last.
pub(super) fn most_likely(isa: Isa, logits: &[f32], count: usize) -> Vec<u32> {
    let mut buffers = Buffers::default();
    let candidates = Candidates::new(isa, logits, &mut buffers).expect("the row was checked before");
    let top = candidates.most_likely(count);
    let forbidden = (0..).zip(logits).filter(|(_, logit)| **logit == f32::NEG_INFINITY).map(|(id, _)| id);
    top.iter().map(|candidate| candidate.id).chain(forbidden).take(count).collect()
}

mod sets;
#[cfg(test)]
mod tests;
