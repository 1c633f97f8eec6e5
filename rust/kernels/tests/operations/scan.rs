//! Recurrences against f64, at any shape, on guarded buffers. Every way to divide sequences into segments has the same
//! bits.

use std::num::NonZeroUsize;
use std::ops::Range;

use ferrule_kernels::activation::Activation;
use ferrule_kernels::arch::{Isa, LANES};
use ferrule_kernels::scan::{
    CausalConvolution, Decay, Gate, InputOutputGates, LinearAttention, Segment, SelectiveScan, SoftmaxPooling,
    UpdateRule, Wkv, causal_convolution, gates, linear_attention, selective_scan, softmax_pooling,
    softmax_pooling_state_len, wkv,
};
use ferrule_kernels::{Cancel, Exec, Pool, PoolError, Rows, RowsMut};
use proptest::prelude::*;

use crate::guard::Guarded;

fn numbers(len: usize, seed: u32) -> Guarded<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    Guarded::new(&(0..len).map(|_| next()).collect::<Vec<_>>())
}

/// Returns numbers from 0 to 1.
fn fractions(len: usize, seed: u32) -> Guarded<f32> {
    Guarded::new(&numbers(len, seed).iter().map(|x| 0.5 * x + 0.5).collect::<Vec<_>>())
}

fn on(isa: Isa, threads: usize, run: impl FnOnce(&Exec<'_>) -> Result<(), PoolError>) {
    let (pool, cancel) = (Pool::new(NonZeroUsize::new(threads).expect("some")), Cancel::new());
    run(&Exec { isa, pool: &pool, cancel: &cancel }).expect("runs");
}

/// Columns of a row of states before and after those of the view, which belong to other layers: a view that is not aligned
/// to cache lines, and one that is if the state is a whole number of them.
const OTHERS: [[usize; 2]; 2] = [[3, 2], [LANES, 0]];

type Run<'a> = &'a dyn Fn(&Exec<'_>, &[Segment], RowsMut<'_>, &mut [f32]) -> Result<(), PoolError>;

/// A recurrence of `width` columns of output with states of `state_len` floats.
struct Recurrence<'a> {
    width: usize,
    state_len: usize,
    run: Run<'a>,
}

impl Recurrence<'_> {
    /// Checks sequences of these lengths against `oracle`, which is called for the rows of each, and every division of
    /// them at the fraction `cut` of their length.
    fn check(&self, lengths: &[usize], cut: f64, tolerance: f64, oracle: impl Fn(Range<usize>) -> Vec<f64>) {
        let rows: usize = lengths.iter().sum();
        let ends = lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        });
        let sequences: Vec<_> = ends.zip(lengths).map(|(end, length)| end - length..end).collect();
        let wanted: Vec<f64> = sequences.iter().flat_map(|rows| oracle(rows.clone())).collect();
        let slots = 3 * sequences.len();
        for (isa, [columns_before, columns_after]) in
            Isa::available().into_iter().flat_map(|isa| OTHERS.map(|others| (isa, others)))
        {
            let stride = columns_before + self.state_len + columns_after;
            let states = Guarded::new(&vec![f32::NAN; slots * stride]);
            let (mut whole, mut whole_states) = (Guarded::new(&vec![f32::NAN; rows * self.width]), states);
            let segments: Vec<_> = (sequences.iter().enumerate())
                .map(|(new, rows)| Segment { first_row: rows.start, rows: rows.len(), old: None, new })
                .collect();
            on(isa, 1, |exec| {
                (self.run)(exec, &segments, RowsMut::new(&mut whole_states, stride, columns_before), &mut whole)
            });
            for (index, (got, wanted)) in whole.iter().zip(&wanted).enumerate() {
                let error = (f64::from(*got) - wanted).abs();
                assert!(error <= tolerance * wanted.abs().max(1.0), "{} {index}: {got} for {wanted}", isa.name());
            }
            // One call up to the cut of each sequence; then one from there on, in two segments and into other slots.
            let (mut out, mut states) =
                (Guarded::new(&vec![f32::NAN; rows * self.width]), Guarded::new(&vec![f32::NAN; slots * stride]));
            let cuts: Vec<_> =
                sequences.iter().map(|rows| rows.start + (cut * rows.len() as f64).round() as usize).collect();
            let first: Vec<_> = (sequences.iter().zip(&cuts).enumerate())
                .map(|(new, (rows, cut))| Segment { first_row: rows.start, rows: cut - rows.start, old: None, new })
                .collect();
            let second: Vec<_> = (sequences.iter().zip(&cuts).enumerate())
                .flat_map(|(index, (rows, &cut))| {
                    let (middle, slot) = ((cut + rows.end) / 2, sequences.len() + 2 * index);
                    [
                        Segment { first_row: cut, rows: middle - cut, old: Some(index), new: slot },
                        Segment { first_row: middle, rows: rows.end - middle, old: Some(slot), new: slot + 1 },
                    ]
                })
                .collect();
            on(isa, 3, |exec| (self.run)(exec, &first, RowsMut::new(&mut states, stride, columns_before), &mut out));
            let before = bits(&states[..sequences.len() * stride]);
            on(isa, 2, |exec| (self.run)(exec, &second, RowsMut::new(&mut states, stride, columns_before), &mut out));
            assert_eq!(bits(&out), bits(&whole), "{}", isa.name());
            assert_eq!(bits(&states[..sequences.len() * stride]), before, "a step must not change the states it reads");
            for index in 0..sequences.len() {
                let [last, only] = [(&states, sequences.len() + 2 * index + 1), (&whole_states, index)]
                    .map(|(states, slot)| bits(&states[slot * stride..][..stride]));
                assert_eq!(last, only, "{}", isa.name());
            }
            // From the cut on in place.
            let in_place: Vec<_> = (sequences.iter().zip(&cuts).enumerate())
                .map(|(slot, (rows, &cut))| Segment {
                    first_row: cut,
                    rows: rows.end - cut,
                    old: Some(slot),
                    new: slot,
                })
                .collect();
            on(isa, 3, |exec| (self.run)(exec, &in_place, RowsMut::new(&mut states, stride, columns_before), &mut out));
            assert_eq!(bits(&out), bits(&whole), "{}", isa.name());
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Shapes of a linear attention.
#[derive(Debug, Clone, Copy)]
struct Shape {
    key_heads: usize,
    /// Heads of values for each head of keys.
    group: usize,
    alternating: bool,
    key_dim: usize,
    value_dim: usize,
}

/// Kind of decay.
#[derive(Debug, Clone, Copy)]
enum DecayKind {
    Constant,
    Heads,
    Keys,
}

fn check_linear(shape: Shape, rule: UpdateRule, kind: DecayKind, extras: bool, lengths: &[usize], cut: f64, seed: u32) {
    let Shape { key_heads, group, alternating, key_dim, value_dim } = shape;
    let heads = key_heads * group;
    let (rows, keys, values) = (lengths.iter().sum::<usize>(), key_heads * key_dim, heads * value_dim);
    // Queries, keys and values side by side, as a projection returns them. Keys are at most of unit length, as those of
    // models with the delta rule are.
    let width = 2 * keys + values + 1;
    let scale = 1.0 / (key_dim as f32).sqrt();
    let qkv: Vec<_> = numbers(rows * width, seed)
        .iter()
        .enumerate()
        .map(|(index, x)| if index % width < 2 * keys { x * scale } else { *x })
        .collect();
    let qkv = Guarded::new(&qkv);
    let [q, k, v] = [0, keys, 2 * keys].map(|first| Rows::new(&qkv, width, first));
    // A third of the decays by head are so strong that elements of the state vanish, or nearly.
    let strong = |(index, x): (usize, &f32)| match (index as u32 ^ seed) % 9 {
        0 => 0.0,
        1 => x * 1e-30,
        2 => x * 1e-12,
        _ => *x,
    };
    let by_head: Vec<_> = fractions(rows * heads, seed + 2).iter().enumerate().map(strong).collect();
    let (constant, by_head, by_key) =
        (fractions(heads, seed + 1), Guarded::new(&by_head), fractions(rows * heads * key_dim, seed + 3));
    let (factors, skips) = (fractions(rows * heads, seed + 4), numbers(heads, seed + 5));
    let attention = LinearAttention {
        heads,
        key_heads,
        alternating,
        key_dim,
        value_dim,
        decay: match kind {
            DecayKind::Constant => Decay::Constant(&constant),
            DecayKind::Heads => Decay::Heads(Rows::new(&by_head, heads, 0)),
            DecayKind::Keys => Decay::Keys(Rows::new(&by_key, heads * key_dim, 0)),
        },
        rule,
        factor: extras.then(|| Rows::new(&factors, heads, 0)),
        skip: extras.then_some(&skips[..]),
    };
    let oracle = |sequence: Range<usize>| {
        let mut states = vec![vec![0.0; key_dim * value_dim]; heads];
        let mut out = Vec::new();
        for row in sequence {
            for (head, state) in states.iter_mut().enumerate() {
                let key_head = if alternating { head % key_heads } else { head / group };
                let [q, k] = [q, k].map(|view| wide(&view.row(row, keys)[key_head * key_dim..][..key_dim]));
                let v = wide(&v.row(row, values)[head * value_dim..][..value_dim]);
                for (i, s) in state.chunks_mut(value_dim).enumerate() {
                    let decay = match kind {
                        DecayKind::Constant => constant[head],
                        DecayKind::Heads => by_head[row * heads + head],
                        DecayKind::Keys => by_key[(row * heads + head) * key_dim + i],
                    };
                    s.iter_mut().for_each(|s| *s *= f64::from(decay));
                }
                let read = |state: &[f64], by: &[f64], column: usize| -> f64 {
                    state.chunks(value_dim).zip(by).map(|(s, by)| s[column] * by).sum()
                };
                let factor = if extras { f64::from(factors[row * heads + head]) } else { 1.0 };
                let updates: Vec<_> = (0..value_dim)
                    .map(|column| match rule {
                        UpdateRule::Add => factor * v[column],
                        UpdateRule::Delta => factor * (v[column] - read(state, &k, column)),
                    })
                    .collect();
                for (s, k) in state.chunks_mut(value_dim).zip(&k) {
                    s.iter_mut().zip(&updates).for_each(|(s, u)| *s += k * u);
                }
                let skip = if extras { f64::from(skips[head]) } else { 0.0 };
                out.extend((0..value_dim).map(|column| read(state, &q, column) + skip * v[column]));
            }
        }
        out
    };
    let run = |exec: &Exec<'_>, segments: &[Segment], states: RowsMut<'_>, out: &mut [f32]| {
        linear_attention(exec, q, k, v, &attention, segments, states, out)
    };
    Recurrence { width: values, state_len: attention.state_len(), run: &run }.check(lengths, cut, 2e-5, oracle);
}

fn check_selective(channels: usize, states: usize, lengths: &[usize], cut: f64, seed: u32) {
    let rows: usize = lengths.iter().sum();
    let rates: Vec<_> = fractions(channels * states, seed).iter().map(|x| -4.0 * x).collect();
    let skips = numbers(channels, seed + 1);
    let scan = SelectiveScan::new(&rates, &skips);
    let (x, steps) = (numbers(rows * channels, seed + 2), fractions(rows * channels, seed + 3));
    let bc = numbers(rows * 2 * states, seed + 4);
    let [x, steps] = [&x, &steps].map(|values| Rows::new(values, channels, 0));
    let [b, c] = [0, states].map(|first| Rows::new(&bc, 2 * states, first));
    let oracle = |sequence: Range<usize>| {
        let mut state = vec![0.0; channels * states];
        let mut out = Vec::new();
        for row in sequence {
            let [x, steps] = [x, steps].map(|view| wide(view.row(row, channels)));
            let [b, c] = [b, c].map(|view| wide(view.row(row, states)));
            for (channel, h) in state.chunks_mut(states).enumerate() {
                let mut sum = f64::from(skips[channel]) * x[channel];
                for (n, h) in h.iter_mut().enumerate() {
                    let rate = f64::from(rates[channel * states + n]);
                    *h = (rate * steps[channel]).exp() * *h + b[n] * steps[channel] * x[channel];
                    sum += c[n] * *h;
                }
                out.push(sum);
            }
        }
        out
    };
    let run = |exec: &Exec<'_>, segments: &[Segment], states: RowsMut<'_>, out: &mut [f32]| {
        selective_scan(exec, [x, steps, b, c], &scan, segments, states, out)
    };
    Recurrence { width: channels, state_len: scan.state_len(), run: &run }.check(lengths, cut, 2e-5, oracle);
}

/// Checks keys up to `largest` in magnitude.
fn check_wkv(channels: usize, largest: f32, lengths: &[usize], cut: f64, tolerance: f64, seed: u32) {
    let rows: usize = lengths.iter().sum();
    let rates: Vec<_> = fractions(channels, seed).iter().map(|x| -2.0 * x).collect();
    let bonuses = numbers(channels, seed + 1);
    let weights = Wkv::new(&rates, &bonuses);
    // Keys and values side by side, with a column of another view.
    let width = 2 * channels + 1;
    let inputs: Vec<_> = (numbers(rows * width, seed + 2).iter().enumerate())
        .map(|(index, x)| if index % width < channels { largest * x } else { *x })
        .collect();
    let inputs = Guarded::new(&inputs);
    let [k, v] = [0, channels].map(|first| Rows::new(&inputs, width, first));
    let oracle = |sequence: Range<usize>| {
        let mut out = Vec::new();
        for row in sequence.clone() {
            for channel in 0..channels {
                let [rate, bonus] = [&rates[..], &bonuses].map(|of| f64::from(of[channel]));
                let [key, value] = [k, v].map(|view| move |row| f64::from(view.row(row, channels)[channel]));
                let weight = |of: usize| {
                    let growth = if of == row { bonus } else { rate * (row - 1 - of) as f64 };
                    (growth + key(of)).exp()
                };
                let total: f64 = (sequence.start..=row).map(weight).sum();
                out.push((sequence.start..=row).map(|of| weight(of) * value(of)).sum::<f64>() / total);
            }
        }
        out
    };
    let run = |exec: &Exec<'_>, segments: &[Segment], states: RowsMut<'_>, out: &mut [f32]| {
        wkv(exec, [k, v], &weights, segments, states, out)
    };
    Recurrence { width: channels, state_len: weights.state_len(), run: &run }.check(lengths, cut, tolerance, oracle);
}

/// Checks gates up to `largest` in magnitude.
fn check_pooling([channels, block]: [usize; 2], overlap: bool, largest: f32, lengths: &[usize], cut: f64, seed: u32) {
    let rows: usize = lengths.iter().sum();
    let columns = channels * if overlap { 2 } else { 1 };
    let bias = numbers(block * columns, seed);
    let pooling = SoftmaxPooling { channels, block, overlap, bias: &bias };
    // Values and gates side by side, with a column of another view.
    let width = 2 * columns + 1;
    let inputs: Vec<_> = (numbers(rows * width, seed + 1).iter().enumerate())
        .map(|(index, x)| if index % width < columns { *x } else { largest * x })
        .collect();
    let inputs = Guarded::new(&inputs);
    let [values, gates] = [0, columns].map(|first| Rows::new(&inputs, width, first));
    let positions: Vec<_> = lengths.iter().flat_map(|length| 0..*length).collect();
    let oracle = |sequence: Range<usize>| {
        let mut out = Vec::new();
        for row in 0..sequence.len() {
            for channel in 0..channels {
                if (row + 1) % block != 0 {
                    out.push(0.0);
                    continue;
                }
                // The tokens of the block, and with those of the block before it the first series of channels.
                let own = (row + 1 - block..row + 1).map(|token| (token, columns - channels + channel));
                let before = (row + 1).saturating_sub(2 * block)..(row + 1 - block) * usize::from(overlap);
                let tokens: Vec<_> = before.map(|token| (token, channel)).chain(own).collect();
                let of = |view: Rows<'_>, (token, column): (usize, usize)| {
                    f64::from(view.row(sequence.start + token, columns)[column])
                };
                let gate = |at: (usize, usize)| of(gates, at) + f64::from(bias[at.0 % block * columns + at.1]);
                let largest = tokens.iter().map(|at| gate(*at)).fold(f64::NEG_INFINITY, f64::max);
                let weight = |at: &(usize, usize)| (gate(*at) - largest).exp();
                let total: f64 = tokens.iter().map(weight).sum();
                out.push(tokens.iter().map(|at| weight(at) * of(values, *at)).sum::<f64>() / total);
            }
        }
        out
    };
    let run = |exec: &Exec<'_>, segments: &[Segment], states: RowsMut<'_>, out: &mut [f32]| {
        // Rows that end no block are unchanged.
        let mut means = vec![f32::NAN; out.len()];
        softmax_pooling(exec, [values, gates], &pooling, &positions, segments, states, &mut means)?;
        for Segment { first_row, rows, .. } in segments {
            for row in *first_row..first_row + rows {
                let means = &means[row * channels..][..channels];
                let ends = (positions[row] + 1).is_multiple_of(block);
                assert!(ends || means.iter().all(|x| x.is_nan()), "row {row} ends no block");
                let out = &mut out[row * channels..][..channels];
                out.copy_from_slice(if ends { means } else { &[0.0; 1000][..channels] });
            }
        }
        Ok(())
    };
    let state_len = softmax_pooling_state_len(channels, overlap);
    Recurrence { width: channels, state_len, run: &run }.check(lengths, cut, 2e-5, oracle);
}

fn check_convolution(channels: usize, taps: usize, extras: bool, lengths: &[usize], cut: f64, seed: u32) {
    let rows: usize = lengths.iter().sum();
    let (weights, bias) = (numbers(taps * channels, seed), numbers(channels, seed + 1));
    let width = 3 * channels;
    let inputs = numbers(rows * width, seed + 2);
    let [x, before, after] = [0, channels, 2 * channels].map(|first| Rows::new(&inputs, width, first));
    let convolution = CausalConvolution {
        channels,
        weights: &weights,
        bias: extras.then_some(&bias[..]),
        activation: (!extras).then_some(Activation::Silu),
        gates: extras.then_some(InputOutputGates { input: before, output: after }),
    };
    let oracle = |sequence: Range<usize>| {
        let input = |row: usize, channel: usize| {
            let factor = if extras { before.row(row, channels)[channel] } else { 1.0 };
            f64::from(x.row(row, channels)[channel] * factor)
        };
        let output = |row: usize, channel: usize| {
            let first = sequence.start;
            let sum: f64 = (0..taps)
                .filter(|tap| row + tap + 1 >= first + taps)
                .map(|tap| f64::from(weights[tap * channels + channel]) * input(row + tap + 1 - taps, channel))
                .sum();
            if extras {
                (sum + f64::from(bias[channel])) * f64::from(after.row(row, channels)[channel])
            } else {
                sum / (1.0 + (-sum).exp())
            }
        };
        sequence
            .clone()
            .flat_map(|row| (0..channels).map(move |channel| (row, channel)))
            .map(|(row, channel)| output(row, channel))
            .collect()
    };
    let run = |exec: &Exec<'_>, segments: &[Segment], states: RowsMut<'_>, out: &mut [f32]| {
        causal_convolution(exec, x, &convolution, segments, states, out)
    };
    Recurrence { width: channels, state_len: convolution.state_len(), run: &run }.check(lengths, cut, 1e-5, oracle);
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

#[test]
fn every_kind_of_linear_attention_agrees_with_f64() {
    let shape = Shape { key_heads: 2, group: 2, alternating: false, key_dim: 19, value_dim: 53 };
    for rule in [UpdateRule::Add, UpdateRule::Delta] {
        for (seed, kind) in [DecayKind::Constant, DecayKind::Heads, DecayKind::Keys].into_iter().enumerate() {
            for extras in [false, true] {
                check_linear(shape, rule, kind, extras, &[1, 7, 12], 0.4, seed as u32);
            }
        }
    }
}

#[test]
fn long_sequences_of_wide_heads_use_all_threads_and_agree_with_f64() {
    let shape = Shape { key_heads: 1, group: 3, alternating: false, key_dim: 128, value_dim: 128 };
    check_linear(shape, UpdateRule::Delta, DecayKind::Heads, true, &[70, 1], 0.7, 1);
    check_selective(300, 16, &[40, 9], 0.5, 2);
    check_wkv(600, 4.0, &[50, 9], 0.5, 2e-5, 4);
    check_convolution(600, 4, false, &[33, 1], 0.5, 3);
    check_pooling([300, 4], true, 3.0, &[70, 9], 0.5, 5);
}

#[test]
fn scales_of_long_sequences_stay_in_range() {
    // Constant decays of up to 1, over so many tokens that scales leave their range many times.
    let shape = Shape { key_heads: 1, group: 5, alternating: false, key_dim: 3, value_dim: 40 };
    for rule in [UpdateRule::Add, UpdateRule::Delta] {
        check_linear(shape, rule, DecayKind::Constant, true, &[700], 0.3, 7);
    }
}

#[test]
fn weights_of_large_keys_neither_overflow_nor_vanish() {
    // The exponent of a key of 300 has an error of 3e-5 in f32.
    check_wkv(21, 300.0, &[1, 12], 0.4, 2e-4, 1);
}

#[test]
fn a_segment_without_rows_copies_the_state() {
    let scan = SelectiveScan::new(&[-1.0, -2.0], &[0.5]);
    let (x, bc) = ([1.0; 1], [1.0; 4]);
    let [x, steps] = [Rows::new(&x, 1, 0); 2];
    let [b, c] = [0, 2].map(|first| Rows::new(&bc, 4, first));
    let len = scan.state_len();
    let mut states = vec![0.0; 2 * len];
    states[..len].iter_mut().enumerate().for_each(|(index, state)| *state = index as f32);
    let copy = Segment { first_row: 0, rows: 0, old: Some(0), new: 1 };
    let mut out = [7.0];
    on(Isa::best(), 1, |exec| {
        selective_scan(exec, [x, steps, b, c], &scan, &[copy], RowsMut::new(&mut states, len, 0), &mut out)
    });
    assert_eq!((out[0], &states[len..]), (7.0, &states.clone()[..len]));
}

#[test]
#[should_panic(expected = "row 0 is in a region")]
fn a_state_that_another_segment_writes_cannot_be_read() {
    let convolution =
        CausalConvolution { channels: 1, weights: &[1.0, 1.0], bias: None, activation: None, gates: None };
    let segments = [
        Segment { first_row: 0, rows: 1, old: None, new: 0 },
        Segment { first_row: 1, rows: 1, old: None, new: 1 },
        Segment { first_row: 2, rows: 1, old: Some(0), new: 2 },
    ];
    let (mut states, mut out) = ([0.0; 3], [0.0; 3]);
    on(Isa::best(), 1, |exec| {
        let states = RowsMut::new(&mut states, 1, 0);
        causal_convolution(exec, Rows::new(&[1.0; 3], 1, 0), &convolution, &segments, states, &mut out)
    });
}

fn check_gates(rows: usize, width: usize, seed: u32) {
    let stride = width + 3;
    let x = Guarded::new(&numbers(rows * stride, seed).iter().map(|x| 8.0 * x).collect::<Vec<_>>());
    let (bias, slopes) = (numbers(width, seed + 1), fractions(width, seed + 2));
    let rates = Guarded::new(&slopes.iter().map(|x| -x).collect::<Vec<_>>());
    let limits = [0.5, 6.0];
    let softplus = |x: f64| (1.0 + x.exp()).ln().clamp(0.5, 6.0);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    type Oracle<'a> = &'a dyn Fn(f64, usize) -> f64;
    let all: [(Gate<'_>, Oracle<'_>); 4] = [
        (Gate::Step { bias: &bias, limits }, &|x, i| softplus(x + f64::from(bias[i]))),
        (Gate::Decay { bias: &bias, limits, rates: &rates }, &|x, i| {
            (f64::from(rates[i]) * softplus(x + f64::from(bias[i]))).exp()
        }),
        (Gate::BoundedDecay { bias: &bias, slopes: &slopes, bound: -5.0 }, &|x, i| {
            (-5.0 * sigmoid(f64::from(slopes[i]) * (x + f64::from(bias[i])))).exp()
        }),
        (Gate::Sigmoid { scale: 2.0 }, &|x, _| 2.0 * sigmoid(x)),
    ];
    for (gate, oracle) in all {
        for isa in Isa::available() {
            let mut out = Guarded::new(&vec![f32::NAN; rows * width]);
            on(isa, 2, |exec| gates(exec, Rows::new(&x, stride, 2), &gate, width, &mut out));
            for (row, out) in out.chunks(width).enumerate() {
                for (i, got) in out.iter().enumerate() {
                    let wanted = oracle(f64::from(x[row * stride + 2 + i]), i);
                    let error = (f64::from(*got) - wanted).abs();
                    assert!(error <= 3e-6 * wanted.abs(), "{} {gate:?} {i}: {got} for {wanted}", isa.name());
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn gates_at_any_width(rows in 0..5_usize, width in 1..100_usize, seed: u32) {
        check_gates(rows, width, seed % 1000);
    }

    #[test]
    fn linear_attention_at_any_shape(
        key_heads in 1..3_usize,
        group in 1..3_usize,
        alternating: bool,
        key_dim in 1..40_usize,
        value_dim in 1..70_usize,
        is_delta: bool,
        kind in prop::sample::select(vec![DecayKind::Constant, DecayKind::Heads, DecayKind::Keys]),
        extras: bool,
        lengths in prop::collection::vec(1..9_usize, 1..4),
        cut in 0.0..=1.0_f64,
        seed: u32,
    ) {
        let rule = if is_delta { UpdateRule::Delta } else { UpdateRule::Add };
        let shape = Shape { key_heads, group, alternating, key_dim, value_dim };
        check_linear(shape, rule, kind, extras, &lengths, cut, seed % 1000);
    }

    #[test]
    fn selective_scan_at_any_shape(
        channels in 1..150_usize,
        states in 1..20_usize,
        lengths in prop::collection::vec(1..9_usize, 1..4),
        cut in 0.0..=1.0_f64,
        seed: u32,
    ) {
        check_selective(channels, states, &lengths, cut, seed % 1000);
    }

    #[test]
    fn wkv_at_any_shape(
        channels in 1..300_usize,
        largest in 0.0..10.0_f32,
        lengths in prop::collection::vec(1..9_usize, 1..4),
        cut in 0.0..=1.0_f64,
        seed: u32,
    ) {
        check_wkv(channels, largest, &lengths, cut, 2e-5, seed % 1000);
    }

    #[test]
    fn softmax_pooling_at_any_shape(
        channels in 1..300_usize,
        block in 1..6_usize,
        overlap: bool,
        largest in 0.0..40.0_f32,
        lengths in prop::collection::vec(1..20_usize, 1..4),
        cut in 0.0..=1.0_f64,
        seed: u32,
    ) {
        check_pooling([channels, block], overlap, largest, &lengths, cut, seed % 1000);
    }

    #[test]
    fn causal_convolution_at_any_shape(
        channels in 1..300_usize,
        taps in 1..6_usize,
        extras: bool,
        lengths in prop::collection::vec(1..9_usize, 1..4),
        cut in 0.0..=1.0_f64,
        seed: u32,
    ) {
        check_convolution(channels, taps, extras, &lengths, cut, seed % 1000);
    }
}
