//! Rows of vocabulary size, in which the sampler visits few tokens, compared with a sampler that sorts everything.

use ferrule_engine::sampling::{distribution, rng};
use ferrule_engine::{Distribution, SampleError, SamplingParams};
use proptest::prelude::*;

/// All filters written directly: f32 logits, f64 weights with the library's exponential, full sorts.
mod naive {
    use super::*;

    type Left = Vec<(u32, f32)>;

    fn weigh(left: &Left) -> Vec<f64> {
        let highest = left.iter().map(|entry| entry.1).fold(f32::NEG_INFINITY, f32::max);
        left.iter().map(|entry| (f64::from(entry.1) - f64::from(highest)).exp()).collect()
    }

    fn sort(left: &mut Left) {
        left.sort_by(|a, b| (b.1 + 0.0).total_cmp(&(a.1 + 0.0)).then(a.0.cmp(&b.0)));
    }

    /// Returns the remaining ids, ascending, with their probabilities.
    pub fn distribution(logits: &[f32], params: &SamplingParams) -> (Vec<u32>, Vec<f64>) {
        let mut left: Left = (0..).zip(logits.iter().copied()).collect();
        for &(id, bias) in &params.logit_bias {
            left[id as usize].1 += bias as f32;
        }
        left.retain(|entry| entry.1 > f32::NEG_INFINITY);
        sort(&mut left);
        if params.temperature == 0.0 {
            left.truncate(1);
        } else if params.temperature != 1.0 {
            let highest = f64::from(left[0].1);
            left.iter_mut().for_each(|entry| entry.1 = ((f64::from(entry.1) - highest) / params.temperature) as f32);
            // Division can make different logits equal.
            sort(&mut left);
        }
        let kept = weigh(&left).iter().filter(|weight| **weight >= params.min_p).count();
        left.truncate(kept);
        if (1..left.len()).contains(&params.top_k) {
            let last = left[params.top_k - 1].1;
            left.retain(|entry| entry.1 >= last);
        }
        if params.top_p < 1.0 {
            let weights = weigh(&left);
            let mass = params.top_p * weights.iter().sum::<f64>();
            let mut sum = 0.0;
            let reached = weights.iter().position(|weight| {
                sum += weight;
                sum >= mass
            });
            left.truncate(reached.map_or(left.len(), |last| last + 1));
        }
        left.sort_by_key(|entry| entry.0);
        let weights = weigh(&left);
        let total: f64 = weights.iter().sum();
        (left.iter().map(|entry| entry.0).collect(), weights.iter().map(|weight| weight / total).collect())
    }
}

#[derive(Debug, Clone, Copy)]
enum Shape {
    Normal(f32),
    Coarse,
    Equal,
    /// One logit far above all others, which are nearly equal.
    Outlier,
    /// One logit far below.
    Straggler,
    Ascending,
    /// Peaks at equal distances, which a sample at equal distances may hit or miss entirely.
    Periodic(usize),
    MostlyForbidden,
}

fn row(shape: Shape, len: usize, seed: u64) -> Vec<f32> {
    let uniform = |place: usize| rng::uniform(seed, place as u64) as f32;
    let normal = |place: usize| (0..6).map(|part| uniform(6 * place + part)).sum::<f32>() - 3.0;
    let logit = |place: usize| match shape {
        Shape::Normal(width) => width * normal(place),
        Shape::Coarse => (4.0 * normal(place)).round() / 2.0,
        Shape::Equal => -7.25,
        Shape::Outlier => 0.01 * normal(place) + if place == len / 3 { 9.0 } else { 0.0 },
        Shape::Straggler => 0.01 * normal(place) - if place == len / 3 { 90.0 } else { 0.0 },
        Shape::Ascending => place as f32 / len as f32,
        Shape::Periodic(period) => normal(place) + if place.is_multiple_of(period) { 5.0 } else { 0.0 },
        Shape::MostlyForbidden => {
            // One token at least is allowed.
            if uniform(place) < 0.99 && place != len / 2 { f32::NEG_INFINITY } else { normal(place) }
        }
    };
    (0..len).map(logit).collect()
}

fn shape(len: usize) -> impl Strategy<Value = Shape> {
    prop_oneof![
        3 => (0.01_f32..4.0).prop_map(Shape::Normal),
        2 => Just(Shape::Coarse),
        1 => Just(Shape::Equal),
        1 => Just(Shape::Outlier),
        1 => Just(Shape::Straggler),
        1 => Just(Shape::Ascending),
        1 => prop_oneof![Just(len / 1024), 2..200_usize].prop_map(Shape::Periodic),
        1 => Just(Shape::MostlyForbidden),
    ]
}

fn params(len: usize) -> impl Strategy<Value = SamplingParams> {
    let filters = (
        prop_oneof![4 => Just(1.0), 3 => 0.2..3.0, 1 => Just(0.0)],
        prop_oneof![4 => Just(0), 3 => 1..100_usize, 1 => 1..len],
        prop_oneof![1 => Just(1.0), 4 => 0.01..0.9999],
        prop_oneof![2 => Just(0.0), 1 => 1e-5..1.0],
    );
    let bias = prop_oneof![Just(Vec::new()), Just(vec![(3, 4.0), (len as u32 / 3, -100.0), (len as u32 - 1, 2.5)])];
    (filters, bias, any::<u64>()).prop_map(|((temperature, top_k, top_p, min_p), logit_bias, seed)| SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        logit_bias,
        seed,
        ..SamplingParams::default()
    })
}

/// Requires the same ids, probabilities within rounding of the naive sampler's (one unit in the last place per summand,
/// plus the exponential's error), and a draw from the share that contains the uniform number.
fn check(logits: &[f32], params: &SamplingParams) -> Result<(), TestCaseError> {
    let got: Distribution = distribution(logits, params, &[0], &[]).expect("a row with a token");
    let (ids, probabilities) = naive::distribution(logits, params);
    prop_assert_eq!(got.ids.len(), ids.len());
    prop_assert!(got.ids == ids, "same number of ids, but different ids");
    let bound = (logits.len() + 32) as f64 * f64::EPSILON;
    for ((got, wanted), id) in got.probabilities.iter().zip(&probabilities).zip(&ids) {
        prop_assert!((got - wanted).abs() <= bound * wanted, "{}: {} for {}", id, got, wanted);
    }
    let place = got.ids.binary_search(&got.chosen).expect("one of those kept is chosen");
    if let Some(draw) = got.draw {
        let below: f64 = probabilities[..place].iter().sum();
        prop_assert!(below - bound <= draw && draw <= below + probabilities[place] + bound);
    }
    Ok(())
}

fn cases() -> impl Strategy<Value = (Shape, usize, u64, SamplingParams)> {
    prop_oneof![1 => 300..6000_usize, 1 => 20_000..60_000_usize]
        .prop_flat_map(|len| (shape(len), Just(len), any::<u64>(), params(len)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn large_rows_agree_with_the_naive_sampler((shape, len, seed, params) in cases()) {
        check(&row(shape, len, seed), &params)?;
    }
}

/// Even where rounding decides the end of the nucleus, the kept tokens hold almost all of the mass.
#[test]
fn a_nucleus_of_almost_all_mass_keeps_almost_all_mass() {
    for shape in [Shape::Equal, Shape::Coarse, Shape::Normal(3.0), Shape::Outlier, Shape::MostlyForbidden] {
        let logits = row(shape, 20_021, 3);
        let params = SamplingParams { top_p: 1.0 - f64::EPSILON, ..SamplingParams::default() };
        let kept = distribution(&logits, &params, &[0], &[]).unwrap().ids;
        let all = distribution(&logits, &SamplingParams::default(), &[0], &[]).unwrap();
        let mass: f64 = kept.iter().map(|id| all.probabilities[all.ids.binary_search(id).unwrap()]).sum();
        assert!(mass >= 1.0 - 1e-12, "{shape:?}: {mass}");
    }
}

#[test]
fn non_finite_logits_are_found_in_large_rows() {
    let mut logits = row(Shape::Normal(1.0), 50_001, 1);
    (logits[40_000], logits[50_000]) = (f32::NAN, f32::INFINITY);
    let error = SampleError::NotFinite { count: 2, token: 40_000, vocab_size: 50_001, position: 1 };
    assert_eq!(distribution(&logits, &SamplingParams::default(), &[0], &[]), Err(error));
}
