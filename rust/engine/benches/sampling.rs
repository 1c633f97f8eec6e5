//! Sampling time per token: `cargo bench -p ferrule-engine --bench sampling [-- NAME...]`.
//!
//! One thread, a vocabulary of 128k. The floor beside every row is one plain read of the logits. Floors and rows
//! alternate, and the best and median of all rounds are shown, since the machine may be shared. Rows of logits
//! alternate too, so that they are not in the nearest cache.

use std::hint::black_box;
use std::time::Instant;

use ferrule_engine::SamplingParams;
use ferrule_engine::sampling::{History, Sampler, rng};

/// Vocabulary size of Llama 3.
const VOCAB: usize = 128_256;
const ROWS: usize = 8;
const ROUNDS: usize = 31;

/// A benchmark: kind of logits, parameters, number of earlier tokens.
struct Case {
    name: &'static str,
    logits: fn(u64) -> f32,
    params: SamplingParams,
    history: usize,
}

/// Returns a normally distributed number, the sum of twelve uniform ones.
fn normal(row: u64, place: u64) -> f32 {
    ((0..12).map(|part| rng::uniform(row, 12 * place + part)).sum::<f64>() - 6.0) as f32
}

fn cases() -> Vec<Case> {
    let peaked: fn(u64) -> f32 = |place| 2.5 * normal(place / VOCAB as u64, place);
    let flat: fn(u64) -> f32 = |place| 0.1 * normal(place / VOCAB as u64, place);
    let equal: fn(u64) -> f32 = |_| 1.0;
    let plain = SamplingParams { seed: 1, ..SamplingParams::default() };
    let filters = SamplingParams { top_k: 40, top_p: 0.95, min_p: 0.05, ..plain.clone() };
    let case = |name, logits, params| Case { name, logits, params, history: 0 };
    vec![
        case("greedy", peaked, SamplingParams { temperature: 0.0, ..plain.clone() }),
        case("top-k 40, top-p 0.95, min-p 0.05", peaked, filters.clone()),
        case("the same at temperature 0.7", peaked, SamplingParams { temperature: 0.7, ..filters.clone() }),
        case("the same, flat row", flat, filters.clone()),
        Case {
            name: "the same with penalties, 1k tokens",
            logits: peaked,
            params: SamplingParams { repetition_penalty: 1.1, ..filters.clone() },
            history: 1000,
        },
        case("the same with 20 logprobs", peaked, SamplingParams { logprobs: Some(20), ..filters.clone() }),
        case("min-p 0.05", peaked, SamplingParams { min_p: 0.05, ..plain.clone() }),
        case("top-k 5000", peaked, SamplingParams { top_k: 5000, ..plain.clone() }),
        case("top-p 0.95", peaked, SamplingParams { top_p: 0.95, ..plain.clone() }),
        case("top-p 0.95, flat row", flat, SamplingParams { top_p: 0.95, ..plain.clone() }),
        case("top-p 0.5, flat row", flat, SamplingParams { top_p: 0.5, ..plain.clone() }),
        case("top-p 0.95, all equal", equal, SamplingParams { top_p: 0.95, ..plain.clone() }),
        case(
            "top-p 0.95, flat row, temperature 0.7",
            flat,
            SamplingParams { top_p: 0.95, temperature: 0.7, ..plain.clone() },
        ),
        case("typical 0.95", peaked, SamplingParams { typical_p: 0.95, ..plain.clone() }),
        case("eta cutoff 0.001", peaked, SamplingParams { eta_cutoff: 1e-3, ..plain.clone() }),
        case("top-n-sigma 1.5", peaked, SamplingParams { top_n_sigma: 1.5, ..plain.clone() }),
        case("top-h 0.4", peaked, SamplingParams { top_h: 0.4, ..plain.clone() }),
        case("dynamic temperature", peaked, SamplingParams { dynatemp_range: 0.5, ..plain.clone() }),
        case("XTC", peaked, SamplingParams { xtc_probability: 1.0, xtc_threshold: 0.01, ..plain.clone() }),
        case("mirostat 1", peaked, SamplingParams { mirostat: 1, ..plain.clone() }),
        case("mirostat 2", peaked, SamplingParams { mirostat: 2, ..plain.clone() }),
        case("entropy", peaked, SamplingParams { entropy: true, ..filters.clone() }),
        Case {
            name: "top-k 40 … with DRY, 100k tokens",
            logits: peaked,
            params: SamplingParams { dry_multiplier: 0.8, ..filters.clone() },
            history: 100_000,
        },
        Case {
            name: "… with no-repeat-ngram 3, 100k tokens",
            logits: peaked,
            params: SamplingParams { no_repeat_ngram_size: 3, ..filters.clone() },
            history: 100_000,
        },
        case("no filter", flat, plain),
    ]
}

/// Returns the mean time of `work` per row in microseconds.
fn time(rows: &[f32], mut work: impl FnMut(&[f32])) -> f64 {
    let start = Instant::now();
    rows.chunks_exact(VOCAB).for_each(&mut work);
    start.elapsed().as_secs_f64() / ROWS as f64 * 1e6
}

fn main() {
    let names: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    println!("{:<38} {:>7} {:>7}   {:>7} {:>7}", "microseconds per token", "best", "median", "floor", "median");
    let mut sampler = Sampler::default();
    for case in cases().iter().filter(|case| names.is_empty() || names.iter().any(|name| case.name.contains(name))) {
        let rows: Vec<f32> = (0..(ROWS * VOCAB) as u64).map(case.logits).collect();
        let prompt: Vec<u32> = (0..case.history as u32).map(|place| place * 97 % VOCAB as u32).collect();
        let mut history = History::new(&case.params, &prompt, &[]);
        let (mut floor, mut sampled) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            floor.push(time(&rows, |row| {
                black_box(row.iter().fold(0, |bits, logit| bits ^ logit.to_bits()));
            }));
            sampled.push(time(&rows, |row| {
                let token = sampler.sample(row, &case.params, &mut history, None, prompt.len() + round);
                black_box(token.expect("a token"));
            }));
        }
        floor.sort_by(f64::total_cmp);
        sampled.sort_by(f64::total_cmp);
        let middle = ROUNDS / 2;
        println!(
            "{:<38} {:>7.1} {:>7.1}   {:>7.1} {:>7.1}",
            case.name, sampled[0], sampled[middle], floor[0], floor[middle]
        );
    }
}
