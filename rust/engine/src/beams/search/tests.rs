//! Compares the search with Hugging Face's algorithm over the whole vocabulary (`_beam_search` of transformers 5.23,
//! without its batch dimension).

use proptest::prelude::*;

use super::*;
use crate::BeamSearchParams;

/// The value that transformers uses for minus infinity.
const NOTHING: f64 = -1e9;

/// Returns log-probabilities after some tokens; coarse, so that there are ties.
fn logprobs(seed: u64, output: &[u32], vocab: usize) -> Vec<f64> {
    let mut state = seed;
    for &token in output {
        state = (state ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
    }
    let logits: Vec<f64> = (0..vocab as u64)
        .map(|id| (((state ^ id).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 33) % 16) as f64 / 4.0)
        .collect();
    let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
    logits.iter().map(|logit| logit - sum.ln()).collect()
}

/// Returns the indices of the `count` highest scores, the first among equals.
fn top(scores: &[f64], count: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..scores.len()).collect();
    places.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    places.truncate(count);
    places
}

/// Returns the sequences and scores of the reference algorithm.
fn plain(seed: u64, vocab: usize, params: &SamplingParams) -> Vec<(Vec<u32>, f64)> {
    let BeamSearchParams { beam_width, length_penalty, early_stopping, .. } = params.beam_search.clone().unwrap();
    let stop = &params.stop_token_ids;
    let kept = beam_width * (1 + stop.len()).max(2);
    let mut running: Vec<(Vec<u32>, f64)> =
        (0..beam_width).map(|beam| (Vec::new(), if beam == 0 { 0.0 } else { NOTHING })).collect();
    let mut finished: Vec<(Vec<u32>, f64, bool)> = vec![(Vec::new(), NOTHING, false); beam_width];
    for length in 1.. {
        let scores: Vec<f64> = running
            .iter()
            .flat_map(|(output, score)| logprobs(seed, output, vocab).into_iter().map(move |logprob| logprob + score))
            .collect();
        let best = top(&scores, kept);
        let sequences: Vec<Vec<u32>> =
            best.iter().map(|&place| [&running[place / vocab].0[..], &[(place % vocab) as u32]].concat()).collect();
        let ends: Vec<bool> = sequences
            .iter()
            .map(|tokens| length == params.max_tokens || stop.contains(tokens.last().unwrap()))
            .collect();
        let open: Vec<f64> =
            best.iter().zip(&ends).map(|(&place, &ends)| scores[place] + if ends { NOTHING } else { 0.0 }).collect();
        running = top(&open, beam_width).into_iter().map(|place| (sequences[place].clone(), open[place])).collect();
        let is_full = finished.iter().all(|(_, _, is_finished)| *is_finished);
        let mut merged = finished;
        for (place, tokens) in sequences.into_iter().enumerate() {
            let is_finished = ends[place] && place < beam_width;
            let mut score = scores[best[place]] / (length as f64).powf(length_penalty);
            if !is_finished || is_full && early_stopping == EarlyStopping::Always {
                score += NOTHING;
            }
            merged.push((tokens, score, is_finished));
        }
        let scores: Vec<f64> = merged.iter().map(|(_, score, _)| *score).collect();
        finished = top(&scores, beam_width).into_iter().map(|place| merged[place].clone()).collect();
        let is_full = finished.iter().all(|(_, _, is_finished)| *is_finished);
        let long = early_stopping == EarlyStopping::Never && length_penalty > 0.0;
        let length = if long { params.max_tokens } else { length };
        let possible = running[0].1 / (length as f64).powf(length_penalty);
        let worst = if is_full { finished.iter().map(|one| one.1).fold(f64::INFINITY, f64::min) } else { NOTHING };
        if possible <= worst || is_full && early_stopping == EarlyStopping::Always || ends.iter().all(|&ends| ends) {
            break;
        }
    }
    finished.into_iter().map(|(tokens, score, _)| (tokens, score)).collect()
}

/// Returns the same by [`Search`], given only the candidates that it requests.
fn searched(seed: u64, vocab: usize, params: &SamplingParams) -> Vec<(Vec<u32>, f64)> {
    let mut search = Search::new(params, params.max_tokens).unwrap();
    let mut beams = vec![(Vec::new(), 0.0)];
    while !beams.is_empty() {
        let ways: Vec<Vec<Continuation>> = beams
            .iter()
            .map(|(output, _)| {
                let logprobs = logprobs(seed, output, vocab);
                let way = |place: usize| Continuation { token: place as u32, logprob: logprobs[place] };
                top(&logprobs, Search::candidates_per_beam(params)).into_iter().map(way).collect()
            })
            .collect();
        let views: Vec<Beam<'_>> = beams
            .iter()
            .zip(&ways)
            .map(|((output, score), continuations)| Beam { output, score: *score, continuations })
            .collect();
        let children = search.advance(&views);
        let grown = |child: &Child| ([&beams[child.parent].0[..], &[child.token]].concat(), child.score);
        beams = children.iter().map(grown).collect();
    }
    let complete = search.into_hypotheses();
    for one in &complete {
        let last = *one.token_ids.last().unwrap();
        assert_eq!(one.stop_token, params.stop_token_ids.contains(&last).then_some(last));
        assert!(one.stop_token.is_some() || one.token_ids.len() == params.max_tokens);
        let length = one.token_ids.len() as f64;
        let penalty = params.beam_search.as_ref().unwrap().length_penalty;
        assert_eq!(one.score, one.cumulative_logprob / length.powf(penalty));
    }
    complete.into_iter().map(|one| (one.token_ids, one.score)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn results_equal_those_of_transformers(
        seed: u64,
        beam_width in 1..6_usize,
        more in 3..8_usize,
        stop in prop::sample::subsequence(vec![0_u32, 1, 2], 0..4),
        max_tokens in 1..9_usize,
        length_penalty in prop_oneof![Just(0.0), Just(1.0), Just(-0.5), -3.0..3.0],
        early_stopping in prop_oneof![
            Just(EarlyStopping::Always), Just(EarlyStopping::Heuristic), Just(EarlyStopping::Never)
        ],
    ) {
        // The prompt's single beam has as many candidates as there are beams.
        let vocab = beam_width + more;
        let search = BeamSearchParams { beam_width, n: beam_width, length_penalty, early_stopping };
        let params = SamplingParams {
            stop_token_ids: stop, max_tokens, beam_search: Some(search), ..SamplingParams::default()
        };
        let (expected, found) = (plain(seed, vocab, &params), searched(seed, vocab, &params));
        prop_assert_eq!(found, expected);
    }
}

#[test]
fn fewer_candidates_than_beams_give_fewer_sequences() {
    let search = BeamSearchParams { beam_width: 4, n: 4, ..BeamSearchParams::default() };
    let params = SamplingParams {
        max_tokens: 2,
        beam_search: Some(search),
        stop_token_ids: vec![9],
        ..SamplingParams::default()
    };
    let mut search = Search::new(&params, 2).unwrap();
    let ways = [Continuation { token: 3, logprob: -1.0 }];
    let first = search.advance(&[Beam { output: &[], score: 0.0, continuations: &ways }]);
    assert_eq!(first, [Child { parent: 0, token: 3, score: -1.0 }]);
    let ways = [Continuation { token: 9, logprob: -0.5 }, Continuation { token: 4, logprob: -1.0 }];
    assert_eq!(search.advance(&[Beam { output: &[3], score: -1.0, continuations: &ways }]), []);
    let complete = search.into_hypotheses();
    let returned: Vec<_> = complete.iter().map(|one| (&one.token_ids[..], one.score, one.stop_token)).collect();
    assert_eq!(returned, [(&[3, 9][..], -0.75, Some(9)), (&[3, 4][..], -1.0, None)]);
    // A beam without candidates ends the search.
    let mut search = Search::new(&params, 2).unwrap();
    assert_eq!(search.advance(&[Beam { output: &[], score: 0.0, continuations: &[] }]), []);
    assert!(search.into_hypotheses().is_empty());
}
