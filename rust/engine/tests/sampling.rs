//! The sampler against a plain one, against what transformers computed, and against the law of large numbers.

use std::collections::BTreeMap;

use ferrule_engine::sampling::{distribution, rng};
use ferrule_engine::{Distribution, SampleError, SamplingParams};
use proptest::collection::vec;
use proptest::prelude::*;
use serde::Deserialize;

/// What the sampler should do, in the most obvious way: sort everything, compute everything in f64.
mod oracle {
    use super::*;

    /// `(id, logit)` of what is left, most likely first.
    type Left = Vec<(u32, f64)>;

    fn softmax(left: &Left) -> Vec<f64> {
        let weights: Vec<f64> = left.iter().map(|(_, logit)| (logit - left[0].1).exp()).collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / sum).collect()
    }

    fn sort(left: &mut Left) {
        left.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    }

    /// Ids kept and their probabilities, ids ascending.
    pub fn distribution(logits: &[f32], params: &SamplingParams, prompt: &[u32], output: &[u32]) -> Vec<(u32, f64)> {
        let mut left: Left = logits.iter().enumerate().map(|(id, &logit)| (id as u32, f64::from(logit))).collect();
        for (id, logit) in &mut left {
            *logit += params.logit_bias.iter().filter(|(other, _)| other == id).map(|(_, bias)| bias).sum::<f64>();
        }
        if output.len() < params.min_tokens {
            left.retain(|(id, _)| !params.stop_token_ids.contains(id));
        }
        for (id, logit) in &mut left {
            let times = output.iter().filter(|token| *token == id).count() as f64;
            if times > 0.0 || prompt.contains(id) {
                *logit =
                    if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
            }
            *logit -= times * params.frequency_penalty;
            if times > 0.0 {
                *logit -= params.presence_penalty;
            }
        }
        sort(&mut left);
        if params.temperature == 0.0 {
            return vec![(left[0].0, 1.0)];
        }
        left.iter_mut().for_each(|(_, logit)| *logit /= params.temperature);
        let probabilities = softmax(&left);
        let kept = probabilities.iter().filter(|&probability| *probability >= params.min_p * probabilities[0]).count();
        left.truncate(kept);
        if params.top_k > 0 && params.top_k < left.len() {
            let last = left[params.top_k - 1].1;
            left.retain(|(_, logit)| *logit >= last);
        }
        if params.top_p < 1.0 {
            let mut sum = 0.0;
            let before = softmax(&left).into_iter().map(|probability| {
                sum += probability;
                sum - probability
            });
            let kept = before.filter(|before| *before < params.top_p).count();
            left.truncate(kept);
        }
        let mut kept: Vec<(u32, f64)> = left.iter().map(|(id, _)| *id).zip(softmax(&left)).collect();
        kept.sort_by_key(|(id, _)| *id);
        kept
    }
}

fn assert_same(got: &Distribution, expected: &[(u32, f64)]) -> Result<(), TestCaseError> {
    let ids: Vec<u32> = expected.iter().map(|(id, _)| *id).collect();
    prop_assert_eq!(&got.ids, &ids);
    for (probability, (id, expected)) in got.probabilities.iter().zip(expected) {
        prop_assert!((probability - expected).abs() < 1e-6, "{}: {} and not {}", id, probability, expected);
    }
    // The draw is the inverse of the distribution function at the uniform number, ids ascending.
    let place = got.ids.iter().position(|id| *id == got.chosen).expect("one of those kept is chosen");
    let below: f64 = got.probabilities[..place].iter().sum();
    if let Some(draw) = got.draw {
        prop_assert!(below - 1e-12 <= draw && draw <= below + got.probabilities[place] + 1e-12);
    }
    Ok(())
}

/// Multiples of a power of two, so that no rounding stands between the f32 sampler and the f64 oracle, and ties abound.
fn coarse(range: i32, parts: f32) -> impl Strategy<Value = f32> {
    (-range..=range).prop_map(move |number| number as f32 / parts)
}

fn power_of_two() -> impl Strategy<Value = f64> {
    (-2..3).prop_map(|exponent| 2.0_f64.powi(exponent))
}

fn coarse_params(vocab: u32) -> impl Strategy<Value = SamplingParams> {
    let filters = (
        prop_oneof![3 => power_of_two(), 1 => Just(0.0)],
        prop_oneof![Just(0), 1..12_usize],
        prop_oneof![Just(1.0), 0.01..0.999],
        prop_oneof![Just(0.0), 0.001..0.9],
    );
    let penalties = (power_of_two(), coarse(8, 4.0), coarse(8, 4.0));
    let bias = vec((0..vocab, coarse(16, 4.0)), 0..4);
    let stops = (0..4_usize, vec(1..vocab, 0..4));
    (filters, penalties, bias, stops, any::<u64>()).prop_map(
        |(filters, (repetition, presence, frequency), bias, (min_tokens, stop_token_ids), seed)| {
            let (temperature, top_k, top_p, min_p) = filters;
            let bias: BTreeMap<u32, f64> = bias.into_iter().map(|(id, bias)| (id, f64::from(bias))).collect();
            SamplingParams {
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty: repetition,
                presence_penalty: presence.into(),
                frequency_penalty: frequency.into(),
                logit_bias: bias.into_iter().collect(),
                seed,
                min_tokens,
                stop_token_ids,
                ..SamplingParams::default()
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// All stages together, with ties and every kind of history.
    #[test]
    fn the_chain_agrees_with_the_oracle(
        logits in vec(coarse(64, 8.0), 20),
        params in coarse_params(20),
        prompt in vec(0..20_u32, 1..8),
        output in vec(0..20_u32, 0..8),
    ) {
        let got = distribution(&logits, &params, &prompt, &output).unwrap();
        assert_same(&got, &oracle::distribution(&logits, &params, &prompt, &output))?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Rows long enough that top-p sorts in several rounds, with any logits.
    #[test]
    fn long_rows_agree_with_the_oracle(
        logits in vec(-8.0_f32..8.0, 1000..6000),
        top_k in prop_oneof![Just(0), 1..6000_usize],
        top_p in 0.01..1.0,
        min_p in prop_oneof![Just(0.0), 1e-6..0.1],
        seed: u64,
    ) {
        let params = SamplingParams { top_k, top_p, min_p, seed, ..SamplingParams::default() };
        assert_same(&distribution(&logits, &params, &[1], &[]).unwrap(), &oracle::distribution(&logits, &params, &[1], &[]))?;
    }
}

#[derive(Deserialize)]
struct Golden {
    logits: Vec<f32>,
    filters: BTreeMap<String, Kept>,
}

#[derive(Deserialize)]
struct Kept {
    kept: Vec<u32>,
    probabilities: Vec<f64>,
}

/// What a filter's name in the golden file means; none for those that are not sampler stages yet.
fn golden_params(filter: &str) -> Option<SamplingParams> {
    let (name, value) = filter.rsplit_once('_').unwrap();
    let number: f64 = value.parse().unwrap();
    let default = SamplingParams::default();
    match name {
        "top_k" => Some(SamplingParams { top_k: number as usize, ..default }),
        "top_p" => Some(SamplingParams { top_p: number, ..default }),
        "min_p" => Some(SamplingParams { min_p: number, ..default }),
        "temperature" => Some(SamplingParams { temperature: number, ..default }),
        "typical" | "epsilon" | "top_h" => None,
        other => panic!("{other} is not known here"),
    }
}

/// transformers' filters. Where equal logits lie on top-p's edge, which of them transformers keeps is an accident of its
/// unstable sort: there we keep as many of them, the lowest ids.
#[test]
fn filters_agree_with_transformers() {
    let rows: Vec<Golden> = serde_json::from_str(include_str!("../../../tests/golden/decoding/warpers.json")).unwrap();
    let mut compared = 0;
    for row in &rows {
        for (name, expected) in &row.filters {
            let Some(params) = golden_params(name) else { continue };
            let got = distribution(&row.logits, &params, &[0], &[]).unwrap();
            let logits_of = |ids: &[u32]| {
                let mut logits: Vec<f32> = ids.iter().map(|&id| row.logits[id as usize]).collect();
                logits.sort_by(f32::total_cmp);
                logits
            };
            let lowest = logits_of(&expected.kept)[0];
            let off_the_edge = |ids: &[u32]| -> Vec<u32> {
                let is_edge = |id: &u32| name.starts_with("top_p") && row.logits[*id as usize] == lowest;
                ids.iter().copied().filter(|id| !is_edge(id)).collect()
            };
            assert_eq!(off_the_edge(&got.ids), off_the_edge(&expected.kept), "{name}");
            assert_eq!(logits_of(&got.ids), logits_of(&expected.kept), "{name}");
            let expected: BTreeMap<u32, f64> =
                expected.kept.iter().copied().zip(expected.probabilities.iter().copied()).collect();
            for (id, probability) in got.ids.iter().zip(&got.probabilities) {
                let same = expected.get(id).or_else(|| {
                    expected.iter().find_map(|(other, probability)| {
                        (row.logits[*other as usize] == row.logits[*id as usize]).then_some(probability)
                    })
                });
                assert!((probability - same.unwrap()).abs() < 1e-6, "{name}, token {id}");
            }
            compared += 1;
        }
    }
    assert_eq!((rows.len(), compared), (4, 4 * 7));
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [0.0, 2.0, -1.0, 1.0, 0.5];
    let at = |seed| SamplingParams { seed, temperature: 0.8, top_k: 4, ..SamplingParams::default() };
    let probabilities: BTreeMap<u32, f64> = {
        let kept = distribution(&logits, &at(0), &[0], &[]).unwrap();
        kept.ids.into_iter().zip(kept.probabilities).collect()
    };
    const DRAWS: u64 = 20_000;
    let mut counts: BTreeMap<u32, f64> = BTreeMap::new();
    for seed in 0..DRAWS {
        *counts.entry(distribution(&logits, &at(seed), &[0], &[]).unwrap().chosen).or_default() += 1.0;
    }
    assert_eq!(counts.keys().collect::<Vec<_>>(), probabilities.keys().collect::<Vec<_>>());
    // Chi-squared with 3 degrees of freedom: above 21 once in ten thousand, and the seeds are fixed.
    let chi_squared: f64 = probabilities
        .iter()
        .map(|(id, probability)| (counts[id] - DRAWS as f64 * probability).powi(2) / (DRAWS as f64 * probability))
        .sum();
    assert!(chi_squared < 21.0, "{chi_squared}");
}

#[test]
fn the_draw_depends_on_seed_and_position_alone() {
    let params = SamplingParams { seed: 5, ..SamplingParams::default() };
    let draw = |prompt: &[u32], output: &[u32]| distribution(&[0.0; 9], &params, prompt, output).unwrap().draw;
    assert_eq!(draw(&[1, 2, 3], &[4]), draw(&[7], &[7, 7, 7]));
    assert_eq!(draw(&[1, 2, 3], &[4]), Some(rng::uniform(5, 4)));
    assert_ne!(draw(&[1, 2, 3], &[4]), draw(&[1, 2, 3], &[]));
    let greedy = SamplingParams { temperature: 0.0, ..params };
    assert_eq!(distribution(&[0.0, 1.0, 1.0], &greedy, &[0], &[]).unwrap().draw, None);
}

#[test]
fn equal_logits_are_kept_from_the_lowest_id_and_by_top_k_all() {
    let logits = [1.0, 1.0, 0.0, 1.0, 1.0];
    let kept = |params: SamplingParams| distribution(&logits, &params, &[0], &[]).unwrap().ids;
    assert_eq!(kept(SamplingParams { temperature: 0.0, ..SamplingParams::default() }), [0]);
    assert_eq!(kept(SamplingParams { top_p: 0.4, ..SamplingParams::default() }), [0, 1]);
    assert_eq!(kept(SamplingParams { top_k: 2, ..SamplingParams::default() }), [0, 1, 3, 4]);
}

/// Values at the ends of their ranges, and logits at the ends of theirs.
#[test]
fn extremes_neither_overflow_nor_lose_the_best() {
    let tiny = f64::MIN_POSITIVE;
    let logits = [f32::MAX, 5.0, f32::NEG_INFINITY, -f32::MAX];
    for params in [
        SamplingParams { temperature: tiny, ..SamplingParams::default() },
        SamplingParams { temperature: 100.0, top_p: tiny, ..SamplingParams::default() },
        SamplingParams { repetition_penalty: 100.0, temperature: tiny, min_p: 1.0, ..SamplingParams::default() },
        SamplingParams { logit_bias: vec![(0, 100.0)], top_k: usize::MAX, ..SamplingParams::default() },
    ] {
        let kept = distribution(&logits, &params, &[0, 1, 2, 3], &[]).unwrap();
        assert_eq!(kept.chosen, 0, "{params:?}");
        assert!((kept.probabilities.iter().sum::<f64>() - 1.0).abs() < 1e-12);
    }
    // Both positive logits overflow: they are equal then, and neither is lost.
    let params = SamplingParams { repetition_penalty: tiny, temperature: tiny, ..SamplingParams::default() };
    let kept = distribution(&logits, &params, &[0, 1, 2, 3], &[]).unwrap();
    assert_eq!((&kept.ids[..2], &kept.probabilities[..2]), (&[0, 1][..], &[0.5, 0.5][..]));
    let cold = SamplingParams { temperature: 1e-40, ..SamplingParams::default() };
    assert_eq!(distribution(&[4.0, 5.0], &cold, &[0], &[]).unwrap().probabilities, [1.0]);
}

#[test]
fn what_gives_no_token_is_an_error_that_says_why() {
    let params = SamplingParams { stop_token_ids: vec![0, 1], min_tokens: 1, ..SamplingParams::default() };
    let nothing_left = |stage| Err(SampleError::NothingLeft { position: 1, stage });
    assert_eq!(distribution(&[1.0, 2.0], &params, &[0], &[]), nothing_left("min_tokens"));
    assert_eq!(distribution(&[f32::NEG_INFINITY; 2], &params, &[0], &[]), nothing_left("model"));
    for bad in [f32::NAN, f32::INFINITY] {
        let error = SampleError::NotFinite { count: 2, token: 1, vocab_size: 3, position: 1 };
        assert_eq!(distribution(&[0.0, bad, bad], &params, &[0], &[]), Err(error));
    }
}
