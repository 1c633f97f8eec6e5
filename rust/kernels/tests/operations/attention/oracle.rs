//! Reference implementation of attention in f64, token by token.

use std::ops::Range;

use ferrule_kernels::attention::{ATTENTION_BLOCK, AttentionShape};
use ferrule_kernels::kv::KvFormat;

use super::Case;
use crate::kv::dequantized;

/// Computes the attention of the rows at `positions` in f64, with K and V rounded to the format. Returns each element and
/// its tolerance, from f32 rounding and, for int8, from quantizing probabilities.
pub(super) fn oracle(case: &Case, positions: Range<usize>) -> Vec<(f64, f64)> {
    let AttentionShape {
        heads,
        kv_heads,
        key_dim,
        value_dim,
        scale,
        bidirectional,
        window,
        chunk,
        softcap,
        slopes,
        sinks,
        ..
    } = case.shape();
    let [q_width, k_width, v_width] = case.widths();
    let stride = q_width + k_width + v_width;
    let qkv = case.qkv();
    let rounded = |numbers: &[f32]| -> Vec<f64> {
        let round = |x: &f32| match case.format {
            KvFormat::F32 | KvFormat::Int8 => f64::from(*x),
            KvFormat::F16 => half::f16::from_f32(*x).to_f64(),
            KvFormat::Bf16 => half::bf16::from_f32(*x).to_f64(),
        };
        match case.format {
            KvFormat::Int8 => dequantized(numbers).iter().map(round).collect(),
            _ => numbers.iter().map(round).collect(),
        }
    };
    let heads_of = |first: usize, width: usize, head: usize| -> Vec<Vec<f64>> {
        (0..case.tokens).map(|token| rounded(&qkv[token * stride + first + head * width..][..width])).collect()
    };
    let keys: Vec<_> = (0..kv_heads).map(|head| heads_of(q_width, key_dim, head)).collect();
    let values: Vec<_> = (0..kv_heads).map(|head| heads_of(q_width + k_width, value_dim, head)).collect();
    let scale_of = |numbers: &Vec<f64>| numbers.iter().fold(0f64, |largest, x| largest.max(x.abs())) / 127.0;
    let scales: Vec<Vec<_>> = values.iter().map(|values| values.iter().map(scale_of).collect()).collect();
    let mut out = Vec::new();
    for position in positions {
        let sees = |token: &usize| {
            (bidirectional || *token <= position)
                && chunk.is_none_or(|chunk| *token >= position / chunk * chunk)
                && window.is_none_or(|window| token.abs_diff(position) < window)
        };
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let chosen = case.sets.map(|sets| case.chosen(kv_head / (kv_heads / sets), position));
            let is_chosen = |token: &usize| chosen.as_ref().is_none_or(|chosen| chosen.contains(token));
            let tokens: Vec<usize> = (0..case.tokens).filter(sees).filter(is_chosen).collect();
            let (keys, values, scales) = (&keys[kv_head], &values[kv_head], &scales[kv_head]);
            let q = &qkv[position * stride + head * key_dim..][..key_dim];
            let q = if case.format == KvFormat::Int8 {
                quantized_query(q)
            } else {
                q.iter().map(|x| f64::from(*x)).collect()
            };
            let bias =
                |token: usize| slopes.map_or(0.0, |slopes| f64::from(slopes[head]) * (token as f64 - position as f64));
            let score = |token: &usize| {
                let dot: f64 = q.iter().zip(&keys[*token]).map(|(q, k)| q * k).sum();
                let score = dot * f64::from(scale);
                softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()) + bias(*token)
            };
            let scores: Vec<f64> = tokens.iter().map(score).collect();
            let sink = sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
            let max = scores.iter().copied().fold(sink, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let sum = weights.iter().sum::<f64>() + (sink - max).exp();
            let mut output = vec![0.0; value_dim];
            // Largest weight times scale of V in each block.
            let mut heaviest = vec![0f64; case.tokens.div_ceil(ATTENTION_BLOCK)];
            for (token, weight) in tokens.iter().zip(&weights) {
                output.iter_mut().zip(&values[*token]).for_each(|(output, value)| *output += weight / sum * value);
                let block = &mut heaviest[token / ATTENTION_BLOCK];
                *block = block.max(weight / sum * scales[*token]);
            }
            let mut tolerance = vec![2e-5; value_dim];
            for (token, weight) in tokens.iter().zip(&weights) {
                // Adding a large bias to a score loses precision: a product and a sum are rounded.
                let rounding = weight / sum * bias(*token).abs() * f64::from(f32::EPSILON);
                // Half a step of the second digit.
                let step = if case.format == KvFormat::Int8 {
                    heaviest[token / ATTENTION_BLOCK] / scales[*token].max(f64::MIN_POSITIVE) / 127.0 / 254.0
                } else {
                    0.0
                };
                for ((tolerance, output), value) in tolerance.iter_mut().zip(&output).zip(&values[*token]) {
                    *tolerance += rounding * (value - output).abs() + step * value.abs();
                }
            }
            out.extend(output.into_iter().zip(tolerance));
        }
    }
    out
}

/// Quantizes and dequantizes Q with one scale for 256 columns.
fn quantized_query(q: &[f32]) -> Vec<f64> {
    let coded = |group: &[f32]| -> Vec<f64> {
        let largest = group.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let scale = largest / 127.0;
        group.iter().map(|x| f64::from((x * scale.recip()).round_ties_even()) * f64::from(scale)).collect()
    };
    q.chunks(256).flat_map(coded).collect()
}

pub(super) fn assert_close(got: &[f32], wanted: &[(f64, f64)], what: &str) {
    assert_eq!(got.len(), wanted.len());
    for (index, (got, (wanted, tolerance))) in got.iter().zip(wanted).enumerate() {
        let off = (f64::from(*got) - wanted).abs();
        assert!(off <= *tolerance, "{what}, element {index}: {got} for {wanted} within {tolerance}");
    }
}
