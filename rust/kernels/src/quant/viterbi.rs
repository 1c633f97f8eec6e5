//! Viterbi search for the symbols of a chain of a [`trellis`](super::trellis) format.
//!
//! The search visits the inputs of a chain in order. For each state it keeps the sequence of symbols with the least loss
//! that ends in it, a *survivor*. With a Hessian, the target of an input depends on the errors before it (GPTQ), and so on
//! the survivor. Each survivor therefore has its own corrections of the next [`WINDOW`] inputs. All survivors have the
//! same symbols further in the past, with rare exceptions, so those of the best survivor become final then, and correct
//! all later inputs.
//!
//! Sixteen rows are searched at once, one per lane. Multiplications and additions are rounded separately (no FMA), so all
//! instruction sets find the same symbols.

use std::marker::PhantomData;

use super::trellis::{CHAIN, Trellis, Trellised};
use crate::arch::{LANES, Simd};
use crate::hessian::feedback::{Column, subtract};

/// Number of inputs whose targets survivors correct by themselves.
const WINDOW: usize = LANES;

/// Cost of errors e in the weights of a chain: the squares of `e R`, for an upper triangular R.
pub struct ChainCost<'a> {
    /// Squares of R's diagonal.
    pub importance: [f32; CHAIN],
    /// Rows of the inverse of R, each from the first input of the chain on; `None` if R is diagonal.
    pub inverse: Option<[&'a [f32]; CHAIN]>,
}

impl<'a> ChainCost<'a> {
    /// Returns the cost given the rows of the inverse of R, each from the first input of the chain on.
    pub fn of_rows(rows: &[&'a [f32]]) -> Self {
        let mut cost = Self { importance: [0.0; CHAIN], inverse: Some([&[]; CHAIN]) };
        let inverse = cost.inverse.iter_mut().flatten();
        for (k, ((importance, inverse), row)) in cost.importance.iter_mut().zip(inverse).zip(rows).enumerate() {
            (*importance, *inverse) = ((row[k] * row[k]).recip(), row);
        }
        cost
    }
}

/// Symbols of a chain of sixteen rows. Of a short chain, only the first elements are used.
#[derive(Clone)]
pub struct EncodedChain {
    pub symbols: [[u8; LANES]; CHAIN],
    /// Weights without their scale.
    pub weights: [Column; CHAIN],
    /// Elements of `e R` for the inputs of the chain.
    pub residuals: [Column; CHAIN],
    /// Sum of the squares of the residuals.
    pub loss: Column,
}

impl EncodedChain {
    /// Chain of zeros.
    pub const ZERO: Self = Self {
        symbols: [[0; LANES]; CHAIN],
        weights: [[0.0; LANES]; CHAIN],
        residuals: [[0.0; LANES]; CHAIN],
        loss: [0.0; LANES],
    };

    /// Takes the rows from `other` whose loss is less: `found`, and before `least`.
    #[inline(always)]
    pub fn replace_worse<S: Simd>(&mut self, simd: S, least: S::F32, found: S::F32, other: &Self) {
        let worse = simd.to_array(simd.select_greater(least, found, simd.splat(1.0), simd.splat(0.0)));
        for (symbols, other) in self.symbols.iter_mut().zip(&other.symbols) {
            for ((symbol, other), worse) in symbols.iter_mut().zip(other).zip(worse) {
                *symbol = if worse > 0.0 { *other } else { *symbol };
            }
        }
        for (weights, other) in self.weights.iter_mut().zip(&other.weights) {
            simd.store(simd.select_greater(least, found, simd.load(other), simd.load(weights)), weights);
        }
    }
}

/// Search with its buffers.
pub struct Viterbi<S, T> {
    simd: S,
    /// Weights without their scale, `[state][symbol]`.
    weights: Vec<f32>,
    /// Loss of each survivor, and the target of the next input after its errors, or its correction before.
    losses: Vec<Column>,
    targets: Vec<Column>,
    /// Loss of each survivor after the next input, the residual of that input, and the oldest symbol of the state from
    /// which it comes.
    next_losses: Vec<Column>,
    residuals: Vec<Column>,
    oldest: Vec<[i8; LANES]>,
    /// Latest symbols of the survivors, `[row][state]`, the last one in the lowest bits.
    histories: Vec<u64>,
    next_histories: Vec<u64>,
    /// Corrections of the survivors, `[row][state]`, those of input k in lane `k % WINDOW`.
    corrections: Vec<[f32; WINDOW]>,
    next_corrections: Vec<[f32; WINDOW]>,
    trellis: PhantomData<T>,
}

/// Targets of the inputs of a chain.
struct Targets {
    /// After the errors of final symbols.
    now: Vec<Column>,
    /// After the errors of final symbols that are not in the windows of survivors.
    outside: Vec<Column>,
}

impl<S: Simd, T: Trellis> Viterbi<S, T> {
    const STATES: usize = Trellised::<T>::STATES;
    const SYMBOLS: usize = Trellised::<T>::SYMBOLS;
    const BITS: usize = Trellised::<T>::BITS;

    /// Number of states that differ in their oldest symbol alone. The same symbol leads from them to the same state.
    const KEPT: usize = Self::STATES / Self::SYMBOLS;

    /// Lowest bit of the oldest symbol of a history.
    const OLDEST: usize = {
        assert!(Self::BITS * WINDOW <= u64::BITS as usize);
        Self::BITS * (WINDOW - 1)
    };

    /// Creates the buffers.
    pub fn new(simd: S) -> Self {
        let weight = |at| Trellised::<T>::weight(at / Self::SYMBOLS, at % Self::SYMBOLS) as f32;
        let columns = || vec![[0.0; LANES]; Self::STATES];
        let corrections = || vec![[0.0; WINDOW]; LANES * Self::STATES];
        Self {
            simd,
            weights: (0..Self::STATES * Self::SYMBOLS).map(weight).collect(),
            losses: columns(),
            targets: columns(),
            next_losses: columns(),
            residuals: columns(),
            oldest: vec![[0; LANES]; Self::STATES],
            histories: vec![0; LANES * Self::STATES],
            next_histories: vec![0; LANES * Self::STATES],
            corrections: corrections(),
            next_corrections: corrections(),
            trellis: PhantomData,
        }
    }

    /// Finds symbols with little loss for the targets of a chain, which are in units of the scale.
    #[inline(always)]
    pub fn encode(&mut self, targets: &[Column], cost: &ChainCost<'_>, to: &mut EncodedChain) {
        let length = targets.len();
        let mut targets = Targets { now: targets.to_vec(), outside: targets.to_vec() };
        // No survivor begins in another state than that of the start.
        self.losses.fill([f32::INFINITY; LANES]);
        self.losses[Trellised::<T>::START] = [0.0; LANES];
        self.corrections.fill([0.0; WINDOW]);
        self.targets.fill([0.0; LANES]);
        to.loss = [0.0; LANES];
        for input in 0..length {
            self.correct_targets(&targets.outside[input]);
            self.extend(cost.importance[input]);
            let oldest = input.checked_sub(WINDOW - 1);
            let last = oldest.map(|_| self.last_symbols());
            self.follow(input, cost.inverse.map(|inverse| &inverse[input][input + 1..length]), last.as_ref());
            if let (Some(oldest), Some(last)) = (oldest, last) {
                to.symbols[oldest] = last;
                self.finish(oldest, &mut targets, cost, to);
            }
        }
        let best = self.best();
        for input in (length + 1).saturating_sub(WINDOW)..length {
            for (row, best) in best.into_iter().enumerate() {
                let history = self.histories[row * Self::STATES + best] >> ((length - 1 - input) * Self::BITS);
                to.symbols[input][row] = (history as usize % Self::SYMBOLS) as u8;
            }
            self.finish(input, &mut targets, cost, to);
        }
    }

    /// Subtracts the corrections of the survivors from the target of an input.
    #[inline(always)]
    fn correct_targets(&mut self, target: &Column) {
        let simd = self.simd;
        for to in &mut self.targets {
            simd.store(simd.sub(simd.load(target), simd.load(to)), to);
        }
    }

    /// Extends the survivors by the symbol of an input, and keeps the best one that ends in each state.
    #[inline(always)]
    fn extend(&mut self, importance: f32) {
        let simd = self.simd;
        let (square_root, importance) = (simd.splat(importance.sqrt()), simd.splat(importance));
        for state in 0..Self::KEPT {
            for symbol in 0..Self::SYMBOLS {
                let mut least = simd.splat(f32::INFINITY);
                let mut best = simd.splat(0.0);
                let mut least_error = simd.splat(0.0);
                for old in 0..Self::SYMBOLS {
                    let from = old * Self::KEPT + state;
                    let weight = simd.splat(self.weights[from * Self::SYMBOLS + symbol]);
                    let error = simd.sub(simd.load(&self.targets[from]), weight);
                    let loss = simd.add(simd.load(&self.losses[from]), simd.mul(simd.mul(error, error), importance));
                    best = simd.select_greater(least, loss, simd.splat(old as f32), best);
                    least_error = simd.select_greater(least, loss, error, least_error);
                    least = simd.min(loss, least);
                }
                let next = Trellised::<T>::next(state, symbol);
                simd.store(least, &mut self.next_losses[next]);
                simd.store(simd.mul(least_error, square_root), &mut self.residuals[next]);
                simd.store_i8(simd.to_i32(best), &mut self.oldest[next]);
            }
        }
        std::mem::swap(&mut self.losses, &mut self.next_losses);
    }

    /// Returns the symbol of each row that becomes final when the survivors move to their new states.
    #[inline(always)]
    fn last_symbols(&self) -> [u8; LANES] {
        let mut symbols = [0; LANES];
        for (row, (symbol, best)) in symbols.iter_mut().zip(self.best()).enumerate() {
            let history = self.histories[row * Self::STATES + self.from(row, best)] << Self::BITS;
            *symbol = Self::oldest_symbol(history);
        }
        symbols
    }

    /// Returns the state from which the survivor of a row comes to its new state.
    #[inline(always)]
    fn from(&self, row: usize, state: usize) -> usize {
        usize::from(self.oldest[state][row].cast_unsigned()) * Self::KEPT + (state >> Self::BITS)
    }

    /// Returns the oldest symbol in a history.
    #[inline(always)]
    fn oldest_symbol(history: u64) -> u8 {
        (history >> Self::OLDEST) as u8 & (Self::SYMBOLS - 1) as u8
    }

    /// Moves the history and the corrections of each survivor to its new state, and adds the symbol and the corrections of
    /// `input`. `factors` are those of its residual in the targets of later inputs. Survivors whose oldest symbol is not
    /// `last` end.
    #[inline(always)]
    fn follow(&mut self, input: usize, factors: Option<&[f32]>, last: Option<&[u8; LANES]>) {
        let simd = self.simd;
        let mut window = [0.0; WINDOW];
        for (later, factor) in factors.unwrap_or(&[]).iter().take(WINDOW).enumerate() {
            window[(input + 1 + later) % WINDOW] = *factor;
        }
        let (window, lane, next) = (simd.load(&window), 1 << (input % WINDOW), (input + 1) % WINDOW);
        for row in 0..LANES {
            let states = row * Self::STATES..(row + 1) * Self::STATES;
            for (state, at) in states.clone().enumerate() {
                let from = states.start + self.from(row, state);
                let history = self.histories[from] << Self::BITS | (state % Self::SYMBOLS) as u64;
                self.next_histories[at] = history;
                if last.is_some_and(|last| Self::oldest_symbol(history) != last[row]) {
                    self.losses[state][row] = f32::INFINITY;
                }
                if factors.is_some() {
                    let residual = simd.splat(self.residuals[state][row]);
                    let before = simd.select_lanes(lane, simd.splat(0.0), simd.load(&self.corrections[from]));
                    let corrected = &mut self.next_corrections[at];
                    simd.store(simd.add(before, simd.mul(residual, window)), corrected);
                    self.targets[state][row] = corrected[next];
                }
            }
        }
        std::mem::swap(&mut self.histories, &mut self.next_histories);
        if factors.is_some() {
            std::mem::swap(&mut self.corrections, &mut self.next_corrections);
        } else {
            self.targets.fill([0.0; LANES]);
        }
    }

    /// Returns the state of the best survivor of each row.
    #[inline(always)]
    fn best(&self) -> [usize; LANES] {
        let simd = self.simd;
        let (mut least, mut best) = (simd.splat(f32::INFINITY), simd.splat(0.0));
        for (state, loss) in self.losses.iter().enumerate() {
            let loss = simd.load(loss);
            best = simd.select_greater(least, loss, simd.splat(state as f32), best);
            least = simd.min(loss, least);
        }
        simd.to_array(best).map(|state| state as usize)
    }

    /// Sets the weights of an input from the symbols up to it.
    pub fn read_weights(&self, chain: &mut EncodedChain, input: usize) {
        for row in 0..LANES {
            let before = (0..input).rev().map(|before| usize::from(chain.symbols[before][row]));
            let start = (0..).map(|steps| Trellised::<T>::START >> (steps * Self::BITS) & (Self::SYMBOLS - 1));
            let state = before.chain(start).take(T::MEMORY).enumerate();
            let state = state.fold(0, |state, (steps, symbol)| state | symbol << (steps * Self::BITS));
            chain.weights[input][row] = self.weights[state * Self::SYMBOLS + usize::from(chain.symbols[input][row])];
        }
    }

    /// Sets weight and residual of an input from its final symbol, and corrects the targets of later inputs.
    #[inline(always)]
    fn finish(&self, input: usize, targets: &mut Targets, cost: &ChainCost<'_>, to: &mut EncodedChain) {
        let simd = self.simd;
        self.read_weights(to, input);
        let error = simd.sub(simd.load(&targets.now[input]), simd.load(&to.weights[input]));
        let residual = simd.mul(error, simd.splat(cost.importance[input].sqrt()));
        simd.store(residual, &mut to.residuals[input]);
        simd.store(simd.add(simd.load(&to.loss), simd.mul(residual, residual)), &mut to.loss);
        if let Some(inverse) = &cost.inverse {
            let (next, outside) = (input + 1, input + 1 + WINDOW);
            let factors = &inverse[input][..targets.now.len()];
            subtract(simd, &mut targets.now[next..], &[residual], &[&factors[next..]]);
            if outside < factors.len() {
                subtract(simd, &mut targets.outside[outside..], &[residual], &[&factors[outside..]]);
            }
        }
    }
}
