//! The rotation under which integer formats store weights and quantize activations.
//!
//! A few inputs are often far larger than their neighbours, and a scale that serves them leaves the others few codes.
//! So each block of [`BLOCK`] inputs is rotated before it is quantized: signs are turned at random, and a Hadamard
//! matrix mixes all inputs of the block, so that each number is a sum of all of them and none stands out. Products do
//! not change when both factors are rotated alike (<https://arxiv.org/abs/2404.00456>; `benches/quality` is what it gains
//! here). A short block is filled up with zeros.
//!
//! The matrix is of ones, positive and negative: what it gives is `sqrt(BLOCK)` times too long, so products are
//! [`BLOCK`] times too large. Activations' scales take that off, exactly: it is a power of two.

use super::integer::BLOCK;
use crate::arch::{LANES, Simd};

/// What takes the rotation's length off a product.
pub(crate) const SHRINK: f32 = 1.0 / BLOCK as f32;

/// Of each input the sign, as bits: the fraction of pi begins so.
const TURNED: u128 = 0x243f_6a88_85a3_08d3_1319_8a2e_0370_7344;

/// 1 or -1 for each input.
const SIGNS: [[f32; LANES]; BLOCK / LANES] = {
    let mut signs = [[1.0; LANES]; BLOCK / LANES];
    let mut input = 0;
    while input < BLOCK {
        if TURNED >> input & 1 == 1 {
            signs[input / LANES][input % LANES] = -1.0;
        }
        input += 1;
    }
    signs
};

/// -1 for each lane whose number has bit `N`, else 1.
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

/// Rotates a row's block.
#[inline(always)]
pub(crate) fn rotate<S: Simd>(simd: S, mut block: [S::F32; BLOCK / LANES]) -> [S::F32; BLOCK / LANES] {
    for (x, signs) in block.iter_mut().zip(&SIGNS) {
        *x = simd.mul(*x, simd.load(signs));
    }
    mix(&mut block, |a, b| (simd.add(a, b), simd.sub(a, b)));
    for x in &mut block {
        *x = mix_lanes::<S, 8>(simd, *x);
        *x = mix_lanes::<S, 4>(simd, *x);
        *x = mix_lanes::<S, 2>(simd, *x);
        *x = mix_lanes::<S, 1>(simd, *x);
    }
    block
}

/// The sum of lanes i and i + N in the first, and their difference in the second.
#[inline(always)]
fn mix_lanes<S: Simd, const N: usize>(simd: S, x: S::F32) -> S::F32 {
    // A product with one is exact, so this rounds once, fused or not.
    simd.mul_add(x, simd.load(&const { odd::<N>() }), simd.swap_lanes::<N>(x))
}

/// Rotates a block of sixteen rows, `[input][row]`.
#[inline(always)]
pub(crate) fn rotate_columns<S: Simd>(simd: S, block: &mut [[f32; LANES]; BLOCK]) {
    for (column, sign) in block.iter_mut().zip(SIGNS.as_flattened()) {
        simd.store(simd.mul(simd.load(column), simd.splat(*sign)), column);
    }
    mix(block, |a, b| {
        let (a, b) = (simd.load(&a), simd.load(&b));
        (simd.to_array(simd.add(a, b)), simd.to_array(simd.sub(a, b)))
    });
}

/// Rotates a block back, and shrinks it to its length.
pub(crate) fn restore(block: &mut [f32; BLOCK]) {
    mix(block, |a, b| (a + b, a - b));
    for (value, sign) in block.iter_mut().zip(SIGNS.as_flattened()) {
        *value *= sign * SHRINK;
    }
}

/// The Hadamard transform over the elements: for each bit of their numbers, sums where it is 0 and differences where
/// it is 1.
#[inline(always)]
fn mix<T: Copy, const N: usize>(elements: &mut [T; N], butterfly: impl Fn(T, T) -> (T, T)) {
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

    /// A block rotated as a row, and as one of sixteen.
    struct Both<'a>(&'a [f32; BLOCK]);

    impl Kernel for Both<'_> {
        type Output = [[f32; BLOCK]; 2];

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Self::Output {
            let lines: &[[f32; LANES]; BLOCK / LANES] = self.0.as_chunks().0.try_into().unwrap();
            let row = rotate(simd, lines.map(|line| simd.load(&line))).map(|x| simd.to_array(x));
            let mut columns = self.0.map(|value| std::array::from_fn(|row| if row == 5 { value } else { -3.0 }));
            rotate_columns(simd, &mut columns);
            [row.as_flattened().try_into().unwrap(), columns.map(|column| column[5])]
        }
    }

    /// Element (i, j) of the matrix.
    fn element(i: usize, j: usize) -> f64 {
        let sign = f64::from(SIGNS.as_flattened()[j]);
        if (i & j).count_ones().is_multiple_of(2) { sign } else { -sign }
    }

    proptest! {
        #[test]
        fn rows_and_columns_are_rotated_alike_and_back(
            values in prop::collection::vec(-100i16..100, BLOCK), shrink in 0.001f32..1.0,
        ) {
            let whole: [f32; BLOCK] = std::array::from_fn(|i| f32::from(values[i]));
            let exact: [f32; BLOCK] =
                std::array::from_fn(|i| (0..BLOCK).map(|j| element(i, j) * f64::from(whole[j])).sum::<f64>() as f32);
            let broken = whole.map(|value| value * shrink);
            for isa in Isa::available() {
                // Sums of whole numbers are exact in any order.
                prop_assert_eq!(isa.run(Both(&whole)), [exact; 2]);
                let [mut row, _] = isa.run(Both(&broken));
                restore(&mut row);
                for (back, value) in row.iter().zip(&broken) {
                    prop_assert!((back - value).abs() < 1e-4, "{back} for {value}");
                }
            }
        }
    }

    #[test]
    fn about_half_of_the_signs_are_turned() {
        assert!((48..=80).contains(&TURNED.count_ones()));
        // No row of the matrix gathers what inputs of one sign add up to.
        let row = |i| (0..BLOCK).map(|j| element(i, j)).sum::<f64>();
        let largest = (0..BLOCK).map(|i| row(i).abs()).fold(0.0, f64::max);
        assert!(largest <= 40.0, "{largest}");
    }
}
