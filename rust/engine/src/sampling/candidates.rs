//! The tokens that can still be sampled.

use std::cmp::Ordering;

/// A token that can still be sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub id: u32,
    pub logit: f32,
}

/// What the stages work on: ids ascending, each once. A logit of negative infinity means dropped.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    entries: Vec<Candidate>,
    /// Room for filters that reorder.
    scratch: Vec<Candidate>,
}

/// Most likely first; among equal logits the lower id. A total order: a filter that sorts cannot be upset.
pub(super) fn by_likelihood(a: &Candidate, b: &Candidate) -> Ordering {
    // Adding zero makes -0 a +0, which the total order would tell apart.
    (b.logit + 0.0).total_cmp(&(a.logit + 0.0)).then(a.id.cmp(&b.id))
}

/// Probability relative to that of the highest logit, which is 1. Stays right where both have overflowed.
pub(super) fn weight(logit: f32, highest: f32) -> f64 {
    if logit == highest { 1.0 } else { (f64::from(logit) - f64::from(highest)).exp() }
}

impl Candidates {
    /// Starts over with every token of a row.
    pub fn fill(&mut self, logits: &[f32]) {
        self.entries.clear();
        self.entries.extend((0..).zip(logits).map(|(id, &logit)| Candidate { id, logit }));
    }

    pub fn entries(&self) -> &[Candidate] {
        &self.entries
    }

    pub fn entries_mut(&mut self) -> impl Iterator<Item = &mut Candidate> {
        self.entries.iter_mut()
    }

    fn index_of(&self, id: u32) -> Option<usize> {
        // While nothing has been dropped, a token's place is its id.
        let place = id as usize;
        if self.entries.get(place).is_some_and(|entry| entry.id == id) {
            return Some(place);
        }
        self.entries.binary_search_by_key(&id, |entry| entry.id).ok()
    }

    /// The logit of a token, if it has not been dropped altogether.
    pub fn logit(&self, id: u32) -> Option<f32> {
        self.index_of(id).map(|index| self.entries[index].logit)
    }

    /// The same, to change it.
    pub fn logit_mut(&mut self, id: u32) -> Option<&mut f32> {
        self.index_of(id).map(|index| &mut self.entries[index].logit)
    }

    /// The highest logit; negative infinity when nothing is left.
    pub fn highest_logit(&self) -> f32 {
        highest(self.entries.iter().map(|entry| entry.logit))
    }

    /// Drops what does not pass.
    pub fn retain(&mut self, keep: impl FnMut(&Candidate) -> bool) {
        self.entries.retain(keep);
    }

    /// What is left, ids ascending, with probabilities relative to the most likely one.
    pub fn weights(&self) -> impl Iterator<Item = (u32, f64)> {
        let highest = self.highest_logit();
        let left = self.entries.iter().filter(|entry| entry.logit > f32::NEG_INFINITY);
        left.map(move |entry| (entry.id, weight(entry.logit, highest)))
    }

    /// A copy that the caller may reorder, to be used by one filter.
    pub fn shuffled(&mut self) -> &mut Vec<Candidate> {
        self.scratch.clone_from(&self.entries);
        &mut self.scratch
    }
}

/// The highest of some logits, negative infinity if there are none. Several maxima side by side, since each waits for
/// its last comparison; which one a logit goes to does not matter to the result.
pub(super) fn highest(logits: impl Iterator<Item = f32>) -> f32 {
    let mut highest = [f32::NEG_INFINITY; 8];
    for (index, logit) in logits.enumerate() {
        let lane = &mut highest[index % 8];
        *lane = if logit > *lane { logit } else { *lane };
    }
    highest.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// The ids of the `count` most likely tokens of a row, most likely first.
pub(super) fn most_likely(logits: &[f32], count: usize) -> Vec<u32> {
    let mut top: Vec<Candidate> = Vec::with_capacity(count.min(logits.len()));
    if count == 0 {
        return Vec::new();
    }
    for (id, &logit) in (0..).zip(logits) {
        let candidate = Candidate { id, logit };
        if top.len() == count {
            if by_likelihood(&candidate, &top[count - 1]) == Ordering::Greater {
                continue;
            }
            top.pop();
        }
        // Insertion is rare after the first few: a row has few records.
        let place = top.partition_point(|other| by_likelihood(other, &candidate) == Ordering::Less);
        top.insert(place, candidate);
    }
    top.iter().map(|candidate| candidate.id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookups_work_before_and_after_dropping() {
        let mut candidates = Candidates::default();
        candidates.fill(&[1.0, 2.0, 3.0, 4.0]);
        assert_eq!(candidates.logit(2), Some(3.0));
        candidates.retain(|entry| entry.id != 1);
        assert_eq!((candidates.logit(1), candidates.logit(2), candidates.logit(3)), (None, Some(3.0), Some(4.0)));
        *candidates.logit_mut(3).unwrap() = f32::NEG_INFINITY;
        assert_eq!(candidates.weights().map(|(id, _)| id).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(candidates.logit(4), None);
    }

    #[test]
    fn the_lower_id_wins_among_equals_and_zeros_are_equal() {
        assert_eq!(most_likely(&[0.0, -0.0, 1.0, 1.0, 0.0], 4), [2, 3, 0, 1]);
        assert_eq!(most_likely(&[-0.0, 0.0], 9), [0, 1]);
        assert_eq!(most_likely(&[1.0], 0), [0_u32; 0]);
    }

    #[test]
    fn weights_survive_overflow_and_underflow() {
        assert_eq!(weight(f32::INFINITY, f32::INFINITY), 1.0);
        assert_eq!(weight(0.0, f32::INFINITY), 0.0);
        assert_eq!(weight(f32::NEG_INFINITY, 3.0), 0.0);
        assert_eq!(weight(-f32::MAX, f32::MAX), 0.0);
    }
}
