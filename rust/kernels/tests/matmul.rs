//! Matmul against an f64 oracle, and batch invariance: results depend only on format, instruction set and K.

mod dense;
mod guard;
mod guarded_matrix;
mod rotation;

use std::io::Write as _;

use dense::{Noise, noise, pack, packed, packed_bands, pool, whole, with_exec};
use ferrule_kernels::arch::Isa;
use ferrule_kernels::{Cancel, Exec, Format, PackedMatrix, PoolError, RowSource, matmul};
use guard::Guarded;
use guarded_matrix::guarded;
use proptest::prelude::*;
use rotation::{BLOCK, HALF, restored, rotated};

/// Number of inputs that share an activation scale for formats without rotation. Rows are whole groups.
const GROUP: usize = 32;

/// Row source of a dense f32 matrix.
struct Dense {
    cols: usize,
    values: Vec<f32>,
}

impl RowSource for Dense {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        out.copy_from_slice(&self.values[row * self.cols..][..self.cols]);
    }
}

fn product(exec: &Exec<'_>, x: &[f32], w: &PackedMatrix) -> Vec<f32> {
    let m = x.len().checked_div(w.cols()).unwrap();
    let x = Guarded::new(x);
    let mut out = Guarded::new(&vec![f32::NAN; m * w.rows()]);
    matmul(exec, &x, w, &mut out).unwrap();
    out.to_vec()
}

/// Zero-pads rows of `cols` numbers to whole half blocks.
fn padded(rows: &[f32], cols: usize) -> Vec<f32> {
    let fill = cols.next_multiple_of(HALF) - cols;
    rows.chunks(cols).flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(0.0, fill))).collect()
}

/// Quantizes and dequantizes activations to int8 with one scale per `inputs` of them: a rotated block for integer
/// formats, a group for grouped formats.
fn quantized(x: &[f32], inputs: usize) -> Vec<f32> {
    let block = |x: &[f32]| {
        let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        x.iter().map(|x| (x * inverse).round_ties_even() * (largest / 127.0)).collect::<Vec<_>>()
    };
    x.chunks(inputs).flat_map(block).collect()
}

/// Returns each output in f64 with the error bound of a chain of k roundings. `w` is [`Noise`] with seed 1.
fn expected(format: Format, x: &[f32], w: &PackedMatrix) -> Vec<(f64, f64)> {
    let (n, k) = (w.rows(), w.cols());
    // Rotation mixes the padding of a short block into its weights, and `read_row` returns only `k` of them, so the oracle
    // packs padded rows.
    let is_rotated = format.is_integer() && format.stored_block().is_none();
    let cols = if is_rotated { k.next_multiple_of(HALF) } else { k };
    let repacked = (cols != k).then(|| {
        let mut values = vec![0.0; n * k];
        let source = Noise { formats: &[(format, n)], seed: 1, first: 0 };
        values.chunks_exact_mut(k).enumerate().for_each(|(row, values)| source.read_row(row, values));
        pack(&[(format, n)], cols, &Dense { cols, values: padded(&values, k) })
    });
    let w = repacked.as_ref().unwrap_or(w);
    let (x, scale) = if is_rotated {
        let x = padded(x, k).chunks(cols).flat_map(|row| quantized(&rotated(row), BLOCK)).collect();
        (x, 1.0 / BLOCK as f64)
    } else if format.is_integer() {
        (quantized(x, if format == Format::Int8Sparse { BLOCK } else { GROUP }), 1.0)
    } else {
        (x.to_vec(), 1.0)
    };
    let mut expected = vec![(0.0, 0.0); x.len() / cols * n];
    let mut row = vec![0.0; cols];
    for column in 0..n {
        w.read_row(column, &mut row);
        if is_rotated {
            row = rotated(&row);
        }
        for (x, expected) in x.chunks(cols).zip(expected.chunks_mut(n)) {
            let terms = || x.iter().zip(&row).map(|(x, w)| f64::from(*x) * f64::from(*w) * scale);
            let (exact, magnitude) = (terms().sum(), terms().map(f64::abs).sum::<f64>());
            // Without FMA there are two roundings per input: (1 + eps / 2)^(2k) - 1 < 2 k eps.
            expected[column] = (exact, 2.0 * cols as f64 * f64::from(f32::EPSILON) * magnitude);
        }
    }
    expected
}

/// Checks products on every instruction set against f64. `k` is rounded up to whole stored blocks.
fn check_against_oracle(format: Format, m: usize, n: usize, k: usize, threads: usize) {
    let k = whole(&[(format, n)], k);
    let w = packed(format, n, k, 1);
    let x = noise(m * k, 2);
    let expected = expected(format, &x, &w);
    for isa in Isa::available() {
        let out = with_exec(isa, threads, |exec| product(exec, &x, &w));
        for (out, (exact, bound)) in out.iter().zip(&expected) {
            let error = (f64::from(*out) - exact).abs();
            assert!(error <= *bound, "{m}x{n}x{k} {format:?} {isa:?}: {error} > {bound}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn products_agree_with_the_oracle(m in 1usize..=40, n in 1usize..=150, k in 1usize..=300, threads in 1usize..=3) {
        for format in Format::ALL {
            check_against_oracle(*format, m, n, k, threads);
        }
    }
}

/// The largest codes and activations, of either sign, must not overflow 16 bits anywhere.
#[test]
fn extremes_are_exact() {
    const K: usize = 256 + HALF;
    for format in Format::ALL.iter().copied().filter(|format| format.stored_block().is_none()) {
        // Rows of one sign; rows whose signs alternate with every input, or with every second input.
        let sign = |row: usize, input: usize| [1.0, -1.0, [1.0, -1.0][input % 2], [1.0, -1.0][input / 2 % 2]][row % 4];
        let signs = |rows: usize, size: f32| {
            let signs: Vec<f32> = (0..rows * K).map(|i| size * sign(i / K, i % K)).collect();
            if format.is_integer() { signs.chunks(K).flat_map(restored).collect() } else { signs }
        };
        let w = pack(&[(format, 32)], K, &Dense { cols: K, values: signs(32, 2.0) });
        let mut row = vec![0.0; K];
        for (isa, m) in Isa::available().into_iter().flat_map(|isa| [1, 4, 32].map(|m| (isa, m))) {
            let x = signs(m, 127.0);
            let out = with_exec(isa, 1, |exec| product(exec, &x, &w));
            for column in 0..32 {
                w.read_row(column, &mut row);
                for (x, out) in x.chunks(K).zip(out.chunks(32)) {
                    let exact: f64 = x.iter().zip(&row).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                    let error = (f64::from(out[column]) - exact).abs();
                    assert!(error <= 1e-5 * exact.abs() + 1e-2, "{format:?} {isa:?}: {} {exact}", out[column]);
                }
            }
        }
    }
}

/// Row counts for every tile height, and a K beyond the K blocks of all but the smallest tile.
const ROWS: [usize; 12] = [1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 40, 100];
const K: usize = 1033;
const N: usize = 83;

/// Reference implementation in f32: one chain of multiply-adds over k.
fn chain(isa: Isa, x: &[f32], w: &[f32]) -> f32 {
    let fused = isa.name() != "scalar";
    x.iter().zip(w).fold(0.0, |sum, (x, w)| if fused { x.mul_add(*w, sum) } else { x * w + sum })
}

#[test]
fn float_products_are_batch_invariant_chains_over_k() {
    let x = noise(100 * K, 3);
    for format in Format::ALL.iter().filter(|format| !format.is_integer()) {
        let w = packed(*format, N, K, 4);
        for isa in Isa::available() {
            let mut row = vec![0.0; K];
            let mut expected = vec![0.0; 100 * N];
            for column in 0..N {
                w.read_row(column, &mut row);
                for (x, out) in x.chunks(K).zip(expected.chunks_mut(N)) {
                    out[column] = chain(isa, x, &row);
                }
            }
            for threads in 1..=3 {
                for m in ROWS {
                    let out = with_exec(isa, threads, |exec| product(exec, &x[..m * K], &w));
                    let same = out.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{m} rows, {threads} threads, {format:?}, {isa:?}");
                }
            }
        }
    }
}

/// Returns each quantized format alone, and matrices with several of them, with rows that end within a panel.
fn bands() -> Vec<Vec<(Format, usize)>> {
    let quantized = Format::ALL.iter().filter(|format| format.is_integer());
    let mut bands: Vec<_> = quantized.map(|format| vec![(*format, N)]).collect();
    bands.push(vec![
        (Format::Int4, 48),
        (Format::Int3, 16),
        (Format::Int5, 16),
        (Format::Trellis3, 16),
        (Format::Int2, 16),
        (Format::Int8, 35),
    ]);
    bands.push(vec![(Format::Q4K, 80), (Format::Int4, 16), (Format::Q6K, 16), (Format::Q4_0, 20)]);
    bands
}

#[test]
fn quantized_products_are_batch_invariant() {
    for formats in bands() {
        let k = whole(&formats, K);
        let x = noise(100 * k, 3);
        let w = packed_bands(&formats, k, 4);
        for isa in Isa::available() {
            let alone: Vec<f32> = with_exec(isa, 1, |exec| x.chunks(k).flat_map(|x| product(exec, x, &w)).collect());
            for threads in 1..=3 {
                for m in ROWS {
                    let out = with_exec(isa, threads, |exec| product(exec, &x[..m * k], &w));
                    let same = out.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{m} rows, {threads} threads, {formats:?}, {isa:?}");
                }
            }
        }
    }
}

/// Rows that end with a half block, or within one, for every tile height. Nothing behind their panels is read.
#[test]
fn half_blocks_agree_with_the_oracle_in_batches_of_any_size() {
    for format in Format::ALL.iter().copied().filter(|format| format.stored_block().is_none()) {
        for k in [8, 64, 72, 192, 320, 576, 584] {
            for m in [1, 40] {
                check_against_oracle(format, m, N, k, 2);
            }
            let packed = packed(format, N, k, 1);
            let w = guarded(&[(format, N)], k, packed.buffers());
            let x = noise(100 * k, 2);
            for isa in Isa::available() {
                with_exec(isa, 2, |exec| {
                    let alone: Vec<f32> = x.chunks(k).flat_map(|x| product(exec, x, &w)).collect();
                    for m in ROWS {
                        let out = product(exec, &x[..m * k], &w);
                        let same = out.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{m} rows of {k}, {format:?}, {isa:?}");
                    }
                });
            }
        }
    }
}

#[test]
fn formats_in_one_matrix_have_the_bits_of_separate_matrices() {
    let x = noise(3 * K, 5);
    for isa in Isa::available() {
        with_exec(isa, 2, |exec| {
            let formats = [(Format::Int5, 16), (Format::Int3, 16), (Format::Int6, 16), (Format::Int8, 9)];
            let together = product(exec, &x, &packed_bands(&formats, K, 6));
            let mut first = 0;
            for (format, rows) in formats {
                let part = Noise { formats: &[(format, rows)], seed: 6, first };
                let alone = product(exec, &x, &pack(part.formats, K, &part));
                for (together, alone) in together.chunks(57).zip(alone.chunks(rows)) {
                    assert_eq!(together[first..][..rows], *alone, "{format:?} {isa:?}");
                }
                first += rows;
            }
        });
    }
}

/// NaN or infinity in activations or weights always gives NaN outputs.
#[test]
fn non_finite_inputs_give_nan() {
    let formats = [
        Format::Int8,
        Format::Int6,
        Format::Int5,
        Format::Int4,
        Format::Int3,
        Format::Int2,
        Format::Trellis5,
        Format::Trellis4,
        Format::Trellis3,
        Format::Trellis2,
    ];
    for format in formats {
        let finite = packed(format, 20, K, 8);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = noise(2 * K, 7);
            x[K + 700] = bad;
            let mut source = Dense { cols: K, values: noise(20 * K, 8) };
            source.values[3 * K + 5] = bad;
            let w = pack(&[(format, 20)], K, &source);
            for isa in Isa::available() {
                with_exec(isa, 1, |exec| {
                    let out = product(exec, &x, &finite);
                    assert!(out[..20].iter().all(|y| y.is_finite()) && out[20..].iter().all(|y| y.is_nan()));
                    let out = product(exec, &noise(K, 7), &w);
                    for (row, y) in out.iter().enumerate() {
                        assert_eq!(y.is_finite(), row != 3, "row {row}");
                    }
                });
            }
        }
    }
}

/// Measures the error of the other channels when five outlier channels, three hundred times larger than the rest, occupy
/// five of sixteen blocks. With one scale per row, the other channels would be almost lost.
#[test]
fn outliers_affect_only_their_own_blocks() {
    let (n, k) = (64, 2048);
    let is_outlier = |channel: usize| channel.is_multiple_of(k / 5) && channel < k / 5 * 5;
    let x: Vec<f32> = noise(k, 10).iter().enumerate().map(|(i, x)| if is_outlier(i) { 300.0 } else { *x }).collect();
    with_exec(Isa::best(), 2, |exec| {
        let w = packed(Format::Int8, n, k, 9);
        let out = product(exec, &x, &w);
        let (mut row, mut missed, mut missed_by_row, mut all) = (vec![0.0; k], 0.0, 0.0, 0.0);
        for (out, index) in out.iter().zip(0..) {
            w.read_row(index, &mut row);
            let dot = |x: &dyn Fn(usize) -> f32| (0..k).map(|i| f64::from(x(i)) * f64::from(row[i])).sum::<f64>();
            let exact = dot(&|i| x[i]);
            let one_scale = dot(&|i| (x[i] * (127.0 / 300.0)).round_ties_even() * (300.0 / 127.0));
            missed += (f64::from(*out) - exact).powi(2);
            missed_by_row += (one_scale - exact).powi(2);
            all += dot(&|i| if is_outlier(i) { 0.0 } else { x[i] }).powi(2);
        }
        let (blocks, row) = ((missed / all).sqrt(), (missed_by_row / all).sqrt());
        assert!(blocks < 0.75 && blocks < 0.75 * row, "{blocks} by blocks, {row} with one scale");
    });
}

#[test]
fn long_chains_continue_across_k_blocks() {
    // Longer than the K block of two rows.
    let k = 7000;
    let x = noise(2 * k, 5);
    for isa in Isa::available() {
        with_exec(isa, 2, |exec| {
            let w = packed(Format::F16, 17, k, 6);
            let both = product(exec, &x, &w);
            assert_eq!(both[..17], product(exec, &x[..k], &w));
            assert_eq!(both[17..], product(exec, &x[k..], &w));
        });
    }
}

/// Returns the instruction sets of this machine according to the system rather than our own detection.
fn expected_isas() -> Vec<&'static str> {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let has = |names: &[&str]| names.iter().all(|name| line.split_whitespace().any(|flag| flag == *name));
    let mut isas = vec!["scalar"];
    if has(&["avx2", "fma", "f16c", "popcnt"]) {
        isas.push("avx2");
        if has(&["avx_vnni"]) {
            isas.push("avxvnni");
        }
        if has(&["avx512f", "avx512bw", "avx512vl", "avx512dq"]) {
            isas.push("avx512");
            if has(&["avx512_vnni"]) {
                isas.push("avx512vnni");
                if has(&["amx_tile", "amx_int8"]) {
                    isas.push("amx");
                }
            }
        }
    }
    isas
}

#[test]
fn every_instruction_set_of_this_machine_is_exercised() {
    for format in Format::ALL {
        check_against_oracle(*format, 14, 37, 41, 2);
    }
    let exercised: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
    // Written to stdout directly, because the test runner captures `println`; CI logs show the instruction sets.
    writeln!(std::io::stdout(), "\nexercised ISAs: {}", exercised.join(", ")).unwrap();
    assert_eq!(exercised, expected_isas());
}

#[test]
fn cancelling_is_an_error() {
    let (pool, cancel) = (pool(2), Cancel::new());
    let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
    let w = packed(Format::Bf16, 100, 10, 1);
    cancel.cancel();
    assert_eq!(matmul(&exec, &[1.0; 10], &w, &mut [0.0; 100]), Err(PoolError::Cancelled));
}

#[test]
#[should_panic(expected = "x must have 10 elements (2 rows of 5), got 9")]
fn activations_of_the_wrong_length_are_refused() {
    with_exec(Isa::best(), 1, |exec| {
        let w = packed(Format::F32, 3, 5, 1);
        let _ = matmul(exec, &[0.0; 9], &w, &mut [0.0; 6]);
    });
}

#[test]
fn empty_products_are_supported() {
    with_exec(Isa::best(), 2, |exec| {
        let w = packed(Format::F32, 17, 5, 1);
        matmul(exec, &[], &w, &mut []).unwrap();
        for format in Format::ALL {
            let w = packed(*format, 17, 0, 1);
            let mut out = [f32::NAN; 40 * 17];
            matmul(exec, &[], &w, &mut out).unwrap();
            assert_eq!(out, [0.0; 40 * 17]);
        }
    });
}
