//! Elementary functions over SIMD vectors. All of them propagate NaN.
//!
//! They are rational and polynomial approximations in f32 with an error of a few ulp, which is enough for softmax and
//! activations; the functions of the standard library are scalar.

// Coefficients are written as published.
#![allow(clippy::excessive_precision)]

use crate::arch::{Kernel, LANES, Simd};

/// Evaluates the polynomial `c[0] x^(n-1) + .. + c[n-1]` by Horner's rule.
#[inline(always)]
fn polynomial<S: Simd, const N: usize>(simd: S, x: S::F32, coefficients: [f32; N]) -> S::F32 {
    let mut value = simd.splat(coefficients[0]);
    for coefficient in &coefficients[1..] {
        value = simd.mul_add(value, x, simd.splat(*coefficient));
    }
    value
}

/// Clamps `x` to [-limit, limit].
#[inline(always)]
pub(crate) fn clamp<S: Simd>(simd: S, x: S::F32, limit: f32) -> S::F32 {
    // `x` is the second operand, which min and max return if one operand is NaN.
    simd.min(simd.splat(limit), simd.max(simd.splat(-limit), x))
}

/// Computes e^x within 2 ulp; exactly 1 at 0, exactly 0 below -87, infinite from 88.73 on.
///
/// Follows `expf` of Cephes: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, times 2^n. It is evaluated as
/// (2 e^r) 2^(n - 1), so that n = 128 does not overflow. Results below 2^-126 become 0 instead of denormals, which are a
/// hundred times slower on many CPUs.
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts; the first has few enough bits that its product with n is exact.
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

/// Computes 2^x for x up to 127, within 2 ulp; exactly 1 at 0, exactly 0 below -126.5.
///
/// It takes half the operations of [`exp`], which matters in attention with one evaluation per pair of tokens. The
/// polynomial is the minimax approximation of the relative error on [-1/2, 1/2].
#[inline(always)]
pub(crate) fn exp2<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    // `x` is the second operand, which is kept if it is NaN.
    let x = simd.max(simd.splat(-127.0), x);
    let n = simd.round(x);
    let p = polynomial(
        simd,
        simd.sub(x, n),
        [1.326_472_71e-3, 9.671_512_65e-3, 5.550_733_74e-2, 2.402_224_21e-1, 6.931_469_78e-1, 1.0],
    );
    simd.mul(p, simd.exp2_integer(n))
}

/// Computes 2^x of one number, with the same bits as [`exp2`].
#[inline(always)]
pub(crate) fn exp2_scalar<S: Simd>(simd: S, x: f32) -> f32 {
    simd.to_array(exp2(simd, simd.splat(x)))[0]
}

/// Computes tanh x as an odd over an even polynomial with Eigen's coefficients for [-7.9, 7.9]. Beyond that the result
/// is ±1 in f32.
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

/// Computes erf x as an odd over an even polynomial with Eigen's coefficients for [-4, 4]. Beyond that the result is ±1
/// in f32.
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

/// Computes the logistic sigmoid: 1 / (1 + e^-x).
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    let one = simd.splat(1.0);
    simd.div(one, simd.add(one, exp(simd, simd.sub(simd.splat(0.0), x))))
}

/// Computes softplus: ln(1 + e^x), as max(x, 0) + ln(1 + y) with y = e^-|x|, so that it neither overflows nor loses
/// precision where it is small. The logarithm is 2 atanh(y / (2 + y)) by its series, whose argument is at most 1/3.
#[inline(always)]
pub(crate) fn softplus<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    let zero = simd.splat(0.0);
    // `x` is the second operand, which max and min return if it is NaN.
    let y = exp(simd, simd.min(simd.sub(zero, x), x));
    let s = simd.div(y, simd.add(y, simd.splat(2.0)));
    let square = simd.mul(s, s);
    let series = polynomial(
        simd,
        square,
        [2.0 / 17.0, 2.0 / 15.0, 2.0 / 13.0, 2.0 / 11.0, 2.0 / 9.0, 2.0 / 7.0, 2.0 / 5.0, 2.0 / 3.0, 2.0],
    );
    simd.mul_add(series, s, simd.max(zero, x))
}

/// Computes SiLU: x / (1 + e^-x).
#[inline(always)]
pub(crate) fn silu<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    swish(simd, x, 1.0)
}

/// Computes Swish: x sigmoid(βx) = x / (1 + e^-βx); Ramachandran et al. 2017.
#[inline(always)]
pub(crate) fn swish<S: Simd>(simd: S, x: S::F32, beta: f32) -> S::F32 {
    let one = simd.splat(1.0);
    simd.div(x, simd.add(one, exp(simd, simd.mul(x, simd.splat(-beta)))))
}

/// Computes GELU: x Φ(x), with Φ the cumulative distribution function of the normal distribution.
#[inline(always)]
pub(crate) fn gelu<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    let half = simd.mul(x, simd.splat(0.5));
    let erf = erf(simd, simd.mul(x, simd.splat(std::f32::consts::FRAC_1_SQRT_2)));
    simd.mul_add(half, erf, half)
}

/// Computes the tanh approximation of [`gelu`] that many models were trained with: x (1 + tanh u) / 2, evaluated as
/// x / (1 + e^-2u), which keeps precision where tanh is close to -1.
#[inline(always)]
pub(crate) fn gelu_tanh<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_560_8;
    let cubic = simd.mul_add(simd.mul(simd.mul(x, x), x), simd.splat(0.044_715), x);
    let one = simd.splat(1.0);
    simd.div(x, simd.add(one, exp(simd, simd.mul(cubic, simd.splat(-2.0 * SQRT_2_OVER_PI)))))
}

/// Loads up to sixteen numbers, zero-padded.
#[inline(always)]
pub(crate) fn load_padded<S: Simd>(simd: S, tail: &[f32]) -> S::F32 {
    let mut lanes = [0.0; LANES];
    lanes[..tail.len()].copy_from_slice(tail);
    simd.load(&lanes)
}

/// Loads up to sixteen numbers, zero-padded if there are fewer.
#[inline(always)]
pub(crate) fn load_up_to<S: Simd>(simd: S, from: &[f32]) -> S::F32 {
    match from.as_chunks() {
        ([from], _) => simd.load(from),
        (_, from) => load_padded(simd, from),
    }
}

/// Stores the first `to.len()` lanes of `value`; at most sixteen.
#[inline(always)]
pub(crate) fn store_up_to<S: Simd>(simd: S, value: S::F32, to: &mut [f32]) {
    match to.as_chunks_mut() {
        ([to], _) => simd.store(value, to),
        (_, to) => store_partial(simd, value, to),
    }
}

/// Stores the first `tail.len()` lanes of `value`.
#[inline(always)]
pub(crate) fn store_partial<S: Simd>(simd: S, value: S::F32, tail: &mut [f32]) {
    let lanes = simd.to_array(value);
    tail.copy_from_slice(&lanes[..tail.len()]);
}

/// Elementwise function.
pub(crate) trait Lanewise: Copy {
    /// Applies the function to every lane of `x`. Implementations must be `#[inline(always)]`.
    fn apply<S: Simd>(self, simd: S, x: S::F32) -> S::F32;
}

/// Kernel that applies a function in place: `x = function(x)`, elementwise.
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
