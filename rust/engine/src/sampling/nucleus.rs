//! How far down an order one must go for so much weight, without sorting.

use std::cmp::Ordering;

/// The first entry, in the order, down to which the weights and `above` add up to `mass`; the last one if all do not.
pub(super) fn last_to_reach<T: Copy>(
    weighed: &mut [(T, f64)],
    above: f64,
    mass: f64,
    order: impl Fn(&T, &T) -> Ordering,
) -> Option<T> {
    // Halves what is left until one is; the last of all if rounding leaves the sum of all below the mass of almost all.
    let (mut rest, mut sum) = (weighed, above);
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
