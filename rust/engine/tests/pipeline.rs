//! An engine whose model runs in stages behind connections: tokens and log-probabilities equal those of one process,
//! also after preemption, and a stage that is lost ends the requests with its reason.
#![cfg(unix)]

#[path = "../../model/tests/specs/mod.rs"]
mod specs;

use std::io::Write;
use std::num::NonZeroUsize;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ferrule_engine::{
    ConfigError, Engine, EngineConfig, EngineError, EngineFailure, FinishReason, PrefixCacheDir, Request,
    SamplingParams, SpeculativeConfig, StepOutput,
};
use ferrule_kernels::arch::Isa;
use ferrule_kernels::kv::KvFormat;
use ferrule_kernels::{Cancel, Pool};
use ferrule_model::{
    LanguageModel, LinkError, LoadOptions, ModelSpec, Pipeline, PipelineError, Quantization, Source, Stage, StageLink,
    StagePart, TensorParallelGroup, Transformer, serve_stage,
};
use serde_json::{Value, json};

/// Number of tokens, which is not divisible by the number of stages or by the rows of a panel.
const VOCABULARY: usize = 101;

/// Returns a dense model, a mixture of experts with its own lm_head, and a hybrid model with states.
fn models() -> [Value; 3] {
    let dense = specs::llama(VOCABULARY, 4);
    let mut experts = dense.clone();
    experts["lm_head"] = json!({"tied": false, "bias": true, "scale": 0.5, "softcap": 20.0});
    for layer in experts["layers"].as_array_mut().unwrap() {
        let expert = layer["blocks"][1]["mixer"].clone();
        layer["blocks"][1]["mixer"] = json!({
            "type": "experts", "experts": 4, "experts_per_token": 2, "expert": expert, "shared": null,
            "shared_gate": false,
            "router": {
                "scoring": "softmax", "normalize": true, "scale": 1.0, "bias": false, "correction_bias": false,
                "groups": 1, "groups_chosen": 1, "group_score": "max"
            }
        });
    }
    let mut hybrid = dense.clone();
    for layer in [0, 2] {
        let block = &mut hybrid["layers"][layer]["blocks"][0];
        block["name"] = json!("convolution");
        block["mixer"] = json!({"type": "short_convolution", "channels": 64, "taps": 4, "bias": true});
    }
    [dense, experts, hybrid]
}

fn read(json: &Value) -> ModelSpec {
    ModelSpec::from_json(&json.to_string()).unwrap()
}

fn options() -> LoadOptions {
    LoadOptions { quantization: Quantization::named("int8").unwrap(), kv_format: KvFormat::F16, isa: Isa::best() }
}

fn pool() -> Arc<Pool> {
    Arc::new(Pool::new(NonZeroUsize::MIN))
}

/// Returns a configuration with `pages` pages per group.
fn config(groups: usize, pages: usize) -> EngineConfig {
    EngineConfig {
        pages: vec![pages; groups],
        max_model_len: 128,
        max_num_seqs: 8,
        max_num_batched_tokens: 48,
        max_queued_requests: None,
        target_itl: Duration::from_millis(50),
        enable_prefix_caching: true,
        prefix_cache_dir: None,
        speculative: SpeculativeConfig::default(),
    }
}

/// A worker thread with one stage, and the connection to it.
struct Worker {
    stream: UnixStream,
    thread: JoinHandle<Result<(), LinkError>>,
}

fn worker(json: &Value, layers: std::ops::Range<usize>, (stage, stages): (usize, usize)) -> Worker {
    start_worker(json, StagePart { layers, stage, stages, group: None })
}

fn start_worker(json: &Value, part: StagePart) -> Worker {
    let (stream, other) = UnixStream::pair().unwrap();
    let json = json.clone();
    let thread = std::thread::spawn(move || {
        let cancel = Cancel::new();
        let mut stage =
            Stage::load(read(&json), part, Source::Random, options(), pool(), &cancel, &mut |_, _| {}).unwrap();
        serve_stage(&mut stage, 1 << 20, &other, &cancel)
    });
    Worker { stream, thread }
}

fn link(worker: &Worker) -> StageLink {
    StageLink::open(worker.stream.try_clone().unwrap(), &Cancel::new()).unwrap()
}

fn pipeline(json: &Value, cuts: &[usize]) -> (Pipeline, Vec<Worker>) {
    pipeline_of_pairs(json, cuts, false)
}

/// Joins stages between `cuts`; pairs of workers divide the rows of their matrices, if `pairs`.
fn pipeline_of_pairs(json: &Value, cuts: &[usize], pairs: bool) -> (Pipeline, Vec<Worker>) {
    let stages = cuts.len() - 1;
    let of_stage = |(stage, cut): (usize, &[usize])| {
        let start = |group| start_worker(json, StagePart { layers: cut[0]..cut[1], stage, stages, group });
        match pairs {
            false => vec![start(None)],
            true => {
                let (first, second) = UnixStream::pair().unwrap();
                let group = |(rank, peer)| TensorParallelGroup::new(rank, vec![peer]).unwrap();
                [(0, first), (1, second)].map(group).map(|group| start(Some(group))).into()
            }
        }
    };
    let workers: Vec<_> = cuts.windows(2).enumerate().flat_map(of_stage).collect();
    (Pipeline::new(read(json), workers.iter().map(link).collect()).unwrap(), workers)
}

/// Ends the connections and waits for the workers.
fn join(workers: Vec<Worker>) -> Vec<Result<(), LinkError>> {
    let end = |Worker { stream, thread }| {
        let _ = stream.shutdown(std::net::Shutdown::Both);
        drop(stream);
        thread.join().unwrap()
    };
    workers.into_iter().map(end).collect()
}

/// Returns one of eight requests: greedy or not, with details that need all logits or without.
fn request(index: usize) -> Request {
    let prompt = (0..10 + 7 * index).map(|i| ((i * i + index) % 40) as u32).collect();
    let params = SamplingParams {
        temperature: if index.is_multiple_of(2) { 0.0 } else { 0.9 },
        seed: index as u64,
        max_tokens: 24,
        logprobs: if index % 4 < 2 { Some(3) } else { None },
        ..SamplingParams::default()
    };
    Request::new(prompt, params)
}

/// Runs eight requests and returns the tokens and log-probabilities of each, and the number of preemptions.
fn generate<M: LanguageModel>(engine: &mut Engine<M>) -> (Vec<String>, u64) {
    let ids: Vec<_> = (0..8).map(|index| engine.add_request(request(index)).unwrap()).collect();
    let mut outputs: Vec<StepOutput> = Vec::new();
    while engine.has_unfinished_requests() {
        outputs.extend(engine.step(&Cancel::new()).unwrap());
    }
    let of_request = |id| {
        let outputs = outputs.iter().filter(|output| output.request == id);
        outputs.map(|output| format!("{:?} {:?} {:?}", output.token_ids, output.logprobs, output.finish)).collect()
    };
    assert_eq!(engine.audit_pages(), Ok(()));
    (ids.into_iter().map(of_request).collect(), engine.metrics().preemptions)
}

#[test]
fn tokens_equal_those_of_one_process_also_after_preemption() {
    let [dense, experts, hybrid] = &models();
    let mut biased = dense.clone();
    biased["lm_head"] = json!({"tied": true, "bias": true, "scale": 0.5, "softcap": 20.0});
    biased["embedding"]["width"] = json!(32);
    let (biased, small) = (&biased, &specs::llama(40, 4));
    for (json, cuts, pairs) in [
        (dense, &[0, 2, 4][..], false),
        (experts, &[0, 3, 4], false),
        (hybrid, &[0, 1, 2, 4], false),
        (biased, &[0, 1, 4], false),
        // Some workers have no rows of the vocabulary.
        (small, &[0, 1, 2, 3, 4], false),
        (dense, &[0, 4], true),
        (experts, &[0, 4], true),
        (experts, &[0, 2, 4], true),
        (hybrid, &[0, 2, 4], true),
    ] {
        for pages in [64, 14] {
            let mut whole =
                Transformer::load(read(json), Source::Random, options(), pool(), &Cancel::new(), &mut |_, _| {})
                    .unwrap();
            let config = config(whole.kv_groups().len(), pages);
            whole.allocate_kv(&config.pages).unwrap();
            let (expected, preemptions) = generate(&mut Engine::new(whole, config.clone()).unwrap());
            assert_eq!(preemptions > 0, pages == 14, "{preemptions}");

            let (mut pipeline, workers) = pipeline_of_pairs(json, cuts, pairs);
            pipeline.allocate_kv(&config.pages, &Cancel::new()).unwrap();
            let mut engine = Engine::new(pipeline, config).unwrap();
            // How often a sequence is preempted depends on the time that steps take, and the results do not.
            let (found, preemptions) = generate(&mut engine);
            assert_eq!(preemptions > 0, pages == 14, "{preemptions}");
            assert_eq!(found, expected);
            drop(engine);
            assert!(join(workers).iter().all(Result::is_ok));
        }
    }
}

#[test]
fn requests_that_end_and_work_between_steps_leave_batches_in_flight_intact() {
    for json in models() {
        let layers = json["layers"].as_array().unwrap().len();
        let run = |mut engine: Engine<Pipeline>, aborted: &[usize]| {
            let ids: Vec<_> = (0..8).map(|index| engine.add_request(request(index)).unwrap()).collect();
            let mut logits = Vec::new();
            let mut outputs: Vec<StepOutput> = Vec::new();
            for step in 0.. {
                if let Some(index) = aborted.get(step) {
                    engine.abort(ids[*index]);
                    logits.push(engine.logits(&[5, 4, 3, 2, 1], 3, None, &Cancel::new()).unwrap());
                }
                if !engine.has_unfinished_requests() {
                    break;
                }
                outputs.extend(engine.step(&Cancel::new()).unwrap());
                assert_eq!(engine.audit_pages(), Ok(()));
            }
            assert!(logits.windows(2).all(|pair| pair[0] == pair[1]));
            let others = (0..8).filter(|index| !aborted.contains(index));
            let of_request = |index: usize| {
                let outputs = outputs.iter().filter(|output| output.request == ids[index]);
                outputs.map(|output| format!("{:?} {:?}", output.token_ids, output.logprobs)).collect()
            };
            others.map(of_request).collect::<Vec<String>>()
        };
        let start = || {
            let (mut pipeline, workers) = pipeline(&json, &[0, layers / 2, layers]);
            let config = config(pipeline.kv_groups().len(), 40);
            pipeline.allocate_kv(&config.pages, &Cancel::new()).unwrap();
            (Engine::new(pipeline, config).unwrap(), workers)
        };
        let (engine, workers) = start();
        let undisturbed = run(engine, &[]);
        join(workers);
        let (engine, workers) = start();
        let aborted = [3, 0, 6, 1];
        let expected: Vec<_> =
            undisturbed.into_iter().enumerate().filter(|(index, _)| !aborted.contains(index)).collect();
        assert_eq!(run(engine, &aborted), expected.into_iter().map(|(_, output)| output).collect::<Vec<_>>());
        join(workers);
    }
}

#[test]
fn a_lost_worker_ends_every_request_with_its_reason() {
    check_loss(&[0, 2, 4], false, 1, "pipeline stage 1: the connection ended");
    check_loss(&[0, 4], true, 1, "pipeline stage 0, tensor-parallel rank 1: the connection ended");
    // Workers of the first stage, which also have rows of the lm_head.
    check_loss(&[0, 2, 4], false, 0, "pipeline stage 0: the connection ended");
    check_loss(&[0, 2, 4], true, 1, "pipeline stage 0, tensor-parallel rank 1: the connection ended");
}

/// Checks that the loss of worker `lost` ends the requests with `message`.
fn check_loss(cuts: &[usize], pairs: bool, lost: usize, message: &str) {
    let stage = if pairs { lost / 2 } else { lost };
    let [dense, ..] = models();
    let (mut pipeline, mut workers) = pipeline_of_pairs(&dense, cuts, pairs);
    let config = config(1, 64);
    pipeline.allocate_kv(&config.pages, &Cancel::new()).unwrap();
    let mut engine = Engine::new(pipeline, config).unwrap();
    let ids: Vec<_> = (0..3).map(|index| engine.add_request(request(index)).unwrap()).collect();
    engine.step(&Cancel::new()).unwrap();
    join(vec![workers.remove(lost)]);
    // Tokens of a batch that the worker had answered come first.
    let mut outputs: Vec<StepOutput> = Vec::new();
    while engine.has_unfinished_requests() {
        outputs.extend(engine.step(&Cancel::new()).unwrap());
    }
    let ends: Vec<_> = outputs.into_iter().filter(|output| output.finish.is_some()).collect();
    assert_eq!(ends.iter().map(|output| output.request).collect::<Vec<_>>(), ids);
    for output in ends {
        let Some(FinishReason::Dead(EngineFailure { reason, lost_stage })) = output.finish else {
            panic!("{:?}", output.finish)
        };
        assert!(reason.contains(message), "{reason}");
        assert_eq!(lost_stage, Some(stage));
    }
    assert!(matches!(engine.add_request(request(0)), Err(error) if error.to_string().contains(message)));
    drop(engine);
    join(workers);
}

#[test]
fn a_stage_ends_after_a_request_that_failed_although_the_connection_is_open() {
    let [dense, ..] = models();
    let Worker { mut stream, thread } = worker(&dense, 0..2, (0, 2));
    StageLink::open(stream.try_clone().unwrap(), &Cancel::new()).unwrap();
    stream.write_all(&[0xff; 12]).unwrap();
    assert!(matches!(thread.join().unwrap(), Err(LinkError::Protocol(_))));
}

#[test]
fn states_and_cache_directories_are_refused() {
    let [dense, ..] = models();
    let (mut pipeline, workers) = pipeline(&dense, &[0, 2, 4]);
    let config = config(1, 64);
    pipeline.allocate_kv(&config.pages, &Cancel::new()).unwrap();
    let mut engine = Engine::new(pipeline, config.clone()).unwrap();
    assert_eq!(engine.save_state(&[1, 2], None, None, &Cancel::new()), Err(EngineError::RemotePages));
    assert_eq!(engine.restore_state(&[]), Err(EngineError::RemotePages));
    drop(engine);
    join(workers);

    let (pipeline, workers) = self::pipeline(&dense, &[0, 2, 4]);
    let directory = PrefixCacheDir { path: "cache".into(), limit: 1 << 20, step_bytes: 1 << 20 };
    let refused = Engine::new(pipeline, EngineConfig { prefix_cache_dir: Some(directory), ..config });
    assert_eq!(refused.err(), Some(ConfigError::RemotePages));
    join(workers);
}

#[test]
fn stages_that_do_not_fit_together_are_refused() {
    let [dense, experts, _] = models();
    for (parts, expected) in [
        (vec![(&dense, 0..2), (&dense, 1..4)], "pipeline stage 1: first must be 2, got 1"),
        (vec![(&dense, 0..2), (&dense, 2..3)], "pipeline stage 1: end must be 4, got 3"),
        (vec![(&dense, 0..4)], "pipeline stage 0: end_token must be 0, got 48"),
        (vec![], "pipeline stage 0: end must be 4, got 0"),
    ] {
        let workers: Vec<_> =
            parts.into_iter().enumerate().map(|(index, (json, layers))| worker(json, layers, (index, 2))).collect();
        let error = Pipeline::new(read(&experts), workers.iter().map(link).collect()).err().unwrap();
        assert!(matches!(error, PipelineError::Mismatch { .. }), "{error}");
        assert_eq!(error.to_string(), expected);
        join(workers);
    }
    // Ranks with the same shapes and formats, one of which has another model or computes other rotary embeddings.
    let mut biased = dense.clone();
    biased["layers"][1]["blocks"][1]["mixer"]["bias"] = json!(true);
    let mut rotated = dense.clone();
    rotated["ropes"][0]["theta"] = json!(20_000.0);
    for (other, field) in [(&biased, "shared_fingerprint"), (&rotated, "math_fingerprint")] {
        let (first, second) = UnixStream::pair().unwrap();
        let start = |json, rank, peer| {
            let group = Some(TensorParallelGroup::new(rank, vec![peer]).unwrap());
            start_worker(json, StagePart { layers: 0..4, stage: 0, stages: 1, group })
        };
        let workers = vec![start(&dense, 0, first), start(other, 1, second)];
        let error = Pipeline::new(read(&dense), workers.iter().map(link).collect()).err().unwrap();
        assert!(matches!(error, PipelineError::Mismatch { .. }), "{error}");
        let message = format!("pipeline stage 0, tensor-parallel rank 1: {field} must be ");
        assert!(error.to_string().starts_with(&message), "{error}");
        join(workers);
    }
    let mut encoder = dense;
    encoder["causal"] = json!(false);
    let error = Pipeline::new(read(&encoder), Vec::new()).err().unwrap();
    assert_eq!(error.to_string(), "pipeline and tensor parallelism do not support bidirectional attention");
}
