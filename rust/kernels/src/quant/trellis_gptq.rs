//! GPTQ for [`trellis`](super::trellis) formats.
//!
//! Super-blocks are quantized one after the other as in [`gptq`](super::gptq), and the segments of chains in a super-block
//! one after the other: each by a [`viterbi`](super::viterbi) search with the targets that compensate the errors before it.
//! Block scales next to that of normally distributed weights are tried. With a Hessian,
//! [`trellis_descent`](super::trellis_descent) then improves the symbols.

use std::marker::PhantomData;

use super::gptq::CalibratedPanel;
use super::integer::{BlockScales, GROUP, HALF, SUPER};
use super::quantize::not_finite;
use super::trellis::{AHEAD, CHAINS, SEGMENT, Trellis, Trellised, by_segment};
use super::trellis_descent;
use super::viterbi::{SegmentCost, Viterbi};
use crate::arch::{ByteLine, Isa, Kernel, LANES, Simd};
use crate::hessian::feedback::{Column, correct, subtract};
use crate::hessian::{HessianFactor, InputStatistics};

/// Block scales that are tried, relative to the one with which targets have the variance for which the tables are made
/// (`benches/record/2026-11-30-intel-avx512vnni/allocation-search.txt`).
const SCALE_RATIOS: [f32; 5] = [0.9, 0.95, 1.0, 1.05, 1.1];

/// Lower bound of divisors. All block scales are larger.
pub(super) const TINY: f32 = 1e-30;

/// Quantizes sixteen rows, `rows: [16, cols]`, into a panel whose lines are zero.
pub fn pack_panel<T: Trellis>(isa: Isa, rows: &[f32], block_scales: &mut [BlockScales], lines: &mut [ByteLine]) {
    let panels = &mut [CalibratedPanel::new(isa, rows, block_scales, lines)];
    isa.run(PackTrellis::<T> { statistics: None, panels, sweeps: 0, is_cancelled: &|| false, format: PhantomData });
}

/// Kernel that quantizes several panels, which share cached parts of R.
pub(crate) struct PackTrellis<'a, 'p, T> {
    /// Statistics of the inputs; without them, all are equally important.
    pub statistics: Option<&'a InputStatistics>,
    pub panels: &'a mut [CalibratedPanel<'p>],
    /// Number of sweeps of the descent.
    pub sweeps: usize,
    /// Returns whether to leave the panels incomplete. Called for each super-block of a panel and each segment of the
    /// descent.
    pub is_cancelled: &'a dyn Fn() -> bool,
    pub format: PhantomData<T>,
}

impl<T: Trellis> Kernel for PackTrellis<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { statistics, panels, sweeps, is_cancelled, .. } = self;
        let factor = statistics.and_then(|statistics| statistics.factor.as_ref());
        let size = panels.first().map_or(0, |panel| panel.residuals.len());
        let mut viterbi = Viterbi::<S, T>::new(simd);
        for first in (0..size).step_by(SUPER) {
            let block = SuperBlock::new(statistics, first, size);
            // A loop rather than a closure: closures are compiled without the instruction set unless they are inlined.
            for panel in &mut *panels {
                if is_cancelled() {
                    return;
                }
                block.quantize(&mut viterbi, panel);
            }
            if let Some(factor) = factor {
                correct(simd, factor, first / SUPER, panels);
            }
        }
        if let Some(factor) = factor {
            trellis_descent::improve(&mut viterbi, factor, panels, sweeps, is_cancelled);
        }
        for panel in panels {
            finish::<S, T>(simd, panel);
        }
    }
}

/// Stores symbols in the output lines, and sums up the loss.
#[inline(always)]
fn finish<S: Simd, T: Trellis>(simd: S, panel: &mut CalibratedPanel<'_>) {
    let codes = panel.groups.iter().flat_map(|group| &group.codes);
    let symbols: Vec<_> = codes.map(|column| column.map(|symbol| symbol as u8)).collect();
    Trellised::<T>::store(panel.lines, &symbols);
    panel.sum_loss(simd);
}

/// Super-block during quantization. Its inputs are in the order of [`by_segment`], and those of the half block after it,
/// at which the search looks ahead, follow.
struct SuperBlock<'a> {
    factor: Option<&'a HessianFactor>,
    /// First input.
    first: usize,
    /// Number of inputs.
    width: usize,
    /// Inputs in order.
    inputs: Vec<usize>,
    /// Rows of the inverse of R, each from the first input of its segment on. Empty if R is diagonal.
    inverse: Vec<&'a [f32]>,
    /// Cost of each segment.
    costs: Vec<SegmentCost>,
}

impl<'a> SuperBlock<'a> {
    /// Creates the super-block from input `first` of `size` on.
    fn new(statistics: Option<&'a InputStatistics>, first: usize, size: usize) -> Self {
        let factor = statistics.and_then(|statistics| statistics.factor.as_ref());
        let width = (size - first).min(SUPER);
        let next = first + width;
        let ahead = by_segment((size - next).min(HALF)).map(|input| next + input);
        let inputs: Vec<usize> = by_segment(width).map(|input| first + input).chain(ahead).collect();
        let rows = |first: usize| match factor {
            Some(factor) if first < size => factor.inverse_by_segment(first / SUPER).collect(),
            _ => Vec::new(),
        };
        let (rows, next_rows) = (rows(first), rows(next));
        let costs = (0..width).step_by(SEGMENT).map(|segment| {
            let places: Vec<usize> = Self::places(segment, inputs.len()).collect();
            if factor.is_none() {
                let importance = |place| statistics.map_or(1.0, |statistics| statistics.importance[inputs[place]]);
                let diagonal = places.into_iter().map(|place| importance(place).sqrt());
                return SegmentCost { diagonal: diagonal.collect(), windows: None };
            }
            SegmentCost::of_inverse(places.len(), |row, column| match (places[row], places[column]) {
                (row, column) if column < width => rows[row][column],
                (row, column) if row >= width => next_rows[row - width][column - width],
                _ => 0.0,
            })
        });
        let costs = costs.collect();
        let inverse = rows.into_iter().enumerate().map(|(place, row)| &row[place / SEGMENT * SEGMENT..]);
        Self { factor, first, width, inverse: inverse.collect(), costs, inputs }
    }

    /// Returns the places of the inputs of a segment, which starts at place `segment`, and of those to look ahead at: those of
    /// the same chain in the next half block.
    fn places(segment: usize, end: usize) -> impl Iterator<Item = usize> {
        let next = (segment + HALF).min(end);
        (segment..segment + SEGMENT).chain(next..end.min(next + AHEAD))
    }

    /// Quantizes the super-block of a panel and replaces its weights by their errors.
    #[inline(always)]
    fn quantize<S: Simd, T: Trellis>(&self, viterbi: &mut Viterbi<S, T>, panel: &mut CalibratedPanel<'_>) {
        let simd = viterbi.simd;
        let mut targets = [[0.0; LANES]; SUPER];
        let targets = &mut targets[..self.width];
        panel.feedback.targets(simd, self.factor, self.first / SUPER, targets);
        // Weights of the next super-block are not corrected yet.
        let target = |input: &usize| targets.get(input - self.first).unwrap_or(&panel.feedback.weights[*input]);
        let ordered: Vec<Column> = self.inputs.iter().map(|input| *target(input)).collect();
        let starts = std::array::from_fn(|chain| states::<T>(panel, self.first + chain));

        let usual = self.usual_scale::<S, T>(simd, &ordered);
        let mut best = Encoded::new(self.width);
        let mut tried = best.clone();
        for ratio in SCALE_RATIOS {
            simd.store(to_f16(simd, simd.mul(usual, simd.splat(ratio))), &mut tried.scale);
            self.encode(viterbi, &ordered, starts, &mut tried);
            best.replace_worse(simd, &tried);
        }

        let scale = simd.load(&best.scale);
        let block_scale = &mut panel.block_scales[self.first / SUPER];
        simd.store_f16(simd.add(scale, not_finite(simd, targets.as_chunks::<GROUP>().0)), block_scale);
        for ((input, weight), symbols) in self.inputs.iter().zip(&best.weights).zip(&best.symbols) {
            let weight = simd.mul(simd.load(weight), scale);
            for changed in [&mut panel.feedback.weights[*input], &mut targets[input - self.first]] {
                simd.store(simd.sub(simd.load(changed), weight), changed);
            }
            panel.groups[input / GROUP].codes[input % GROUP] = symbols.map(f32::from);
        }
        self.add_errors(simd, targets, &mut panel.residuals[self.first..][..self.width]);
    }

    /// Sets the elements of `e R` of the super-block from the errors of its targets.
    #[inline(always)]
    fn add_errors<S: Simd>(&self, simd: S, errors: &[Column], residuals: &mut [Column]) {
        let zero = simd.splat(0.0);
        let Some(factor) = self.factor else {
            let diagonals = self.costs.iter().flat_map(|cost| &cost.diagonal[..SEGMENT]);
            for (input, diagonal) in self.inputs.iter().zip(diagonals) {
                let at = input - self.first;
                simd.store(simd.mul(simd.load(&errors[at]), simd.splat(*diagonal)), &mut residuals[at]);
            }
            return;
        };
        for (at, error) in errors.iter().enumerate() {
            let (input, minus) = (self.first + at, simd.sub(zero, simd.load(error)));
            subtract(simd, &mut residuals[at..], &[minus], &[&factor.row(input)[input..]]);
        }
    }

    /// Finds symbols for the targets of all inputs and a scale. `states` are those before the first input of each chain.
    #[inline(always)]
    fn encode<S: Simd, T: Trellis>(
        &self,
        viterbi: &mut Viterbi<S, T>,
        targets: &[Column],
        mut states: [[usize; LANES]; CHAINS],
        to: &mut Encoded,
    ) {
        let simd = viterbi.simd;
        let scale = simd.load(&to.scale);
        let inverse_scale = simd.div(simd.splat(1.0), simd.max(scale, simd.splat(TINY)));
        let mut left = targets.to_vec();
        for target in &mut left {
            simd.store(simd.mul(simd.load(target), inverse_scale), target);
        }
        let mut loss = simd.splat(0.0);
        for (index, cost) in self.costs.iter().enumerate() {
            let (first, states) = (index * SEGMENT, &mut states[index % CHAINS]);
            let now: Vec<Column> = Self::places(first, left.len()).map(|place| left[place]).collect();
            let symbols = to.symbols[first..].first_chunk_mut().expect("a segment");
            viterbi.search(&now, (states, None), cost, symbols);
            for k in 0..SEGMENT {
                let place = first + k;
                to.weights[place] = viterbi.weights(states, &to.symbols[place]);
                let error = simd.sub(simd.load(&left[place]), simd.load(&to.weights[place]));
                let residual = simd.mul(error, simd.splat(cost.diagonal[k]));
                if let Some(row) = self.inverse.get(place) {
                    subtract(simd, &mut left[place + 1..self.width], &[residual], &[&row[k + 1..]]);
                }
                loss = simd.add(loss, simd.mul(residual, residual));
            }
        }
        simd.store(simd.mul(loss, simd.mul(scale, scale)), &mut to.loss);
    }

    /// Returns the scale with which the targets have the variance for which the tables are made.
    #[inline(always)]
    fn usual_scale<S: Simd, T: Trellis>(&self, simd: S, targets: &[Column]) -> S::F32 {
        let (mut squares, mut total) = (simd.splat(0.0), 0.0);
        let diagonals = self.costs.iter().flat_map(|cost| &cost.diagonal[..SEGMENT]);
        for (target, diagonal) in targets.iter().zip(diagonals) {
            let (target, importance) = (simd.load(target), diagonal * diagonal);
            squares = simd.add(squares, simd.mul(simd.mul(target, target), simd.splat(importance)));
            total += importance;
        }
        let variances = simd.to_array(simd.mul(squares, simd.splat(1.0 / (total * T::DEVIATION * T::DEVIATION))));
        simd.load(&variances.map(f32::sqrt))
    }
}

/// Symbols of a super-block of sixteen rows, in the order of [`by_segment`], with their scale.
#[derive(Clone)]
struct Encoded {
    symbols: Vec<[u8; LANES]>,
    /// Weights without their scale.
    weights: Vec<Column>,
    scale: Column,
    /// Sum of the squares of `e R`.
    loss: Column,
}

impl Encoded {
    /// Creates a super-block that is worse than all others.
    fn new(width: usize) -> Self {
        let (symbols, weights) = (vec![[0; LANES]; width], vec![[0.0; LANES]; width]);
        Self { symbols, weights, scale: [0.0; LANES], loss: [f32::INFINITY; LANES] }
    }

    /// Replaces the rows that have less loss in `other`.
    #[inline(always)]
    fn replace_worse<S: Simd>(&mut self, simd: S, other: &Self) {
        let (least, loss) = (simd.load(&self.loss), simd.load(&other.loss));
        let columns = self.weights.iter_mut().chain([&mut self.scale, &mut self.loss]);
        let others = other.weights.iter().chain([&other.scale, &other.loss]);
        for (column, other) in columns.zip(others) {
            simd.store(simd.select_greater(least, loss, simd.load(other), simd.load(column)), column);
        }
        let is_better = simd.to_array(simd.select_greater(least, loss, simd.splat(1.0), simd.splat(0.0)));
        for (symbols, other) in self.symbols.iter_mut().zip(&other.symbols) {
            replace_rows(symbols, other, &is_better);
        }
    }
}

/// Replaces the symbols of rows that are marked by 1.
pub(super) fn replace_rows(symbols: &mut [u8; LANES], other: &[u8; LANES], is_better: &Column) {
    for ((symbol, other), is_better) in symbols.iter_mut().zip(other).zip(is_better) {
        *symbol = if *is_better > 0.0 { *other } else { *symbol };
    }
}

/// Rounds to f16.
#[inline(always)]
fn to_f16<S: Simd>(simd: S, value: S::F32) -> S::F32 {
    let mut rounded = [0; LANES];
    simd.store_f16(value, &mut rounded);
    simd.load_f16(&rounded)
}

/// Returns the state of each row before an input.
pub(super) fn states<T: Trellis>(panel: &CalibratedPanel<'_>, input: usize) -> [usize; LANES] {
    let symbol = |input: usize, row: usize| panel.groups[input / GROUP].codes[input % GROUP][row] as usize;
    std::array::from_fn(|row| Trellised::<T>::state(input, |before| symbol(before, row)))
}
