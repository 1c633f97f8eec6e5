//! How near the matmul comes to the machine: `cargo bench -p ferrule-kernels --bench matmul [-- FORMAT... ROWS...]`.
//!
//! With the word `experts` a token also goes through eight experts of a mixture: all at once, one after the other, and
//! through one matrix of the same bytes.
//!
//! Rows of one token and of few are compared with the read bandwidth, prompts with the peak of f32 or of int8. Ceilings
//! and kernels take turns, and of each the best and the median of all rounds are shown: the machine may be shared.

use std::time::Instant;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::{
    Cancel, Exec, Format, PackedMatrix, Pool, Product, RowSource, Scratch, machine, matmul, matmul_each, probe,
};

/// Rows of a fixed pattern.
struct Pattern;

impl RowSource for Pattern {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        for (column, value) in out.iter_mut().enumerate() {
            *value = ((row * 31 + column * 17) % 255) as f32 / 128.0 - 1.0;
        }
    }
}

/// Outputs and inputs of the matrices of a layer of a 1B Llama: QKV, output, gate and up, down.
const LAYER: [(usize, usize); 4] = [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)];

/// Outputs and inputs of the matrices of an expert of Qwen3-30B-A3B: gate and up, down.
const EXPERT: [(usize, usize); 2] = [(1536, 2048), (2048, 768)];

/// Experts that a token goes through.
const EXPERTS: usize = 8;

/// The fewest layers to go through, and the most.
const LAYERS: [usize; 2] = [4, 32];

const ROUNDS: usize = 9;

struct Figure {
    name: String,
    unit: &'static str,
    /// The position of the ceiling to compare with.
    ceiling: Option<usize>,
    rounds: Vec<f64>,
}

fn main() {
    let arguments = || std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let mut names: Vec<_> = arguments().filter(|name| name.parse::<usize>().is_err()).collect();
    let with_experts = names.iter().any(|name| name == "experts");
    names.retain(|name| name != "experts");
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
        // Enough layers that nothing is left in a cache when its turn comes again.
        let layer_bytes: u64 = LAYER.iter().filter_map(|(n, k)| PackedMatrix::bytes_for(*format, *n, *k)).sum();
        let layers = (3 * machine::last_cache_bytes() / 2).div_ceil(layer_bytes as usize).clamp(LAYERS[0], LAYERS[1]);
        let experts = if with_experts { experts(&exec, *format) } else { Vec::new() };
        let model: Vec<Vec<_>> = (0..layers).map(|_| LAYER.map(|(n, k)| pack(&exec, *format, n, k)).into()).collect();
        let peak = if format.is_integer() { "int8 peak" } else { "f32 peak" };
        let most_rows = rows.iter().copied().max().unwrap_or(0);
        let (mut x, mut out) = (Scratch::default(), Scratch::default());
        let (x, out) = (x.take(most_rows * 8192), out.take(most_rows * 16384));
        // Written, so that the memory is there before the clock starts.
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
            figures.extend(WAYS.map(|(name, _)| figure(&format!("{} {name}", format.name()), "GB/s", Some(0))));
        }
        for _ in 0..ROUNDS {
            figures[0].rounds.push(read.pass(&exec, streams).unwrap() / 1e9);
            let peak = if format.is_integer() { probe::int8_pass(&exec) } else { probe::f32_pass(&exec) };
            figures[1].rounds.push(peak.unwrap() / 1e9);
            figures[2].rounds.push(probe::add_pass(&exec).unwrap() / 1e9);
            for (figure, m) in figures[3..].iter_mut().zip(&rows) {
                let layers = if *m < 64 { layers } else { 1 };
                figure.rounds.push(forward(&exec, &model[..layers], *m, x, out, figure.unit));
            }
            for (figure, (_, way)) in figures[first_of_experts..].iter_mut().zip(WAYS) {
                figure.rounds.push(by_experts(&exec, &experts, way, x, out));
            }
        }
        report(&figures);
    }
}

/// Seconds that it takes to hand out nothing.
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

/// All matrices once with `m` rows; weights per second or operations per second.
fn forward(exec: &Exec<'_>, model: &[Vec<PackedMatrix>], m: usize, x: &[f32], out: &mut [f32], unit: &str) -> f64 {
    let mut work = 0;
    let start = Instant::now();
    for w in model.iter().flatten() {
        matmul(exec, &x[..m * w.cols()], w, &mut out[..m * w.rows()]).unwrap();
        work += if unit == "GB/s" { w.bytes() } else { 2 * m * w.rows() * w.cols() };
    }
    work as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Matrices of eight experts, and one of the same bytes.
type Experts = (Vec<PackedMatrix>, PackedMatrix);

/// The experts of more layers than any cache holds.
fn experts(exec: &Exec<'_>, format: Format) -> Vec<Experts> {
    let bytes: u64 = EXPERT.iter().filter_map(|(n, k)| PackedMatrix::bytes_for(format, EXPERTS * n, *k)).sum();
    let layers = (3 * machine::last_cache_bytes() / 2).div_ceil(bytes as usize).clamp(LAYERS[0], LAYERS[1]);
    let of_layer = || {
        EXPERT.map(|(n, k)| {
            let apart = (0..EXPERTS).map(|_| pack(exec, format, n, k)).collect();
            (apart, pack(exec, format, EXPERTS * n, k))
        })
    };
    (0..layers).flat_map(|_| of_layer()).collect()
}

/// How a token goes through its experts.
#[derive(Clone, Copy)]
enum Way {
    AtOnce,
    InTurn,
    AsOne,
}

const WAYS: [(&str, Way); 3] =
    [("experts at once", Way::AtOnce), ("experts in turn", Way::InTurn), ("experts as one", Way::AsOne)];

/// All experts once with one row, which those share that come first; weights per second.
fn by_experts(exec: &Exec<'_>, experts: &[Experts], way: Way, x: &[f32], out: &mut [f32]) -> f64 {
    let mut work = 0;
    let start = Instant::now();
    for (apart, as_one) in experts {
        let (n, k) = (apart[0].rows(), apart[0].cols());
        let step = if k == EXPERT[0].1 { 0 } else { k };
        let products = apart.iter().zip(out.chunks_mut(n)).enumerate();
        let products = products.map(|(expert, (w, out))| Product { x: &x[expert * step..][..k], w, out });
        match way {
            Way::AtOnce => matmul_each(exec, &mut products.collect::<Vec<_>>()),
            Way::InTurn => products.into_iter().try_for_each(|Product { x, w, out }| matmul(exec, x, w, out)),
            Way::AsOne => matmul(exec, &x[..k], as_one, &mut out[..EXPERTS * n]),
        }
        .unwrap();
        work += as_one.bytes();
    }
    work as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn figure(name: &str, unit: &'static str, ceiling: Option<usize>) -> Figure {
    Figure { name: name.to_owned(), unit, ceiling, rounds: Vec::new() }
}

fn report(figures: &[Figure]) {
    let summary = |figure: &Figure| {
        let mut rounds = figure.rounds.clone();
        rounds.sort_by(f64::total_cmp);
        (rounds[rounds.len() - 1], rounds[rounds.len() / 2])
    };
    println!("{:<20} {:>8} {:>8}         of the ceiling, best and median", "", "best", "median");
    for figure in figures {
        let (best, median) = summary(figure);
        let share = figure.ceiling.map_or(String::new(), |ceiling| {
            let ceiling = summary(&figures[ceiling]);
            format!("{:>5.0} % {:>5.0} %", 100.0 * best / ceiling.0, 100.0 * median / ceiling.1)
        });
        println!("{:<20} {best:>8.1} {median:>8.1} {:<7} {share}", figure.name, figure.unit);
    }
}
