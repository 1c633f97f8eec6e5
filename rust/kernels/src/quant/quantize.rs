//! Quantization of floating-point weights to codes, sub-scales and block scales, without calibration data.
//!
//! Sixteen rows are quantized at once, one per lane. First, the ideal scale of each group is searched: several candidates
//! are tried, each refined by least squares. Then several block scales around the largest ideal scale are tried for the
//! super-block. For each of them, every group takes the best of the three sub-scales nearest to its ideal scale, and the
//! block scale with the least total squared error is chosen. `benches/quality` compares this search with others. With
//! calibration ([`gptq`](super::gptq)), squared errors are weighted by the importance of inputs.
//!
//! Multiplications and additions are rounded separately (no FMA), so all instruction sets find the same codes.

use std::marker::PhantomData;

use super::integer::{self, BLOCK, BlockScales, GROUP, HALF, IntegerFormat, SUPER};
use super::rotation;
use crate::arch::{ByteLine, Isa, Kernel, LANES, Simd};

/// Candidates for the scale of a group, relative to the scale that maps its largest weight to the highest code.
const SCALE_RATIOS: [f32; 15] = evenly_spaced(0.62, 1.15);

/// Candidates for the block scale, relative to the one that maps the largest scale to the highest sub-scale.
const BLOCK_SCALE_RATIOS: [f32; 9] = evenly_spaced(0.80, 1.12);

/// Lower bound of divisors. All block scales are larger.
const TINY: f32 = 1e-30;

/// Number of groups in a super-block.
const SUPER_GROUPS: usize = SUPER / GROUP;

/// Weights of the squared errors of inputs.
pub(super) trait Importance: Copy {
    /// Multiplies `value` by the importance of input `input` of group `group`.
    fn weigh<S: Simd>(self, simd: S, group: usize, input: usize, value: S::F32) -> S::F32;
}

/// Equal importance of all inputs.
#[derive(Clone, Copy)]
struct Uniform;

impl Importance for Uniform {
    #[inline(always)]
    fn weigh<S: Simd>(self, _: S, _: usize, _: usize, value: S::F32) -> S::F32 {
        value
    }
}

/// Importance of each input of a super-block, `[group][input]`.
impl Importance for &[[f32; GROUP]] {
    #[inline(always)]
    fn weigh<S: Simd>(self, simd: S, group: usize, input: usize, value: S::F32) -> S::F32 {
        simd.mul(value, simd.splat(self[group][input]))
    }
}

/// Returns evenly spaced numbers from `first` to `last`.
const fn evenly_spaced<const N: usize>(first: f32, last: f32) -> [f32; N] {
    let mut numbers = [0.0; N];
    let mut i = 0;
    while i < N {
        numbers[i] = first + (last - first) * i as f32 / (N - 1) as f32;
        i += 1;
    }
    numbers
}

/// Quantizes sixteen rows, `rows: [16, cols]`, into a panel whose lines are zero.
pub fn pack_panel<F: IntegerFormat>(isa: Isa, rows: &[f32], block_scales: &mut [BlockScales], lines: &mut [ByteLine]) {
    let cols = rows.len() / LANES;
    let mut columns = [[0.0; LANES]; SUPER];
    let mut quantized = Quantized::default();
    for (index, start) in (0..cols).step_by(SUPER).enumerate() {
        columns.as_flattened_mut().fill(0.0);
        for (row, values) in rows.chunks_exact(cols).enumerate() {
            for (column, value) in columns.iter_mut().zip(&values[start..]) {
                column[row] = *value;
            }
        }
        let columns = &mut columns[..integer::padded((cols - start).min(SUPER))];
        isa.run(Rotate(columns));
        let groups = columns.as_chunks().0;
        isa.run(Quantize::<F> { groups, quantized: &mut quantized, format: PhantomData });
        block_scales[index] = quantized.block_scales;
        for group in 0..groups.len() {
            let (block, group_of_block) = (start / BLOCK + group * GROUP / BLOCK, group % (BLOCK / GROUP));
            F::store(lines, block, group_of_block, &quantized.codes[group], &quantized.scales[group]);
        }
    }
}

/// Kernel that rotates blocks of sixteen rows, `[input][row]`; the last may be a half block.
pub(super) struct Rotate<'a>(pub &'a mut [[f32; LANES]]);

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (blocks, half) = self.0.as_chunks_mut::<BLOCK>();
        for block in blocks {
            rotation::rotate_columns(simd, block);
        }
        if let Some(half) = half.first_chunk_mut::<HALF>() {
            rotation::rotate_columns(simd, half);
        }
    }
}

/// Quantized super-block of sixteen rows.
#[derive(Default)]
struct Quantized {
    /// Block scale of each row, f16.
    block_scales: [u16; LANES],
    scales: [[u8; LANES]; SUPER_GROUPS],
    /// Codes, `[group][input][row]`.
    codes: [[[i8; LANES]; GROUP]; SUPER_GROUPS],
}

struct Quantize<'a, F> {
    /// Weights, `[group][input][row]`.
    groups: &'a [[[f32; LANES]; GROUP]],
    quantized: &'a mut Quantized,
    format: PhantomData<F>,
}

impl<F: IntegerFormat> Kernel for Quantize<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let grid = Grid::<S, F>::new(simd);
        let ideal = grid.ideal_scales(self.groups, Uniform);
        let (block_scale, scales) = grid.block_scale_and_sub_scales(self.groups, &ideal, Uniform);
        simd.store_f16(simd.add(block_scale, not_finite(simd, self.groups)), &mut self.quantized.block_scales);
        for (index, (group, scale)) in self.groups.iter().zip(scales).enumerate() {
            let inverse = grid.inverse(simd.mul(scale, block_scale));
            for (codes, column) in self.quantized.codes[index].iter_mut().zip(group) {
                simd.store_i8(simd.to_i32(grid.code(simd.load(column), inverse)), codes);
            }
            let mut narrow = [0; LANES];
            simd.store_i8(simd.to_i32(scale), &mut narrow);
            self.quantized.scales[index] = narrow.map(i8::cast_unsigned);
        }
    }
}

/// Returns NaN for each row that contains infinity or NaN, else 0, so that such rows dequantize to NaN.
#[inline(always)]
pub(super) fn not_finite<S: Simd>(simd: S, groups: &[[[f32; LANES]; GROUP]]) -> S::F32 {
    let mut sum = simd.splat(0.0);
    for column in groups.as_flattened() {
        sum = simd.add(sum, simd.mul(simd.load(column), simd.splat(0.0)));
    }
    sum
}

/// Codes and sub-scales of a format.
pub(super) struct Grid<S: Simd, F> {
    pub simd: S,
    highest: S::F32,
    lowest_scale: S::F32,
    highest_scale: S::F32,
    format: PhantomData<F>,
}

impl<S: Simd, F: IntegerFormat> Grid<S, F> {
    #[inline(always)]
    pub fn new(simd: S) -> Self {
        let [lowest_scale, highest_scale] = F::SCALES;
        Self {
            simd,
            highest: simd.splat(F::CODES[1] as f32),
            lowest_scale: simd.splat(lowest_scale as f32),
            highest_scale: simd.splat(highest_scale as f32),
            format: PhantomData,
        }
    }

    /// Returns `1 / scale`.
    #[inline(always)]
    pub fn inverse(&self, scale: S::F32) -> S::F32 {
        self.simd.div(self.simd.splat(1.0), self.simd.max(scale, self.simd.splat(TINY)))
    }

    /// Returns the code nearest to `value / scale`, given the inverse of the scale.
    #[inline(always)]
    pub fn code(&self, value: S::F32, inverse: S::F32) -> S::F32 {
        F::nearest(self.simd, self.simd.mul(value, inverse))
    }

    /// Returns the largest magnitude of each row.
    #[inline(always)]
    pub(super) fn peak(&self, group: &[[f32; LANES]]) -> S::F32 {
        let simd = self.simd;
        let mut peak = simd.splat(0.0);
        for column in group {
            let value = simd.load(column);
            peak = simd.max(simd.max(value, simd.sub(simd.splat(0.0), value)), peak);
        }
        peak
    }

    /// Returns the scale of each group with the least squared error.
    #[inline(always)]
    pub fn ideal_scales(
        &self,
        groups: &[[[f32; LANES]; GROUP]],
        importance: impl Importance,
    ) -> [S::F32; SUPER_GROUPS] {
        let simd = self.simd;
        let mut ideal = [simd.splat(0.0); SUPER_GROUPS];
        for (index, (ideal, group)) in ideal.iter_mut().zip(groups).enumerate() {
            let base = simd.div(self.peak(group), self.highest);
            let mut best_gain = simd.splat(-1.0);
            *ideal = base;
            for ratio in SCALE_RATIOS {
                let inverse = self.inverse(simd.mul(base, simd.splat(ratio)));
                let (mut squares, mut products) = (simd.splat(0.0), simd.splat(0.0));
                for (input, column) in group.iter().enumerate() {
                    let value = simd.load(column);
                    let code = self.code(value, inverse);
                    let weighted = importance.weigh(simd, index, input, code);
                    squares = simd.add(squares, simd.mul(weighted, code));
                    products = simd.add(products, simd.mul(weighted, value));
                }
                // The best scale for these codes reduces the squared error by products^2 / squares. If all codes are zero
                // this is NaN, which never compares greater.
                let scale = simd.div(products, squares);
                let gain = simd.mul(products, scale);
                *ideal = simd.select_greater(gain, best_gain, scale, *ideal);
                best_gain = simd.select_greater(gain, best_gain, gain, best_gain);
            }
        }
        ideal
    }

    /// Returns the block scale of each row, and the sub-scales of each group.
    #[inline(always)]
    pub fn block_scale_and_sub_scales(
        &self,
        groups: &[[[f32; LANES]; GROUP]],
        ideal: &[S::F32; SUPER_GROUPS],
        importance: impl Importance,
    ) -> (S::F32, [S::F32; SUPER_GROUPS]) {
        let simd = self.simd;
        let mut best = (simd.splat(0.0), [self.lowest_scale; SUPER_GROUPS]);
        if const { F::SCALES[0] == F::SCALES[1] } {
            best.0 = self.to_f16(simd.div(self.peak(groups.as_flattened()), self.highest));
            return best;
        }
        let mut largest = simd.splat(0.0);
        for scale in ideal {
            largest = simd.max(*scale, largest);
        }
        let top = simd.div(largest, self.highest_scale);
        let mut least = simd.splat(f32::INFINITY);
        for share in BLOCK_SCALE_RATIOS {
            let block_scale = self.to_f16(simd.mul(top, simd.splat(share)));
            let inverse = self.inverse(block_scale);
            let mut total = simd.splat(0.0);
            let mut scales = best.1;
            for (index, ((scale, group), ideal)) in scales.iter_mut().zip(groups).zip(ideal).enumerate() {
                let nearest = simd.round(self.clamp_scale(simd.mul(*ideal, inverse)));
                let mut least_of_group = simd.splat(f32::INFINITY);
                for offset in [-1.0, 0.0, 1.0] {
                    let tried = self.clamp_scale(simd.add(nearest, simd.splat(offset)));
                    let error = self.error(group, simd.mul(tried, block_scale), |input, error| {
                        importance.weigh(simd, index, input, error)
                    });
                    *scale = simd.select_greater(least_of_group, error, tried, *scale);
                    least_of_group = simd.min(error, least_of_group);
                }
                total = simd.add(total, least_of_group);
            }
            best.0 = simd.select_greater(least, total, block_scale, best.0);
            for (best, scale) in best.1.iter_mut().zip(scales) {
                *best = simd.select_greater(least, total, scale, *best);
            }
            least = simd.min(total, least);
        }
        best
    }

    #[inline(always)]
    pub fn clamp_scale(&self, scale: S::F32) -> S::F32 {
        self.simd.max(self.simd.min(scale, self.highest_scale), self.lowest_scale)
    }

    /// Returns the squared error of a group with the given scale. `weigh` multiplies an error by the importance of its
    /// input.
    #[inline(always)]
    pub fn error(
        &self,
        group: &[[f32; LANES]; GROUP],
        scale: S::F32,
        weigh: impl Fn(usize, S::F32) -> S::F32,
    ) -> S::F32 {
        let simd = self.simd;
        let inverse = self.inverse(scale);
        // A loop rather than `fold`: closures are compiled without the instruction set unless they are inlined.
        let mut sum = simd.splat(0.0);
        for (input, column) in group.iter().enumerate() {
            let value = simd.load(column);
            let error = simd.sub(simd.mul(self.code(value, inverse), scale), value);
            sum = simd.add(sum, simd.mul(weigh(input, error), error));
        }
        sum
    }

    /// Rounds to f16.
    #[inline(always)]
    pub(super) fn to_f16(&self, value: S::F32) -> S::F32 {
        let mut narrow = [0; LANES];
        self.simd.store_f16(value, &mut narrow);
        self.simd.load_f16(&narrow)
    }
}
