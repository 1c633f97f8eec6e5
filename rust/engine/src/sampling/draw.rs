//! Draws a token by inverting the cumulative distribution in the order of token ids.

use ferrule_kernels::logits::BLOCK;

use super::candidates::Weighted;

/// Returns the token whose share of the distribution contains `uniform` in [0, 1).
pub(super) fn draw(weighted: Weighted<'_>, uniform: f64) -> u32 {
    let target = uniform * weighted.total();
    let (block, below) = find_share(weighted.sums.iter().copied(), 0.0, target);
    let first = block * BLOCK;
    let places = first..weighted.logits.len().min(first + BLOCK);
    let (place, _) = find_share(places.map(|place| weighted.weight(place)), below, target);
    weighted.candidate(first + place).id
}

/// Returns the index of the share that contains `target`, with shares laid end to end from `below` on, and where that
/// share begins. Returns the last share if none does, because rounding can put the target at the very end.
fn find_share(shares: impl Iterator<Item = f64>, mut below: f64, target: f64) -> (usize, f64) {
    let mut found = (0, below);
    for (place, share) in shares.enumerate().filter(|(_, share)| *share > 0.0) {
        found = (place, below);
        below += share;
        if below > target {
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_half_open_intervals() {
        let shares = [0.0, 0.5, 0.0, 0.25, 0.25, 0.0];
        let found = |target| find_share(shares.into_iter(), 1.0, target);
        assert_eq!([1.0, 1.4999, 1.5, 1.75].map(found), [(1, 1.0), (1, 1.0), (3, 1.5), (4, 1.75)]);
        assert_eq!(found(2.0), (4, 1.75));
    }
}
