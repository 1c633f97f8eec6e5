//! [`CodeGrid`]: quantization of the weights that are kept, while others are pruned.

use crate::Format;
use crate::arch::{LANES, Simd};
use crate::hessian::feedback::Column;

/// Candidates for a scale, relative to the one that maps the largest weight to the highest code.
const RATIOS: std::ops::RangeInclusive<u8> = 60..=115;

/// Step between candidates, in hundredths.
const RATIO_STEP: usize = 5;

/// Codes that kept weights are rounded to: `scale * code`, with one f16 scale for each `inputs` inputs of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodeGrid {
    /// Number of inputs that share a scale: a divisor of 256 and multiple of 4.
    pub inputs: usize,
    /// Lowest and highest code; the magnitude of the lowest is that of the highest, or greater by 1.
    pub codes: [i8; 2],
}

impl CodeGrid {
    /// Returns the grid of the stored blocks of a sparse format; `None` for other formats.
    #[must_use]
    pub fn of(format: Format) -> Option<Self> {
        let inputs = format.stored_block().filter(|_| format.is_sparse())?.inputs;
        let codes = if format == Format::Int4TwoOfFour { [-8, 7] } else { [-127, 127] };
        Some(Self { inputs, codes })
    }

    /// Returns the code nearest to `value / scale`, given the inverse of the scale.
    #[inline(always)]
    pub(super) fn code<S: Simd>(self, simd: S, value: S::F32, inverse: S::F32) -> S::F32 {
        let [lowest, highest] = self.codes.map(|code| simd.splat(f32::from(code)));
        simd.round(simd.max(simd.min(simd.mul(value, inverse), highest), lowest))
    }

    /// Returns the scale of each row with the least squared error of the weights that are kept, rounded to f16. It is NaN if
    /// a weight is not finite.
    #[inline(always)]
    pub(super) fn scale<S: Simd>(self, simd: S, targets: &[Column], kept: &[Column], importance: &[f32]) -> S::F32 {
        let zero = simd.splat(0.0);
        let (mut peak, mut invalid) = (zero, zero);
        for (target, kept) in targets.iter().zip(kept) {
            let value = simd.mul(simd.load(target), simd.load(kept));
            peak = simd.max(simd.max(value, simd.sub(zero, value)), peak);
            invalid = simd.add(invalid, simd.mul(simd.load(target), zero));
        }
        let base = simd.div(peak, simd.splat(f32::from(self.codes[1])));
        let (mut best, mut best_gain) = (base, simd.splat(-1.0));
        for ratio in RATIOS.step_by(RATIO_STEP) {
            let inverse = inverse(simd, simd.mul(base, simd.splat(f32::from(ratio) / 100.0)));
            let (mut squares, mut products) = (zero, zero);
            for ((target, kept), importance) in targets.iter().zip(kept).zip(importance) {
                let value = simd.mul(simd.load(target), simd.load(kept));
                let code = self.code(simd, value, inverse);
                let weighted = simd.mul(code, simd.splat(*importance));
                squares = simd.add(squares, simd.mul(weighted, code));
                products = simd.add(products, simd.mul(weighted, value));
            }
            // The best scale for these codes reduces the squared error by products^2 / squares. If all codes are zero this is
            // NaN, which never compares greater.
            let scale = simd.div(products, squares);
            let gain = simd.mul(products, scale);
            best = simd.select_greater(gain, best_gain, scale, best);
            best_gain = simd.select_greater(gain, best_gain, gain, best_gain);
        }
        let mut narrow = [0; LANES];
        simd.store_f16(simd.add(best, invalid), &mut narrow);
        simd.load_f16(&narrow)
    }
}

/// Returns `1 / scale`; 0 becomes a large number.
#[inline(always)]
pub(super) fn inverse<S: Simd>(simd: S, scale: S::F32) -> S::F32 {
    simd.div(simd.splat(1.0), simd.max(scale, simd.splat(f32::MIN_POSITIVE)))
}
