//! Keeps the smallest set of most likely tokens whose probabilities add up to `top_p` or more
//! (nucleus sampling, <https://arxiv.org/abs/1904.09751>).
//!
//! Sorting a vocabulary takes ten milliseconds. Instead a sample of its logits is sorted, which tells about where the
//! last of the nucleus lies; a few passes over all weights tell between which two of the sample it does, and only what
//! lies there is put in order.

use ferrule_kernels::logits;

use super::candidates::{Candidate, Weighed, by_likelihood};
use super::nucleus::last_to_reach;
use super::{Candidates, Context, SampleError, Stage};

/// Logits of a large row that are looked at first.
const SAMPLE: usize = 1024;

/// Rows that are not longer need no sample.
const SHORT: usize = 2 * SAMPLE;

/// So many of the sample may be left between two of them: what lies there is put in order as fast as the row is looked
/// through again.
const CLOSE: usize = 8;

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

    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError> {
        let last = last_of_nucleus(candidates.weigh(), context.params.top_p);
        candidates.keep_through(last);
        Ok(())
    }
}

/// The least likely candidate of the nucleus that holds `share` of all weight.
fn last_of_nucleus(row: Weighed<'_>, share: f64) -> Candidate {
    let mass = share * row.total();
    let Gap { lowest, highest, above, .. } = gap(row, mass);
    if lowest == highest {
        return last_of_equals(row, lowest, mass - above);
    }
    let mut places = Vec::new();
    logits::places_between(row.isa, row.logits, lowest, highest, &mut places);
    let weighed = places.into_iter().map(|place| (row.candidate(place as usize), row.weight(place as usize)));
    let mut weighed: Vec<(Candidate, f64)> = weighed.filter(|(_, weight)| *weight > 0.0).collect();
    last_to_reach(&mut weighed, above, mass, by_likelihood).unwrap_or(row.last)
}

/// Between which logits the last of the nucleus lies, both included.
struct Gap {
    lowest: f32,
    highest: f32,
    /// The weight of all that is at least `lowest`: it is enough.
    down_to_lowest: f64,
    /// The weight of all that is more likely than `highest`: it is not enough.
    above: f64,
}

/// A gap with little in it but equal logits, for the nucleus of weight `mass`.
fn gap(row: Weighed<'_>, mass: f64) -> Gap {
    let mut gap = Gap { lowest: row.last.logit, highest: row.highest, down_to_lowest: row.total(), above: 0.0 };
    let sample = sample(row);
    let (mut low, mut high) = (0, sample.len());
    while high - low > CLOSE {
        let inside = &sample[low..high];
        let (guess, margin) = (guess(inside, &gap, mass), inside.len().isqrt() * 3 / 4);
        let probes = [guess.saturating_sub(margin), (guess + margin).min(inside.len() - 1)].map(|at| inside[at].0);
        for (probe, sum) in probes.into_iter().zip(logits::sums_at_least(row.isa, row.logits, row.weights, probes)) {
            if sum >= mass {
                (gap.lowest, gap.down_to_lowest) = (probe, sum);
                low = sample.partition_point(|(logit, _)| *logit <= probe);
            } else {
                (gap.highest, gap.above) = (probe.next_down(), sum);
                high = sample.partition_point(|(logit, _)| *logit < probe);
                break;
            }
        }
    }
    // What was found more than once is likely to be all over the row.
    if low >= 2 && sample[low - 2].0 == gap.lowest {
        let end = gap.lowest.next_up();
        let [above] = logits::sums_at_least(row.isa, row.logits, row.weights, [end]);
        if above >= mass {
            gap.lowest = end;
        } else {
            (gap.highest, gap.above) = (gap.lowest, above);
        }
    }
    gap
}

/// Logits from places at equal distances with their weights, logits ascending.
fn sample(row: Weighed<'_>) -> Vec<(f32, f64)> {
    if row.logits.len() <= SHORT {
        return Vec::new();
    }
    let all = row.logits.iter().map(|logit| logit + 0.0).zip(row.weights.iter().copied());
    let mut sample: Vec<(f32, f64)> = all.step_by(row.logits.len() / SAMPLE).collect();
    sample.sort_unstable_by(|(a, _), (b, _)| a.total_cmp(b));
    sample
}

/// About which of what was sampled inside a gap is the last of the nucleus, if it stands for all that is there.
fn guess(inside: &[(f32, f64)], gap: &Gap, mass: f64) -> usize {
    let sampled: f64 = inside.iter().map(|(_, weight)| weight).sum();
    let each = (gap.down_to_lowest - gap.above) / sampled;
    let mut sum = gap.above;
    let reached = inside.iter().rposition(|(_, weight)| {
        sum += weight * each;
        sum >= mass
    });
    reached.unwrap_or_default()
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
