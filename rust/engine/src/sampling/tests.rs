//! Log-probabilities and traces, compared with direct computations.

use proptest::prelude::*;

use super::*;

fn sample(logits: &[f32], params: &SamplingParams) -> Sample {
    Sampler::default().sample(logits, params, &mut History::new(params, &[0], &[]), None, 1).unwrap()
}

/// Returns ids by likelihood with their log-probabilities.
fn ranked(logits: &[f32]) -> Vec<(u32, f64)> {
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    let mut all: Vec<(u32, f64)> =
        (0..).zip(logits).map(|(id, &logit)| (id, (f64::from(logit).exp() / sum).ln())).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all
}

proptest! {
    #[test]
    fn logprobs_are_those_of_the_raw_logits(
        logits in prop::collection::vec((-40..40).prop_map(|number| number as f32 / 8.0), 1..50),
        count in 0..20_usize,
        seed: u64,
    ) {
        // All stages that could change them are active.
        let params = SamplingParams {
            seed, temperature: 0.5, top_k: 3, repetition_penalty: 2.0, logit_bias: vec![(0, 5.0)], logprobs: Some(count),
            ..SamplingParams::default()
        };
        let sample = sample(&logits, &params);
        let got = sample.logprobs.unwrap();
        let ranked = ranked(&logits);
        prop_assert_eq!(got.top.len(), count.min(logits.len()));
        let sampled_rank = 1 + ranked.iter().position(|(id, _)| *id == sample.token).unwrap();
        prop_assert_eq!((got.sampled.id, got.sampled.rank), (sample.token, sampled_rank));
        for (place, token) in got.top.iter().enumerate() {
            prop_assert_eq!((token.id, token.rank), (ranked[place].0, place + 1));
        }
        for token in got.top.iter().chain([&got.sampled]) {
            prop_assert!((token.logprob - ranked[token.rank - 1].1).abs() < 1e-12);
        }
    }
}

proptest! {
    #[test]
    fn processed_logprobs_are_those_of_the_distribution_after_all_stages(
        logits in prop::collection::vec((-40..40).prop_map(|number| number as f32 / 8.0), 1..50),
        count in 0..20_usize,
        top_k in 0..5_usize,
        temperature in prop_oneof![Just(0.0), 0.1..2.0],
        seed: u64,
    ) {
        let params = SamplingParams {
            seed, temperature, top_k, min_p: 0.01, logit_bias: vec![(0, 5.0)], logprobs: Some(count),
            processed_logprobs: true, ..SamplingParams::default()
        };
        let sample = sample(&logits, &params);
        let got = sample.logprobs.unwrap();
        let Distribution { ids, probabilities, chosen, .. } = distribution(&logits, &params, &[0], &[]).unwrap();
        let mut ranked: Vec<(u32, f64)> = ids.into_iter().zip(probabilities).collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        prop_assert_eq!((sample.token, got.sampled.id), (chosen, chosen));
        prop_assert_eq!(got.top.len(), count.min(ranked.len()));
        for token in got.top.iter().chain([&got.sampled]) {
            let (id, probability) = ranked[token.rank - 1];
            prop_assert_eq!(token.id, id);
            prop_assert!((token.logprob.exp() - probability).abs() < 1e-12);
        }
        prop_assert!(got.top.iter().zip(1..).all(|(token, rank)| token.rank == rank));
    }
}

proptest! {
    #[test]
    fn a_greedy_sample_needs_only_the_first_of_the_largest_logits(
        logits in prop::collection::vec((-40..40).prop_map(|number| number as f32 / 8.0), 1..700),
        (top_k, top_p, min_p) in (0..40_usize, 0.1..1.0, 0.0..0.2),
    ) {
        let params = SamplingParams { temperature: 0.0, top_k, top_p, min_p, ..SamplingParams::default() };
        prop_assert!(needs_only_largest(&params, &History::new(&params, &[0], &[]), 1));
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut largest = vec![f32::NEG_INFINITY; logits.len()];
        largest[logits.iter().position(|logit| *logit == highest).unwrap()] = highest;
        prop_assert_eq!(
            distribution(&largest, &params, &[0], &[]).unwrap(),
            distribution(&logits, &params, &[0], &[]).unwrap()
        );
    }
}

#[test]
fn other_samples_need_all_logits() {
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let only_largest = |params: &SamplingParams, output: &[u32]| {
        needs_only_largest(params, &History::new(params, &[0], output), 1 + output.len())
    };
    assert!(only_largest(&greedy, &[]));
    let at_least_one = SamplingParams { stop_token_ids: vec![2], min_tokens: 1, ..greedy.clone() };
    assert!(only_largest(&at_least_one, &[3]));
    for params in [
        at_least_one,
        SamplingParams::default(),
        SamplingParams { temperature: 0.9, top_k: 1, ..greedy.clone() },
        SamplingParams { logprobs: Some(0), ..greedy.clone() },
        SamplingParams { entropy: true, ..greedy.clone() },
        SamplingParams { trace: Some(1), ..greedy.clone() },
        SamplingParams { logit_bias: vec![(3, 1.0)], ..greedy.clone() },
        SamplingParams { repetition_penalty: 1.1, ..greedy.clone() },
        SamplingParams { frequency_penalty: 0.1, ..greedy.clone() },
        SamplingParams { presence_penalty: 0.1, ..greedy.clone() },
        SamplingParams { no_repeat_ngram_size: 2, ..greedy.clone() },
        SamplingParams { dry_multiplier: 1.0, ..greedy.clone() },
        SamplingParams { allowed_token_ids: Some(vec![1]), ..greedy.clone() },
        SamplingParams { bad_words: vec![vec![1]], ..greedy },
    ] {
        assert!(!only_largest(&params, &[]), "{params:?}");
    }
}

#[test]
fn a_trace_names_the_stage_that_dropped_each_candidate() {
    let logits = [4.0, 3.5, 3.0, 2.5, 2.0, -9.0, f32::NEG_INFINITY];
    let params = SamplingParams {
        stop_token_ids: vec![1],
        min_tokens: 1,
        min_p: 0.01,
        top_k: 3,
        top_p: 0.8,
        trace: Some(7),
        seed: 1,
        ..SamplingParams::default()
    };
    let sample = sample(&logits, &params);
    let trace = sample.trace.unwrap();
    let dropped: Vec<_> = trace.candidates.iter().map(|candidate| (candidate.id, candidate.dropped_by)).collect();
    // After top-k 4, 3 and 2.5 remain, of which the first two hold 0.86 of the mass.
    let expected = [
        (0, None),
        (1, Some("min_tokens")),
        (2, None),
        (3, Some("top_p")),
        (4, Some("top_k")),
        (5, Some("min_p")),
        (6, Some("model")),
    ];
    assert_eq!(dropped, expected);
    let distribution = distribution(&logits, &params, &[0], &[]).unwrap();
    assert_eq!((trace.chosen, trace.draw), (distribution.chosen, distribution.draw));
    for candidate in &trace.candidates {
        assert_eq!(candidate.logit, logits[candidate.id as usize]);
        let place = distribution.ids.iter().position(|id| *id == candidate.id);
        assert_eq!(candidate.final_probability, place.map_or(0.0, |place| distribution.probabilities[place]));
    }
    let raw: f64 = trace.candidates.iter().map(|candidate| candidate.probability).sum();
    assert!((raw - 1.0).abs() < 1e-12);
}

/// Tracing does not change the result, and the last stage's probabilities are those of the draw.
#[test]
fn a_trace_has_the_probabilities_after_each_stage() {
    let logits = [2.0, 1.0, 0.0, -1.0, f32::NEG_INFINITY];
    let params = SamplingParams { temperature: 0.5, top_k: 3, typical_p: 0.9, seed: 3, ..SamplingParams::default() };
    let traced = sample(&logits, &SamplingParams { trace: Some(5), ..params.clone() });
    assert_eq!(traced.token, sample(&logits, &params).token);
    let trace = traced.trace.unwrap();
    let stages: Vec<_> = trace.stages.iter().map(|stage| (stage.name, stage.left)).collect();
    assert_eq!(stages, [("temperature", 4), ("top_k", 3), ("typical_p", 2)]);
    for (place, stage) in trace.stages.iter().enumerate() {
        let column: Vec<f64> = trace.candidates.iter().map(|candidate| candidate.stage_probabilities[place]).collect();
        assert!((column.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{stage:?}");
        assert_eq!(column.iter().filter(|probability| **probability > 0.0).count(), stage.left);
        let entropy: f64 = column.iter().filter(|share| **share > 0.0).map(|share| -share * share.ln()).sum();
        assert!((stage.entropy - entropy).abs() < 1e-12, "{stage:?}");
    }
    for candidate in &trace.candidates {
        assert!((candidate.stage_probabilities[2] - candidate.final_probability).abs() < 1e-15);
    }
}

/// Mirostat's bound follows the surprisal of each token, before the stage dropped tokens.
#[test]
fn mirostat_moves_by_the_surprisal_error() {
    let logits = [2.0_f32, 1.0, 0.0, -1.0];
    let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    for (mirostat, seed) in [(1, 3), (1, 4), (2, 5), (2, 6)] {
        let params = SamplingParams { mirostat, mirostat_tau: 0.7, mirostat_eta: 0.3, seed, ..Default::default() };
        let mut history = History::new(&params, &[0], &[]);
        let mut mu = 1.4;
        for position in 1..30 {
            let token = Sampler::default().sample(&logits, &params, &mut history, None, position).unwrap().token;
            history.push(token);
            let surprise = -(f64::from(logits[token as usize]).exp() / total).log2();
            mu -= 0.3 * (surprise - 0.7);
            assert!((history.mirostat_mu - mu).abs() < 1e-9);
        }
    }
}

#[test]
fn a_trace_ends_with_the_sampled_token_if_it_is_not_among_the_most_likely() {
    let greedy = SamplingParams { temperature: 0.0, logit_bias: vec![(2, 9.0)], trace: Some(1), ..Default::default() };
    let trace = sample(&[3.0, 2.0, 1.0], &greedy).trace.unwrap();
    let shown: Vec<_> = trace.candidates.iter().map(|candidate| (candidate.id, candidate.dropped_by)).collect();
    assert_eq!((shown, trace.chosen, trace.draw), (vec![(0, Some("greedy")), (2, None)], 2, None));
    assert_eq!(trace.candidates[1].final_probability, 1.0);
}

#[test]
fn an_incremental_history_equals_a_new_one() {
    let params = SamplingParams { frequency_penalty: 0.5, ..SamplingParams::default() };
    let mut grown = History::new(&params, &[1, 2, 2], &[]);
    [2, 3, 3].into_iter().for_each(|token| grown.push(token));
    let made = History::new(&params, &[1, 2, 2], &[2, 3, 3]);
    assert_eq!(grown.tokens().collect::<Vec<_>>(), made.tokens().collect::<Vec<_>>());
    assert_eq!((grown.output_len(), made.tokens().count()), (3, 3));
    // No stage needs counts, so none are kept.
    assert_eq!(History::new(&SamplingParams::default(), &[1], &[2]).tokens().count(), 0);
}
