//! Keeps the smallest set of most likely tokens whose probabilities reach `top_p` (nucleus sampling,
//! <https://arxiv.org/abs/1904.09751>).
//!
//! Sorting a vocabulary takes about ten milliseconds. Instead, a sorted sample of the logits locates the end of the
//! nucleus roughly, a few passes over all weights narrow it to a gap between two sampled logits, and only the tokens in
//! that gap are ordered.

use ferrule_kernels::logits;

use super::candidates::{Candidate, Weighted, by_likelihood};
use super::nucleus::last_to_reach;
use super::{Candidates, Context, SampleError, Stage};

/// Size of the sample.
const SAMPLE: usize = 1024;

/// Rows up to this length need no sample.
const SHORT: usize = 2 * SAMPLE;

/// Number of sampled logits in the gap at which ordering the gap is as fast as another pass.
const CLOSE: usize = 8;

/// Block size for finding the last of many equal logits.
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

/// Returns the least likely candidate of the nucleus that holds `share` of the total weight.
fn last_of_nucleus(row: Weighted<'_>, share: f64) -> Candidate {
    let mass = share * row.total();
    let Gap { lowest, highest, above, .. } = gap(row, mass);
    if lowest == highest {
        return last_of_equals(row, lowest, mass - above);
    }
    let mut indices = Vec::new();
    logits::indices_between(row.isa, row.logits, lowest, highest, &mut indices);
    let weighted = indices.into_iter().map(|index| (row.candidate(index as usize), row.weight(index as usize)));
    let mut weighted: Vec<(Candidate, f64)> = weighted.filter(|(_, weight)| *weight > 0.0).collect();
    last_to_reach(&mut weighted, above, mass, by_likelihood).unwrap_or(row.last)
}

/// Range of logits that contains the end of the nucleus, inclusive.
struct Gap {
    lowest: f32,
    highest: f32,
    /// Weight of all tokens with a logit of at least `lowest`; it reaches the mass.
    down_to_lowest: f64,
    /// Weight of all tokens above `highest`; it does not reach the mass.
    above: f64,
}

/// Returns a small gap (apart from equal logits) for a nucleus of weight `mass`.
fn gap(row: Weighted<'_>, mass: f64) -> Gap {
    let mut gap = Gap { lowest: row.last.logit, highest: row.highest, down_to_lowest: row.total(), above: 0.0 };
    let sample = sample(row);
    let (mut low, mut high) = (0, sample.len());
    while high - low > CLOSE {
        let inside = &sample[low..high];
        let (estimate, margin) = (estimate(inside, &gap, mass), inside.len().isqrt() * 3 / 4);
        let probes =
            [estimate.saturating_sub(margin), (estimate + margin).min(inside.len() - 1)].map(|at| inside[at].0);
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
    // A logit sampled more than once is likely to be frequent in the row.
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

/// Samples logits and weights at equal distances, logits ascending.
fn sample(row: Weighted<'_>) -> Vec<(f32, f64)> {
    if row.logits.len() <= SHORT {
        return Vec::new();
    }
    let all = row.logits.iter().map(|logit| logit + 0.0).zip(row.weights.iter().copied());
    let mut sample: Vec<(f32, f64)> = all.step_by(row.logits.len() / SAMPLE).collect();
    sample.sort_unstable_by(|(a, _), (b, _)| a.total_cmp(b));
    sample
}

/// Estimates which sampled logit in the gap is the end of the nucleus, if the sample is representative.
fn estimate(inside: &[(f32, f64)], gap: &Gap, mass: f64) -> usize {
    let sampled: f64 = inside.iter().map(|(_, weight)| weight).sum();
    let each = (gap.down_to_lowest - gap.above) / sampled;
    let mut sum = gap.above;
    let reached = inside.iter().rposition(|(_, weight)| {
        sum += weight * each;
        sum >= mass
    });
    reached.unwrap_or_default()
}

/// Returns the last of the tokens with this `logit`, lower ids first, that is needed to reach `mass`.
fn last_of_equals(row: Weighted<'_>, logit: f32, mass: f64) -> Candidate {
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
    // Rounding can ask for one token too many.
    row.candidate(row.logits.iter().rposition(|other| *other == logit).unwrap_or_default())
}
