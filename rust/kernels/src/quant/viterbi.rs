//! Viterbi search for the symbols of a [`trellis`](super::trellis) format.
//!
//! The search visits the inputs of a segment of a chain in order, and then some inputs after it, whose symbols are not
//! kept: they show which end of the segment is good for them. For each state it keeps the sequence of symbols with the
//! least loss that ends in it, a *survivor*. With a Hessian, the target of an input depends on the errors before it
//! (GPTQ), and so on the survivor: each has its own corrections of the next [`WINDOW`] inputs.
//!
//! Rows are searched one after the other, states are lanes. Multiplications and additions are rounded separately (no FMA),
//! so all instruction sets find the same symbols.

use std::marker::PhantomData;

use super::trellis::{AHEAD, SEGMENT, STATES, Trellis, Trellised};
use crate::arch::{LANES, Simd};
use crate::hessian::feedback::Column;

/// Number of inputs whose targets survivors correct: at least those of a segment.
const WINDOW: usize = LANES;

const _: () = assert!(WINDOW >= SEGMENT);

/// Cost of errors e in the weights of a segment and of the inputs that are looked ahead at: the squares of `e R`, for an
/// upper triangular R.
pub struct SegmentCost {
    /// R's diagonal.
    pub diagonal: Vec<f32>,
    /// Factors of the residual of each input in the targets of the inputs after it, those of input k in lane `k % WINDOW`;
    /// `None` if R is diagonal.
    pub windows: Option<Vec<[f32; WINDOW]>>,
}

impl SegmentCost {
    /// Returns the cost given the inverse of R by row and column.
    pub fn of_inverse(inputs: usize, inverse: impl Fn(usize, usize) -> f32) -> Self {
        let windows = (0..inputs).map(|row| {
            let mut window = [0.0; WINDOW];
            (row + 1..inputs.min(row + 1 + WINDOW)).for_each(|column| window[column % WINDOW] = inverse(row, column));
            window
        });
        Self { diagonal: (0..inputs).map(|k| inverse(k, k).recip()).collect(), windows: Some(windows.collect()) }
    }
}

/// Search with its buffers.
pub struct Viterbi<S, T> {
    pub simd: S,
    /// Weights without their scale, `[state][symbol without its sign]`.
    weights: Vec<Column>,
    /// Loss of the survivor of each state, and its residual of the last input.
    losses: Vec<Column>,
    next_losses: Vec<Column>,
    residuals: Vec<Column>,
    /// Corrections by survivors, those of input k in lane `k % WINDOW`.
    corrections: Vec<[f32; WINDOW]>,
    next_corrections: Vec<[f32; WINDOW]>,
    /// State before each state of a survivor, `[input][state]`, plus [`STATES`] if the symbol between them is negative.
    origins: Vec<[i8; LANES]>,
    trellis: PhantomData<T>,
}

impl<S: Simd, T: Trellis> Viterbi<S, T> {
    const SYMBOLS: usize = Trellised::<T>::SYMBOLS;
    const IS_SIGNED: bool = Trellised::<T>::IS_SIGNED;

    /// Number of values of the part of a state that stays in the next one, and number of vectors of states.
    const KEPT: usize = STATES / Self::SYMBOLS;
    const VECTORS: usize = STATES / LANES;

    /// Number of states whose next states share a vector.
    const SHARING: usize = {
        assert!(2 * STATES <= i8::MAX as usize + 1 && Self::KEPT * Self::SYMBOLS >= LANES);
        LANES / Self::SYMBOLS
    };

    /// Creates the buffers.
    pub fn new(simd: S) -> Self {
        let weight = |state| (0..Self::SYMBOLS).map(move |symbol| Trellised::<T>::weight(state, symbol) as f32);
        let weights: Vec<f32> = (0..STATES).flat_map(weight).collect();
        let columns = vec![[0.0; LANES]; Self::VECTORS];
        Self {
            simd,
            weights: weights.as_chunks().0.to_vec(),
            losses: columns.clone(),
            next_losses: columns.clone(),
            residuals: columns,
            corrections: vec![[0.0; WINDOW]; STATES],
            next_corrections: vec![[0.0; WINDOW]; STATES],
            origins: vec![[0; LANES]; Self::VECTORS * (SEGMENT + AHEAD)],
            trellis: PhantomData,
        }
    }

    /// Finds symbols of a segment with little loss. `targets` are those of its inputs and of the ones to look ahead at, in
    /// units of the scale. `starts` is the state of each row before the segment, and `ends` that after the last target, if
    /// it is given.
    #[inline(always)]
    pub fn search(
        &mut self,
        targets: &[Column],
        (starts, ends): (&[usize; LANES], Option<&[usize; LANES]>),
        cost: &SegmentCost,
        symbols: &mut [[u8; LANES]; SEGMENT],
    ) {
        for (row, start) in starts.iter().enumerate() {
            self.losses.fill([f32::INFINITY; LANES]);
            self.losses.as_flattened_mut()[*start] = 0.0;
            self.corrections.fill([0.0; WINDOW]);
            for (input, target) in targets.iter().enumerate() {
                self.extend(input, target[row], cost.diagonal[input]);
                if let Some(windows) = &cost.windows {
                    self.follow(input, &windows[input]);
                }
            }
            let mut state = ends.map_or_else(|| self.best(), |ends| ends[row]);
            for (input, origins) in self.origins.chunks_exact(Self::VECTORS).take(targets.len()).enumerate().rev() {
                let origin = usize::from(origins.as_flattened()[state].cast_unsigned());
                if let Some(symbols) = symbols.get_mut(input) {
                    symbols[row] = (state % Self::SYMBOLS + origin / STATES * Self::SYMBOLS) as u8;
                }
                state = origin % STATES;
            }
        }
    }

    /// Returns the weights of symbols after states, which become those after the symbols.
    pub fn weights(&self, states: &mut [usize; LANES], symbols: &[u8; LANES]) -> Column {
        std::array::from_fn(|row| {
            let symbol = usize::from(symbols[row]);
            let at = states[row] * Self::SYMBOLS + symbol % Self::SYMBOLS;
            states[row] = at % STATES;
            let weight = self.weights.as_flattened()[at];
            if symbol < Self::SYMBOLS { weight } else { -weight }
        })
    }

    /// Returns the weights of the symbols of a segment after the state of each row before it.
    pub fn segment_weights(&self, starts: &[usize; LANES], symbols: &[[u8; LANES]; SEGMENT]) -> [Column; SEGMENT] {
        let mut states = *starts;
        symbols.each_ref().map(|symbols| self.weights(&mut states, symbols))
    }

    /// Extends the survivors by the symbol of an input, and keeps the best one that ends in each state.
    #[inline(always)]
    fn extend(&mut self, input: usize, target: f32, diagonal: f32) {
        let simd = self.simd;
        let diagonal = simd.splat(diagonal);
        let losses = self.losses.as_flattened();
        let origins = &mut self.origins[input * Self::VECTORS..][..Self::VECTORS];
        for (vector, origins) in origins.iter_mut().enumerate() {
            let mut least = simd.splat(f32::INFINITY);
            let mut best = simd.splat(0.0);
            let mut residual = simd.splat(0.0);
            for oldest in 0..Self::SYMBOLS {
                let from = oldest * Self::KEPT + vector * Self::SHARING;
                let target = Self::by_state(simd, |state| target - self.corrections[from + state][input % WINDOW]);
                let weight = simd.load(&self.weights[from / Self::SHARING]);
                let (mut error, mut origin) = (simd.sub(target, weight), simd.splat((oldest * Self::KEPT) as f32));
                if const { Self::IS_SIGNED } {
                    let (square, other) = (simd.mul(error, error), simd.add(target, weight));
                    let other_square = simd.mul(other, other);
                    let negative = simd.splat((oldest * Self::KEPT + STATES) as f32);
                    origin = simd.select_greater(square, other_square, negative, origin);
                    error = simd.select_greater(square, other_square, other, error);
                }
                let tried = simd.mul(error, diagonal);
                let loss = simd.add(Self::by_state(simd, |state| losses[from + state]), simd.mul(tried, tried));
                best = simd.select_greater(least, loss, origin, best);
                residual = simd.select_greater(least, loss, tried, residual);
                least = simd.select_greater(least, loss, loss, least);
            }
            simd.store(least, &mut self.next_losses[vector]);
            simd.store(residual, &mut self.residuals[vector]);
            let kept = Self::by_state(simd, |state| (vector * Self::SHARING + state) as f32);
            simd.store_i8(simd.to_i32(simd.add(best, kept)), origins);
        }
        std::mem::swap(&mut self.losses, &mut self.next_losses);
    }

    /// Returns values of the states whose next states share a vector, each in the lanes of its next states.
    #[inline(always)]
    fn by_state(simd: S, value: impl Fn(usize) -> f32) -> S::F32 {
        if const { Self::SHARING == 1 } {
            return simd.splat(value(0));
        }
        let mut lanes = [0.0; LANES];
        for (state, lanes) in lanes.chunks_exact_mut(Self::SYMBOLS).enumerate() {
            lanes.fill(value(state));
        }
        simd.load(&lanes)
    }

    /// Moves the corrections of each survivor to its new state, and adds those by the residual of `input`. The lane of
    /// `input` becomes that of a later input.
    #[inline(always)]
    fn follow(&mut self, input: usize, window: &[f32; WINDOW]) {
        let simd = self.simd;
        let (window, lane, zero) = (simd.load(window), 1 << (input % WINDOW), simd.splat(0.0));
        let origins = self.origins[input * Self::VECTORS..][..Self::VECTORS].as_flattened();
        let survivors = origins.iter().zip(self.residuals.as_flattened());
        for ((origin, residual), to) in survivors.zip(&mut self.next_corrections) {
            let before = simd.load(&self.corrections[usize::from(origin.cast_unsigned()) % STATES]);
            let correction = simd.mul(simd.splat(*residual), window);
            simd.store(simd.add(simd.select_lanes(lane, zero, before), correction), to);
        }
        std::mem::swap(&mut self.corrections, &mut self.next_corrections);
    }

    /// Returns the state of the best survivor, the first of several.
    #[inline(always)]
    fn best(&self) -> usize {
        let losses = self.losses.as_flattened().iter().enumerate();
        losses.fold((0, f32::INFINITY), |best, (state, loss)| if *loss < best.1 { (state, *loss) } else { best }).0
    }
}

#[cfg(test)]
mod tests {
    use super::super::trellis2::TwoBits as Two;
    use super::super::trellis3::ThreeBits as Three;
    use super::super::trellis4::FourBits as Four;
    use super::super::trellis5::FiveBits as Five;
    use super::*;
    use crate::arch::{Isa, Kernel};

    /// Returns pseudorandom numbers from -1 to 1.
    fn random(seed: u64, count: usize) -> Vec<f64> {
        let mut state = seed;
        let next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f64 / f64::from(1 << 23) - 1.0
        };
        std::iter::repeat_with(next).take(count).collect()
    }

    /// Naive search in f64: a survivor is its symbols, whose residuals are computed again at each input.
    struct Naive<'a> {
        inverse: &'a dyn Fn(usize, usize) -> f64,
        weight: &'a dyn Fn(usize, usize) -> f64,
        /// Number of symbols, and of those without their signs.
        symbols: usize,
        unsigned: usize,
    }

    impl Naive<'_> {
        fn next(&self, state: usize, symbol: usize) -> usize {
            (state * self.unsigned + symbol % self.unsigned) % STATES
        }

        /// Returns the sum of the squares of the residuals of symbols.
        fn loss(&self, targets: &[f64], start: usize, symbols: &[usize]) -> f64 {
            let (mut targets, mut state, mut loss) = (targets.to_vec(), start, 0.0);
            for (k, symbol) in symbols.iter().enumerate() {
                let residual = (targets[k] - (self.weight)(state, *symbol)) / (self.inverse)(k, k);
                (k + 1..targets.len()).for_each(|later| targets[later] -= residual * (self.inverse)(k, later));
                loss += residual * residual;
                state = self.next(state, *symbol);
            }
            loss
        }

        /// Returns the symbols of the best survivor of each end, and its loss.
        fn search(&self, targets: &[f64], start: usize) -> Vec<Option<(Vec<usize>, f64)>> {
            let mut survivors = vec![None; STATES];
            survivors[start] = Some((Vec::new(), 0.0));
            for _ in targets {
                let mut next: Vec<Option<(Vec<usize>, f64)>> = vec![None; STATES];
                for (state, (symbols, _)) in
                    survivors.iter().enumerate().filter_map(|(k, each)| Some((k, each.as_ref()?)))
                {
                    for symbol in 0..self.symbols {
                        let symbols = [symbols.as_slice(), &[symbol]].concat();
                        let loss = self.loss(targets, start, &symbols);
                        let best = &mut next[self.next(state, symbol)];
                        if best.as_ref().is_none_or(|best| loss < best.1) {
                            *best = Some((symbols, loss));
                        }
                    }
                }
                survivors = next;
            }
            survivors
        }
    }

    struct Search<'a, T> {
        targets: &'a [Column],
        ends: ([usize; LANES], Option<[usize; LANES]>),
        cost: &'a SegmentCost,
        trellis: PhantomData<T>,
    }

    impl<T: Trellis> Kernel for Search<'_, T> {
        type Output = [[u8; LANES]; SEGMENT];

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Self::Output {
            let mut symbols = [[0; LANES]; SEGMENT];
            let (starts, ends) = &self.ends;
            Viterbi::<S, T>::new(simd).search(self.targets, (starts, ends.as_ref()), self.cost, &mut symbols);
            symbols
        }
    }

    /// Compares the loss of a search with that of the naive one.
    fn check<T: Trellis>(correlation: f64) {
        let weight = |state, symbol| f64::from(Trellised::<T>::weight(state, symbol));
        let factors = random(1, SEGMENT * SEGMENT);
        let inverse = |row: usize, column: usize| match row == column {
            true => 1.0 + 0.5 * factors[row],
            false => correlation * factors[row * SEGMENT + column],
        };
        let (symbols, unsigned) = (1 << Trellised::<T>::BITS, Trellised::<T>::SYMBOLS);
        let naive = Naive { inverse: &inverse, weight: &weight, symbols, unsigned };
        let cost = SegmentCost::of_inverse(SEGMENT, |row, column| inverse(row, column) as f32);
        let values = random(2, SEGMENT * LANES);
        let target = |k: usize, row: usize| (values[k * LANES + row] * 80.0) as f32;
        let targets: Vec<Column> = (0..SEGMENT).map(|k| std::array::from_fn(|row| target(k, row))).collect();
        let starts = std::array::from_fn(|row| row * 7 % STATES);
        let given: [usize; LANES] = std::array::from_fn(|row| row * 23 % STATES);
        let of_row = |row: usize| targets.iter().map(|target| f64::from(target[row])).collect::<Vec<_>>();
        // The naive search is slow.
        const ROWS: usize = 3;
        let naive_survivors: Vec<_> = (0..ROWS).map(|row| naive.search(&of_row(row), starts[row])).collect();
        for isa in Isa::available() {
            for ends in [None, Some(given)] {
                let search = Search::<T> { targets: &targets, ends: (starts, ends), cost: &cost, trellis: PhantomData };
                let symbols = isa.run(search);
                for (row, survivors) in naive_survivors.iter().enumerate() {
                    let found: Vec<_> = symbols.iter().map(|symbols| usize::from(symbols[row])).collect();
                    let loss = naive.loss(&of_row(row), starts[row], &found);
                    let best = match ends {
                        Some(ends) => survivors[ends[row]].as_ref().unwrap().1,
                        None => survivors.iter().flatten().map(|(_, loss)| *loss).fold(f64::INFINITY, f64::min),
                    };
                    assert!((loss - best).abs() <= 1e-4 * best, "{}, row {row}: {loss}, not {best}", isa.name());
                    let end = found.iter().fold(starts[row], |state, symbol| naive.next(state, *symbol));
                    assert!(ends.is_none_or(|ends| ends[row] == end), "{}, row {row}", isa.name());
                }
            }
        }
    }

    #[test]
    fn searches_find_the_losses_of_a_naive_one() {
        for correlation in [0.0, 0.2] {
            check::<Two>(correlation);
            check::<Three>(correlation);
            check::<Four>(correlation);
            check::<Five>(correlation);
        }
    }

    /// Without correlations, the symbols of a segment are those of the best sequence over all inputs.
    #[test]
    fn the_search_looks_ahead() {
        let weight = |state, symbol| f64::from(Trellised::<Three>::weight(state, symbol));
        let inverse = |row, column| f64::from(u8::from(row == column));
        let naive = Naive { inverse: &inverse, weight: &weight, symbols: 8, unsigned: 8 };
        let (values, length) = (random(3, 2 * SEGMENT), SEGMENT + 8);
        let targets: Vec<Column> = values[..length].iter().map(|value| [(80.0 * value) as f32; LANES]).collect();
        let cost = SegmentCost { diagonal: vec![1.0; length], windows: None };
        let search = Search::<Three> { targets: &targets, ends: ([5; LANES], None), cost: &cost, trellis: PhantomData };
        let found = Isa::best().run(search).map(|symbols| usize::from(symbols[0]));
        let exact: Vec<f64> = targets.iter().map(|target| f64::from(target[0])).collect();
        let best = |targets: &[f64]| {
            let survivors = naive.search(targets, 5).into_iter().flatten();
            survivors.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0
        };
        assert_eq!(found[..], best(&exact)[..SEGMENT]);
        assert_ne!(found[..], best(&exact[..SEGMENT])[..]);
    }
}
