//! Picks one of what is left, by the inverse of the cumulative distribution in the order of token ids.

use super::Candidates;

/// The token whose share of the distribution holds `uniform` in [0, 1). `weights` is room that is used again.
pub(super) fn draw(candidates: &Candidates, uniform: f64, weights: &mut Vec<(u32, f64)>) -> u32 {
    weights.clear();
    weights.extend(candidates.weights().filter(|&(_, weight)| weight > 0.0));
    let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
    let target = uniform * total;
    let mut sum = 0.0;
    let found = weights.iter().find(|(_, weight)| {
        sum += weight;
        sum > target
    });
    // Rounding can put the target at the very end: the last one's share reaches that far.
    found.or(weights.last()).expect("a stage left no candidate; the chain checks that after every one").0
}
