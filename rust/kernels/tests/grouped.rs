//! Grouped formats (quantized by other programs): weights are read bit for bit and multiplied exactly.

mod dense;
mod guard;
mod guarded_matrix;
#[path = "grouped/sparse.rs"]
mod sparse;

use dense::{Noise, noise, packed, packed_bands, whole, with_exec};
use ferrule_kernels::arch::Isa;
use ferrule_kernels::quant::{Iq2SBlock, Iq2XsBlock, Iq2XxsBlock, Iq3SBlock, Iq3XxsBlock, PointFormat, Q8_0};
use ferrule_kernels::{Exec, Format, PackError, PackedMatrix, PoolError, Product, RowSource, matmul, matmul_each};
use guard::Guarded;
use proptest::prelude::*;

/// Returns the grouped formats that store all codes.
fn grouped() -> impl Iterator<Item = Format> {
    Format::ALL.iter().copied().filter(|format| format.stored_block().is_some() && !format.is_sparse())
}

/// Row source of stored blocks.
struct Stored<F>(F);

impl<F: Fn(usize, &mut [u8]) + Sync> RowSource for Stored<F> {
    fn read_row(&self, row: usize, _: &mut [f32]) {
        unreachable!("row {row} is stored in blocks");
    }

    fn read_stored(&self, first: usize, row_bytes: usize, out: &mut [u8]) {
        (first..).zip(out.chunks_exact_mut(row_bytes)).for_each(|(row, out)| (self.0)(row, out));
    }
}

/// Packs stored rows that `write` writes, and returns the dequantized rows.
fn read_back(format: Format, rows: usize, cols: usize, write: impl Fn(usize, &mut [u8]) + Sync) -> Vec<Vec<f32>> {
    let pack = |exec: &Exec<'_>| PackedMatrix::pack(exec, &[(format, rows)], cols, &Stored(write)).unwrap();
    let matrix = with_exec(Isa::best(), 2, pack);
    let read = |row| {
        let mut out = vec![f32::NAN; cols];
        matrix.read_row(row, &mut out);
        out
    };
    (0..rows).map(read).collect()
}

/// Includes golden files: three rows of 256 inputs, and their weights by the `gguf` package (see `grouped/make.py`).
macro_rules! golden {
    ($($format:ident $name:literal),* $(,)?) => {
        [$((Format::$format, &include_bytes!(concat!("grouped/", $name, ".bin"))[..])),*]
    };
}

#[test]
fn dequantized_weights_equal_ggml() {
    for (format, golden) in golden! {
        Q4_0 "q4_0", Q4_1 "q4_1", Q5_0 "q5_0", Q5_1 "q5_1", Q8_0 "q8_0", Q2K "q2_k", Q3K "q3_k", Q4K "q4_k",
        Q5K "q5_k", Q6K "q6_k", Iq2Xxs "iq2_xxs", Iq2Xs "iq2_xs", Iq2S "iq2_s", Iq3Xxs "iq3_xxs", Iq3S "iq3_s",
        Iq4Nl "iq4_nl", Iq4Xs "iq4_xs", Mxfp4 "mxfp4",
    } {
        let (stored, weights) = golden.split_at(3 * format.stored_block().unwrap().row_bytes(256));
        let weights: Vec<f32> = weights.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        assert_eq!(weights.len(), 3 * 256);
        let stored: Vec<_> = stored.chunks(stored.len() / 3).collect();
        // Each stored row occurs at every position of a panel, in different orders.
        let order = |row: usize| (0..3).map(move |part| (row + part) % 3);
        let rows = read_back(format, 37, 3 * 256, |row, out: &mut [u8]| {
            out.chunks_mut(stored[0].len()).zip(order(row)).for_each(|(out, part)| out.copy_from_slice(stored[part]));
        });
        for (row, read) in rows.iter().enumerate() {
            let expected = order(row).flat_map(|part| &weights[part * 256..][..256]);
            for (input, (read, expected)) in read.iter().zip(expected).enumerate() {
                assert_eq!(read.to_bits(), expected.to_bits(), "{format:?} {row} {input}: {read} {expected}");
            }
        }
    }
}

/// Compares the blocks of a golden file, dequantized one by one.
fn blocks_equal_ggml<F: PointFormat>(golden: &[u8]) {
    let (stored, weights) = golden.split_at(3 * F::BYTES);
    for (block, weights) in stored.chunks(F::BYTES).zip(weights.chunks(4 * 256)) {
        let mut out = [f32::NAN; 256];
        F::dequantize(block, &mut out);
        assert!(out.iter().flat_map(|weight| weight.to_le_bytes()).eq(weights.iter().copied()));
    }
}

#[test]
fn dequantized_blocks_of_points_equal_ggml() {
    blocks_equal_ggml::<Iq2XxsBlock>(include_bytes!("grouped/iq2_xxs.bin"));
    blocks_equal_ggml::<Iq2XsBlock>(include_bytes!("grouped/iq2_xs.bin"));
    blocks_equal_ggml::<Iq2SBlock>(include_bytes!("grouped/iq2_s.bin"));
    blocks_equal_ggml::<Iq3XxsBlock>(include_bytes!("grouped/iq3_xxs.bin"));
    blocks_equal_ggml::<Iq3SBlock>(include_bytes!("grouped/iq3_s.bin"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Weights are `scale * (code - zero_point)`.
    #[test]
    fn zero_points_are_subtracted(
        blocks in prop::collection::vec((-6e4f32..6e4, 0u16..=256, prop::array::uniform32(any::<u8>())), 1..50),
        rows in 1usize..40,
        groups in 1usize..12,
    ) {
        let block = |row: usize, group: usize| &blocks[(row * 7 + group) % blocks.len()];
        let scale = |scale: f32| half::f16::from_f32(scale);
        let eight = read_back(Format::U8, rows, 32 * groups, |row, out: &mut [u8]| {
            for (group, out) in out.chunks_mut(36).enumerate() {
                let (factor, zero, codes) = block(row, group);
                out[..2].copy_from_slice(&scale(*factor).to_le_bytes());
                out[2..4].copy_from_slice(&zero.to_le_bytes());
                out[4..].copy_from_slice(codes);
            }
        });
        let four = read_back(Format::U4, rows, 32 * groups, |row, out: &mut [u8]| {
            for (group, out) in out.chunks_mut(19).enumerate() {
                let (factor, zero, codes) = block(row, group);
                out[..2].copy_from_slice(&scale(*factor).to_le_bytes());
                out[2] = (zero / 16) as u8;
                let (first, second) = codes.split_at(16);
                for ((out, first), second) in out[3..].iter_mut().zip(first).zip(second) {
                    *out = first & 15 | second << 4;
                }
            }
        });
        for row in 0..rows {
            for input in 0..32 * groups {
                let (factor, zero, codes) = block(row, input / 32);
                let (factor, code) = (scale(*factor).to_f32(), f32::from(codes[input % 32]));
                prop_assert_eq!(eight[row][input], factor * (code - f32::from(*zero)));
                prop_assert_eq!(four[row][input], factor * (code % 16.0 - f32::from(zero / 16)));
            }
        }
    }
}

/// Quantizes numbers to blocks of q8_0 and dequantizes them.
fn as_q8_0(numbers: &[f32]) -> Vec<f32> {
    let mut blocks = vec![0xff; numbers.len() / 32 * 34];
    Q8_0::quantize(numbers, &mut blocks);
    read_back(Format::Q8_0, 1, numbers.len(), |_, out: &mut [u8]| out.copy_from_slice(&blocks)).remove(0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Multiples of an f16 scale by codes of at most seven bits are represented exactly.
    #[test]
    fn seven_bit_codes_are_exact_in_q8_0(
        groups in prop::collection::vec((1e-3f32..100.0, 64i8..=127, prop::array::uniform32(-64i8..=64)), 1..20),
    ) {
        let group = |(scale, largest, codes): &(f32, i8, [i8; 32])| {
            let scale = half::f16::from_f32(*scale).to_f32();
            let mut codes = *codes;
            codes[7] = *largest;
            codes.map(|code| f32::from(code) * scale)
        };
        let numbers: Vec<f32> = groups.iter().flat_map(group).collect();
        prop_assert_eq!(as_q8_0(&numbers), numbers);
    }

    /// FP8 (e4m3) values of at least an eighth of the largest are multiples of a scale of which the largest is 64 to 120.
    #[test]
    fn fp8_values_are_close_in_q8_0(
        codes in prop::collection::vec((0u32..8, -6i32..=8, any::<bool>()), 32), scale in 0.1f32..1.0,
    ) {
        let number = |&(mantissa, exponent, minus): &(u32, i32, bool)| {
            (8 + mantissa) as f32 * 2f32.powi(exponent - 3) * if minus { -scale } else { scale }
        };
        let mut numbers: Vec<f32> = codes.iter().map(number).collect();
        numbers[3] = number(&(codes[3].0, 8, false));
        let largest = numbers.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let squares = as_q8_0(&numbers).iter().zip(&numbers).map(|(a, b)| (a - b) * (a - b)).sum::<f32>();
        // The other values are within half a scale, which is rounded to f16.
        let small = numbers.iter().filter(|x| x.abs() < largest / 8.0).count() as f32;
        let scale = largest / 64.0;
        let rounding = 1.1 * 32.0 * (largest / 2048.0).powi(2);
        prop_assert!(squares <= 1.1 * small * (scale / 2.0).powi(2) + rounding, "{squares}");
    }

    /// The error is at most that of the usual scale, the largest magnitude divided by 127.
    #[test]
    fn the_error_in_q8_0_is_at_most_that_of_absmax_scaling(numbers in prop::collection::vec(-10f32..10.0, 64)) {
        for (read, group) in as_q8_0(&numbers).chunks(32).zip(numbers.chunks(32)) {
            let squares = |other: &[f32]| group.iter().zip(other).map(|(a, b)| (a - b) * (a - b)).sum::<f32>();
            let largest = group.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            let scale = half::f16::from_f32(largest / 127.0).to_f32();
            let usual: Vec<_> = group.iter().map(|x| (x / scale).round().clamp(-127.0, 127.0) * scale).collect();
            prop_assert!(squares(read) <= squares(&usual) * 1.0001);
        }
    }
}

#[test]
fn zeros_stay_zero_and_non_finite_numbers_become_nan_in_q8_0() {
    let mut numbers = [0.5f32; 96];
    numbers[..32].fill(0.0);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        numbers[40] = bad;
        let read = as_q8_0(&numbers);
        assert_eq!(read[..32], [0.0; 32]);
        assert!(read[32..64].iter().all(|x| x.is_nan()) && read[64..].iter().all(|x| (x - 0.5).abs() < 1e-3));
    }
}

/// Packing adds no bytes to rows that are whole blocks.
#[test]
fn packed_rows_are_as_large_as_stored_ones() {
    for format in grouped() {
        let stored = format.stored_block().unwrap().row_bytes(1024) as u64;
        assert_eq!(PackedMatrix::bytes_for(format, 48, 1024), Some(48 * stored), "{format:?}");
        assert_eq!(PackedMatrix::bytes_for(format, usize::MAX, usize::MAX), None);
        let cols = whole(&[(format, 20)], 900);
        let matrix = packed(format, 20, cols, 1);
        assert_eq!(Some(matrix.bytes() as u64), PackedMatrix::bytes_for(format, 20, cols));
    }
}

/// The largest products, of either sign, must not overflow 16 bits anywhere.
#[test]
fn extremes_are_exact() {
    const K: usize = 512;
    for (isa, format) in Isa::available().into_iter().flat_map(|isa| grouped().map(move |format| (isa, format))) {
        with_exec(isa, 1, |exec| {
            // Codes and sub-scales of all ones, all zeros, only the highest bit, all other bits, and alternations.
            let patterns = [[0xff, 0xff], [0, 0], [0x80, 0x80], [0x7f, 0x7f], [0xff, 0], [0x0f, 0xf0], [0x80, 0x7f]];
            let block = format.stored_block().unwrap();
            let source = Stored(|row: usize, out: &mut [u8]| {
                out.iter_mut().enumerate().for_each(|(i, out)| *out = patterns[row % 7][i % 2]);
                for block in out.chunks_mut(block.bytes) {
                    let one = half::f16::ONE.to_le_bytes();
                    match format {
                        Format::Mxfp4 => block[0] = 128,
                        Format::Q2K => block[80..82].copy_from_slice(&one),
                        Format::Q3K => block[108..].copy_from_slice(&one),
                        Format::Q6K => block[208..].copy_from_slice(&one),
                        _ => block[..2].copy_from_slice(&one),
                    }
                    match format {
                        Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => {
                            block[2..4].copy_from_slice(&one);
                        }
                        Format::Q2K => block[82..].copy_from_slice(&one),
                        Format::U4 => block[2] = [0, 16][row / 7 % 2],
                        Format::U8 => block[2..4].copy_from_slice(&[[0, 0], [0, 1]][row / 7 % 2]),
                        _ => {}
                    }
                }
            });
            let w = PackedMatrix::pack(exec, &[(format, 30)], K, &source).unwrap();
            let sign = |row: usize, i: usize| [1.0, -1.0, [1.0, -1.0][i % 2], [1.0, -1.0][i / 2 % 2]][row % 4];
            let mut row = vec![0.0; K];
            for m in [1, 4, 32] {
                let x: Vec<f32> = (0..m * K).map(|i| 127.0 * sign(i / K, i % K)).collect();
                let mut out = vec![f32::NAN; m * 30];
                matmul(exec, &x, &w, &mut out).unwrap();
                for column in 0..30 {
                    w.read_row(column, &mut row);
                    for (x, out) in x.chunks(K).zip(out.chunks(30)) {
                        let terms = || x.iter().zip(&row).map(|(x, w)| f64::from(*x) * f64::from(*w));
                        let (exact, all) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                        let error = (f64::from(out[column]) - exact).abs();
                        assert!(error <= 1e-6 * all + 1.0, "{format:?} {isa:?} {column}: {} {exact}", out[column]);
                    }
                }
            }
        });
    }
}

/// A matrix with a band of every grouped format, and integer formats between them, has the bits of separate matrices.
#[test]
fn bands_have_the_bits_of_separate_matrices() {
    const K: usize = 1280;
    let mut formats: Vec<_> = grouped().map(|format| (format, 16)).collect();
    formats.insert(3, (Format::Int4, 32));
    formats.push((Format::Int8, 16));
    formats.push((Format::Q4_0, 9));
    let rows: usize = formats.iter().map(|(_, rows)| rows).sum();
    for (isa, m) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 3), (isa, 40)]) {
        let x = noise(m * K, 5);
        with_exec(isa, 2, |exec| {
            let mut together = Guarded::new(&vec![f32::NAN; m * rows]);
            matmul(exec, &x, &packed_bands(&formats, K, 6), &mut together).unwrap();
            let mut first = 0;
            for part in formats.chunks(1) {
                let n = part[0].1;
                let w = PackedMatrix::pack(exec, part, K, &Noise { formats: part, seed: 6, first }).unwrap();
                let mut alone = vec![f32::NAN; m * n];
                matmul(exec, &x, &w, &mut alone).unwrap();
                for (together, alone) in together.chunks(rows).zip(alone.chunks(n)) {
                    assert_eq!(together[first..][..n], *alone, "{part:?} {isa:?}");
                }
                first += n;
            }
        });
    }
}

/// Activations that are shared with an integer format are also quantized for grouped formats.
#[test]
fn formats_share_activations() {
    let x = noise(2 * 256, 1);
    let weights = [Format::Int4, Format::Q4K].map(|format| packed(format, 20, 256, 2));
    for isa in Isa::available() {
        with_exec(isa, 1, |exec| {
            let mut out = [[f32::NAN; 40]; 2];
            let mut products: Vec<_> = weights.iter().zip(&mut out).map(|(w, out)| Product { x: &x, w, out }).collect();
            matmul_each(exec, &mut products).unwrap();
            for (w, out) in weights.iter().zip(out) {
                let mut alone = [f32::NAN; 40];
                matmul(exec, &x, w, &mut alone).unwrap();
                assert_eq!(out, alone);
            }
        });
    }
}

#[test]
fn non_finite_activations_give_nan() {
    for (isa, format) in Isa::available().into_iter().flat_map(|isa| grouped().map(move |format| (isa, format))) {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            with_exec(isa, 1, |exec| {
                let mut x = noise(2 * 512, 7);
                x[512 + 300] = bad;
                let mut out = [0.0; 40];
                matmul(exec, &x, &packed(format, 20, 512, 8), &mut out).unwrap();
                assert!(out[..20].iter().all(|y| y.is_finite()) && out[20..].iter().all(|y| y.is_nan()));
            });
        }
    }
}

#[test]
fn packing_numbers_to_a_grouped_format_is_refused() {
    struct Numbers;

    impl RowSource for Numbers {
        fn read_row(&self, _: usize, out: &mut [f32]) {
            out.fill(0.0);
        }
    }

    with_exec(Isa::best(), 1, |exec| {
        let error = PackedMatrix::pack(exec, &[(Format::Q4_0, 16)], 64, &Numbers).unwrap_err();
        let PackError::Pool(PoolError::Panicked(message)) = error else { panic!("{error}") };
        assert!(message.contains("numbers"), "{message}");
    });
}

#[test]
fn zero_points_out_of_range_are_refused() {
    for (format, at, zero) in [(Format::U4, 2, 17), (Format::U8, 3, 2)] {
        let source = Stored(|_, out: &mut [u8]| out[at] = zero);
        with_exec(Isa::best(), 1, |exec| {
            let error = PackedMatrix::pack(exec, &[(format, 16)], 32, &source).unwrap_err();
            let PackError::Pool(PoolError::Panicked(message)) = error else { panic!("{error}") };
            assert!(message.contains("zero point"), "{message}");
        });
    }
}

#[test]
#[should_panic(expected = "number of inputs must be a multiple of 256 for q4_k, got 300")]
fn rows_of_partial_blocks_are_refused() {
    packed(Format::Q4K, 16, 300, 1);
}
