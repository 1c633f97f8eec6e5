//! Beam searches on the fake model: results, memory and termination.

use crate::fake::{self, FakeModel, STATE, VOCAB, config, engine, first_state, logits_after, mix};
use ferrule_engine::{
    BeamSearchParams, Engine, EngineConfig, FinishReason, Hypothesis, Request, RequestError, SampleError,
    SamplingParams,
};
use ferrule_kernels::Cancel;
use ferrule_kernels::kv::PAGE_TOKENS;

fn request(prompt: &[u32], beam_width: usize, max_tokens: usize) -> Request {
    let search = BeamSearchParams { beam_width, n: beam_width, ..BeamSearchParams::default() };
    let params = SamplingParams { beam_search: Some(search), max_tokens, ..SamplingParams::default() };
    Request::new(prompt.to_vec(), params)
}

/// Returns the hypotheses of a request that runs alone.
fn found(config: &EngineConfig, windows: &[Option<usize>], request: Request) -> Vec<Hypothesis> {
    let mut engine = engine(config, windows);
    engine.add_request(request).unwrap();
    let mut outputs = fake::run(&mut engine);
    assert_eq!((outputs.len(), engine.audit_pages()), (1, Ok(())));
    assert!(outputs[0].token_ids.is_empty());
    outputs.remove(0).beams
}

/// Beam search without stop tokens, written directly: the most likely sequences of `length` tokens after a prompt.
fn reference(prompt: &[u32], beam_width: usize, length: usize) -> Vec<(Vec<u32>, f64)> {
    let after_prompt = prompt.iter().fold(first_state(prompt.len(), usize::MAX, None), |s, &t| mix(s, t.into()));
    let mut beams = vec![(Vec::new(), 0.0, after_prompt)];
    for _ in 0..length {
        let mut all = Vec::new();
        for (tokens, score, state) in &beams {
            let logits: Vec<f64> = logits_after(*state).map(f64::from).collect();
            let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
            for (token, logit) in (0..).zip(logits) {
                let logprob = f64::from((logit - sum.ln()) as f32);
                all.push(([tokens.as_slice(), &[token]].concat(), score + logprob, mix(*state, token.into())));
            }
        }
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all.truncate(beam_width);
        beams = all;
    }
    beams.into_iter().map(|(tokens, score, _)| (tokens, score / length as f64)).collect()
}

#[test]
fn results_match_a_reference_search() {
    for (beam_width, length) in [(1, 5), (2, 1), (3, 9), (5, 40)] {
        let prompt: Vec<u32> = (0..20).collect();
        let beams = found(&config(), &[None], request(&prompt, beam_width, length));
        let expected = reference(&prompt, beam_width, length);
        assert_eq!(beams.len(), beam_width);
        for (beam, (tokens, score)) in beams.iter().zip(expected) {
            assert_eq!((&beam.token_ids, beam.stop_token), (&tokens, None));
            assert!((beam.score - score).abs() < 1e-9, "{} {score}", beam.score);
        }
    }
}

#[test]
fn the_best_hypotheses_are_returned_and_stop_tokens_end_hypotheses() {
    let mut asked = request(&[3, 4, 5], 4, 30);
    asked.params.stop_token_ids = (0..20).collect();
    let all = found(&config(), &[None], asked.clone());
    assert_eq!(all.len(), 4);
    assert!(all.is_sorted_by(|a, b| a.score >= b.score));
    for beam in &all {
        let (last, before) = beam.token_ids.split_last().unwrap();
        assert!(before.iter().all(|token| *token >= 20));
        assert_eq!(beam.stop_token, (*last < 20).then_some(*last));
        assert_eq!(beam.finish(), FinishReason::Stop { token: *last });
    }
    asked.params.beam_search.as_mut().unwrap().n = 2;
    assert_eq!(found(&config(), &[None], asked.clone()), all[..2]);
    // Not before `min_tokens`.
    asked.params.min_tokens = 6;
    assert!(found(&config(), &[None], asked).iter().all(|beam| beam.token_ids.len() >= 6));
}

#[test]
fn beams_share_the_pages_of_their_common_tokens() {
    let mut engine = engine(&EngineConfig { enable_prefix_caching: false, ..config() }, &[None]);
    let prompt: Vec<u32> = (0..4 * PAGE_TOKENS as u32 + 1).map(|token| token % VOCAB as u32).collect();
    engine.add_request(request(&prompt, 8, 10)).unwrap();
    let mut most_held = 0;
    while engine.has_unfinished_requests() {
        engine.step(&Cancel::new()).unwrap();
        assert_eq!(engine.audit_pages(), Ok(()));
        let pages = engine.page_statistics()[0];
        most_held = most_held.max(pages.total - pages.free);
    }
    // The prompt's four full pages and at most one per beam: children of one beam share it until they write.
    assert!((4 + 2..=4 + 8).contains(&most_held), "{most_held}");
    assert_eq!(engine.metrics().preemptions, 0);
    // The prompt was computed once.
    assert_eq!(engine.metrics().computed_tokens, prompt.len() as u64 + 9 * 8);
    assert_eq!((engine.metrics().generated_tokens, engine.metrics().requests_finished.length), (10, 1));
}

/// Beams that wait for siblings can be preempted without losing their expansion.
#[test]
fn pools_of_one_or_two_beams_do_not_change_results() {
    for windows in [vec![None], vec![Some(20), None], vec![None, STATE]] {
        let prompt: Vec<u32> = (0..30).collect();
        let large = EngineConfig { pages: vec![64; windows.len()], ..config() };
        let expected = found(&large, &windows, request(&prompt, 4, 40));
        for (pages, enable_prefix_caching) in [(5, false), (5, true), (7, false), (7, true)] {
            // In a group of state, every beam has one page to read and one to write.
            let pages = windows.iter().map(|window| if *window == STATE { pages + 3 } else { pages }).collect();
            let small = EngineConfig { pages, enable_prefix_caching, ..large.clone() };
            let mut engine = engine(&small, &windows);
            engine.add_request(request(&prompt, 4, 40)).unwrap();
            // Two of them wait for each other's pages.
            engine.add_request(request(&prompt[1..], 4, 40)).unwrap();
            let mut outputs = fake::run(&mut engine);
            outputs.sort_by_key(|output| output.request);
            assert_eq!(outputs[0].beams, expected);
            assert_eq!(outputs[1].beams, found(&large, &windows, request(&prompt[1..], 4, 40)));
            assert_eq!(engine.audit_pages(), Ok(()));
            assert!(engine.metrics().preemptions > 0);
            let of_both: u32 = outputs.iter().map(|output| output.timing.preemptions).sum();
            assert_eq!(u64::from(of_both), engine.metrics().preemptions);
        }
    }
}

/// An abort in any step of a search frees all of its pages at once.
#[test]
fn an_aborted_search_frees_all_pages() {
    for steps in 0..12 {
        let mut engine = engine(&EngineConfig { max_num_batched_tokens: 8, ..config() }, &[None]);
        let prompt: Vec<u32> = (0..20).collect();
        let id = engine.add_request(request(&prompt, 4, 40)).unwrap();
        for _ in 0..steps {
            assert_eq!(engine.step(&Cancel::new()).unwrap(), []);
        }
        assert!(engine.abort(id) && !engine.abort(id));
        assert!(!engine.has_unfinished_requests());
        assert_eq!((engine.audit_pages(), engine.page_statistics()[0].free), (Ok(()), 32));
        assert_eq!((engine.metrics().running, engine.metrics().waiting), (0, 0));
        assert_eq!(engine.metrics().requests_finished.abort, 1);
    }
}

/// Non-finite logits end the search, and its pages are not cached.
#[test]
fn non_finite_logits_end_the_search_and_invalidate_its_pages() {
    let prompt: Vec<u32> = (0..33).collect();
    let best = found(&config(), &[None], request(&prompt, 3, 40));
    // A token of one of the beams, in the middle.
    let mut model = FakeModel::new(&config(), &[None]);
    model.poison = best[2].token_ids[10..].iter().copied().find(|token| !prompt.contains(token));
    assert!(model.poison.is_some());
    let mut engine = Engine::new(model, config()).unwrap();
    engine.add_request(request(&prompt, 3, 40)).unwrap();
    let outputs = fake::run(&mut engine);
    assert_eq!((outputs.len(), &outputs[0].beams), (1, &Vec::new()));
    let finish = outputs[0].finish.as_ref().unwrap();
    assert!(matches!(finish, FinishReason::Sampling(SampleError::NotFinite { .. })), "{finish:?}");
    assert_eq!(engine.page_statistics()[0].cached, 0);
    assert_eq!((engine.audit_pages(), engine.metrics().requests_finished.error), (Ok(()), 1));
}

#[test]
fn a_search_without_continuations_reports_an_error() {
    let mut asked = request(&[1, 2], 3, 9);
    asked.params.allowed_token_ids = Some(vec![7]);
    asked.params.no_repeat_ngram_size = 1;
    // Only token 7 is allowed, and it must not repeat.
    let mut engine = engine(&config(), &[None]);
    engine.add_request(asked.clone()).unwrap();
    let output = fake::run(&mut engine).remove(0);
    let finish = output.finish.unwrap();
    let FinishReason::Sampling(SampleError::NothingLeft { position: 3, stage }) = finish else { panic!("{finish:?}") };
    assert_eq!((stage, output.beams.len()), ("no_repeat_ngram_size", 0));
    // The sequence is complete if it may end there.
    asked.params.max_tokens = 1;
    let beams = found(&config(), &[None], asked);
    assert_eq!(beams.iter().map(|beam| &beam.token_ids[..]).collect::<Vec<_>>(), [[7]]);
}

#[test]
fn more_beams_than_slots_or_pages_are_rejected() {
    let mut engine = engine(&EngineConfig { pages: vec![9], ..config() }, &[None]);
    let prompt: Vec<u32> = (0..20).collect();
    let refused = engine.add_request(request(&prompt, 9, 5)).unwrap_err();
    assert_eq!(refused, RequestError::TooManyBeams { beam_width: 9, limit: 8 });
    assert!(refused.to_string().contains("beam_width must be <= 8") && refused.to_string().contains("max_num_seqs"));
    let prompt: Vec<u32> = (0..40).collect();
    let refused = engine.add_request(request(&prompt, 8, 5)).unwrap_err();
    assert_eq!(refused, RequestError::BeamsExceedKv { beam_width: 8, tokens: 40, needed: 10, pages: 9 });
    assert!(!engine.has_unfinished_requests());
    engine.add_request(request(&prompt, 7, 5)).unwrap();
    assert_eq!(fake::run(&mut engine)[0].beams.len(), 7);
}

/// Every step computes something, however small the pool: a beam never holds pages that another needs to progress.
#[test]
fn no_step_is_idle_in_the_smallest_pool() {
    for (pages, window) in [(2, Some(15)), (3, Some(20)), (4, None)] {
        let config = EngineConfig {
            pages: vec![pages],
            max_model_len: 64,
            max_num_seqs: 3,
            max_num_batched_tokens: 9,
            ..config()
        };
        for first in 0..20 {
            let mut engine = engine(&config, &[window]);
            let prompt: Vec<u32> = (first..first + 10).collect();
            engine.add_request(request(&prompt, if pages == 2 { 2 } else { 3 }, 50)).unwrap();
            let mut steps = 0;
            while engine.has_unfinished_requests() {
                engine.step(&Cancel::new()).unwrap();
                steps += 1;
                assert_eq!(engine.model().batches.borrow().len(), steps);
            }
        }
    }
}
