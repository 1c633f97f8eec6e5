//! Choice of the number of drafts to verify in a step.
//!
//! A step yields one token per sequence, plus one per accepted draft: the draft at depth `d` with probability `rate^d`.
//! It takes longer with more rows. So drafts are added, most likely first, while the expected tokens per second
//! increase.

use super::cost::StepCosts;

/// Minimum expected speedup for adding drafts, because rates and times are estimates.
const MARGIN: f64 = 1.02;

/// Drafts that a sequence's source can supply.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Proposal {
    /// Number of drafts.
    pub count: usize,
    /// Probability of each draft to be accepted if all before it are.
    pub rate: f64,
    /// Seconds to generate one draft for all sequences that share the source.
    pub seconds: f64,
}

/// Returns how many drafts of each proposal to take in a step with `rows` other rows.
pub(super) fn draft_lengths(costs: &StepCosts, rows: usize, proposals: &[Proposal]) -> Vec<usize> {
    let by_depth = |(index, &Proposal { count, rate, .. }): (usize, &Proposal)| {
        (1..=count).map(move |depth| (rate.powi(depth as i32), depth, index))
    };
    let mut drafts: Vec<_> = proposals.iter().enumerate().flat_map(by_depth).collect();
    drafts.sort_by(|one, other| other.0.total_cmp(&one.0).then(one.1.cmp(&other.1)));
    let (mut tokens, mut drafting_seconds) = (rows as f64, 0.0);
    let mut best = (MARGIN * tokens / costs.of(rows), 0);
    let mut deepest = 0;
    for (taken, &(probability, depth, index)) in (1..).zip(&drafts) {
        tokens += probability;
        // Drafts of the same depth are generated together.
        if depth > deepest && proposals[index].seconds > 0.0 {
            drafting_seconds += proposals[index].seconds;
            deepest = depth;
        }
        let rate = tokens / (costs.of(rows + taken) + drafting_seconds);
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

    /// Returns costs where the second row is free and each further row costs a tenth of a step.
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
    fn higher_acceptance_rates_give_longer_drafts() {
        let costs = costs();
        let length = |rate| draft_lengths(&costs, 1, &[proposal(rate)])[0];
        assert_eq!(length(0.0), 0);
        assert!((1..=2).contains(&length(0.3)), "{}", length(0.3));
        assert!((3..=6).contains(&length(0.8)), "{}", length(0.8));
        assert_eq!(length(1.0), 15);
    }

    #[test]
    fn the_most_likely_drafts_of_a_batch_go_first() {
        let costs = costs();
        let both = draft_lengths(&costs, 2, &[proposal(0.9), proposal(0.2)]);
        assert!(both[0] > 3 && both[1] <= 1, "{both:?}");
        // In an expensive batch an unlikely draft is not worth a row.
        assert_eq!(draft_lengths(&costs, 12, &[proposal(0.05); 12]), [0; 12]);
    }

    #[test]
    fn slow_draft_models_draft_fewer_tokens() {
        let made = |seconds| draft_lengths(&costs(), 1, &[Proposal { seconds, ..proposal(0.8) }])[0];
        assert!(made(0.05) > made(0.3) && made(0.3) > 0, "{} {}", made(0.05), made(0.3));
        assert_eq!(made(1.0), 0);
    }
}
