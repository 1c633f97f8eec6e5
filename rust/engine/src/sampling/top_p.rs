//! Keeps the smallest set of most likely tokens whose probabilities add up to `top_p` or more
//! (nucleus sampling, <https://arxiv.org/abs/1904.09751>).
//!
//! Sorting a vocabulary takes ten milliseconds. Instead some of its logits are sorted, passes over all of them find
//! between which two of these the last of the nucleus lies, and only what lies there is sorted.

use ferrule_kernels::logits;

use super::candidates::{Candidate, Weighed, by_likelihood};
use super::{Candidates, Context, Stage};

/// Logits that are sorted to split the others. Between two of them lie some hundred of a large vocabulary.
const SPLITTERS: usize = 256;

/// Rows that are not longer are sorted whole.
const SHORT: usize = 1024;

/// Places among which the last of many equal ones is looked for at once.
const STRETCH: usize = 1024;

pub(super) struct TopP;

impl Stage for TopP {
    fn name(&self) -> &'static str {
        "top_p"
    }

    fn is_active(&self, context: Context<'_>) -> bool {
        context.params.top_p < 1.0
    }

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) {
        let last = last_of_nucleus(candidates.weigh(), context.params.top_p);
        candidates.keep_through(last);
    }
}

/// The least likely candidate of the nucleus that holds `share` of all weight.
fn last_of_nucleus(row: Weighed<'_>, share: f64) -> Candidate {
    // Sums over all and over some are added up alike, so that dropping nothing changes no bit.
    let [total] = logits::sums_at_least(row.isa, row.logits, row.weights, [f32::NEG_INFINITY]);
    let mass = share * total;
    let Gap { lowest, highest, above } = gap(row, mass);
    if lowest == highest {
        return last_of_equals(row, lowest, mass - above);
    }
    let mut places = Vec::new();
    logits::places_between(row.isa, row.logits, lowest, highest, &mut places);
    places.retain(|&place| row.weights[place as usize] > 0.0);
    places.sort_unstable_by(|&a, &b| by_likelihood(&row.candidate(a as usize), &row.candidate(b as usize)));
    let mut sum = above;
    let reached = places.iter().position(|&place| {
        sum += row.weights[place as usize];
        sum >= mass
    });
    // Rounding can leave the sum of all just below the mass of almost all.
    let last = reached.unwrap_or(places.len() - 1);
    row.candidate(places[last] as usize)
}

/// Where the last of the nucleus lies.
struct Gap {
    /// It is not less likely than this.
    lowest: f32,
    /// Nor more likely than this.
    highest: f32,
    /// The weight of all that is more likely than `highest`.
    above: f64,
}

/// The narrowest gap between splitters.
fn gap(row: Weighed<'_>, mass: f64) -> Gap {
    let splitters = splitters(row);
    let (mut low, mut high, mut above) = (0, splitters.len(), 0.0);
    while low < high {
        let probes = [1, 2, 3].map(|quarter| low + (high - low) * quarter / 4);
        let sums = logits::sums_at_least(row.isa, row.logits, row.weights, probes.map(|probe| splitters[probe]));
        for (probe, sum) in probes.into_iter().zip(sums) {
            if sum >= mass {
                low = probe + 1;
            } else {
                (high, above) = (probe, sum);
                break;
            }
        }
    }
    // All that is at least `splitters[low - 1]` has the mass; all that is at least `splitters[high]` has less, and that
    // is the same place now.
    let lowest = if low == 0 { f32::NEG_INFINITY } else { splitters[low - 1] };
    Gap { lowest, highest: splitters.get(high).map_or(f32::INFINITY, |end| end.next_down()), above }
}

/// Logits from places at equal distances, ascending; one that was found twice is followed by the next number, so that
/// a gap has nothing but what equals it.
fn splitters(row: Weighed<'_>) -> Vec<f32> {
    if row.logits.len() <= SHORT {
        return Vec::new();
    }
    let mut found: Vec<f32> =
        row.logits.iter().step_by(row.logits.len() / SPLITTERS).map(|logit| logit + 0.0).collect();
    found.sort_unstable_by(f32::total_cmp);
    let mut splitters = Vec::with_capacity(found.len());
    for logit in found {
        match splitters.last() {
            Some(&last) if last == logit => splitters.push(logit.next_up()),
            Some(&last) if last > logit => {}
            _ => splitters.push(logit),
        }
    }
    splitters
}

/// The last of those that equal `logit` which must be taken, lower ids first, to have `mass` of them.
fn last_of_equals(row: Weighed<'_>, logit: f32, mass: f64) -> Candidate {
    let mut missing = (mass / logits::weight(logit, row.highest)).ceil().max(1.0) as usize;
    for (index, stretch) in row.logits.chunks(STRETCH).enumerate() {
        let count = |at_least| logits::count_at_least(row.isa, stretch, at_least);
        let equal = count(logit) - count(logit.next_up());
        if missing <= equal {
            let mut places = (index * STRETCH..).zip(stretch).filter(|(_, other)| **other == logit);
            return row.candidate(places.nth(missing - 1).map_or(0, |(place, _)| place));
        }
        missing -= equal;
    }
    // Rounding can ask for one more than there are.
    row.candidate(row.logits.iter().rposition(|other| *other == logit).unwrap_or_default())
}
