//! The tokens that can still be sampled, and how to keep few of many without looking at each of them.
//!
//! A filter that keeps the most likely tokens leaves a prefix of the order by likelihood: what is left is told by its
//! last one, in one number. So filters only move that mark, a temperature only takes note of itself, and the row of
//! logits stays where the model wrote it. The maxima of its blocks tell which blocks can have something that is left;
//! once these are few, it is listed, and only the list is worked on. A list is a row like the vocabulary's, but
//! shorter, so that all that follows is written once.

use std::cmp::Ordering;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::logits::{self, BLOCK};

use crate::structured::TokenMask;

/// A token that can still be sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub id: u32,
    pub logit: f32,
}

/// Most likely first; among equal logits the lower id. A total order: a filter that sorts cannot be upset.
pub(super) fn by_likelihood(a: &Candidate, b: &Candidate) -> Ordering {
    // Adding zero makes -0 a +0, which the total order would tell apart.
    (b.logit + 0.0).total_cmp(&(a.logit + 0.0)).then(a.id.cmp(&b.id))
}

/// Nothing that is less likely than this is left: at the start, whatever is not forbidden.
const ANY: Candidate = Candidate { id: u32::MAX, logit: -f32::MAX };

/// What is left is listed once it lies in one of so many blocks.
const FEW: usize = 8;

/// Memory that is used again from one row to the next.
#[derive(Debug, Default)]
pub(super) struct Room {
    logits: Vec<f32>,
    ids: Vec<u32>,
    maxima: Vec<f32>,
    weights: Vec<f64>,
    sums: Vec<f64>,
    other_logits: Vec<f32>,
    other_ids: Vec<u32>,
}

/// Whose logits are at the places of the row that is worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Row {
    /// The model's, untouched. Places are ids.
    Models,
    /// All tokens', in the room. Places are ids.
    Changed,
    /// Some tokens', in the room, as are their ids, ascending.
    Listed,
}

/// What the stages work on. A token is dropped if it is less likely than `last`, or not listed.
#[derive(Debug)]
pub(super) struct Candidates<'a> {
    pub isa: Isa,
    models: &'a [f32],
    room: &'a mut Room,
    row: Row,
    /// The highest logit and the temperature by which the row is still to be divided.
    temperature: Option<(f32, f64)>,
    /// The least likely that is left, or the place in the order where it would be. Not divided yet, as the row.
    last: Candidate,
    /// Whether the room's weights are those of the row, and their sums those of what is left.
    weighed: bool,
    /// What all that was left weighed when a stage asked to remember it.
    remembered_total: Option<f64>,
}

/// The logits at all places, with room to write elsewhere.
fn logits_of<'b>(row: Row, models: &'b [f32], own: &'b [f32]) -> &'b [f32] {
    if row == Row::Models { models } else { own }
}

impl<'a> Candidates<'a> {
    /// Every token of a row. None if one of its logits is NaN or positive infinity.
    pub fn new(isa: Isa, models: &'a [f32], room: &'a mut Room) -> Option<Self> {
        let is_sound = logits::block_maxima(isa, models, &mut room.maxima);
        is_sound.then_some(Self {
            isa,
            models,
            room,
            row: Row::Models,
            temperature: None,
            last: ANY,
            weighed: false,
            remembered_total: None,
        })
    }

    fn logits(&self) -> &[f32] {
        logits_of(self.row, self.models, &self.room.logits)
    }

    /// The logit of a place as stages see it.
    fn seen(&self, logit: f32) -> f32 {
        self.temperature.map_or(logit, |(highest, temperature)| logits::scaled(logit, highest, temperature))
    }

    fn id_at(&self, place: usize) -> u32 {
        if self.row == Row::Listed { self.room.ids[place] } else { place as u32 }
    }

    /// The first place whose id is not below `id`.
    fn place_of(&self, id: u32) -> usize {
        match self.row {
            Row::Listed => self.room.ids.partition_point(|&other| other < id),
            Row::Models | Row::Changed => id as usize,
        }
    }

    fn is_left(&self, id: u32, logit: f32) -> bool {
        by_likelihood(&Candidate { id, logit }, &self.last).is_le()
    }

    /// The places of the blocks that can have something that is left.
    fn blocks_left(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        let len = self.logits().len();
        let reach = |&(_, maximum): &(usize, &f32)| *maximum >= self.last.logit;
        let maxima = self.room.maxima.iter().enumerate().filter(reach);
        maxima.map(move |(block, _)| block * BLOCK..((block + 1) * BLOCK).min(len))
    }

    fn highest_in_row(&self) -> f32 {
        highest(&self.room.maxima)
    }

    /// The highest logit; negative infinity when nothing is left.
    pub fn highest_logit(&self) -> f32 {
        self.seen(self.highest_in_row())
    }

    /// The logit of a token, if it has not been dropped.
    pub fn logit(&self, id: u32) -> Option<f32> {
        let place = self.place_of(id);
        let logit = *self.logits().get(place)?;
        (self.id_at(place) == id && self.is_left(id, logit)).then(|| self.seen(logit))
    }

    /// Changes the logit of a token, if it has not been dropped.
    pub fn change(&mut self, id: u32, change: impl FnOnce(f32) -> f32) {
        if self.is_pending() {
            self.list();
        }
        let Some(old) = self.logit(id) else { return };
        if self.row == Row::Models {
            self.room.logits.clear();
            self.room.logits.extend_from_slice(self.models);
            self.row = Row::Changed;
        }
        let place = self.place_of(id);
        let new = change(old);
        self.room.logits[place] = new;
        let block = place / BLOCK;
        let maximum = &mut self.room.maxima[block];
        if new >= *maximum {
            *maximum = new;
        } else if old == *maximum {
            *maximum = highest(self.room.logits.chunks(BLOCK).nth(block).unwrap_or_default());
        }
        self.weighed = false;
    }

    /// Drops all tokens but those of a mask.
    pub fn keep_allowed(&mut self, mask: &TokenMask) {
        if self.is_pending() {
            self.list();
        }
        let mut logits = std::mem::take(&mut self.room.other_logits);
        let mut ids = std::mem::take(&mut self.room.other_ids);
        logits.clear();
        ids.clear();
        let row = self.logits();
        if self.row == Row::Listed {
            let kept = self.room.ids.iter().zip(row).filter(|(id, _)| mask.allows(**id));
            (ids, logits) = kept.map(|(&id, &logit)| (id, logit)).unzip();
        } else if FEW * mask.count() <= row.len() {
            let kept = mask.tokens().filter_map(|id| Some((id, *row.get(id as usize)?)));
            for (id, logit) in kept.filter(|(_, logit)| *logit > f32::NEG_INFINITY) {
                ids.push(id);
                logits.push(logit);
            }
            self.row = Row::Listed;
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
            self.row = Row::Changed;
        }
        self.room.other_logits = std::mem::replace(&mut self.room.logits, logits);
        self.room.other_ids = std::mem::replace(&mut self.room.ids, ids);
        self.begin_anew();
    }

    /// Divides the distances from the highest logit, which becomes 0.
    pub fn divide(&mut self, temperature: f64) {
        self.apply_temperature();
        self.temperature = Some((self.highest_in_row(), temperature));
        self.weighed = false;
        // What is infinitely far away now is dropped.
        self.keep_down_to(|logit| logit > f32::NEG_INFINITY);
    }

    /// Drops what does not pass, where nothing passes that is less likely than something that does not. The highest
    /// logit must pass.
    pub fn keep_down_to(&mut self, passes: impl Fn(f32) -> bool) {
        let lowest = lowest_passing(self.highest_in_row(), |logit| passes(self.seen(logit)));
        if lowest > self.last.logit {
            self.last = Candidate { logit: lowest, ..ANY };
            self.weighed = false;
        }
    }

    /// Keeps the `count` most likely, and all that are as likely as the last of them.
    pub fn keep_most_likely(&mut self, count: usize) {
        // So many blocks have something at or above their least maximum: the last one kept cannot be lower.
        let maxima = &mut self.room.other_logits;
        maxima.clear();
        maxima.extend(self.room.maxima.iter().filter(|maximum| **maximum >= self.last.logit));
        if let Some(lowest) = nth_highest(maxima, count) {
            let lowest = self.seen(lowest);
            self.keep_down_to(|logit| logit >= lowest);
        }
        self.list_if_few();
        let mut left = std::mem::take(&mut self.room.other_logits);
        left.clear();
        for block in self.blocks_left() {
            left.extend(self.logits()[block].iter().filter(|logit| **logit >= self.last.logit));
        }
        if let Some(lowest) = nth_highest(&mut left, count) {
            let lowest = self.seen(lowest);
            self.keep_down_to(|logit| logit >= lowest);
        }
        self.room.other_logits = left;
    }

    /// Keeps the most likely token, the lowest id among equals.
    pub fn keep_best(&mut self) {
        self.apply_temperature();
        let highest = self.highest_in_row();
        let block = self.room.maxima.iter().position(|maximum| *maximum == highest).unwrap_or_default();
        let equal = self.logits().iter().skip(block * BLOCK).position(|logit| *logit == highest).unwrap_or_default();
        self.last = Candidate { id: self.id_at(block * BLOCK + equal), logit: highest };
        self.weighed = false;
    }

    /// Drops what is less likely than `last`, which is left.
    pub fn keep_through(&mut self, last: Candidate) {
        self.apply_temperature();
        self.last = last;
        if self.weighed {
            self.sum_what_is_left();
        }
    }

    /// The `count` most likely tokens, most likely first.
    pub fn most_likely(mut self, count: usize) -> Vec<Candidate> {
        self.keep_most_likely(count);
        self.list();
        let entries = self.room.ids.iter().zip(&self.room.logits);
        let mut top: Vec<Candidate> = entries.map(|(&id, &logit)| Candidate { id, logit }).collect();
        top.sort_unstable_by(by_likelihood);
        top.truncate(count);
        top
    }

    /// What is left with its probabilities.
    pub fn weigh(&mut self) -> Weighed<'_> {
        self.list_if_few();
        self.apply_temperature();
        let highest = self.highest_in_row();
        let room = &mut *self.room;
        let logits = logits_of(self.row, self.models, &room.logits);
        if !self.weighed {
            logits::weigh(self.isa, logits, highest, &mut room.weights, &mut room.sums);
            self.weighed = true;
            if self.last != ANY {
                self.sum_what_is_left();
            }
        }
        let ids = (self.row == Row::Listed).then_some(&self.room.ids[..]);
        let logits = logits_of(self.row, self.models, &self.room.logits);
        let (weights, sums) = (&self.room.weights[..], &self.room.sums[..]);
        let remembered_total = self.remembered_total;
        Weighed { isa: self.isa, ids, logits, highest, weights, sums, last: self.last, remembered_total }
    }

    /// Adds up each block's weights of what has not been dropped.
    fn sum_what_is_left(&mut self) {
        let cut = self.last.id.checked_add(1).map_or(usize::MAX, |id| self.place_of(id));
        let Room { logits, weights, sums, .. } = &mut *self.room;
        let logits = logits_of(self.row, self.models, logits);
        logits::sum_blocks(self.isa, logits, weights, self.last.logit, cut, sums);
    }

    /// Whether the row alone does not tell what stages see.
    fn is_pending(&self) -> bool {
        self.temperature.is_some() || self.last != ANY
    }

    /// Divides the row.
    fn apply_temperature(&mut self) {
        let Some((highest, temperature)) = self.temperature else { return };
        if self.last.id != ANY.id {
            // Division can make different logits equal, and among equals it is the id that tells what is left.
            return self.list();
        }
        let room = &mut *self.room;
        let logits = logits_of(self.row, self.models, &room.logits);
        logits::scale(self.isa, logits, highest, temperature, self.last.logit, &mut room.other_logits);
        std::mem::swap(&mut room.logits, &mut room.other_logits);
        if self.row == Row::Models {
            self.row = Row::Changed;
        }
        self.begin_anew();
    }

    /// Lists what is left, if that is little of the row.
    fn list_if_few(&mut self) {
        if self.is_pending() && FEW * self.blocks_left().count() <= self.room.maxima.len().max(FEW) {
            self.list();
        }
    }

    /// Makes a shorter row of what is left.
    fn list(&mut self) {
        let mut logits = std::mem::take(&mut self.room.other_logits);
        let mut ids = std::mem::take(&mut self.room.other_ids);
        logits.clear();
        ids.clear();
        for block in self.blocks_left() {
            for place in block {
                let (id, logit) = (self.id_at(place), self.logits()[place]);
                if self.is_left(id, logit) {
                    ids.push(id);
                    logits.push(self.seen(logit));
                }
            }
        }
        self.room.other_logits = std::mem::replace(&mut self.room.logits, logits);
        self.room.other_ids = std::mem::replace(&mut self.room.ids, ids);
        self.row = Row::Listed;
        self.begin_anew();
    }

    /// The row has changed as a whole: nothing is pending any more.
    fn begin_anew(&mut self) {
        logits::block_maxima(self.isa, &self.room.logits, &mut self.room.maxima);
        (self.temperature, self.last, self.weighed) = (None, ANY, false);
    }
}

/// What is left of a row with its probabilities relative to the most likely one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weighed<'a> {
    pub isa: Isa,
    /// The ids of the places, ascending, where they are not the places themselves.
    ids: Option<&'a [u32]>,
    pub logits: &'a [f32],
    /// The highest of them.
    pub highest: f32,
    /// The weights of all places, also of those whose tokens were dropped.
    pub weights: &'a [f64],
    /// Sums of the weights that are left of each block.
    pub sums: &'a [f64],
    /// The least likely that is left, or the place in the order where it would be.
    pub last: Candidate,
    /// The sum of what was left when a stage asked to remember it.
    pub remembered_total: Option<f64>,
}

impl<'a> Weighed<'a> {
    pub fn candidate(&self, place: usize) -> Candidate {
        Candidate { id: self.ids.map_or(place as u32, |ids| ids[place]), logit: self.logits[place] }
    }

    /// The sum of all weights.
    pub fn total(&self) -> f64 {
        self.sums.iter().sum()
    }

    /// The weight of a place; zero if its token was dropped.
    pub fn weight(&self, place: usize) -> f64 {
        if by_likelihood(&self.candidate(place), &self.last).is_le() { self.weights[place] } else { 0.0 }
    }

    /// The weight of a token; zero if it was dropped.
    pub fn weight_of(&self, id: u32) -> f64 {
        let place = self.ids.map_or(Some(id as usize), |ids| ids.binary_search(&id).ok());
        place.map_or(0.0, |place| self.weight(place))
    }

    /// Ids, ascending, and weights of what is left.
    pub fn left(self) -> impl Iterator<Item = (u32, f64)> + use<'a> {
        self.left_at().map(|(id, _, weight)| (id, weight))
    }
}

/// The highest of some logits, negative infinity if there are none. Several maxima side by side, since each waits for
/// its last comparison; which one a logit goes to does not matter to the result.
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

/// The number that has `count - 1` of the others at or above it, if there are so many.
fn nth_highest(logits: &mut [f32], count: usize) -> Option<f32> {
    let index = count.checked_sub(1).filter(|index| *index < logits.len())?;
    Some(*logits.select_nth_unstable_by(index, |a, b| b.total_cmp(a)).1)
}

/// The lowest number that passes, where all from there up to `highest` pass: found by halving all that there are.
fn lowest_passing(highest: f32, passes: impl Fn(f32) -> bool) -> f32 {
    // The order of these integers is that of the numbers; the way back is the same.
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

/// The ids of the `count` most likely tokens of a row that is sound, most likely first; forbidden ones come last.
pub(super) fn most_likely(isa: Isa, logits: &[f32], count: usize) -> Vec<u32> {
    let mut room = Room::default();
    let candidates = Candidates::new(isa, logits, &mut room).expect("the row was found sound before");
    let top = candidates.most_likely(count);
    let forbidden = (0..).zip(logits).filter(|(_, logit)| **logit == f32::NEG_INFINITY).map(|(id, _)| id);
    top.iter().map(|candidate| candidate.id).chain(forbidden).take(count).collect()
}

mod sets;
#[cfg(test)]
mod tests;
