//! GPTQ for [`trellis`](super::trellis) formats.
//!
//! Super-blocks are quantized one after the other as in [`gptq`](super::gptq), and the chains of a super-block one after
//! the other: each by a [`viterbi`](super::viterbi) search with the targets that compensate the errors before it.
//! Several block scales are tried. With a Hessian, sweeps then search each chain again, while all others stay as they are,
//! as in [`descent`](super::descent): no search increases the loss of a row.

use std::marker::PhantomData;

use super::gptq::CalibratedPanel;
use super::integer::{BlockScales, GROUP, SUPER};
use super::quantize::not_finite;
use super::trellis::{CHAIN, CHAINS, Trellis, Trellised, chained_inputs};
use super::viterbi::{ChainCost, EncodedChain, Viterbi};
use crate::arch::{ByteLine, Isa, Kernel, LANES, Simd};
use crate::hessian::feedback::{Column, correct, subtract};
use crate::hessian::{HessianFactor, InputStatistics};

/// Candidates for the block scale, relative to the one for normally distributed weights of the same variance.
const BLOCK_SCALE_RATIOS: [f32; 3] = [0.95, 1.0, 1.05];

/// Lower bound of divisors. All block scales are larger.
const TINY: f32 = 1e-30;

/// Number of inputs of a chain whose gradients are summed at a time, in registers.
const SUMMED: usize = 8;

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
    /// Number of sweeps over all chains.
    pub sweeps: usize,
    /// Returns whether to leave the panels incomplete. Called for each super-block and, in a sweep, for each chain.
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
        let mut encoder = Encoder { simd, viterbi: Viterbi::<S, T>::new(simd), factor };
        for first in (0..size).step_by(SUPER) {
            if is_cancelled() {
                return;
            }
            let width = (size - first).min(SUPER);
            let importance = statistics.map(|statistics| &statistics.importance[first..first + width]);
            let costs = encoder.costs(first / SUPER, width, importance);
            // A loop rather than a closure: closures are compiled without the instruction set unless they are inlined.
            for panel in &mut *panels {
                encoder.quantize(first / SUPER, width, &costs, panel);
            }
            if let Some(factor) = factor {
                correct(simd, factor, first / SUPER, panels);
            }
        }
        if let Some(factor) = factor {
            for chain in (0..sweeps).flat_map(|_| 0..size.div_ceil(SUPER) * CHAINS) {
                if is_cancelled() {
                    return;
                }
                encoder.improve(factor, chain, panels);
            }
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
    let mut loss = simd.splat(0.0);
    for column in &panel.residuals {
        let residual = simd.load(column);
        loss = simd.add(loss, simd.mul(residual, residual));
    }
    simd.store(loss, &mut panel.loss);
}

struct Encoder<'a, S, T> {
    simd: S,
    viterbi: Viterbi<S, T>,
    factor: Option<&'a HessianFactor>,
}

impl<'a, S: Simd, T: Trellis> Encoder<'a, S, T> {
    /// Returns the cost of the errors of each chain of super-block `index`, and the rows of the inverse of the factor in
    /// the order of chains.
    fn costs(&self, index: usize, width: usize, importance: Option<&[f32]>) -> Vec<(ChainCost<'a>, Vec<&'a [f32]>)> {
        let length = width / CHAINS;
        let order: Vec<_> = chained_inputs(width).collect();
        (0..CHAINS)
            .map(|chain| {
                let inputs = chain * length..(chain + 1) * length;
                let Some(factor) = self.factor else {
                    let mut importances = [1.0; CHAIN];
                    for (to, input) in importances.iter_mut().zip(&order[inputs]) {
                        *to = importance.map_or(1.0, |importance| importance[*input]);
                    }
                    return (ChainCost { importance: importances, inverse: None }, Vec::new());
                };
                let rows: Vec<&[f32]> = factor.chained_inverse(index).skip(inputs.start).take(length).collect();
                let rows: Vec<_> = rows.into_iter().map(|row| &row[inputs.start..]).collect();
                let later = rows.iter().map(|row| &row[length..]).collect();
                (ChainCost::of_rows(&rows), later)
            })
            .collect()
    }

    /// Quantizes super-block `index` of a panel and replaces its weights by their errors.
    #[inline(always)]
    fn quantize(
        &mut self,
        index: usize,
        width: usize,
        costs: &[(ChainCost<'_>, Vec<&[f32]>)],
        panel: &mut CalibratedPanel<'_>,
    ) {
        let simd = self.simd;
        let (first, length) = (index * SUPER, width / CHAINS);
        let mut targets = [[0.0; LANES]; SUPER];
        let targets = &mut targets[..width];
        panel.feedback.targets(simd, self.factor, index, targets);
        let mut chained = vec![[0.0; LANES]; width];
        chained.iter_mut().zip(chained_inputs(width)).for_each(|(to, input)| *to = targets[input]);

        let (mut squares, mut total) = (simd.splat(0.0), 0.0);
        for ((cost, _), targets) in costs.iter().zip(chained.chunks_exact(length)) {
            for (target, importance) in targets.iter().zip(&cost.importance) {
                let target = simd.load(target);
                squares = simd.add(squares, simd.mul(simd.mul(target, target), simd.splat(*importance)));
                total += importance;
            }
        }
        let mean = simd.to_array(simd.mul(squares, simd.splat(1.0 / (total * T::DEVIATION * T::DEVIATION))));
        let base = simd.load(&mean.map(f32::sqrt));

        let mut best = vec![EncodedChain::ZERO; CHAINS];
        let mut tried = best.clone();
        let (mut least, mut block_scale) = (simd.splat(f32::INFINITY), simd.splat(0.0));
        for ratio in BLOCK_SCALE_RATIOS {
            let scale = to_f16(simd, simd.mul(base, simd.splat(ratio)));
            let inverse = simd.div(simd.splat(1.0), simd.max(scale, simd.splat(TINY)));
            let mut left = chained.clone();
            for target in &mut left {
                simd.store(simd.mul(simd.load(target), inverse), target);
            }
            let mut loss = simd.splat(0.0);
            for (chain, ((cost, later), encoded)) in costs.iter().zip(&mut tried).enumerate() {
                let (now, after) = left[chain * length..].split_at_mut(length);
                self.viterbi.encode(now, cost, encoded);
                loss = simd.add(loss, simd.load(&encoded.loss));
                for (residual, row) in encoded.residuals.iter().zip(later) {
                    subtract(simd, after, &[simd.load(residual)], &[row]);
                }
            }
            loss = simd.mul(loss, simd.mul(scale, scale));
            for (best, tried) in best.iter_mut().zip(&tried) {
                best.replace_worse(simd, least, loss, tried);
            }
            block_scale = simd.select_greater(least, loss, scale, block_scale);
            least = simd.select_greater(least, loss, loss, least);
        }
        simd.store_f16(
            simd.add(block_scale, not_finite(simd, targets.as_chunks::<GROUP>().0)),
            &mut panel.block_scales[index],
        );

        let codes = panel.groups[first / GROUP..].iter_mut().flat_map(|group| &mut group.codes);
        let mut codes: Vec<_> = codes.take(width).collect();
        for (at, input) in chained_inputs(width).enumerate() {
            let chain = &best[at / length];
            let weight = simd.mul(simd.load(&chain.weights[at % length]), block_scale);
            for value in [&mut panel.feedback.weights[first + input], &mut targets[input]] {
                simd.store(simd.sub(simd.load(value), weight), value);
            }
            *codes[input] = chain.symbols[at % length].map(f32::from);
        }
        let residuals = &mut panel.residuals[first..first + width];
        for (input, error) in targets.iter().enumerate() {
            let error = simd.load(error);
            match self.factor {
                Some(factor) => {
                    let minus = simd.sub(simd.splat(0.0), error);
                    subtract(simd, &mut residuals[input..], &[minus], &[&factor.row(first + input)[first + input..]]);
                }
                None => {
                    let importance = costs[input % CHAINS].0.importance[input / CHAINS];
                    simd.store(simd.mul(error, simd.splat(importance.sqrt())), &mut residuals[input]);
                }
            }
        }
    }

    /// Searches a chain of some panels again, and keeps the symbols of rows whose loss decreases.
    #[inline(always)]
    fn improve(&mut self, factor: &HessianFactor, chain: usize, panels: &mut [CalibratedPanel<'_>]) {
        let inverse: Vec<&[f32]> = factor.chain_inverse(chain).collect();
        let length = inverse.len();
        let (first, of_super) = (chain / CHAINS * SUPER, chain % CHAINS);
        let size = panels.first().map_or(0, |panel| panel.residuals.len());
        // Rows of R of the chain, transposed: `[input][CHAIN]` from the first input of the super-block on.
        let mut rows = vec![[0.0; CHAIN]; size - first];
        for index in 0..length {
            let row = &factor.row(first + index * CHAINS + of_super)[first..];
            rows.iter_mut().zip(row).for_each(|(column, value)| column[index] = *value);
        }
        let cost = ChainCost::of_rows(&inverse);
        for panel in panels {
            self.improve_panel(&cost, &rows, (first, of_super, length), panel);
        }
    }

    #[inline(always)]
    fn improve_panel(
        &mut self,
        cost: &ChainCost<'_>,
        rows: &[[f32; CHAIN]],
        (first, of_super, length): (usize, usize, usize),
        panel: &mut CalibratedPanel<'_>,
    ) {
        let simd = self.simd;
        let block_scale = simd.load_f16(&panel.block_scales[first / SUPER]);
        let inverse_scale = simd.div(simd.splat(1.0), simd.max(block_scale, simd.splat(TINY)));
        let residuals = &mut panel.residuals[first..];
        let gradient = gradient(simd, rows, residuals);
        let mut now = EncodedChain::ZERO;
        let mut codes = panel.groups[first / GROUP..].iter_mut().flat_map(|group| &mut group.codes).skip(of_super);
        let mut codes: Vec<_> = codes.by_ref().step_by(CHAINS).take(length).collect();
        for (symbols, code) in now.symbols.iter_mut().zip(&codes) {
            *symbols = code.map(|symbol| symbol as u8);
        }
        (0..length).for_each(|input| self.viterbi.read_weights(&mut now, input));
        let mut targets = now.weights;
        let rows_of = cost.inverse.as_ref().expect("there is a Hessian");
        let mut loss = simd.splat(0.0);
        for (k, row) in rows_of[..length].iter().enumerate() {
            // The residual of input k in the basis of the chain, by which its errors can decrease the loss.
            let mut residual = simd.splat(0.0);
            for (gradient, factor) in gradient[..length].iter().zip(*row).skip(k) {
                residual = simd.add(residual, simd.mul(simd.load(gradient), simd.splat(*factor)));
            }
            residual = simd.mul(residual, inverse_scale);
            for (target, factor) in targets[..length].iter_mut().zip(*row).skip(k) {
                simd.store(simd.add(simd.load(target), simd.mul(residual, simd.splat(*factor))), target);
            }
            loss = simd.add(loss, simd.mul(residual, residual));
        }
        let mut tried = EncodedChain::ZERO;
        self.viterbi.encode(&targets[..length], cost, &mut tried);
        let before = now.weights;
        now.replace_worse(simd, loss, simd.load(&tried.loss), &tried);
        let mut changes = [[0.0; LANES]; CHAIN];
        for (k, code) in codes.iter_mut().enumerate() {
            let change = simd.sub(simd.load(&before[k]), simd.load(&now.weights[k]));
            simd.store(simd.mul(change, block_scale), &mut changes[k]);
            **code = now.symbols[k].map(f32::from);
        }
        for (residual, row) in residuals.iter_mut().zip(rows) {
            let mut sum = simd.load(residual);
            for (change, factor) in changes[..length].iter().zip(row) {
                sum = simd.mul_add(simd.load(change), simd.splat(*factor), sum);
            }
            simd.store(sum, residual);
        }
    }
}

/// Returns half of the gradient of the loss with respect to the errors of a chain.
#[inline(always)]
fn gradient<S: Simd>(simd: S, rows: &[[f32; CHAIN]], residuals: &[Column]) -> [Column; CHAIN] {
    let mut gradient = [[0.0; LANES]; CHAIN];
    for (part, to) in gradient.as_chunks_mut::<SUMMED>().0.iter_mut().enumerate() {
        let mut sums = [simd.splat(0.0); SUMMED];
        for (row, residual) in rows.iter().zip(residuals) {
            let (factors, residual) = (&row.as_chunks::<SUMMED>().0[part], simd.load(residual));
            for (sum, factor) in sums.iter_mut().zip(factors) {
                *sum = simd.mul_add(residual, simd.splat(*factor), *sum);
            }
        }
        for (to, sum) in to.iter_mut().zip(sums) {
            simd.store(sum, to);
        }
    }
    gradient
}

/// Rounds to f16.
#[inline(always)]
fn to_f16<S: Simd>(simd: S, value: S::F32) -> S::F32 {
    let mut narrow = [0; LANES];
    simd.store_f16(value, &mut narrow);
    simd.load_f16(&narrow)
}
