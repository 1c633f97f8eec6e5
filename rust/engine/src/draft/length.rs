//! Which drafts are worth their rows.
//!
//! A step gives each sequence one token, and one more for each draft that is accepted: the one at depth `d` with the
//! probability `rate^d`. It takes longer the more rows it has. So drafts are taken, the likeliest first, as far as
//! tokens a second are the most.

use super::cost::StepCosts;

/// How much faster a step must be for its drafts: what is measured and what is expected is no more exact than that.
const MARGIN: f64 = 1.02;

/// Drafts that there are for a sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Proposal {
    /// How many.
    pub count: usize,
    /// The probability of each to be accepted if all before it are.
    pub rate: f64,
    /// Seconds that each takes to make, for all sequences that make one beside.
    pub seconds: f64,
}

/// How many drafts of each offer to take in a step that has `rows` without them.
pub(super) fn draft_lengths(costs: &StepCosts, rows: usize, proposals: &[Proposal]) -> Vec<usize> {
    let of = |(index, &Proposal { count, rate, .. }): (usize, &Proposal)| {
        (1..=count).map(move |depth| (rate.powi(depth as i32), depth, index))
    };
    let mut drafts: Vec<_> = proposals.iter().enumerate().flat_map(of).collect();
    drafts.sort_by(|one, other| other.0.total_cmp(&one.0).then(one.1.cmp(&other.1)));
    let (mut tokens, mut making) = (rows as f64, 0.0);
    let mut best = (MARGIN * tokens / costs.of(rows), 0);
    let mut deepest = 0;
    for (taken, &(probability, depth, index)) in (1..).zip(&drafts) {
        tokens += probability;
        // Sequences make drafts of the same depth together.
        if depth > deepest && proposals[index].seconds > 0.0 {
            making += proposals[index].seconds;
            deepest = depth;
        }
        let rate = tokens / (costs.of(rows + taken) + making);
        if rate > best.0 {
            best = (rate, taken);
        }
    }
    let mut lengths = vec![0; proposals.len()];
    drafts[..best.1].iter().for_each(|&(_, _, index)| lengths[index] += 1);
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which the second row costs nothing and each further one a tenth of a step.
    fn costs() -> StepCosts {
        let mut costs = StepCosts::new();
        for _ in 0..50 {
            (1..=16).for_each(|rows: u32| costs.record(rows as usize, 1.0 + 0.1 * f64::from(rows.max(2) - 2)));
        }
        costs
    }

    fn proposal(rate: f64) -> Proposal {
        Proposal { count: 15, rate, seconds: 0.0 }
    }

    #[test]
    fn likelier_drafts_are_longer() {
        let costs = costs();
        let length = |rate| draft_lengths(&costs, 1, &[proposal(rate)])[0];
        assert_eq!(length(0.0), 0);
        assert!((1..=2).contains(&length(0.3)), "{}", length(0.3));
        assert!((3..=6).contains(&length(0.8)), "{}", length(0.8));
        assert_eq!(length(1.0), 15);
    }

    #[test]
    fn beside_others_the_likely_ones_go_first() {
        let costs = costs();
        let both = draft_lengths(&costs, 2, &[proposal(0.9), proposal(0.2)]);
        assert!(both[0] > 3 && both[1] <= 1, "{both:?}");
        // Where rows are dear already a doubtful draft is not worth one.
        assert_eq!(draft_lengths(&costs, 12, &[proposal(0.05); 12]), [0; 12]);
    }

    #[test]
    fn what_takes_long_to_make_is_not_made() {
        let made = |seconds| draft_lengths(&costs(), 1, &[Proposal { seconds, ..proposal(0.8) }])[0];
        assert!(made(0.05) > made(0.3) && made(0.3) > 0, "{} {}", made(0.05), made(0.3));
        assert_eq!(made(1.0), 0);
    }
}
