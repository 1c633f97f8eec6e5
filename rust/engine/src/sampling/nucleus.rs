//! Weighted selection: the prefix of an order that reaches a given weight, without sorting.

use std::cmp::Ordering;

/// Returns the first entry, in the order, at which `above` plus the weights reach `mass`; the last entry if they never
/// do.
pub(super) fn last_to_reach<T: Copy>(
    weighted: &mut [(T, f64)],
    above: f64,
    mass: f64,
    order: impl Fn(&T, &T) -> Ordering,
) -> Option<T> {
    // Bisects until one entry is left; rounding may leave the total below `mass`, then it is the last entry.
    let (mut rest, mut sum) = (weighted, above);
    while rest.len() > 1 {
        let middle = rest.len() / 2;
        rest.select_nth_unstable_by(middle, |(a, _), (b, _)| order(a, b));
        let (before, others) = rest.split_at_mut(middle);
        let down_to_middle = sum + before.iter().map(|(_, weight)| weight).sum::<f64>();
        if down_to_middle >= mass {
            rest = before;
        } else {
            (rest, sum) = (others, down_to_middle);
        }
    }
    rest.first().map(|(entry, _)| *entry)
}
