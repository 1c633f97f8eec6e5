//! Matmul throughput relative to the roofline: `cargo bench -p ferrule-kernels --bench matmul [-- FORMAT... ROWS...]`.
//!
//! The argument `small` multiplies the matrices of a small model, which stay in the last-level cache of some machines.
//! The argument `experts` adds MoE cases, in which one token is multiplied with eight experts: batched in one call, one
//! after the other, and as one matrix of the same size.
//!
//! Few rows (decode) are compared with the read bandwidth, many rows (prefill) with the f32 or int8 peak. Probes and
//! kernels are interleaved, and the best and the median of all rounds are reported, because the machine may be shared.

use std::time::Instant;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::{
    Cancel, Exec, Format, PackedMatrix, Pool, Product, RowSource, Scratch, machine, matmul, matmul_each, probe,
};

/// Row source with a fixed pattern.
struct Pattern;

impl RowSource for Pattern {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        for (column, value) in out.iter_mut().enumerate() {
            *value = ((row * 31 + column * 17) % 255) as f32 / 128.0 - 1.0;
        }
    }
}

/// Outputs and inputs of the matrices of a layer of Llama 1B: QKV, output, gate and up, down.
const LAYER: [(usize, usize); 4] = [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)];

/// Outputs and inputs of the matrices of a layer of SmolLM2-135M.
const SMALL_LAYER: [(usize, usize); 4] = [(960, 576), (576, 576), (3072, 576), (576, 1536)];

/// Number of layers of SmolLM2-135M.
const SMALL_LAYERS: usize = 30;

/// Outputs and inputs of the matrices of an expert of Qwen3-30B-A3B: gate and up, down.
const EXPERT: [(usize, usize); 2] = [(1536, 2048), (2048, 768)];

/// Number of experts per token.
const EXPERTS: usize = 8;

/// Minimum and maximum number of layers per round.
const LAYERS: [usize; 2] = [4, 32];

const ROUNDS: usize = 9;

struct Figure {
    name: String,
    unit: &'static str,
    /// Index of the roofline to compare with.
    roofline: Option<usize>,
    rounds: Vec<f64>,
}

fn main() {
    let arguments = || std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let mut names: Vec<_> = arguments().filter(|name| name.parse::<usize>().is_err()).collect();
    let with_experts = names.iter().any(|name| name == "experts");
    let is_small = names.iter().any(|name| name == "small");
    names.retain(|name| !["experts", "small"].contains(&&**name));
    let mut rows: Vec<usize> = arguments().filter_map(|rows| rows.parse().ok()).collect();
    if rows.is_empty() {
        rows = vec![1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 16, 17, 24, 32, 64, 128, 512];
    }
    let threads = std::env::var("THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or_else(machine::cpu_count);
    let (pool, cancel) = (Pool::new(threads), Cancel::new());
    let isa = Isa::from_environment().expect("FERRULE_ISA");
    let exec = Exec { isa, pool: &pool, cancel: &cancel };
    println!("{} threads, {}; an empty parallel run takes {:.2} us", threads, isa.name(), empty_run(&exec) * 1e6);
    let read = probe::ReadProbe::new(2 * machine::last_cache_bytes().max(128 << 20)).expect("memory");
    let streams = read.fastest_streams(&exec).unwrap();
    let formats = Format::ALL.iter().filter(|format| names.is_empty() || names.iter().any(|n| n == format.name()));
    for format in formats {
        // Enough layers that no weights are still cached in the next round.
        let layer_bytes: u64 = LAYER.iter().filter_map(|(n, k)| PackedMatrix::bytes_for(*format, *n, *k)).sum();
        let layers = (3 * machine::last_cache_bytes() / 2).div_ceil(layer_bytes as usize).clamp(LAYERS[0], LAYERS[1]);
        let (layer, layers) = if is_small { (SMALL_LAYER, SMALL_LAYERS) } else { (LAYER, layers) };
        let experts = if with_experts { experts(&exec, *format) } else { Vec::new() };
        let model: Vec<Vec<_>> = (0..layers).map(|_| layer.map(|(n, k)| pack(&exec, *format, n, k)).into()).collect();
        let peak = if format.is_integer() { "int8 peak" } else { "f32 peak" };
        let most_rows = rows.iter().copied().max().unwrap_or(0);
        let (mut x, mut out) = (Scratch::default(), Scratch::default());
        let (x, out) = (x.take(most_rows * 8192), out.take(most_rows * 16384));
        // Written first, so that the memory is committed before the measurement starts.
        x.fill(0.01);
        out.fill(0.01);
        let mut figures =
            vec![figure("read", "GB/s", None), figure(peak, "Gop/s", None), figure("integer adds", "G/s", None)];
        for m in &rows {
            let name = format!("{} M = {m}", format.name());
            figures.push(if *m < 24 { figure(&name, "GB/s", Some(0)) } else { figure(&name, "Gop/s", Some(1)) });
        }
        let first_of_experts = figures.len();
        if with_experts {
            figures.extend(EXPERT_MODES.map(|(name, _)| figure(&format!("{} {name}", format.name()), "GB/s", Some(0))));
        }
        for _ in 0..ROUNDS {
            figures[0].rounds.push(read.pass(&exec, streams).unwrap() / 1e9);
            let peak = if format.is_integer() { probe::int8_pass(&exec) } else { probe::f32_pass(&exec) };
            figures[1].rounds.push(peak.unwrap() / 1e9);
            figures[2].rounds.push(probe::add_pass(&exec).unwrap() / 1e9);
            for (figure, m) in figures[3..].iter_mut().zip(&rows) {
                let layers = if *m < 64 { layers } else { 1 };
                if is_small {
                    // The probe has evicted the weights.
                    forward(&exec, &model[..layers], *m, x, out, figure.unit);
                }
                figure.rounds.push(forward(&exec, &model[..layers], *m, x, out, figure.unit));
            }
            for (figure, (_, mode)) in figures[first_of_experts..].iter_mut().zip(EXPERT_MODES) {
                figure.rounds.push(forward_experts(&exec, &experts, mode, x, out));
            }
        }
        report(&figures);
    }
}

/// Measures the seconds of a parallel run of empty tasks.
fn empty_run(exec: &Exec<'_>) -> f64 {
    const RUNS: u32 = 20_000;
    let start = Instant::now();
    for _ in 0..RUNS {
        exec.run(2, |_| ()).unwrap();
    }
    start.elapsed().as_secs_f64() / f64::from(RUNS)
}

fn pack(exec: &Exec<'_>, format: Format, n: usize, k: usize) -> PackedMatrix {
    if format.is_integer() {
        return PackedMatrix::random(exec, &[(format, n)], k, 1).expect("memory");
    }
    PackedMatrix::pack(exec, &[(format, n)], k, &Pattern).expect("memory")
}

/// Multiplies all matrices once with `m` rows. Returns 1e9 bytes of weights, or operations, per second.
fn forward(exec: &Exec<'_>, model: &[Vec<PackedMatrix>], m: usize, x: &[f32], out: &mut [f32], unit: &str) -> f64 {
    let mut work = 0;
    let start = Instant::now();
    for w in model.iter().flatten() {
        matmul(exec, &x[..m * w.cols()], w, &mut out[..m * w.rows()]).unwrap();
        work += if unit == "GB/s" { w.bytes() } else { 2 * m * w.rows() * w.cols() };
    }
    work as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Matrices of eight experts, and one matrix of the same total size.
type Experts = (Vec<PackedMatrix>, PackedMatrix);

/// Creates the experts of enough layers to exceed all caches.
fn experts(exec: &Exec<'_>, format: Format) -> Vec<Experts> {
    let bytes: u64 = EXPERT.iter().filter_map(|(n, k)| PackedMatrix::bytes_for(format, EXPERTS * n, *k)).sum();
    let layers = (3 * machine::last_cache_bytes() / 2).div_ceil(bytes as usize).clamp(LAYERS[0], LAYERS[1]);
    let of_layer = || {
        EXPERT.map(|(n, k)| {
            let separate = (0..EXPERTS).map(|_| pack(exec, format, n, k)).collect();
            (separate, pack(exec, format, EXPERTS * n, k))
        })
    };
    (0..layers).flat_map(|_| of_layer()).collect()
}

/// Execution mode of the experts of a token.
#[derive(Clone, Copy)]
enum ExpertMode {
    Batched,
    Sequential,
    Merged,
}

const EXPERT_MODES: [(&str, ExpertMode); 3] = [
    ("batched experts", ExpertMode::Batched),
    ("sequential experts", ExpertMode::Sequential),
    ("merged experts", ExpertMode::Merged),
];

/// Multiplies all experts once with one row. Returns 1e9 bytes of weights per second.
fn forward_experts(exec: &Exec<'_>, experts: &[Experts], mode: ExpertMode, x: &[f32], out: &mut [f32]) -> f64 {
    let mut work = 0;
    let start = Instant::now();
    for (separate, merged) in experts {
        let (n, k) = (separate[0].rows(), separate[0].cols());
        // Experts share the input of gate and up; each has a different input of down.
        let stride = if k == EXPERT[0].1 { 0 } else { k };
        let products = separate.iter().zip(out.chunks_mut(n)).enumerate();
        let products = products.map(|(expert, (w, out))| Product { x: &x[expert * stride..][..k], w, out });
        match mode {
            ExpertMode::Batched => matmul_each(exec, &mut products.collect::<Vec<_>>()),
            ExpertMode::Sequential => {
                products.into_iter().try_for_each(|Product { x, w, out }| matmul(exec, x, w, out))
            }
            ExpertMode::Merged => matmul(exec, &x[..k], merged, &mut out[..EXPERTS * n]),
        }
        .unwrap();
        work += merged.bytes();
    }
    work as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn figure(name: &str, unit: &'static str, roofline: Option<usize>) -> Figure {
    Figure { name: name.to_owned(), unit, roofline, rounds: Vec::new() }
}

fn report(figures: &[Figure]) {
    let summary = |figure: &Figure| {
        let mut rounds = figure.rounds.clone();
        rounds.sort_by(f64::total_cmp);
        (rounds[rounds.len() - 1], rounds[rounds.len() / 2])
    };
    println!("{:<20} {:>8} {:>8}         of the roofline, best and median", "", "best", "median");
    for figure in figures {
        let (best, median) = summary(figure);
        let share = figure.roofline.map_or(String::new(), |roofline| {
            let roofline = summary(&figures[roofline]);
            format!("{:>5.0} % {:>5.0} %", 100.0 * best / roofline.0, 100.0 * median / roofline.1)
        });
        println!("{:<20} {best:>8.1} {median:>8.1} {:<7} {share}", figure.name, figure.unit);
    }
}
