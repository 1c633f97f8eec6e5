//! Picks one of what is left, by the inverse of the cumulative distribution in the order of token ids.

use super::Candidates;

/// The token whose share of the distribution holds `uniform` in [0, 1).
pub(super) fn draw(candidates: &Candidates, uniform: f64) -> u32 {
    let total: f64 = candidates.weights().map(|(_, weight)| weight).sum();
    let target = uniform * total;
    let mut sum = 0.0;
    let mut chosen = None;
    for (id, weight) in candidates.weights().filter(|&(_, weight)| weight > 0.0) {
        sum += weight;
        chosen = Some(id);
        if sum > target {
            break;
        }
    }
    chosen.expect("a stage left no candidate; the chain checks that after every one")
}
