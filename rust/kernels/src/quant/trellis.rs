//! Trellis formats: each weight depends on the stored symbols of several inputs (trellis-coded quantization, Marcellin and
//! Fischer, 1990).
//!
//! A *chain* is a sequence of inputs of one row in a super-block: every fourth one, so the symbols of a chain are at one
//! place of successive quads. A weight is an entry of a small table that the symbols of its input and of those before it
//! in the chain select, plus an entry that its own symbol selects. A chain of one symbol per input reaches more weights
//! than there are symbols, and [`viterbi`](super::viterbi) finds the sequence with the least error. The idea of weights that
//! overlapping windows of bits select is that of QTIP (<https://arxiv.org/abs/2406.11235>).
//!
//! Tables of sixteen bytes are looked up in registers, and the symbols before those of a quad are in the lines before, at
//! the same place, so a chain needs no moves between lanes. There are no sub-scales: [`integer`](super::integer) describes
//! the rest. Symbols are stored in [`planes`](super::planes); a pair of groups has as many lines as a symbol has bits.

use std::marker::PhantomData;
use std::ops::Range;

use super::integer::{BLOCK, BLOCK_PAIRS, Codes, HALF, PAIR_QUADS, SUPER, Unpack};
use super::planes::{self, BitPlanes};
use crate::arch::{ByteLine, Dot, LANES, LINE};

/// Number of chains of a row in a super-block.
pub const CHAINS: usize = 4;

/// Number of inputs of a chain, in a whole super-block.
pub const CHAIN: usize = SUPER / CHAINS;

/// Number of symbols on which a weight depends besides its own, at most.
const MAX_MEMORY: usize = 2;

/// Returns the inputs of a super-block of `width` inputs, chain by chain.
pub fn chained_inputs(width: usize) -> impl Iterator<Item = usize> {
    (0..CHAINS).flat_map(move |chain| (chain..width).step_by(CHAINS))
}

/// Description of a format by its tables. The weight of symbol x after symbols x1 and x2 is
/// `BY_INDEX[x ^ BEFORE[0][x1] ^ BEFORE[1][x2]] + BY_SYMBOL[x]`. Before the first symbol of a chain there are
/// those of the start.
pub trait Trellis: Send + Sync + 'static {
    /// Symbols.
    type Symbols: BitPlanes;

    /// Number of symbols on which a weight depends besides its own: 1 or 2.
    const MEMORY: usize;

    /// Bits of the index that symbols flip: of the symbol before that of the weight, and of the one before that.
    const BEFORE: [[u8; LANES]; MAX_MEMORY];

    /// Terms by index.
    const BY_INDEX: [i8; LANES];

    /// Terms by symbol.
    const BY_SYMBOL: [i8; LANES];

    /// Symbols before the first one of a chain, latest first. 0 beyond the memory.
    const START: [u8; MAX_MEMORY];

    /// Standard deviation of the weights for which the tables are made: normally distributed ones.
    const DEVIATION: f32;
}

/// Integer format of a description.
pub struct Trellised<T>(PhantomData<T>);

/// Packed block: the lines from those of its symbols on, and those of the pair of groups before it in its super-block.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    symbols: &'a [ByteLine],
    before: Option<&'a [ByteLine]>,
}

/// Symbols of two groups, and those of the last two quads before them, latest first.
#[derive(Clone, Copy)]
pub struct Pair<'a, S: Dot> {
    symbols: &'a [ByteLine],
    before: [S::Bytes; MAX_MEMORY],
}

impl<T: Trellis> Trellised<T> {
    /// Number of bits of a symbol.
    pub const BITS: usize = <T::Symbols as BitPlanes>::BITS;

    /// Number of symbols.
    pub const SYMBOLS: usize = {
        assert!(T::MEMORY == 1 || T::MEMORY == MAX_MEMORY);
        1 << Self::BITS
    };

    /// Number of states: sequences of the symbols on which a weight depends besides its own. The latest symbol is in the
    /// lowest bits of a state.
    pub const STATES: usize = 1 << (Self::BITS * T::MEMORY);

    /// State before the first symbol of a chain.
    pub const START: usize = T::START[0] as usize | (T::START[1] as usize) << Self::BITS;

    /// Number of lines of a block.
    const BLOCK_LINES: usize = BLOCK_PAIRS * Self::BITS;

    /// Returns the state after `symbol`.
    pub const fn next(state: usize, symbol: usize) -> usize {
        (state << Self::BITS | symbol) % Self::STATES
    }

    /// Returns the weight of `symbol` in a state.
    pub fn weight(state: usize, symbol: usize) -> i32 {
        let [before, earlier] = [state % Self::SYMBOLS, state >> Self::BITS];
        let mut index = symbol ^ usize::from(T::BEFORE[0][before]);
        if T::MEMORY > 1 {
            index ^= usize::from(T::BEFORE[1][earlier]);
        }
        i32::from(T::BY_INDEX[index]) + i32::from(T::BY_SYMBOL[symbol])
    }

    /// Returns the root mean square of the weights of uniformly distributed symbols.
    pub fn uniform_deviation() -> f32 {
        let all = (0..Self::STATES).flat_map(|state| (0..Self::SYMBOLS).map(move |symbol| Self::weight(state, symbol)));
        (all.map(|weight| (weight * weight) as f32).sum::<f32>() / (Self::STATES * Self::SYMBOLS) as f32).sqrt()
    }

    /// Returns the number of lines of `halves` half blocks.
    pub const fn lines(halves: usize) -> usize {
        halves * Self::BLOCK_LINES * HALF / BLOCK
    }

    /// Returns the lines with the symbols of quad `quad` of a row, and its index among those quads.
    fn place(quad: usize) -> (Range<usize>, usize) {
        let first = quad / PAIR_QUADS * Self::BITS;
        (first..first + Self::BITS, quad % PAIR_QUADS)
    }

    /// Stores symbols `[input][row]` into zeroed lines.
    pub fn store(lines: &mut [ByteLine], symbols: &[[u8; LANES]]) {
        for (input, symbols) in symbols.iter().enumerate() {
            let (range, quad) = Self::place(input / 4);
            let lines = planes::vectors_mut::<LINE>(&mut lines[range]);
            for (row, symbol) in symbols.iter().enumerate() {
                T::Symbols::store(lines, PAIR_QUADS, quad, row * 4 + input % 4, *symbol);
            }
        }
    }

    /// Returns the rotated weight of row `row` and input `input`, without its block scale.
    pub fn read(lines: &[ByteLine], input: usize, row: usize) -> i32 {
        let symbol = |input: usize| {
            let (range, quad) = Self::place(input / 4);
            usize::from(T::Symbols::number(
                planes::vectors::<LINE>(&lines[range]),
                PAIR_QUADS,
                quad,
                row * 4 + input % 4,
            ))
        };
        let before = (1..=T::MEMORY).map(|steps| match input % SUPER >= CHAINS * steps {
            true => symbol(input - CHAINS * steps),
            false => usize::from(T::START[steps - 1 - input % SUPER / CHAINS]),
        });
        let state = before.enumerate().fold(0, |state, (steps, symbol)| state | symbol << (steps * Self::BITS));
        Self::weight(state, symbol(input))
    }

    /// Returns the terms of the indices with the bias of an instruction set.
    const fn biased_terms(bias: u8) -> [u8; LANES] {
        let mut terms = [0; LANES];
        let mut index = 0;
        while index < LANES {
            terms[index] = bias.wrapping_add_signed(T::BY_INDEX[index]);
            index += 1;
        }
        terms
    }

    /// Returns the negated terms of the symbols.
    const fn negated_terms() -> [u8; LANES] {
        let mut terms = [0; LANES];
        let mut symbol = 0;
        while symbol < LANES {
            terms[symbol] = 0u8.wrapping_add_signed(-T::BY_SYMBOL[symbol]);
            symbol += 1;
        }
        terms
    }

    /// Returns the symbols of the last two quads of two groups, latest first.
    #[inline(always)]
    fn last<S: Dot>(simd: S, symbols: &[ByteLine]) -> [S::Bytes; MAX_MEMORY] {
        let symbols = &symbols[..Self::BITS];
        [T::Symbols::quad(simd, symbols, PAIR_QUADS - 1), T::Symbols::quad(simd, symbols, PAIR_QUADS - 2)]
    }
}

impl<T: Trellis> Unpack for Trellised<T> {
    const BY_CODES: Option<Codes> = None;

    type Block<'a> = Block<'a>;
    type Pair<'a, S: Dot> = Pair<'a, S>;

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        index * Self::BLOCK_LINES
    }

    #[inline(always)]
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_> {
        let first = Self::first_line(index);
        let before = (index * BLOCK % SUPER > 0).then(|| &lines[first - Self::BITS..first]);
        Block { symbols: &lines[first..], before }
    }

    #[inline(always)]
    fn pair<'a, S: Dot>(simd: S, block: Self::Block<'a>, index: usize) -> Self::Pair<'a, S> {
        let before = match (index, block.before) {
            (0, None) => [simd.splat_byte(T::START[0]), simd.splat_byte(T::START[1])],
            (0, Some(symbols)) => Self::last(simd, symbols),
            _ => Self::last(simd, &block.symbols[(index - 1) * Self::BITS..]),
        };
        Pair { symbols: &block.symbols[index * Self::BITS..][..Self::BITS], before }
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        let symbol = T::Symbols::quad(simd, pair.symbols, index);
        let [latest, earlier] = match index {
            0 => pair.before,
            1 => [T::Symbols::quad(simd, pair.symbols, 0), pair.before[0]],
            _ => [T::Symbols::quad(simd, pair.symbols, index - 1), T::Symbols::quad(simd, pair.symbols, index - 2)],
        };
        let mut place = simd.xor(symbol, simd.lookup(&T::BEFORE[0], latest));
        if const { T::MEMORY > 1 } {
            place = simd.xor(place, simd.lookup(&T::BEFORE[1], earlier));
        }
        let term = simd.lookup(&const { Self::biased_terms(S::WEIGHT_BIAS) }, place);
        simd.sub_bytes(term, simd.lookup(&const { Self::negated_terms() }, symbol))
    }
}
