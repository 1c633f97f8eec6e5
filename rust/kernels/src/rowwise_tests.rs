//! Norms, rotation, gates and sums against f64, at any width, on buffers that end where memory ends.

use std::num::NonZeroUsize;

use proptest::prelude::*;

use crate::activation::{Activation, activate, gated};
use crate::arch::Isa;
use crate::elementwise::{add, add_bias};
use crate::guard::Guarded;
use crate::norm::{layer_norm, rms_norm, rms_norm_in_place};
use crate::rope::{Rope, rope_in_place};
use crate::{Cancel, Exec, Pool, RowsMut};

const EPS: f32 = 1e-5;

/// Runs `operation` on every instruction set, with one thread and with three, on a guarded copy of `out`, and checks
/// that the threads change no bit and that `wanted` is met to `tolerance`.
fn check(
    out: &[f32],
    wanted: &[f64],
    tolerance: f64,
    operation: impl Fn(&Exec<'_>, &mut [f32]) -> Result<(), crate::PoolError>,
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

fn rms_norm_oracle(x: &[f32], weight: &[f32], offset: f32) -> Vec<f64> {
    let x = wide(x);
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
    x.iter().zip(weight).map(|(x, weight)| x * scale * (f64::from(*weight) + f64::from(offset))).collect()
}

fn layer_norm_oracle(x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f64> {
    let x = wide(x);
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (variance + f64::from(EPS)).sqrt();
    let bias = |i: usize| bias.map_or(0.0, |bias| f64::from(bias[i]));
    x.iter().zip(weight).enumerate().map(|(i, (x, w))| (x - mean) * scale * f64::from(*w) + bias(i)).collect()
}

fn check_norms(rows: usize, width: usize, seed: u32) {
    let (x, weight, bias) = (numbers(rows * width, seed), numbers(width, seed + 1), numbers(width, seed + 2));
    let out = vec![f32::NAN; rows * width];
    for offset in [0.0, 1.0] {
        let wanted: Vec<f64> = x.chunks(width).flat_map(|x| rms_norm_oracle(x, &weight, offset)).collect();
        check(&out, &wanted, 2e-6, |exec, out| rms_norm(exec, &x, &weight, offset, EPS, out));
    }
    // A large mean must not cancel the variance.
    let far: Vec<f32> = x.iter().map(|x| x + 100.0).collect();
    if width > 1 {
        let wanted: Vec<f64> = far.chunks(width).flat_map(|x| layer_norm_oracle(x, &weight, None)).collect();
        check(&out, &wanted, 2e-4, |exec, out| layer_norm(exec, &far, &weight, None, EPS, out));
    }
    let wanted: Vec<f64> = x.chunks(width).flat_map(|x| layer_norm_oracle(x, &weight, Some(&bias))).collect();
    check(&out, &wanted, 4e-5, |exec, out| layer_norm(exec, &x, &weight, Some(&bias), EPS, out));
}

fn check_heads(rows: usize, heads: usize, dim: usize, first: usize, seed: u32) {
    let stride = first + heads * dim + 2;
    let (x, weight) = (numbers(rows * stride, seed), numbers(dim, seed + 1));
    let mut wanted = wide(&x);
    for (row, wanted) in x.chunks(stride).zip(wanted.chunks_mut(stride)) {
        for head in 0..heads {
            let columns = first + head * dim..first + (head + 1) * dim;
            wanted[columns.clone()].copy_from_slice(&rms_norm_oracle(&row[columns], &weight, 0.5));
        }
    }
    check(&x, &wanted, 2e-6, |exec, x| {
        rms_norm_in_place(exec, RowsMut::new(x, stride, first), heads, &weight, 0.5, EPS)
    });
}

fn check_rope(rows: usize, heads: usize, half: usize, rest: usize, seed: u32) {
    let (dim, first) = (2 * half + rest, 3);
    let stride = first + heads * dim + 1;
    let x = numbers(rows * stride, seed);
    let angle = |i: usize| (i * 7 % 1000) as f32;
    let cos = Guarded::new(&(0..rows * half).map(|i| angle(i).cos()).collect::<Vec<_>>());
    let sin = Guarded::new(&(0..rows * half).map(|i| angle(i).sin()).collect::<Vec<_>>());
    for interleaved in [false, true] {
        let mut wanted = wide(&x);
        for (row, wanted) in wanted.chunks_mut(stride).enumerate() {
            for head in 0..heads {
                let head = &mut wanted[first + head * dim..][..dim];
                for pair in 0..half {
                    let (a, b) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
                    let (cos, sin) = (f64::from(cos[row * half + pair]), f64::from(sin[row * half + pair]));
                    (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
                }
            }
        }
        let rope = Rope { heads, head_dim: dim, rotary_dim: 2 * half, interleaved, cos: &cos, sin: &sin };
        check(&x, &wanted, 1e-6, |exec, x| rope_in_place(exec, RowsMut::new(x, stride, first), &rope));
    }
}

fn check_gates(rows: usize, width: usize, seed: u32) {
    let gate_up = numbers(rows * 2 * width, seed);
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let wanted: Vec<f64> = gate_up
        .chunks(2 * width)
        .flat_map(|row| (0..width).map(|i| silu(f64::from(row[i])) * f64::from(row[width + i])))
        .collect();
    let out = vec![f32::NAN; rows * width];
    check(&out, &wanted, 1e-6, |exec, out| gated(exec, &gate_up, width, Activation::Silu, out));

    let tanh = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
    let wanted: Vec<f64> = gate_up.iter().map(|x| tanh(f64::from(*x))).collect();
    check(&gate_up, &wanted, 1e-6, |exec, x| activate(exec, x, Activation::GeluTanh));
    // Both forms of GELU are within 5e-4 of each other.
    check(&gate_up, &wanted, 1e-3, |exec, x| activate(exec, x, Activation::Gelu));
}

fn check_sums(rows: usize, width: usize, seed: u32) {
    let (x, y, bias) = (numbers(rows * width, seed), numbers(rows * width, seed + 1), numbers(width, seed + 2));
    let wanted: Vec<f64> = x.iter().zip(y.iter()).map(|(x, y)| f64::from(x + y)).collect();
    check(&x, &wanted, 0.0, |exec, x| add(exec, x, &y));
    let wanted: Vec<f64> = x.iter().zip(bias.iter().cycle()).map(|(x, bias)| f64::from(x + bias)).collect();
    check(&x, &wanted, 0.0, |exec, x| add_bias(exec, x, &bias));
}

/// Enough rows that the pool is used.
#[test]
fn many_rows_agree_with_f64() {
    check_norms(70, 600, 1);
    check_heads(50, 4, 130, 7, 2);
    check_rope(60, 3, 33, 80, 3);
    check_gates(40, 501, 4);
    check_sums(40, 700, 5);
}

#[test]
fn no_rows_are_no_work() {
    check_norms(0, 16, 1);
    check_heads(0, 2, 16, 0, 1);
    check_rope(0, 2, 8, 0, 1);
    check_gates(0, 16, 1);
    check_sums(0, 16, 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_width_agrees_with_f64(rows in 1usize..5, width in 1usize..200, seed in any::<u16>()) {
        check_norms(rows, width, seed.into());
        check_gates(rows, width, seed.into());
        check_sums(rows, width, seed.into());
    }

    #[test]
    fn any_heads_agree_with_f64(
        rows in 1usize..4, heads in 1usize..5, dim in 1usize..100, first in 0usize..20, seed in any::<u16>(),
    ) {
        check_heads(rows, heads, dim, first, seed.into());
        check_rope(rows, heads, dim / 2, dim % 2 * 7, seed.into());
    }
}
