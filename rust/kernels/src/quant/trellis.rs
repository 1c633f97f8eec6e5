//! Trellis formats: each weight depends on the stored symbols of several inputs (trellis-coded quantization, Marcellin and
//! Fischer, 1990).
//!
//! A *chain* is a sequence of inputs of one row: every fourth one, so the symbols of a chain are at one place of successive
//! quads. A weight is an entry of a small table that the symbols of its input and of those before it in the chain select,
//! plus an entry that its own symbol selects; a fifth bit of a symbol is the sign of the sum. A chain of one symbol per input
//! reaches more weights than there are symbols, and [`viterbi`](super::viterbi) finds a sequence with little error, one
//! *segment* of a chain after the other. The idea of weights that overlapping windows of bits select is that of QTIP
//! (<https://arxiv.org/abs/2406.11235>). Tables were found by random changes that decrease the error of normally distributed
//! weights.
//!
//! Tables of sixteen bytes are looked up in registers, and the symbols before those of a quad are in the lines before, at
//! the same place, so a chain needs no moves between lanes. There are no sub-scales: [`integer`](super::integer) describes
//! the rest. Symbols are stored in [`planes`](super::planes); a pair of groups has as many lines as a symbol has bits.

use std::marker::PhantomData;
use std::ops::Range;

use super::integer::{BLOCK, BLOCK_PAIRS, Codes, HALF, PAIR_QUADS, SUPER, Unpack};
use super::planes::{self, BitPlanes};
use crate::arch::{ByteLine, Dot, LANES, LINE};

/// Number of chains of a row.
pub const CHAINS: usize = 4;

/// Number of inputs of a segment: those of a chain in a half block.
pub const SEGMENT: usize = HALF / CHAINS;

/// Number of inputs after a segment at which the search looks ahead. One takes as much time as one of the segment.
pub const AHEAD: usize = SEGMENT;

/// Number of bits of a state: the symbols on which a weight depends besides its own. Of the earliest one, it may be the
/// lowest bits alone.
const STATE_BITS: usize = 6;

/// Number of states. The latest symbol is in the lowest bits of a state.
pub const STATES: usize = 1 << STATE_BITS;

/// Number of symbols of which a state has a part, at most.
const MAX_MEMORY: usize = 3;

/// Returns the inputs of a row of `width` inputs, segment by segment: those of all chains in a half block before the next
/// half block.
pub fn by_segment(width: usize) -> impl Iterator<Item = usize> {
    let firsts = (0..width).step_by(HALF).flat_map(|first| first..first + CHAINS);
    firsts.flat_map(|first| (0..SEGMENT).map(move |k| first + k * CHAINS))
}

/// Returns the segments that a descent searches again: first those between the middles of half blocks in a super-block,
/// then those of half blocks.
pub fn descent_segments(size: usize) -> impl Iterator<Item = [usize; SEGMENT]> {
    let middles = (HALF / 2..size.saturating_sub(HALF / 2)).step_by(HALF).filter(|first| first % SUPER < SUPER - HALF);
    let firsts = middles.chain((0..size).step_by(HALF)).flat_map(|first| first..first + CHAINS);
    firsts.map(|first| std::array::from_fn(|k| first + k * CHAINS))
}

/// Description of a format by its tables. The weight of symbol x after a state of symbols x1 (the latest), x2 and so on is
/// `BY_INDEX[x ^ BY_LATEST[x1] ^ BY_EARLIER[y]] + BY_SYMBOL[x]`, where y are the bits of the state above x1. If symbols have
/// five bits, x, x1 and so on are their lowest four, and the weight is negated where the fifth bit is set. Before the
/// first symbol of a chain there are those of the start.
pub trait Trellis: Send + Sync + 'static {
    /// Symbols.
    type Symbols: BitPlanes;

    /// Bits of the index that the latest symbol flips.
    const BY_LATEST: [u8; LANES];

    /// Bits of the index that earlier symbols flip. Bits above those of a state change nothing: parts of the table repeat.
    const BY_EARLIER: [u8; LANES];

    /// Terms by index.
    const BY_INDEX: [i8; LANES];

    /// Terms by symbol.
    const BY_SYMBOL: [i8; LANES];

    /// Symbols before the first one of a chain, latest first.
    const START: [u8; MAX_MEMORY];

    /// Standard deviation of the weights for which the tables are made: normally distributed ones.
    const DEVIATION: f32;
}

/// Integer format of a description.
pub struct Trellised<T>(PhantomData<T>);

/// Packed block: the lines from those of its symbols on, and those of the pair of groups before it.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    symbols: &'a [ByteLine],
    before: Option<&'a [ByteLine]>,
}

/// Symbols of two groups, and those of the last quads before them, latest first.
#[derive(Clone, Copy)]
pub struct Pair<'a, S: Dot> {
    symbols: &'a [ByteLine],
    before: [S::Bytes; MAX_MEMORY],
}

impl<T: Trellis> Trellised<T> {
    /// Number of bits of a symbol.
    pub const BITS: usize = <T::Symbols as BitPlanes>::BITS;

    /// Number of bits of a symbol without its sign.
    const UNSIGNED_BITS: usize = if Self::IS_SIGNED { Self::BITS - 1 } else { Self::BITS };

    /// Whether symbols have a sign.
    pub const IS_SIGNED: bool = {
        assert!(Self::BITS <= 5);
        Self::BITS == 5
    };

    /// Number of symbols without their signs.
    pub const SYMBOLS: usize = 1 << Self::UNSIGNED_BITS;

    /// Number of symbols of which a state has a part.
    const MEMORY: usize = STATE_BITS.div_ceil(Self::UNSIGNED_BITS);

    /// Number of lines of a block.
    const BLOCK_LINES: usize = BLOCK_PAIRS * Self::BITS;

    /// Returns the state before an input. `symbol` returns the symbol of an earlier one.
    pub fn state(input: usize, symbol: impl Fn(usize) -> usize) -> usize {
        let before = (1..=Self::MEMORY).map(|steps| match input.checked_sub(CHAINS * steps) {
            Some(before) => symbol(before) % Self::SYMBOLS,
            None => usize::from(T::START[steps - 1 - input / CHAINS]),
        });
        let before = before.enumerate();
        before.fold(0, |state, (steps, symbol)| state | symbol << (steps * Self::UNSIGNED_BITS)) % STATES
    }

    /// Returns the weight of `symbol` in a state.
    pub fn weight(state: usize, symbol: usize) -> i32 {
        let [latest, earlier] = [state % Self::SYMBOLS, state >> Self::UNSIGNED_BITS];
        let (is_negative, symbol) = (symbol >= Self::SYMBOLS, symbol % Self::SYMBOLS);
        let index = symbol ^ usize::from(T::BY_LATEST[latest] ^ T::BY_EARLIER[earlier]);
        let weight = i32::from(T::BY_INDEX[index]) + i32::from(T::BY_SYMBOL[symbol]);
        if is_negative { -weight } else { weight }
    }

    /// Returns the root mean square of the weights of uniformly distributed symbols.
    pub fn uniform_deviation() -> f32 {
        let all = (0..STATES).flat_map(|state| (0..Self::SYMBOLS).map(move |symbol| Self::weight(state, symbol)));
        (all.map(|weight| (weight * weight) as f32).sum::<f32>() / (STATES * Self::SYMBOLS) as f32).sqrt()
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
        Self::weight(Self::state(input, symbol), symbol(input))
    }

    /// Returns the terms of the indices, with the bias of an instruction set unless weights are negated after it.
    const fn terms(bias: u8) -> [u8; LANES] {
        let bias = if Self::IS_SIGNED { 0 } else { bias };
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

    /// Returns the symbols of quad `index` of two groups.
    #[inline(always)]
    fn at<S: Dot>(simd: S, pair: Pair<'_, S>, index: usize) -> S::Bytes {
        T::Symbols::quad(simd, pair.symbols, index)
    }

    /// Returns the symbols of the last quads of two groups, latest first.
    #[inline(always)]
    fn last<S: Dot>(simd: S, symbols: &[ByteLine]) -> [S::Bytes; MAX_MEMORY] {
        let symbols = &symbols[..Self::BITS];
        [
            T::Symbols::quad(simd, symbols, PAIR_QUADS - 1),
            T::Symbols::quad(simd, symbols, PAIR_QUADS - 2),
            T::Symbols::quad(simd, symbols, PAIR_QUADS - 3),
        ]
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
        let before = (index > 0).then(|| &lines[first - Self::BITS..first]);
        Block { symbols: &lines[first..], before }
    }

    #[inline(always)]
    fn pair<'a, S: Dot>(simd: S, block: Self::Block<'a>, index: usize) -> Self::Pair<'a, S> {
        let before = match (index, block.before) {
            (0, None) => {
                let [latest, earlier, earliest] = T::START;
                [simd.splat_byte(latest), simd.splat_byte(earlier), simd.splat_byte(earliest)]
            }
            (0, Some(symbols)) => Self::last(simd, symbols),
            _ => Self::last(simd, &block.symbols[(index - 1) * Self::BITS..]),
        };
        Pair { symbols: &block.symbols[index * Self::BITS..][..Self::BITS], before }
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        let symbol = Self::at(simd, pair, index);
        let [latest, mut earlier, earliest] = match index {
            0 => pair.before,
            1 => [Self::at(simd, pair, 0), pair.before[0], pair.before[1]],
            2 => [Self::at(simd, pair, 1), Self::at(simd, pair, 0), pair.before[0]],
            _ => [Self::at(simd, pair, index - 1), Self::at(simd, pair, index - 2), Self::at(simd, pair, index - 3)],
        };
        if const { Self::MEMORY == MAX_MEMORY } {
            earlier = simd.or(earlier, planes::shift(simd, earliest, 0, Self::BITS));
        }
        let flips = simd.xor(simd.lookup(&T::BY_LATEST, latest), simd.lookup(&T::BY_EARLIER, earlier));
        let place = simd.xor(symbol, flips);
        let term = simd.lookup(&const { Self::terms(S::WEIGHT_BIAS) }, place);
        let weight = simd.sub_bytes(term, simd.lookup(&const { Self::negated_terms() }, symbol));
        if const { !Self::IS_SIGNED } {
            return weight;
        }
        let sign = simd.and(planes::shift(simd, symbol, Self::UNSIGNED_BITS, 0), simd.splat_byte(1));
        simd.sub_bytes(simd.negate(weight, sign), simd.splat_byte(const { 0u8.wrapping_sub(S::WEIGHT_BIAS) }))
    }
}
