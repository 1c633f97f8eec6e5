//! Accuracy of every function against f64, on every instruction set of this machine.

use super::*;
use crate::arch::{Isa, Kernel};

/// Kernel that applies a function of this module to a slice.
struct Apply<'a> {
    function: Function,
    x: &'a [f32],
    out: &'a mut [f32],
}

#[derive(Clone, Copy)]
enum Function {
    Exp,
    Exp2,
    Tanh,
    Erf,
    Sigmoid,
    Softplus,
    Silu,
    Swish,
    Gelu,
    GeluTanh,
}

impl Kernel for Apply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (x, out) in self.x.chunks(LANES).zip(self.out.chunks_mut(LANES)) {
            let x = load_padded(simd, x);
            let value = match self.function {
                Function::Exp => exp(simd, x),
                Function::Exp2 => exp2(simd, x),
                Function::Tanh => tanh(simd, x),
                Function::Erf => erf(simd, x),
                Function::Sigmoid => sigmoid(simd, x),
                Function::Softplus => softplus(simd, x),
                Function::Silu => silu(simd, x),
                Function::Swish => swish(simd, x, 1.702),
                Function::Gelu => gelu(simd, x),
                Function::GeluTanh => gelu_tanh(simd, x),
            };
            store_partial(simd, value, out);
        }
    }
}

fn apply(isa: Isa, function: Function, x: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    isa.run(Apply { function, x, out: &mut out });
    out
}

/// Returns evenly spaced numbers from `from` to `to`. Their count is not a multiple of sixteen.
fn sweep(from: f32, to: f32) -> Vec<f32> {
    const STEPS: u32 = 100_003;
    (0..STEPS).map(|i| from + (to - from) * (i as f32 / (STEPS - 1) as f32)).collect()
}

/// Computes erf by its series, accurate to 1e-9 for |x| <= 4.
fn erf64(x: f64) -> f64 {
    if x.abs() > 4.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

/// Returns the largest |got - wanted| / max(|wanted|, floor) in units of the f32 epsilon.
fn worst(got: &[f32], x: &[f32], wanted: impl Fn(f64) -> f64, floor: f64) -> f64 {
    let error = |(got, x): (&f32, &f32)| {
        let wanted = wanted(f64::from(*x));
        (f64::from(*got) - wanted).abs() / wanted.abs().max(floor) / f64::from(f32::EPSILON)
    };
    got.iter().zip(x).map(error).fold(0.0, f64::max)
}

fn on_every_isa(check: impl Fn(Isa)) {
    for isa in Isa::available() {
        eprintln!("isa {}", isa.name());
        check(isa);
    }
}

#[test]
fn exp_is_within_two_ulp() {
    on_every_isa(|isa| {
        for (from, to) in [(-86.9, 88.7), (-1.0, 1.0), (-1e-3, 1e-3)] {
            let x = sweep(from, to);
            let error = worst(&apply(isa, Function::Exp, &x), &x, f64::exp, 0.0);
            assert!(error <= 2.0, "{}: {error} on {from}..{to}", isa.name());
        }
    });
}

#[test]
fn exp_is_exact_at_zero_and_at_its_limits() {
    on_every_isa(|isa| {
        let x = [0.0, -0.0, -88.0, -104.0, -1e30, f32::NEG_INFINITY, 88.8, 1e30, f32::INFINITY];
        let wanted = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, f32::INFINITY, f32::INFINITY, f32::INFINITY];
        assert_eq!(apply(isa, Function::Exp, &x), wanted, "{}", isa.name());
        assert!(apply(isa, Function::Exp, &sweep(-200.0, 0.0)).iter().all(|y| y.is_normal() || y.to_bits() == 0));
    });
}

#[test]
fn exp2_is_within_two_ulp_and_exact_at_its_limits() {
    on_every_isa(|isa| {
        for (from, to) in [(-126.0, 126.9), (-1.0, 1.0), (-1e-3, 1e-3)] {
            let x = sweep(from, to);
            let error = worst(&apply(isa, Function::Exp2, &x), &x, f64::exp2, 0.0);
            assert!(error <= 2.0, "{}: {error} on {from}..{to}", isa.name());
        }
        let x = [0.0, -0.0, 1.0, -126.0, -126.6, -1e30, f32::NEG_INFINITY];
        let wanted = [1.0, 1.0, 2.0, f32::MIN_POSITIVE, 0.0, 0.0, 0.0];
        assert_eq!(apply(isa, Function::Exp2, &x), wanted, "{}", isa.name());
    });
}

#[test]
fn tanh_and_erf_are_within_a_few_ulp() {
    on_every_isa(|isa| {
        for (from, to) in [(-20.0, 20.0), (-1.0, 1.0), (-1e-3, 1e-3)] {
            let x = sweep(from, to);
            let tanh = worst(&apply(isa, Function::Tanh, &x), &x, f64::tanh, 0.0);
            let erf = worst(&apply(isa, Function::Erf, &x), &x, erf64, 0.0);
            assert!(tanh <= 6.0 && erf <= 6.0, "{}: {tanh} {erf} on {from}..{to}", isa.name());
        }
    });
}

#[test]
fn sigmoid_and_softplus_are_within_a_few_ulp() {
    on_every_isa(|isa| {
        for (from, to) in [(-86.0, 120.0), (-10.0, 10.0), (-1.0, 1.0), (-1e-3, 1e-3)] {
            let x = sweep(from, to);
            let sigmoid = worst(&apply(isa, Function::Sigmoid, &x), &x, |x| 1.0 / (1.0 + (-x).exp()), 0.0);
            let softplus = worst(&apply(isa, Function::Softplus, &x), &x, |x| x.exp().ln_1p(), 0.0);
            assert!(sigmoid <= 4.0 && softplus <= 4.0, "{}: {sigmoid} {softplus} on {from}..{to}", isa.name());
        }
        let x = [-1e30, f32::NEG_INFINITY, 1e30, f32::INFINITY];
        assert_eq!(apply(isa, Function::Sigmoid, &x), [0.0, 0.0, 1.0, 1.0], "{}", isa.name());
        assert_eq!(apply(isa, Function::Softplus, &x), [0.0, 0.0, 1e30, f32::INFINITY], "{}", isa.name());
    });
}

/// Below 1 the absolute error counts, because other summands of the layer set the scale.
#[test]
fn activations_agree_with_f64() {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let swish = |x: f64| x / (1.0 + (-1.702 * x).exp());
    let gelu = |x: f64| 0.5 * x * (1.0 + erf64(x / 2f64.sqrt()));
    let gelu_tanh =
        |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
    on_every_isa(|isa| {
        for (from, to) in [(-300.0, 300.0), (-10.0, 10.0), (-1e-2, 1e-2)] {
            let x = sweep(from, to);
            let errors = [
                worst(&apply(isa, Function::Silu, &x), &x, silu, 1e-30),
                worst(&apply(isa, Function::Swish, &x), &x, swish, 1.0),
                worst(&apply(isa, Function::Gelu, &x), &x, gelu, 1.0),
                worst(&apply(isa, Function::GeluTanh, &x), &x, gelu_tanh, 1.0),
            ];
            assert!(errors.iter().all(|error| *error <= 8.0), "{}: {errors:?} on {from}..{to}", isa.name());
        }
    });
}

#[test]
fn nan_stays_nan() {
    use Function::{Erf, Exp, Exp2, Gelu, GeluTanh, Sigmoid, Silu, Softplus, Swish, Tanh};
    on_every_isa(|isa| {
        for function in [Exp, Exp2, Tanh, Erf, Sigmoid, Softplus, Silu, Swish, Gelu, GeluTanh] {
            let out = apply(isa, function, &[1.0, f32::NAN, -f32::NAN]);
            assert!(out[0].is_finite() && out[1].is_nan() && out[2].is_nan(), "{}", isa.name());
        }
    });
}
