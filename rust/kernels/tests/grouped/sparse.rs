//! Sparse formats: products have the bits of dense products, or of sums over blocks, and damaged panels are harmless.

use ferrule_kernels::arch::{Isa, LANES};
use ferrule_kernels::quant::TooDense;
use ferrule_kernels::{Exec, Format, PackError, PackedMatrix, RowSource, matmul};
use proptest::prelude::*;

use super::dense::{noise, with_exec};
use super::guard::Guarded;
use super::guarded_matrix::guarded;

/// Number of inputs that share a scale in the dense format q8_0.
const DENSE_GROUP: usize = 32;

/// Codes and scales of a matrix.
struct Weights {
    cols: usize,
    /// `[rows][cols]`
    codes: Vec<i8>,
    /// Scale of each group of `inputs`, f16, `[rows][cols / inputs]`.
    scales: Vec<u16>,
    inputs: usize,
}

/// Stored blocks of some weights: a scale and a byte for each of `inputs` codes.
struct Stored<'a> {
    weights: &'a Weights,
    inputs: usize,
}

impl RowSource for Stored<'_> {
    fn read_row(&self, row: usize, _: &mut [f32]) {
        unreachable!("row {row} is stored in blocks");
    }

    fn read_stored(&self, first: usize, row_bytes: usize, out: &mut [u8]) {
        let Weights { cols, codes, scales, inputs } = self.weights;
        for (row, out) in (first..).zip(out.chunks_exact_mut(row_bytes)) {
            for (block, out) in out.chunks_exact_mut(2 + self.inputs).enumerate() {
                let scale = scales[(row * cols + block * self.inputs) / inputs];
                out[..2].copy_from_slice(&scale.to_le_bytes());
                let codes = &codes[row * cols + block * self.inputs..][..self.inputs];
                out[2..].iter_mut().zip(codes).for_each(|(out, code)| *out = code.cast_unsigned());
            }
        }
    }
}

impl Weights {
    /// Creates random weights for a sparse format; `is_kept` says which codes may be nonzero.
    fn new(format: Format, rows: usize, blocks: usize, seed: u64, is_kept: impl Fn(usize, usize) -> bool) -> Self {
        let inputs = format.stored_block().unwrap().inputs;
        let cols = blocks * inputs;
        let random = noise(rows * cols, seed);
        let largest = if format == Format::Int4TwoOfFour { 7.9 } else { 127.9 };
        let code = |(i, x): (usize, &f32)| if is_kept(i / cols, i % cols) { (x * largest) as i8 } else { 0 };
        let codes = random.iter().enumerate().map(code).collect();
        let scales = random.iter().step_by(inputs).map(|x| half::f16::from_f32(x + 1.25).to_bits()).collect();
        Self { cols, codes, scales, inputs }
    }

    fn rows(&self) -> usize {
        self.codes.len() / self.cols
    }

    /// Computes the product with a scale for each block of weights and of activations, number by number. Scalar code rounds
    /// products before it adds them.
    fn product_by_blocks(&self, x: &[f32], isa: Isa) -> Vec<u32> {
        let mul_add = |a: f32, b: f32, c: f32| if isa.name() == "scalar" { a * b + c } else { a.mul_add(b, c) };
        let Self { cols, codes, scales, inputs } = self;
        let rows = x.chunks_exact(*cols).flat_map(|x| (0..self.rows()).map(move |row| (x, row)));
        let outputs = rows.map(|(x, row)| {
            let mut sum = 0.0f32;
            for (block, x) in x.chunks_exact(*inputs).enumerate() {
                let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
                let codes = &codes[row * cols + block * inputs..][..*inputs];
                let products = codes.iter().zip(x).map(|(w, x)| i32::from(*w) * (x * inverse).round_ties_even() as i32);
                let scale = half::f16::from_bits(scales[(row * cols + block * inputs) / inputs]).to_f32();
                sum = mul_add(products.sum::<i32>() as f32, scale * (largest / 127.0), sum);
            }
            sum.to_bits()
        });
        outputs.collect()
    }

    fn pack(&self, exec: &Exec<'_>, format: Format) -> Result<PackedMatrix, PackError> {
        let inputs = format.stored_block().unwrap().inputs;
        PackedMatrix::pack(exec, &[(format, self.rows())], self.cols, &Stored { weights: self, inputs })
    }
}

fn sparse() -> impl Iterator<Item = Format> {
    Format::ALL.iter().copied().filter(|format| format.is_sparse())
}

fn rows_of(matrix: &PackedMatrix) -> Vec<f32> {
    let mut values = vec![f32::NAN; matrix.rows() * matrix.cols()];
    values.chunks_mut(matrix.cols()).enumerate().for_each(|(row, out)| matrix.read_row(row, out));
    values
}

fn product(exec: &Exec<'_>, x: &[f32], w: &PackedMatrix) -> Vec<u32> {
    let mut out = Guarded::new(&vec![f32::NAN; x.len() / w.cols() * w.rows()]);
    matmul(exec, &Guarded::new(x), w, &mut out).unwrap();
    out.iter().map(|value| value.to_bits()).collect()
}

/// Replaces the bits of each NaN by those of one.
fn with_one_nan(mut bits: Vec<u32>) -> Vec<u32> {
    bits.iter_mut().filter(|bits| f32::from_bits(**bits).is_nan()).for_each(|bits| *bits = f32::NAN.to_bits());
    bits
}

/// Checks that the rows of weights, and the products of formats with factors of groups, have the bits of the dense format,
/// and the other products those of sums over blocks.
fn check(format: Format, weights: &Weights, m: usize, threads: usize) {
    let x = noise(m * weights.cols, 9);
    for isa in Isa::available() {
        with_exec(isa, threads, |exec| {
            let packed = weights.pack(exec, format).unwrap();
            let shared = guarded(&[(format, packed.rows())], packed.cols(), packed.buffers());
            let dense = Stored { weights, inputs: DENSE_GROUP };
            let dense = PackedMatrix::pack(exec, &[(Format::Q8_0, packed.rows())], weights.cols, &dense).unwrap();
            assert_eq!(rows_of(&shared), rows_of(&dense), "{format:?}");
            let expected = match format {
                Format::Int8Sparse => weights.product_by_blocks(&x, isa),
                _ => product(exec, &x, &dense),
            };
            assert_eq!(
                product(exec, &x, &shared),
                expected,
                "{m}x{}x{} {format:?} {isa:?}",
                packed.rows(),
                packed.cols()
            );
        });
    }
}

/// Returns whether a code is kept, in one of several patterns: half of the codes of a panel, or of each four inputs.
fn is_kept(format: Format, pattern: usize, random: &[f32], row: usize, input: usize) -> bool {
    let random_at = |index: usize| random[index % random.len()] > 0.0;
    match pattern {
        // The first or the last two of four inputs, or the two between these.
        1 if format != Format::Int8Sparse => match random_at(row * 61 + input / 4) {
            true => (input % 4 < 2) == random_at(row * 67 + input / 4),
            false => (1..=2).contains(&(input % 4)),
        },
        2 if format != Format::Int8Sparse => random_at(row) && input % 2 == row / 2 % 2,
        // A random one of each two inputs.
        0 => random_at(row * 61 + input / 2) == input.is_multiple_of(2),
        // Random halves of rows and their complements, so that blocks have different numbers of codes.
        1 => (random[(row / 2 * 67 + input) % random.len()] > 0.7) == row.is_multiple_of(2),
        // Whole rows.
        2 => row % 2 == 1,
        _ => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn products_have_the_expected_bits(
        m in prop_oneof![1usize..=17, 18usize..=40],
        rows in 1usize..=70,
        blocks in 1usize..=9,
        threads in 1usize..=3,
        pattern in 0usize..4,
        seed in any::<u64>(),
    ) {
        let random = noise(1009, seed);
        for format in sparse() {
            // Both rows of a pair of complements are in one panel, but the last row may lack the other.
            let rows = rows.next_multiple_of(2);
            let weights = Weights::new(format, rows, blocks, seed, |row, input| is_kept(format, pattern, &random, row, input));
            check(format, &weights, m, threads);
        }
    }

    /// Damaged files have any bytes. Results are then unspecified, but nothing outside of the matrix is read, and they do
    /// not depend on the number of threads. Those of bitmaps do not depend on the number of rows either.
    #[test]
    fn damaged_panels_are_harmless(
        bytes in prop::collection::vec(any::<u8>(), 1..300), rows in 1usize..=40, blocks in 1usize..=4,
    ) {
        for format in sparse() {
            let cols = blocks * format.stored_block().unwrap().inputs;
            let size = PackedMatrix::buffer_bytes(format, rows, cols).unwrap()[0];
            let damaged: Vec<u8> = bytes.iter().copied().cycle().take(size).collect();
            // Positions of blocks are small numbers in a file that is damaged elsewhere.
            let mut positions = damaged.clone();
            positions.as_chunks_mut::<4>().0.iter_mut().for_each(|position| position[2..].fill(0));
            for bytes in [damaged, positions] {
                let matrix = guarded(&[(format, rows)], cols, [&bytes[..], &[]].into_iter());
                rows_of(&matrix);
                let x = noise(20 * cols, 1);
                for isa in Isa::available() {
                    let [one, three] = [1, 3].map(|threads| {
                        with_exec(isa, threads, |exec| {
                            [1, 5, 20].map(|m| with_one_nan(product(exec, &x[..m * cols], &matrix)))
                        })
                    });
                    prop_assert!(one == three, "{format:?} {isa:?}");
                    if format == Format::Int8Sparse {
                        let [few, some, many] = &one;
                        prop_assert!(many.starts_with(some) && some.starts_with(few), "{isa:?}");
                    }
                }
            }
        }
    }
}

/// Rows beyond the limit are refused, and the error says which they are.
#[test]
fn weights_that_are_too_dense_are_refused() {
    let pack = |rows: usize, extra: (usize, usize)| {
        let weights = Weights::new(Format::Int8Sparse, rows, 2, 3, |_, _| false);
        let mut codes = weights.codes.clone();
        codes.chunks_mut(2).for_each(|pair| pair[0] = 7);
        codes[extra.0 * weights.cols + extra.1] = 1;
        with_exec(Isa::best(), 2, |exec| Weights { codes, ..weights }.pack(exec, Format::Int8Sparse).map(drop))
    };
    assert_eq!(pack(48, (20, 4)), Ok(()));
    let error = pack(48, (20, 5)).unwrap_err();
    let too_dense = TooDense { weights: 4096, nonzero: 2049, limit: 2048 };
    assert_eq!(error, PackError::TooDense { row: 16, too_dense });
    assert_eq!(
        error.to_string(),
        "rows 16 to 31: 2049 of 4096 weights are nonzero, but the sparse format stores at most 2048 of them"
    );
    // The last panel has fewer rows, and their zeros may be fewer.
    assert_eq!(pack(40, (39, 5)), Ok(()));
}

#[test]
fn sizes_depend_on_the_shape_alone() {
    let bits = |format| PackedMatrix::bytes_for(format, 2048, 2048).unwrap() as f64 * 8.0 / (2048.0 * 2048.0);
    assert!(bits(Format::Int8Sparse) < 5.2, "{}", bits(Format::Int8Sparse));
    assert_eq!(PackedMatrix::bytes_for(Format::Int8Sparse, usize::MAX, usize::MAX), None);
    let weights = Weights::new(Format::Int8Sparse, LANES, 3, 1, |_, _| false);
    let packed = with_exec(Isa::best(), 1, |exec| weights.pack(exec, Format::Int8Sparse).unwrap());
    assert_eq!(Some(packed.bytes() as u64), PackedMatrix::bytes_for(Format::Int8Sparse, LANES, 384));
}
