//! Every pass against a scalar loop, on guarded buffers and on every instruction set of this machine, which must all give
//! the same bits.

use ferrule_kernels::arch::Isa;
use ferrule_kernels::logits::{
    BLOCK, block_maxima, count_at_least, indices_between, scale, scaled, sum_blocks, sums_at_least, total_weight,
    weigh, weight,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::guard::Guarded;

/// Generates coarse logits, so that ties are frequent, and some that are masked, extreme, denormal or signed zeros.
fn logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => (-40..40).prop_map(|number| number as f32 / 4.0),
        4 => -12.0_f32..12.0,
        1 => prop_oneof![Just(f32::NEG_INFINITY), Just(-f32::MAX), Just(-0.0), Just(1e-40), Just(-720.0)],
    ]
}

fn highest(logits: &[f32]) -> f32 {
    logits.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn near(got: f64, wanted: f64) -> bool {
    (got - wanted).abs() <= 1e-14 * wanted
}

#[test]
fn weights_have_a_relative_error_below_2e_15() {
    let steps = 400_000;
    for place in 0..=steps {
        // Dense near zero, down to the limit of f64.
        let part = f64::from(place) / f64::from(steps);
        let logit = (-708.0 * part.powi(3)) as f32;
        let (got, wanted) = (weight(logit, 0.0), f64::from(logit).exp());
        assert!((got - wanted).abs() < 2e-15 * wanted, "{logit}: {got} for {wanted}");
    }
}

#[test]
fn weights_are_monotonic() {
    let mut logit = 0.0_f32;
    let mut last = 1.0;
    for _ in 0..2_000_000 {
        let next = weight(logit, 0.0);
        assert!(next <= last, "{logit}: {next} above {last}");
        last = next;
        logit = (logit - 1e-4).next_down();
    }
}

#[test]
fn weights_survive_overflow_and_underflow() {
    assert_eq!(weight(3.5, 3.5), 1.0);
    assert_eq!(weight(f32::NEG_INFINITY, 3.0), 0.0);
    assert_eq!(weight(-f32::MAX, f32::MAX), 0.0);
    assert_eq!(weight(-709.0, 0.0), 0.0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn passes_agree_with_scalar_loops(
        logits in vec(logit(), 1..400),
        thresholds in [logit(), logit(), logit()],
        cut in 0..400_usize,
        temperature in 0.1..3.0,
    ) {
        let logits = Guarded::new(&logits);
        let highest = highest(&logits);
        prop_assume!(highest > f32::NEG_INFINITY);
        let wanted: Vec<f64> =
            logits.iter().map(|&logit| (f64::from(logit) - f64::from(highest)).exp()).collect();
        let [threshold, ..] = thresholds;
        let mut first = None;
        for isa in Isa::available() {
            let (mut maxima, mut weights, mut sums) = (Vec::new(), Vec::new(), Vec::new());
            prop_assert!(block_maxima(isa, &logits, &mut maxima));
            prop_assert_eq!(&maxima, &logits.chunks(BLOCK).map(self::highest).collect::<Vec<_>>());

            weigh(isa, &logits, highest, &mut weights, &mut sums);
            for (got, wanted) in weights.iter().zip(&wanted) {
                let wanted = if *wanted < f64::MIN_POSITIVE { 0.0 } else { *wanted };
                prop_assert!(near(*got, wanted));
            }
            for (sum, weights) in sums.iter().zip(weights.chunks(BLOCK)) {
                prop_assert!(near(*sum, weights.iter().sum()));
            }
            let total: f64 = sums.iter().sum();
            prop_assert_eq!(total_weight(isa, &logits, highest).to_bits(), total.to_bits());

            let at_least = sums_at_least(isa, &logits, &weights, thresholds);
            for (sum, threshold) in at_least.into_iter().zip(thresholds) {
                let left = logits.iter().zip(&weights).filter(|(logit, _)| **logit >= threshold);
                prop_assert!(near(sum, left.map(|(_, weight)| weight).sum()));
            }
            let count = logits.iter().filter(|logit| **logit >= threshold).count();
            prop_assert_eq!(count_at_least(isa, &logits, threshold), count);

            let (from, to) = (thresholds[1], thresholds[2]);
            let mut places = vec![7];
            indices_between(isa, &logits, from, to, &mut places);
            let between = (0..).zip(logits.iter()).filter(|(_, logit)| from <= **logit && **logit <= to);
            prop_assert_eq!(places, between.map(|(place, _)| place).collect::<Vec<u32>>());

            let mut tempered = Vec::new();
            scale(isa, &logits, highest, temperature, threshold, &mut tempered);
            for (got, &logit) in tempered.iter().zip(logits.iter()) {
                let kept = if logit >= threshold { scaled(logit, highest, temperature) } else { f32::NEG_INFINITY };
                prop_assert_eq!(*got, kept);
            }

            let before = [bits(&weights), bits(&sums), bits(&at_least), bits(&[total])];
            sum_blocks(isa, &logits, &weights, threshold, cut, &mut sums);
            for (block, sum) in sums.iter().enumerate() {
                let is_left = |place: &usize| logits[*place] > threshold || (logits[*place] == threshold && *place < cut);
                let places = (block * BLOCK..logits.len().min((block + 1) * BLOCK)).filter(is_left);
                prop_assert!(near(*sum, places.map(|place| weights[place]).sum()));
            }
            let all = (before, bits(&sums));
            prop_assert_eq!(first.get_or_insert_with(|| all.clone()), &all, "{}", isa.name());
        }
    }

    #[test]
    fn nan_and_infinity_are_detected_at_every_index(len in 1..300_usize, place in 0..300_usize, is_nan: bool) {
        let mut logits = vec![1.0; len];
        logits[place % len] = if is_nan { f32::NAN } else { f32::INFINITY };
        for isa in Isa::available() {
            prop_assert!(!block_maxima(isa, &logits, &mut Vec::new()), "{}", isa.name());
        }
    }
}
