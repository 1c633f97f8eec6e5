//! Elementary functions, written once over the vector vocabulary. NaN in, NaN out.
//!
//! Rational and polynomial approximations in f32 with a few units in the last place of error: softmax and activations
//! need no more, and the library's functions have no vector form.

// Coefficients stand as published.
#![allow(clippy::excessive_precision)]

use crate::arch::{Kernel, LANES, Simd};

/// Horner's rule: `c[0] x^(n-1) + .. + c[n-1]`.
#[inline(always)]
fn polynomial<S: Simd, const N: usize>(simd: S, x: S::F32, coefficients: [f32; N]) -> S::F32 {
    let mut value = simd.splat(coefficients[0]);
    for coefficient in &coefficients[1..] {
        value = simd.mul_add(value, x, simd.splat(*coefficient));
    }
    value
}

/// `x` cut to [-limit, limit].
#[inline(always)]
pub(crate) fn clamp<S: Simd>(simd: S, x: S::F32, limit: f32) -> S::F32 {
    // `x` second: of two operands the second is kept where one is NaN.
    simd.min(simd.splat(limit), simd.max(simd.splat(-limit), x))
}

/// e^x within 2 units in the last place; exactly 1 at 0, exactly 0 below -87, infinite from 88.73 on.
///
/// After Cephes' `expf`: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, times 2^n. It is computed as
/// (2 e^r) 2^(n - 1), so that n = 128 still fits, and results below 2^-126 become 0 instead of denormals, which many
/// CPUs handle a hundred times slower.
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts; the first has so few bits that n times it is exact.
    const LN2_HIGH: f32 = 0.693_359_375;
    const LN2_LOW: f32 = -2.121_944_40e-4;
    let x = clamp(simd, x, 89.0);
    let n = simd.round(simd.mul(x, simd.splat(LOG2_E)));
    let r = simd.mul_add(n, simd.splat(-LN2_HIGH), x);
    let r = simd.mul_add(n, simd.splat(-LN2_LOW), r);
    let p = polynomial(
        simd,
        r,
        [
            1.987_569_15e-4,
            1.398_199_950_7e-3,
            8.333_451_907_3e-3,
            4.166_579_589_4e-2,
            1.666_666_545_9e-1,
            5.000_000_120_1e-1,
        ],
    );
    let two = simd.splat(2.0);
    let twice = simd.mul_add(simd.mul_add(p, simd.mul(r, r), r), two, two);
    let exponent = simd.max(simd.splat(-127.0), simd.min(simd.splat(127.0), simd.sub(n, simd.splat(1.0))));
    simd.mul(twice, simd.exp2_integer(exponent))
}

/// 2^x for x up to 127, within 2 units in the last place; exactly 1 at 0, exactly 0 below -126.5.
///
/// Half the operations of [`exp`], which pay where there is one for every pair of tokens. Polynomial: minimax of the
/// relative error on [-1/2, 1/2].
#[inline(always)]
pub(crate) fn exp2<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    // `x` second: it is kept where it is NaN.
    let x = simd.max(simd.splat(-127.0), x);
    let n = simd.round(x);
    let p = polynomial(
        simd,
        simd.sub(x, n),
        [1.326_472_71e-3, 9.671_512_65e-3, 5.550_733_74e-2, 2.402_224_21e-1, 6.931_469_78e-1, 1.0],
    );
    simd.mul(p, simd.exp2_integer(n))
}

/// 2^x of one number, with the bits that [`exp2`] gives in a vector.
#[inline(always)]
pub(crate) fn exp2_scalar<S: Simd>(simd: S, x: f32) -> f32 {
    simd.to_array(exp2(simd, simd.splat(x)))[0]
}

/// tanh x: an odd over an even polynomial, fitted by the authors of Eigen on [-7.9, 7.9], beyond which f32 has ±1.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    let x = clamp(simd, x, 7.905_311);
    let square = simd.mul(x, x);
    let odd = polynomial(
        simd,
        square,
        [
            -2.760_768_477_423_55e-16,
            2.000_187_904_824_77e-13,
            -8.604_671_522_137_35e-11,
            5.122_297_090_371_14e-8,
            1.485_722_357_179_79e-5,
            6.372_619_288_754_36e-4,
            4.893_524_558_917_86e-3,
        ],
    );
    let even = polynomial(
        simd,
        square,
        [1.198_258_394_667_02e-6, 1.185_347_056_866_54e-4, 2.268_434_632_439_00e-3, 4.893_525_185_543_85e-3],
    );
    simd.div(simd.mul(x, odd), even)
}

/// erf x: an odd over an even polynomial, fitted by the authors of Eigen on [-4, 4], beyond which f32 has ±1.
#[inline(always)]
pub(crate) fn erf<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    let x = clamp(simd, x, 4.0);
    let square = simd.mul(x, x);
    let odd = polynomial(
        simd,
        square,
        [
            -2.726_142_258_013_06e-10,
            2.770_681_424_959_02e-8,
            -2.101_024_020_825_08e-6,
            -5.692_506_394_623_46e-5,
            -7.349_906_302_653_57e-4,
            -2.954_599_808_540_25e-3,
            -1.609_603_332_624_15e-2,
        ],
    );
    let even = polynomial(
        simd,
        square,
        [
            -1.456_607_184_649_96e-5,
            -2.133_740_552_789_05e-4,
            -1.682_826_974_382_03e-3,
            -7.373_329_167_204_68e-3,
            -1.426_473_905_141_89e-2,
        ],
    );
    simd.div(simd.mul(x, odd), even)
}

/// x / (1 + e^-x)
#[inline(always)]
pub(crate) fn silu<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    swish(simd, x, 1.0)
}

/// x / (1 + e^-βx), which is x sigmoid(βx); Ramachandran et al. 2017.
#[inline(always)]
pub(crate) fn swish<S: Simd>(simd: S, x: S::F32, beta: f32) -> S::F32 {
    let one = simd.splat(1.0);
    simd.div(x, simd.add(one, exp(simd, simd.mul(x, simd.splat(-beta)))))
}

/// x Φ(x), with the normal distribution's Φ.
#[inline(always)]
pub(crate) fn gelu<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    let half = simd.mul(x, simd.splat(0.5));
    let erf = erf(simd, simd.mul(x, simd.splat(std::f32::consts::FRAC_1_SQRT_2)));
    simd.mul_add(half, erf, half)
}

/// The approximation of [`gelu`] by tanh that many models were trained with: x (1 + tanh u) / 2, computed as
/// x / (1 + e^-2u), which keeps its digits where tanh is nearly -1.
#[inline(always)]
pub(crate) fn gelu_tanh<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_560_8;
    let cubic = simd.mul_add(simd.mul(simd.mul(x, x), x), simd.splat(0.044_715), x);
    let one = simd.splat(1.0);
    simd.div(x, simd.add(one, exp(simd, simd.mul(cubic, simd.splat(-2.0 * SQRT_2_OVER_PI)))))
}

/// A vector of up to sixteen numbers, filled up with zeros.
#[inline(always)]
pub(crate) fn load_padded<S: Simd>(simd: S, tail: &[f32]) -> S::F32 {
    let mut lanes = [0.0; LANES];
    lanes[..tail.len()].copy_from_slice(tail);
    simd.load(&lanes)
}

/// The first lanes of `value`, as many as `tail` has room for.
#[inline(always)]
pub(crate) fn store_partial<S: Simd>(simd: S, value: S::F32, tail: &mut [f32]) {
    let lanes = simd.to_array(value);
    tail.copy_from_slice(&lanes[..tail.len()]);
}

/// A function of one number that acts on each lane alike.
pub(crate) trait Lanewise: Copy {
    /// The function of every lane of `x`. Must be `#[inline(always)]`.
    fn apply<S: Simd>(self, simd: S, x: S::F32) -> S::F32;
}

/// `x = function(x)`, element by element.
pub(crate) struct InPlace<'a, F> {
    pub x: &'a mut [f32],
    pub function: F,
}

impl<F: Lanewise> Kernel for InPlace<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (x, tail) = self.x.as_chunks_mut::<LANES>();
        for x in x {
            simd.store(self.function.apply(simd, simd.load(x)), x);
        }
        if !tail.is_empty() {
            store_partial(simd, self.function.apply(simd, load_padded(simd, tail)), tail);
        }
    }
}

#[cfg(test)]
mod tests;
