//! Any sequence of operations on rows of any size, compared with a plain list.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// Remaining tokens: ids ascending, with scaled logits.
type Plain = Vec<(u32, f32)>;

#[derive(Debug, Clone)]
enum Step {
    Change { id: u32, to: f32 },
    Divide(f64),
    KeepDownTo(usize),
    KeepMostLikely(usize),
    KeepThrough(usize),
    KeepBest,
    KeepAllowed(Vec<u32>),
    Retain(u32),
    KeepOnly(Vec<u32>),
    Rewrite(f32),
    First(usize),
    Weigh,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..4000_u32, logit()).prop_map(|(id, to)| Step::Change { id, to }),
        2 => (0.01..4.0).prop_map(Step::Divide),
        // A temperature that makes most logits equal.
        1 => Just(Step::Divide(1e44)),
        2 => (1..4000_usize).prop_map(Step::KeepDownTo),
        3 => prop_oneof![1..60_usize, 1..4000_usize].prop_map(Step::KeepMostLikely),
        2 => (1..4000_usize).prop_map(Step::KeepThrough),
        1 => Just(Step::KeepBest),
        2 => vec(prop_oneof![any::<u32>(), Just(0), Just(u32::MAX)], 125).prop_map(Step::KeepAllowed),
        // Few enough for a sparse row.
        1 => vec(prop_oneof![30 => Just(0), 1 => any::<u32>()], 125).prop_map(Step::KeepAllowed),
        1 => (2..5_u32).prop_map(Step::Retain),
        1 => vec(0..4000_u32, 0..200).prop_map(Step::KeepOnly),
        1 => (-8.0_f32..8.0).prop_map(Step::Rewrite),
        1 => (1..200_usize).prop_map(Step::First),
        2 => Just(Step::Weigh),
    ]
}

fn logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => (-30..30).prop_map(|number| number as f32 / 4.0),
        8 => -8.0_f32..8.0,
        1 => prop_oneof![Just(f32::NEG_INFINITY), Just(-0.0), Just(f32::MAX), Just(-f32::MAX)],
    ]
}

/// Returns the `count`-th most likely token, or the last.
fn nth_most_likely(plain: &Plain, count: usize) -> Candidate {
    let mut sorted: Vec<Candidate> = plain.iter().map(|&(id, logit)| Candidate { id, logit }).collect();
    sorted.sort_by(by_likelihood);
    sorted[count.min(sorted.len()) - 1]
}

fn apply(step: &Step, candidates: &mut Candidates<'_>, plain: &mut Plain) {
    match *step {
        Step::Change { id, to } => {
            candidates.change(id, |_| to);
            plain.iter_mut().filter(|entry| entry.0 == id).for_each(|entry| entry.1 = to);
        }
        Step::Divide(temperature) => {
            candidates.divide(temperature);
            let highest = nth_most_likely(plain, 1).logit;
            plain.iter_mut().for_each(|entry| entry.1 = logits::scaled(entry.1, highest, temperature));
        }
        Step::KeepDownTo(count) => {
            let lowest = nth_most_likely(plain, count).logit;
            candidates.keep_down_to(|logit| logit >= lowest);
            plain.retain(|entry| entry.1 >= lowest);
        }
        Step::KeepMostLikely(count) => {
            let lowest = nth_most_likely(plain, count).logit;
            candidates.keep_most_likely(count);
            plain.retain(|entry| entry.1 >= lowest);
        }
        Step::KeepThrough(count) => {
            let last = nth_most_likely(plain, count);
            candidates.keep_through(last);
            plain.retain(|&(id, logit)| by_likelihood(&Candidate { id, logit }, &last).is_le());
        }
        Step::KeepBest => {
            candidates.keep_best();
            let best = nth_most_likely(plain, 1);
            plain.retain(|entry| entry.0 == best.id);
        }
        Step::KeepAllowed(ref words) => {
            let mask = TokenMask::new(words.clone(), 4000);
            candidates.keep_allowed(&mask);
            plain.retain(|entry| mask.allows(entry.0));
        }
        Step::Retain(nth) => {
            candidates.retain(|candidate| candidate.id % nth > 0);
            plain.retain(|entry| entry.0 % nth > 0);
        }
        Step::KeepOnly(ref ids) => {
            let mut ids = ids.clone();
            ids.sort_unstable();
            ids.dedup();
            candidates.keep_only(&ids);
            plain.retain(|entry| ids.contains(&entry.0));
        }
        Step::Rewrite(added) => {
            let size = candidates.vocab_size();
            let rewritten = candidates.rewrite(|logits| {
                assert_eq!(logits.len(), size);
                let left: Plain =
                    (0..).zip(logits.iter().copied()).filter(|(_, logit)| *logit > f32::NEG_INFINITY).collect();
                assert_eq!(left, *plain);
                logits.iter_mut().for_each(|logit| *logit = (*logit / 2.0) + added);
                Ok::<(), ()>(())
            });
            assert_eq!((rewritten, candidates.check_valid()), (Ok(()), Ok(())));
            plain.iter_mut().for_each(|entry| entry.1 = (entry.1 / 2.0) + added);
        }
        Step::First(count) => {
            let mut sorted: Vec<Candidate> = plain.iter().map(|&(id, logit)| Candidate { id, logit }).collect();
            sorted.sort_by(by_likelihood);
            sorted.truncate(count);
            assert_eq!(candidates.first(count), sorted);
        }
        Step::Weigh => {
            let weighted = candidates.weigh();
            let highest = nth_most_likely(plain, 1).logit;
            let wanted: Vec<(u32, f64)> =
                plain.iter().map(|&(id, logit)| (id, logits::weight(logit, highest))).collect();
            assert_eq!(weighted.remaining().collect::<Vec<_>>(), wanted);
            let total: f64 = wanted.iter().map(|(_, weight)| weight).sum();
            assert!((weighted.total() - total).abs() <= 1e-12 * total);
            for &(id, weight) in &wanted {
                assert_eq!(weighted.weight_of(id), weight);
            }
            let parts = wanted.iter().map(|(_, weight)| weight / total).filter(|share| *share > 0.0);
            let entropy: f64 = parts.map(|share| -share * share.ln()).sum();
            assert!((weighted.entropy() - entropy).abs() <= 1e-9 * entropy.max(1.0));
        }
    }
    plain.retain(|entry| entry.1 > f32::NEG_INFINITY);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_operations_agrees_with_a_list(
        row in prop_oneof![vec(logit(), 1..100), vec(logit(), 1000..4000)],
        steps in vec(step(), 1..8),
        same_room: bool,
    ) {
        for isa in Isa::available() {
            let mut buffers = Buffers::default();
            if same_room {
                // Buffers from another row have no effect.
                Candidates::new(isa, &[1.0; 5000], &mut buffers).unwrap().weigh();
            }
            let mut candidates = Candidates::new(isa, &row, &mut buffers).unwrap();
            let mut plain: Plain = (0..).zip(row.iter().copied()).filter(|(_, logit)| logit.is_finite()).collect();
            for step in &steps {
                if plain.is_empty() {
                    break;
                }
                apply(step, &mut candidates, &mut plain);
                let left: Plain =
                    (0..row.len() as u32).filter_map(|id| Some((id, candidates.logit(id)?))).collect();
                prop_assert_eq!(&left, &plain, "{:?}", step);
                let left: Plain = candidates.remaining().map(|candidate| (candidate.id, candidate.logit)).collect();
                prop_assert_eq!(&left, &plain, "{:?}", step);
                let highest = plain.iter().map(|entry| entry.1).fold(f32::NEG_INFINITY, f32::max);
                prop_assert_eq!(candidates.highest_logit(), highest);
            }
        }
    }

    #[test]
    fn bisection_finds_the_lowest_passing_number(highest in logit(), bound in logit()) {
        prop_assume!(bound <= highest);
        prop_assert_eq!(lowest_passing(highest, |logit| logit >= bound), bound);
    }

    #[test]
    fn the_most_likely_tokens_come_first_in_order(row in vec(logit(), 1..3000), count in 0..40_usize) {
        let mut all: Vec<Candidate> = (0..).zip(&row).map(|(id, &logit)| Candidate { id, logit }).collect();
        all.sort_by(by_likelihood);
        let wanted: Vec<u32> = all.iter().map(|candidate| candidate.id).take(count).collect();
        prop_assert_eq!(most_likely(Isa::best(), &row, count), wanted);
    }
}

#[test]
fn ties_go_to_the_lower_id_and_zeros_are_equal() {
    let most_likely = |row: &[f32], count| most_likely(Isa::best(), row, count);
    assert_eq!(most_likely(&[0.0, -0.0, 1.0, 1.0, 0.0], 4), [2, 3, 0, 1]);
    assert_eq!(most_likely(&[-0.0, 0.0], 9), [0, 1]);
    assert_eq!(most_likely(&[1.0], 0), [0_u32; 0]);
    assert_eq!(most_likely(&[f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY], 2), [1, 0]);
}
