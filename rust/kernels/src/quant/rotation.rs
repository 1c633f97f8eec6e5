//! Randomized Hadamard rotation of weights and activations, for integer formats (QuaRot,
//! <https://arxiv.org/abs/2404.00456>).
//!
//! A few inputs are often far larger than their neighbours, and a scale that covers them leaves few codes for the others.
//! Each block of [`BLOCK`] inputs is therefore rotated before quantization: signs are flipped pseudorandomly, and a
//! Hadamard transform replaces each input by a signed sum of all inputs of the block, which removes outliers. Products do
//! not change if both factors are rotated in the same way. `benches/quality` measures the gain. Short blocks are
//! zero-padded to a block or to a half block.
//!
//! The elements of the matrix are 1 and -1, so it scales norms by `sqrt(BLOCK)` and products by [`BLOCK`]. The scales of
//! activations compensate this exactly, because it is a power of two. Half blocks are rotated by half of the matrix times
//! the square root of two, which scales them like whole blocks: they share scales with them.

use super::integer::{BLOCK, HALF};
use crate::arch::{LANES, Simd};

/// Factor that compensates the scaling of a product by the rotation.
pub(crate) const SHRINK: f32 = 1.0 / BLOCK as f32;

/// Factor of a rotated half block.
const HALF_FACTOR: f32 = std::f32::consts::SQRT_2;

/// Sign bits of the inputs of a block: the first bits of the fraction of pi.
const SIGN_BITS: u128 = 0x243f_6a88_85a3_08d3_1319_8a2e_0370_7344;

/// Sign of each input, 1 or -1.
const SIGNS: [[f32; LANES]; BLOCK / LANES] = {
    let mut signs = [[1.0; LANES]; BLOCK / LANES];
    let mut input = 0;
    while input < BLOCK {
        if SIGN_BITS >> input & 1 == 1 {
            signs[input / LANES][input % LANES] = -1.0;
        }
        input += 1;
    }
    signs
};

/// Returns -1 for each lane whose index has bit `N` set, else 1.
const fn odd<const N: usize>() -> [f32; LANES] {
    let mut odd = [1.0; LANES];
    let mut lane = 0;
    while lane < LANES {
        if lane & N != 0 {
            odd[lane] = -1.0;
        }
        lane += 1;
    }
    odd
}

/// Rotates a block of one row, whose first `inputs` inputs are not padding. After a half block there are zeros.
#[inline(always)]
pub(crate) fn rotate<S: Simd>(simd: S, mut block: [S::F32; BLOCK / LANES], inputs: usize) -> [S::F32; BLOCK / LANES] {
    for (x, signs) in block.iter_mut().zip(&SIGNS) {
        *x = simd.mul(*x, simd.load(signs));
    }
    hadamard(&mut block, |a, b| (simd.add(a, b), simd.sub(a, b)));
    for x in &mut block {
        *x = hadamard_lanes::<S, 8>(simd, *x);
        *x = hadamard_lanes::<S, 4>(simd, *x);
        *x = hadamard_lanes::<S, 2>(simd, *x);
        *x = hadamard_lanes::<S, 1>(simd, *x);
    }
    if inputs <= HALF {
        // Both halves of the rotated block are the rotated half block: the other inputs are zero.
        let factors = [HALF_FACTOR, 0.0].map(|factor| simd.splat(factor));
        for (index, x) in block.iter_mut().enumerate() {
            *x = simd.mul(*x, factors[index / (HALF / LANES)]);
        }
    }
    block
}

/// Replaces lanes i and i + N by their sum and their difference.
#[inline(always)]
fn hadamard_lanes<S: Simd, const N: usize>(simd: S, x: S::F32) -> S::F32 {
    // The product with ±1 is exact, so this rounds once, with or without FMA.
    simd.mul_add(x, simd.load(&const { odd::<N>() }), simd.swap_lanes::<N>(x))
}

/// Rotates a block or half block of sixteen rows, `[input][row]`.
#[inline(always)]
pub(crate) fn rotate_columns<S: Simd, const N: usize>(simd: S, block: &mut [[f32; LANES]; N]) {
    for (column, sign) in block.iter_mut().zip(SIGNS.as_flattened()) {
        simd.store(simd.mul(simd.load(column), simd.splat(*sign)), column);
    }
    hadamard(block, |a, b| {
        let (a, b) = (simd.load(&a), simd.load(&b));
        (simd.to_array(simd.add(a, b)), simd.to_array(simd.sub(a, b)))
    });
    if const { factor::<N>() != 1.0 } {
        for column in block {
            simd.store(simd.mul(simd.load(column), simd.splat(const { factor::<N>() })), column);
        }
    }
}

/// Inverts the rotation of a block or half block.
pub(crate) fn restore<const N: usize>(block: &mut [f32; N]) {
    hadamard(block, |a, b| (a + b, a - b));
    for (value, sign) in block.iter_mut().zip(SIGNS.as_flattened()) {
        *value *= sign * SHRINK * const { factor::<N>() };
    }
}

/// Returns the factor of N rotated inputs.
const fn factor<const N: usize>() -> f32 {
    assert!(N == BLOCK || N == HALF, "a block or a half block");
    if N == BLOCK { 1.0 } else { HALF_FACTOR }
}

/// Applies the Hadamard transform over the elements: for each bit of the index, sums where it is 0 and differences where
/// it is 1.
#[inline(always)]
fn hadamard<T: Copy, const N: usize>(elements: &mut [T; N], butterfly: impl Fn(T, T) -> (T, T)) {
    let mut half = N / 2;
    while half > 0 {
        for pairs in elements.chunks_exact_mut(2 * half) {
            let (first, second) = pairs.split_at_mut(half);
            for (a, b) in first.iter_mut().zip(second) {
                (*a, *b) = butterfly(*a, *b);
            }
        }
        half /= 2;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::arch::{Isa, Kernel};

    /// Kernel that rotates a block or half block as one row, and as one of sixteen rows.
    struct Both<'a, const N: usize>(&'a [f32; N]);

    impl<const N: usize> Kernel for Both<'_, N> {
        type Output = [[f32; N]; 2];

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Self::Output {
            let mut lines = [[0.0; LANES]; BLOCK / LANES];
            lines.as_flattened_mut()[..N].copy_from_slice(self.0);
            let row = rotate(simd, lines.map(|line| simd.load(&line)), N).map(|x| simd.to_array(x));
            let (row, padding) = row.as_flattened().split_at(N);
            assert!(padding.iter().all(|x| *x == 0.0), "{padding:?}");
            let mut columns = self.0.map(|value| std::array::from_fn(|row| if row == 5 { value } else { -3.0 }));
            rotate_columns(simd, &mut columns);
            [row.try_into().unwrap(), columns.map(|column| column[5])]
        }
    }

    /// Returns element (i, j) of the rotation matrix.
    fn element(i: usize, j: usize) -> f64 {
        let sign = f64::from(SIGNS.as_flattened()[j]);
        if (i & j).count_ones().is_multiple_of(2) { sign } else { -sign }
    }

    fn check<const N: usize>(values: &[i16], shrink: f32) -> Result<(), TestCaseError> {
        let whole: [f32; N] = std::array::from_fn(|i| f32::from(values[i]));
        let sum = |i| (0..N).map(|j| element(i, j) * f64::from(whole[j])).sum::<f64>() as f32;
        let exact: [f32; N] = std::array::from_fn(|i| sum(i) * factor::<N>());
        let broken = whole.map(|value| value * shrink);
        for isa in Isa::available() {
            // Sums of integers are exact in any order.
            prop_assert_eq!(isa.run(Both(&whole)), [exact; 2]);
            let [mut row, _] = isa.run(Both(&broken));
            restore(&mut row);
            for (back, value) in row.iter().zip(&broken) {
                prop_assert!((back - value).abs() < 1e-4, "{back} for {value}");
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn row_and_column_rotations_agree_and_are_inverted(
            values in prop::collection::vec(-100i16..100, BLOCK), shrink in 0.001f32..1.0,
        ) {
            check::<BLOCK>(&values, shrink)?;
            check::<HALF>(&values, shrink)?;
        }
    }

    #[test]
    fn about_half_of_the_signs_are_negative() {
        assert!((48..=80).contains(&SIGN_BITS.count_ones()));
        // No row of the matrix sums inputs of equal sign to an outlier.
        let row = |i| (0..BLOCK).map(|j| element(i, j)).sum::<f64>();
        let largest = (0..BLOCK).map(|i| row(i).abs()).fold(0.0, f64::max);
        assert!(largest <= 40.0, "{largest}");
    }
}
