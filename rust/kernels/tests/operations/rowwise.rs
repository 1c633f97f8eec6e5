//! Norms, RoPE, activations and elementwise operations against f64, at any width, on guarded buffers.

use std::num::NonZeroUsize;

use ferrule_kernels::activation::{Activation, Gating, activate, apply_gate, gated};
use ferrule_kernels::arch::Isa;
use ferrule_kernels::elementwise::{
    WeightedRow, add, add_bias, add_scaled, add_scaled_columns, clip, scale, scale_rows, softcap, weighted_sums,
};
use ferrule_kernels::norm::{NormWeights, l2_norm_heads, layer_norm, layer_norm_heads, rms_norm, rms_norm_heads};
use ferrule_kernels::rope::{Rope, rope_in_place};
use ferrule_kernels::{Cancel, Exec, Pool, PoolError, Rows, RowsMut};
use proptest::prelude::*;

use crate::guard::Guarded;

const EPS: f32 = 1e-5;

/// Runs `operation` on a guarded copy of `out`, on every instruction set and with one and three threads. Checks that the
/// number of threads changes no bit and that the result agrees with `wanted` within `tolerance`.
fn check(
    out: &[f32],
    wanted: &[f64],
    tolerance: f64,
    operation: impl Fn(&Exec<'_>, &mut [f32]) -> Result<(), PoolError>,
) {
    assert_eq!(out.len(), wanted.len());
    for isa in Isa::available() {
        let run = |threads: usize| {
            let (pool, cancel) = (Pool::new(NonZeroUsize::new(threads).expect("some")), Cancel::new());
            let mut out = Guarded::new(out);
            operation(&Exec { isa, pool: &pool, cancel: &cancel }, &mut out).expect("runs");
            out.to_vec()
        };
        let got = run(1);
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&run(3)), bits(&got), "{}", isa.name());
        for (index, (got, wanted)) in got.iter().zip(wanted).enumerate() {
            let error = (f64::from(*got) - wanted).abs();
            assert!(error <= tolerance * wanted.abs().max(1.0), "{} {index}: {got} for {wanted}", isa.name());
        }
    }
}

fn numbers(len: usize, seed: u32) -> Guarded<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 22) as f32 - 2.0
    };
    Guarded::new(&(0..len).map(|_| next()).collect::<Vec<_>>())
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// Returns the divisor of LayerNorm for a row, in f64.
fn deviation(x: &[f32]) -> f64 {
    let x = wide(x);
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64 + f64::from(EPS)).sqrt()
}

/// Normalizes one row in f64, by LayerNorm if `centered`, else by RMSNorm.
fn norm_oracle(x: &[f32], centered: bool, weights: &NormWeights<'_>) -> Vec<f64> {
    let NormWeights { weight, bias, weight_offset, eps } = *weights;
    let x = wide(x);
    let center = if centered { x.iter().sum::<f64>() / x.len() as f64 } else { 0.0 };
    let variance = x.iter().map(|x| (x - center).powi(2)).sum::<f64>() / x.len() as f64;
    let deviation = (variance + f64::from(eps)).sqrt();
    let weight = |i: usize| weight.map_or(1.0, |weight| f64::from(weight[i]) + f64::from(weight_offset));
    let bias = |i: usize| bias.map_or(0.0, |bias| f64::from(bias[i]));
    x.iter().enumerate().map(|(i, x)| (x - center) / deviation * weight(i) + bias(i)).collect()
}

/// Returns combinations with and without weight, bias and weight offset.
fn all_weights<'a>(weight: &'a [f32], bias: &'a [f32]) -> [NormWeights<'a>; 4] {
    let all = NormWeights { weight: Some(weight), bias: Some(bias), weight_offset: 1.0, eps: EPS };
    [
        all,
        NormWeights { bias: None, weight_offset: 0.0, ..all },
        NormWeights { weight: None, ..all },
        NormWeights { weight: None, bias: None, ..all },
    ]
}

fn check_norms(rows: usize, width: usize, seed: u32) {
    let (x, weight, bias) = (numbers(rows * width, seed), numbers(width, seed + 1), numbers(width, seed + 2));
    let out = vec![f32::NAN; rows * width];
    let wanted = |x: &[f32], centered, weights: &NormWeights<'_>| -> Vec<f64> {
        x.chunks(width).flat_map(|x| norm_oracle(x, centered, weights)).collect()
    };
    for weights in &all_weights(&weight, &bias) {
        check(&out, &wanted(&x, false, weights), 4e-6, |exec, out| rms_norm(exec, &x, width, weights, out));
        check(&out, &wanted(&x, true, weights), 8e-5, |exec, out| layer_norm(exec, &x, width, weights, out));
        // A large mean must not cancel the variance. Rounding of the mean matters more for rows of small variance.
        let far: Vec<f32> = x.iter().map(|x| x + 100.0).collect();
        if width > 1 {
            let tolerance = far.chunks(width).map(|row| 2.5e-5 / deviation(row)).fold(4e-4, f64::max);
            check(&out, &wanted(&far, true, weights), tolerance, |exec, out| {
                layer_norm(exec, &far, width, weights, out)
            });
        }
    }
}

fn check_heads(rows: usize, heads: usize, dim: usize, first: usize, seed: u32) {
    let stride = first + heads * dim + 2;
    let x = numbers(rows * stride, seed);
    let (weight, bias) = (numbers(heads * dim, seed + 1), numbers(heads * dim, seed + 2));
    let shared = all_weights(&weight[..dim], &bias[..dim]).map(|weights| (weights, 0));
    let own = all_weights(&weight, &bias).map(|weights| (weights, dim));
    for (weights, step) in shared.into_iter().chain(own) {
        for centered in [false, true] {
            let mut wanted = wide(&x);
            for (row, wanted) in x.chunks(stride).zip(wanted.chunks_mut(stride)) {
                for head in 0..heads {
                    let columns = first + head * dim..first + (head + 1) * dim;
                    let of_head = NormWeights {
                        weight: weights.weight.map(|weight| &weight[head * step..][..dim]),
                        bias: weights.bias.map(|bias| &bias[head * step..][..dim]),
                        ..weights
                    };
                    wanted[columns.clone()].copy_from_slice(&norm_oracle(&row[columns], centered, &of_head));
                }
            }
            check(&x, &wanted, 8e-5, |exec, x| {
                let norm = if centered { layer_norm_heads } else { rms_norm_heads };
                norm(exec, RowsMut::new(x, stride, first), heads, dim, &weights)
            });
        }
    }
}

fn check_unit_heads(rows: usize, heads: usize, dim: usize, first: usize, seed: u32) {
    let stride = first + heads * dim + 2;
    let x = numbers(rows * stride, seed);
    let mut wanted = wide(&x);
    for row in wanted.chunks_mut(stride) {
        for head in row[first..][..heads * dim].chunks_mut(dim) {
            let length = (head.iter().map(|x| x * x).sum::<f64>() + f64::from(EPS)).sqrt();
            head.iter_mut().for_each(|x| *x *= 0.3 / length);
        }
    }
    check(&x, &wanted, 1e-6, |exec, x| l2_norm_heads(exec, RowsMut::new(x, stride, first), heads, dim, EPS, 0.3));
}

fn check_rope(rows: usize, heads: usize, half: usize, rest: usize, seed: u32) {
    let (dim, first) = (2 * half + rest, 3);
    let stride = first + heads * dim + 1;
    let x = numbers(rows * stride, seed);
    let angle = |i: usize| (i * 7 % 1000) as f32;
    let cos = Guarded::new(&(0..rows * half).map(|i| angle(i).cos()).collect::<Vec<_>>());
    let sin = Guarded::new(&(0..rows * half).map(|i| angle(i).sin()).collect::<Vec<_>>());
    for (interleaved, skipped) in [(false, 0), (true, rest), (false, rest / 2)] {
        let mut wanted = wide(&x);
        for (row, wanted) in wanted.chunks_mut(stride).enumerate() {
            for head in 0..heads {
                let head = &mut wanted[first + head * dim + skipped..][..2 * half];
                for pair in 0..half {
                    let (a, b) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
                    let (cos, sin) = (f64::from(cos[row * half + pair]), f64::from(sin[row * half + pair]));
                    (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
                }
            }
        }
        let rope =
            Rope { heads, head_dim: dim, first: skipped, rotary_dim: 2 * half, interleaved, cos: &cos, sin: &sin };
        check(&x, &wanted, 1e-6, |exec, x| rope_in_place(exec, RowsMut::new(x, stride, first), &rope));
    }
}

const ACTIVATIONS: [Activation; 9] = [
    Activation::Silu,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::GeluQuick,
    Activation::Relu,
    Activation::Relu2,
    Activation::Tanh,
    Activation::Sigmoid,
    Activation::Xielu { alpha_p: 0.9, alpha_n: 0.8, beta: 0.5, eps: -1e-6 },
];

const CLAMPED: [Gating; 2] = [
    Gating::Clamped { alpha: 1.702, gate_limit: 1.5, limit: 1.5, offset: 1.0 },
    Gating::Clamped { alpha: 1.0, gate_limit: 0.75, limit: 0.5, offset: 0.0 },
];

/// Computes an activation in f64. GELU and its tanh approximation share an oracle: they differ by at most 5e-4, and the
/// unit tests of `math` distinguish them.
fn activation_oracle(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu | Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Activation::GeluQuick => x / (1.0 + (-1.702 * x).exp()),
        Activation::Relu => x.max(0.0),
        Activation::Relu2 => x.max(0.0).powi(2),
        Activation::Tanh => x.tanh(),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::Xielu { alpha_p, beta, .. } if x > 0.0 => f64::from(alpha_p) * x * x + f64::from(beta) * x,
        Activation::Xielu { alpha_n, beta, eps, .. } => {
            f64::from(alpha_n) * (x.min(eps.into()).exp_m1() - x) + f64::from(beta) * x
        }
    }
}

fn gating_oracle(gating: Gating, gate: f64, up: f64) -> f64 {
    match gating {
        Gating::Plain(activation) => activation_oracle(activation, gate) * up,
        Gating::Clamped { alpha, gate_limit, limit, offset } => {
            let [alpha, gate_limit, limit, offset] = [alpha, gate_limit, limit, offset].map(f64::from);
            let gate = gate.min(gate_limit);
            (up.clamp(-limit, limit) + offset) * gate / (1.0 + (-alpha * gate).exp())
        }
    }
}

fn check_activations(rows: usize, width: usize, seed: u32) {
    let gate_up = numbers(rows * 2 * width, seed);
    let out = vec![f32::NAN; rows * width];
    for gating in ACTIVATIONS.map(Gating::Plain).into_iter().chain(CLAMPED) {
        let wanted: Vec<f64> = gate_up
            .chunks(2 * width)
            .flat_map(|row| (0..width).map(|i| gating_oracle(gating, row[i].into(), row[width + i].into())))
            .collect();
        let tolerance = if gating == Gating::Plain(Activation::Gelu) { 2e-3 } else { 1e-6 };
        check(&out, &wanted, tolerance, |exec, out| gated(exec, &gate_up, width, gating, out));
    }
    for activation in ACTIVATIONS {
        let wanted: Vec<f64> = gate_up.iter().map(|x| activation_oracle(activation, f64::from(*x))).collect();
        let tolerance = if activation == Activation::Gelu { 1e-3 } else { 1e-6 };
        check(&gate_up, &wanted, tolerance, |exec, x| activate(exec, x, activation));
        let x = numbers(rows * width, seed + 1);
        let gate = Rows::new(&gate_up, 2 * width, width);
        let activated: Vec<f64> = wanted.chunks(2 * width).flat_map(|row| row[width..].to_vec()).collect();
        let wanted: Vec<f64> = x.iter().zip(activated).map(|(x, gate)| f64::from(*x) * gate).collect();
        check(&x, &wanted, 2.0 * tolerance, |exec, x| apply_gate(exec, x, width, gate, activation));
    }
}

fn check_sums(rows: usize, width: usize, seed: u32) {
    let (x, y, bias) = (numbers(rows * width, seed), numbers(rows * width, seed + 1), numbers(width, seed + 2));
    let wanted: Vec<f64> = x.iter().zip(y.iter()).map(|(x, y)| f64::from(x + y)).collect();
    check(&x, &wanted, 0.0, |exec, x| add(exec, x, &y));
    let wanted: Vec<f64> = x.iter().zip(bias.iter().cycle()).map(|(x, bias)| f64::from(x + bias)).collect();
    check(&x, &wanted, 0.0, |exec, x| add_bias(exec, x, &bias));
    // Product and sum are rounded separately on every instruction set.
    let wanted: Vec<f64> = x.iter().zip(y.iter()).map(|(x, y)| f64::from(x + 0.3 * y)).collect();
    check(&x, &wanted, 0.0, |exec, x| add_scaled(exec, x, &y, 0.3));
    let terms: Vec<_> =
        (0..3 * rows).map(|term| WeightedRow { row: (5 * term + 1) % rows, weight: 0.7 - 0.1 * term as f32 }).collect();
    let sum = |terms: &[WeightedRow], column: usize| {
        terms.iter().fold(0.0, |sum, term| sum + term.weight * y[term.row * width + column])
    };
    let sums = terms.chunks_exact(3).flat_map(|terms| (0..width).map(move |column| f64::from(sum(terms, column))));
    check(&x, &sums.collect::<Vec<_>>(), 0.0, |exec, x| weighted_sums(exec, &y, width, &terms, x));
    for (first, count) in [(0, width), (width / 3, width / 3)] {
        let y = numbers(rows * count, seed + 3);
        let mut wanted = wide(&x);
        for (wanted, y) in wanted.chunks_exact_mut(width).zip(y.chunks_exact(count.max(1))) {
            for (wanted, y) in wanted[first..].iter_mut().zip(y) {
                *wanted = f64::from(*wanted as f32 + 0.3 * y);
            }
        }
        check(&x, &wanted, 0.0, |exec, x| add_scaled_columns(exec, RowsMut::new(x, width, first), &y, count, 0.3));
    }
}

fn check_limits(rows: usize, width: usize, seed: u32) {
    let x = numbers(rows * width, seed);
    let wanted: Vec<f64> = x.iter().map(|x| f64::from(x * 0.3)).collect();
    check(&x, &wanted, 0.0, |exec, x| scale(exec, x, 0.3));
    let factors: Vec<f32> = (0..rows).map(|row| 1.0 + row as f32 * 0.1).collect();
    for (first, count) in [(0, width), (width / 3, width / 3)] {
        let is_scaled = |i: usize| (first..first + count).contains(&(i % width));
        let scaled = |(i, x): (usize, &f32)| f64::from(if is_scaled(i) { x * factors[i / width] } else { *x });
        let wanted: Vec<f64> = x.iter().enumerate().map(scaled).collect();
        check(&x, &wanted, 0.0, |exec, x| scale_rows(exec, RowsMut::new(x, width, first), count, &factors));
    }
    let cap = 0.7;
    let wanted: Vec<f64> = wide(&x).iter().map(|x| f64::from(cap) * (x / f64::from(cap)).tanh()).collect();
    check(&x, &wanted, 1e-6, |exec, x| softcap(exec, x, cap));
    // All columns, and those from one third to two thirds.
    for (first, count) in [(0, width), (width / 3, width / 3)] {
        let is_clipped = |i: usize| (first..first + count).contains(&(i % width));
        let clipped = |(i, x): (usize, &f32)| f64::from(if is_clipped(i) { x.clamp(-0.6, 0.6) } else { *x });
        let wanted: Vec<f64> = x.iter().enumerate().map(clipped).collect();
        check(&x, &wanted, 0.0, |exec, x| clip(exec, RowsMut::new(x, width, first), count, 0.6));
    }
}

/// Uses enough rows for parallel execution.
#[test]
fn many_rows_agree_with_f64() {
    check_norms(70, 600, 1);
    check_heads(50, 4, 130, 7, 2);
    check_unit_heads(50, 4, 130, 7, 2);
    check_rope(60, 3, 33, 80, 3);
    check_activations(40, 501, 4);
    check_sums(40, 700, 5);
    check_limits(40, 701, 6);
}

#[test]
fn empty_matrices_are_supported() {
    check_norms(0, 16, 1);
    check_heads(0, 2, 16, 0, 1);
    check_unit_heads(0, 2, 16, 0, 1);
    check_rope(0, 2, 8, 0, 1);
    check_activations(0, 16, 1);
    check_sums(0, 16, 1);
    check_limits(0, 16, 1);
}

/// Returns the bits that an operation writes to `out`, on all instruction sets.
fn bits(out: &[f32], operation: impl Fn(&Exec<'_>, &mut [f32]) -> Result<(), PoolError>) -> Vec<Vec<u32>> {
    let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
    let run = |isa| {
        let mut out = out.to_vec();
        operation(&Exec { isa, pool: &pool, cancel: &cancel }, &mut out).expect("runs");
        out.iter().map(|x| x.to_bits()).collect()
    };
    Isa::available().into_iter().map(run).collect()
}

/// NaN affects only its own element, in whole vectors and in the tail.
#[test]
fn nan_propagates_to_its_own_element_only() {
    const WIDTH: usize = 37;
    let clean = numbers(2 * WIDTH, 1);
    for at in [0, 20, WIDTH - 1] {
        let is_alone = |out: &[u32]| out.iter().enumerate().all(|(i, x)| f32::from_bits(*x).is_nan() == (i == at));
        let mut x = clean.to_vec();
        x[at] = f32::NAN;
        for activation in ACTIVATIONS {
            let out = bits(&x, |exec, x| activate(exec, x, activation));
            assert!(out.iter().all(|out| is_alone(out)), "{activation:?} at {at}");
        }
        assert!(bits(&x, |exec, x| softcap(exec, x, 2.0)).iter().all(|out| is_alone(out)), "at {at}");
        let clipped = bits(&x, |exec, x| clip(exec, RowsMut::new(x, WIDTH, 0), WIDTH, 0.5));
        assert!(clipped.iter().all(|out| is_alone(out)), "at {at}");
        for gating in ACTIVATIONS.map(Gating::Plain).into_iter().chain(CLAMPED) {
            for half in [0, WIDTH] {
                let mut gate_up = clean.to_vec();
                gate_up[half + at] = f32::NAN;
                let out = bits(&[0.0; WIDTH], |exec, out| gated(exec, &gate_up, WIDTH, gating, out));
                assert!(out.iter().all(|out| is_alone(out)), "{gating:?} at {at} of {half}");
            }
        }
    }
}

/// Row-wise operations are batch invariant: a row has the same bits alone and among others. For elementwise operations
/// the same holds for groups of elements.
#[test]
fn rows_are_batch_invariant() {
    const WIDTH: usize = 43;
    type Operation<'a> = &'a dyn Fn(&Exec<'_>, &[f32], &mut [f32]) -> Result<(), PoolError>;
    let (weight, bias) = (numbers(WIDTH, 2), numbers(WIDTH, 3));
    let weights = &NormWeights { weight: Some(&weight), bias: Some(&bias), weight_offset: 1.0, eps: EPS };
    let of_heads = &NormWeights { weight: Some(&weight[..20]), bias: Some(&bias[..20]), ..*weights };
    let (x, out) = (numbers(5 * 2 * WIDTH, 4), numbers(5 * WIDTH, 5));
    // Operation, length of a row, and number of inputs per output.
    let operations: [(Operation<'_>, usize, usize); 13] = [
        (&|exec, x, out| rms_norm(exec, x, WIDTH, weights, out), WIDTH, 1),
        (&|exec, x, out| layer_norm(exec, x, WIDTH, weights, out), WIDTH, 1),
        (&|exec, _, out| rms_norm_heads(exec, RowsMut::new(out, WIDTH, 1), 2, 20, of_heads), WIDTH, 1),
        (&|exec, _, out| layer_norm_heads(exec, RowsMut::new(out, WIDTH, 1), 2, 20, of_heads), WIDTH, 1),
        (&|exec, _, out| l2_norm_heads(exec, RowsMut::new(out, WIDTH, 1), 2, 20, EPS, 0.3), WIDTH, 1),
        (&|exec, x, out| gated(exec, x, WIDTH, CLAMPED[0], out), WIDTH, 2),
        (&|exec, x, out| apply_gate(exec, out, WIDTH, Rows::new(x, WIDTH, 0), Activation::Silu), WIDTH, 1),
        (&|exec, _, out| clip(exec, RowsMut::new(out, WIDTH, 1), 40, 0.5), WIDTH, 1),
        (&|exec, _, out| activate(exec, out, Activation::GeluQuick), 7, 1),
        (&|exec, _, out| softcap(exec, out, 1.5), 7, 1),
        (&|exec, _, out| scale(exec, out, 0.3), 7, 1),
        (&|exec, x, out| add_scaled(exec, out, x, 0.3), 7, 1),
        (&|exec, x, out| add_scaled_columns(exec, RowsMut::new(out, WIDTH, 0), x, WIDTH, 0.3), WIDTH, 1),
    ];
    for (case, (operation, row, inputs)) in operations.into_iter().enumerate() {
        let x = &x[..out.len() * inputs];
        let together = bits(&out, |exec, out| operation(exec, x, out));
        let apart = bits(&out, |exec, out| {
            out.chunks_mut(row).zip(x.chunks(row * inputs)).try_for_each(|(out, x)| operation(exec, x, out))
        });
        assert_eq!(together, apart, "operation {case}");
    }
}

#[test]
fn rows_of_small_variance_are_normalized() {
    check_norms(2, 2, 52_366);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_width_agrees_with_f64(rows in 1usize..5, width in 1usize..200, seed in any::<u16>()) {
        check_norms(rows, width, seed.into());
        check_activations(rows, width, seed.into());
        check_sums(rows, width, seed.into());
        check_limits(rows, width, seed.into());
    }

    #[test]
    fn any_heads_agree_with_f64(
        rows in 1usize..4, heads in 1usize..5, dim in 1usize..100, first in 0usize..20, seed in any::<u16>(),
    ) {
        check_heads(rows, heads, dim, first, seed.into());
        check_unit_heads(rows, heads, dim, first, seed.into());
        check_rope(rows, heads, dim / 2, dim % 2 * 7, seed.into());
    }
}
