//! Passes over a row of logits for sampling: block maxima, unnormalized probabilities, and sums and counts above a
//! threshold.
//!
//! They use plain arithmetic without fused operations, which the compiler vectorizes. Results are bitwise equal on all
//! instruction sets, so sampled tokens do not depend on the instruction set. Sums are f64 over eight lanes; their order
//! depends only on the indices of the summands.

// Coefficients are written as published or as fitted.
#![allow(clippy::excessive_precision)]

use crate::arch::{Isa, Kernel, LANES, Simd};

/// Number of logits per block maximum, and of weights per block sum.
pub const BLOCK: usize = 64;

/// Number of lanes of a sum.
const SUMS: usize = 8;

/// Computes e^x for x <= 0 with a relative error below 2e-15; exactly 1 at 0, and 0 instead of denormals.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2; e^r is 1 + r plus a polynomial that interpolates the rest at Chebyshev nodes.
#[inline(always)]
fn exp(x: f64) -> f64 {
    /// ln 2 in two parts, from Cephes; the first has few enough bits that its product with n is exact.
    const LN2_HIGH: f64 = 6.931_457_519_531_25e-1;
    const LN2_LOW: f64 = 1.428_606_820_309_417_232_12e-6;
    /// Coefficients of (e^r - 1 - r) / r^2, highest power first.
    const REST: [f64; 9] = [
        2.761_380_686_153_829e-07,
        2.762_511_557_828_763e-06,
        2.480_153_638_869_076_6e-05,
        1.984_120_873_253_638_4e-04,
        1.388_888_890_588_154_2e-03,
        8.333_333_353_729_397e-03,
        4.166_666_666_665_136e-02,
        1.666_666_666_664_829e-01,
        0.5,
    ];
    /// 1.5 * 2^52: adding it rounds to an integer, which is left in the low bits of the mantissa.
    const SHIFT: f64 = 6_755_399_441_055_744.0;
    /// Lower bound of x: n is -1023 there, and the bit pattern of 2^n is that of zero.
    const LOWEST: f64 = -709.0;
    let x = if x > LOWEST { x } else { LOWEST };
    let shifted = x * std::f64::consts::LOG2_E + SHIFT;
    let n = shifted - SHIFT;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut rest = REST[0];
    for coefficient in &REST[1..] {
        rest = rest * r + coefficient;
    }
    let power = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    (1.0 + (r + r * r * rest)) * power
}

/// Returns the unnormalized probability of a logit, `e^(logit - highest)`. The highest logit must be finite; its weight
/// is 1.
#[inline(always)]
#[must_use]
pub fn weight(logit: f32, highest: f32) -> f64 {
    exp(f64::from(logit) - f64::from(highest))
}

/// Returns `(logit - highest) / temperature`. The highest logit must be finite and becomes 0, so that small temperatures
/// do not overflow different logits to the same infinity.
#[inline(always)]
#[must_use]
pub fn scaled(logit: f32, highest: f32, temperature: f64) -> f32 {
    ((f64::from(logit) - f64::from(highest)) / temperature) as f32
}

/// Writes the maximum of every [`BLOCK`] logits. Returns false if a logit is NaN or positive infinity; the maxima are
/// then unspecified.
pub fn block_maxima(isa: Isa, logits: &[f32], maxima: &mut Vec<f32>) -> bool {
    maxima.resize(logits.len().div_ceil(BLOCK), 0.0);
    isa.run(BlockMaxima { logits, maxima })
}

/// Writes the [`weight`] of every logit, and the sum of every [`BLOCK`] weights.
pub fn weigh(isa: Isa, logits: &[f32], highest: f32, weights: &mut Vec<f64>, sums: &mut Vec<f64>) {
    weights.resize(logits.len(), 0.0);
    sums.resize(logits.len().div_ceil(BLOCK), 0.0);
    isa.run(Weigh { logits, highest, weights, sums });
}

/// Returns the sum of the [`weight`] of all logits, bitwise equal to the sum of the block sums of [`weigh`].
#[must_use]
pub fn total_weight(isa: Isa, logits: &[f32], highest: f32) -> f64 {
    isa.run(TotalWeight { logits, highest })
}

/// Writes, for every [`BLOCK`] weights, the sum of those whose logit is greater than `at_least`, or equal to it at an
/// index below `cut`.
///
/// # Panics
/// If `weights` does not have one element per logit, or `sums` one per block.
pub fn sum_blocks(isa: Isa, logits: &[f32], weights: &[f64], at_least: f32, cut: usize, sums: &mut [f64]) {
    let expected = (logits.len(), logits.len().div_ceil(BLOCK));
    assert_eq!((weights.len(), sums.len()), expected, "weights must have one element per logit, sums one per block");
    isa.run(SumBlocks { logits, weights, at_least, cut, sums });
}

/// Returns, for each threshold, the sum of the weights whose logit is at least the threshold.
///
/// # Panics
/// If `weights` does not have one element per logit.
#[must_use]
pub fn sums_at_least<const N: usize>(isa: Isa, logits: &[f32], weights: &[f64], thresholds: [f32; N]) -> [f64; N] {
    assert_eq!(weights.len(), logits.len(), "weights must have one element per logit");
    isa.run(SumsAtLeast { logits, weights, thresholds })
}

/// Returns the number of logits that are at least `threshold`.
#[must_use]
pub fn count_at_least(isa: Isa, logits: &[f32], threshold: f32) -> usize {
    isa.run(CountAtLeast { logits, threshold })
}

/// Writes the indices, ascending, of the logits in `lowest..=highest`.
pub fn indices_between(isa: Isa, logits: &[f32], lowest: f32, highest: f32, indices: &mut Vec<u32>) {
    indices.clear();
    isa.run(IndicesBetween { logits, lowest, highest, indices });
}

/// Writes the [`scaled`] value of every logit that is at least `at_least`, and negative infinity for the others.
pub fn scale(isa: Isa, logits: &[f32], highest: f32, temperature: f64, at_least: f32, out: &mut Vec<f32>) {
    out.resize(logits.len(), 0.0);
    isa.run(Scale { logits, highest, temperature, at_least, out });
}

/// Sums the lanes pairwise: i and i + 4, then i and i + 2, then i and i + 1.
#[inline(always)]
fn reduce(lanes: [f64; SUMS]) -> f64 {
    let four: [f64; 4] = std::array::from_fn(|lane| lanes[lane] + lanes[lane + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Returns the larger number, or `b` if `a` is NaN.
#[inline(always)]
fn higher(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// Returns the largest lane.
#[inline(always)]
fn highest_lane(lanes: [f32; LANES]) -> f32 {
    let eight: [f32; 8] = std::array::from_fn(|lane| higher(lanes[lane], lanes[lane + 8]));
    let four: [f32; 4] = std::array::from_fn(|lane| higher(eight[lane], eight[lane + 4]));
    higher(higher(four[0], four[2]), higher(four[1], four[3]))
}

/// Returns the sum of a block of weights.
#[inline(always)]
fn block_sum(weights: &[f64]) -> f64 {
    let mut sums = [0.0; SUMS];
    let (chunks, rest) = weights.as_chunks::<SUMS>();
    for chunk in chunks {
        for lane in 0..SUMS {
            sums[lane] += chunk[lane];
        }
    }
    for (sum, weight) in sums.iter_mut().zip(rest) {
        *sum += weight;
    }
    reduce(sums)
}

/// Writes the [`weight`] of a block of logits and returns their sum.
#[inline(always)]
fn weigh_block(logits: &[f32], highest: f32, weights: &mut [f64]) -> f64 {
    for (weight, logit) in weights.iter_mut().zip(logits) {
        *weight = self::weight(*logit, highest);
    }
    block_sum(weights)
}

/// Returns the sum of the weights of a block whose logit is at least `at_least`.
#[inline(always)]
fn block_sum_at_least(logits: &[f32], weights: &[f64], at_least: f32) -> f64 {
    let mut left = [0.0; BLOCK];
    for ((left, logit), weight) in left.iter_mut().zip(logits).zip(weights) {
        *left = if *logit >= at_least { *weight } else { 0.0 };
    }
    block_sum(&left)
}

struct BlockMaxima<'a> {
    logits: &'a [f32],
    maxima: &'a mut [f32],
}

impl Kernel for BlockMaxima<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> bool {
        let (lowest, zero) = (simd.splat(-f32::MAX), simd.splat(0.0));
        // Zero times NaN or infinity is NaN, and NaN propagates.
        let mut bad = zero;
        let (blocks, rest) = self.logits.as_chunks::<BLOCK>();
        for (block, maximum) in blocks.iter().zip(&mut *self.maxima) {
            let mut highest = simd.splat(f32::NEG_INFINITY);
            for chunk in block.as_chunks::<LANES>().0 {
                let logits = simd.load(chunk);
                highest = simd.max(logits, highest);
                // Negative infinity is a valid logit. NaN is kept as the second operand.
                bad = simd.mul_add(simd.max(lowest, logits), zero, bad);
            }
            *maximum = highest_lane(simd.to_array(highest));
        }
        if let (Some(maximum), false) = (self.maxima.last_mut(), rest.is_empty()) {
            *maximum = rest.iter().copied().fold(f32::NEG_INFINITY, |highest, logit| higher(logit, highest));
        }
        simd.to_array(bad) == [0.0; LANES] && rest.iter().all(|&logit| logit < f32::INFINITY)
    }
}

struct Weigh<'a> {
    logits: &'a [f32],
    highest: f32,
    weights: &'a mut [f64],
    sums: &'a mut [f64],
}

impl Kernel for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (logits, rest_logits) = self.logits.as_chunks::<BLOCK>();
        let (weights, rest_weights) = self.weights.as_chunks_mut::<BLOCK>();
        for ((logits, weights), sum) in logits.iter().zip(weights).zip(&mut *self.sums) {
            *sum = weigh_block(logits, self.highest, weights);
        }
        if let (Some(sum), false) = (self.sums.last_mut(), rest_logits.is_empty()) {
            *sum = weigh_block(rest_logits, self.highest, rest_weights);
        }
    }
}

struct TotalWeight<'a> {
    logits: &'a [f32],
    highest: f32,
}

impl Kernel for TotalWeight<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> f64 {
        let mut weights = [0.0; BLOCK];
        let (blocks, rest) = self.logits.as_chunks::<BLOCK>();
        let total: f64 = blocks.iter().map(|block| weigh_block(block, self.highest, &mut weights)).sum();
        total + weigh_block(rest, self.highest, &mut weights[..rest.len()])
    }
}

struct SumBlocks<'a> {
    logits: &'a [f32],
    weights: &'a [f64],
    at_least: f32,
    cut: usize,
    sums: &'a mut [f64],
}

impl Kernel for SumBlocks<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { logits, weights, at_least, cut, sums } = self;
        // In the block that contains `cut`, weights of logits equal to `at_least` are added separately below.
        let threshold = |block: usize| if (block + 1) * BLOCK <= cut { at_least } else { at_least.next_up() };
        let (blocks, rest) = logits.as_chunks::<BLOCK>();
        let (block_weights, rest_weights) = weights.as_chunks::<BLOCK>();
        for (block, ((logits, weights), sum)) in blocks.iter().zip(block_weights).zip(&mut *sums).enumerate() {
            *sum = block_sum_at_least(logits, weights, threshold(block));
        }
        if let (Some(sum), false) = (sums.last_mut(), rest.is_empty()) {
            *sum = block_sum_at_least(rest, rest_weights, threshold(blocks.len()));
        }
        if let Some(sum) = sums.get_mut(cut / BLOCK) {
            let equal = (cut / BLOCK * BLOCK..cut.min(logits.len())).filter(|&index| logits[index] == at_least);
            *sum += equal.map(|index| weights[index]).sum::<f64>();
        }
    }
}

struct SumsAtLeast<'a, const N: usize> {
    logits: &'a [f32],
    weights: &'a [f64],
    thresholds: [f32; N],
}

impl<const N: usize> Kernel for SumsAtLeast<'_, N> {
    type Output = [f64; N];

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> [f64; N] {
        // One sum per index of a block: summands are selected independently, so the compiler can vectorize the loop.
        let mut sums = [[0.0; BLOCK]; N];
        let (logits, rest_logits) = self.logits.as_chunks::<BLOCK>();
        let (weights, rest_weights) = self.weights.as_chunks::<BLOCK>();
        for (logits, weights) in logits.iter().zip(weights) {
            for (sums, threshold) in sums.iter_mut().zip(self.thresholds) {
                for index in 0..BLOCK {
                    sums[index] += if logits[index] >= threshold { weights[index] } else { 0.0 };
                }
            }
        }
        for (sums, threshold) in sums.iter_mut().zip(self.thresholds) {
            for ((sum, logit), weight) in sums.iter_mut().zip(rest_logits).zip(rest_weights) {
                *sum += if *logit >= threshold { *weight } else { 0.0 };
            }
        }
        sums.map(|sums| block_sum(&sums))
    }
}

struct CountAtLeast<'a> {
    logits: &'a [f32],
    threshold: f32,
}

impl Kernel for CountAtLeast<'_> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        self.logits.iter().map(|&logit| u32::from(logit >= self.threshold)).sum::<u32>() as usize
    }
}

struct IndicesBetween<'a> {
    logits: &'a [f32],
    lowest: f32,
    highest: f32,
    indices: &'a mut Vec<u32>,
}

impl Kernel for IndicesBetween<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let is_between = |logit: f32| (logit >= self.lowest) & (logit <= self.highest);
        for (number, chunk) in self.logits.chunks(LANES).enumerate() {
            // Most chunks have no match, which this vectorized test finds.
            if chunk.iter().fold(false, |any, &logit| any | is_between(logit)) {
                let found = (0..).zip(chunk).filter(|&(_, &logit)| is_between(logit));
                self.indices.extend(found.map(|(lane, _): (usize, _)| (number * LANES + lane) as u32));
            }
        }
    }
}

struct Scale<'a> {
    logits: &'a [f32],
    highest: f32,
    temperature: f64,
    at_least: f32,
    out: &'a mut [f32],
}

impl Kernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (out, &logit) in self.out.iter_mut().zip(self.logits) {
            let scaled = scaled(logit, self.highest, self.temperature);
            *out = if logit >= self.at_least { scaled } else { f32::NEG_INFINITY };
        }
    }
}
