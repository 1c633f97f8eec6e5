//! Choosing tokens by their scores, and the tokens that were chosen.

use std::cell::RefCell;
use std::ops::Range;

use super::{BlockScore, IndexShape};
use crate::disjoint::Tiles;
use crate::kv::PAGE_TOKENS;

/// Tokens that each row of a batch attends to: one set for all heads of K and V, or several for as many groups of them.
#[derive(Debug, Default)]
pub struct Selection {
    /// `[rows, sets, pages]`; one bit for each token of a page.
    words: Vec<u16>,
    sets: usize,
    pages: usize,
}

const _: () = assert!(PAGE_TOKENS == u16::BITS as usize);

impl Selection {
    /// Creates a selection of `sets` sets for each row from the tokens of each set, row by row, which are in the first
    /// `pages` pages of their sequence.
    ///
    /// # Panics
    /// If a token is in a later page.
    ///
    /// # Examples
    /// ```
    /// use ferrule_kernels::indexer::Selection;
    ///
    /// let selection = Selection::from_tokens(1, 2, [vec![0, 17], vec![3]]);
    /// assert_eq!(selection.tokens(0, 0).collect::<Vec<_>>(), [0, 17]);
    /// ```
    #[must_use]
    pub fn from_tokens(sets: usize, pages: usize, tokens: impl IntoIterator<Item = Vec<usize>>) -> Self {
        let mut words = Vec::new();
        for tokens in tokens {
            let first = words.len();
            words.resize(first + pages, 0);
            tokens.iter().for_each(|token| words[first + token / PAGE_TOKENS] |= 1 << (token % PAGE_TOKENS));
        }
        Self { words, sets, pages }
    }

    /// Returns the positions of the chosen tokens of a set of a row, in ascending order.
    pub fn tokens(&self, row: usize, set: usize) -> impl Iterator<Item = usize> + '_ {
        let words = &self.words[(row * self.sets + set) * self.pages..][..self.pages];
        (0..self.pages * PAGE_TOKENS).filter(|token| words[token / PAGE_TOKENS] >> (token % PAGE_TOKENS) & 1 == 1)
    }

    /// Returns the tokens that head `head` of K and V, of `heads`, may be read at, by page.
    pub(crate) fn words(&self, row: usize, head: usize, heads: usize) -> &[u16] {
        let set = head / (heads / self.sets);
        &self.words[(row * self.sets + set) * self.pages..][..self.pages]
    }

    /// Panics if heads of K and V cannot be divided evenly among the sets.
    pub(crate) fn check(&self, kv_heads: usize) {
        let sets = self.sets;
        assert!(sets > 0 && kv_heads.is_multiple_of(sets), "{kv_heads} heads of K and V cannot share {sets} sets");
    }

    /// Makes the selection one of `rows` rows with `sets` sets, all of them empty.
    pub(super) fn clear(&mut self, rows: usize, sets: usize, pages: usize) {
        self.words.clear();
        self.words.resize(rows * sets * pages, 0);
        (self.sets, self.pages) = (sets, pages);
    }

    pub(super) fn sets(&self) -> usize {
        self.sets
    }

    pub(super) fn pages(&self) -> usize {
        self.pages
    }

    /// Returns the sets, one tile each.
    pub(super) fn rows_mut(&mut self) -> Tiles<'_, u16> {
        Tiles::row_blocks(&mut self.words, self.pages, 1)
    }
}

/// The choice of one set.
pub(super) struct Chosen<'a> {
    /// Output: one bit for each token, by page.
    pub words: &'a mut [u16],
    /// Scores of the tokens; unspecified after `position`.
    pub scores: &'a [f32],
    /// Position of the row.
    pub position: usize,
    pub shape: &'a IndexShape,
}

thread_local! {
    /// Scores of the blocks with their indices, as integers in the order of the choice.
    static KEYS: RefCell<Vec<u64>> = RefCell::default();
}

/// Chooses the blocks with the highest scores; where scores tie, those at lower positions.
pub(super) fn choose(Chosen { words, scores, position, shape }: Chosen<'_>) {
    let IndexShape { block, blocks, local_blocks, .. } = *shape;
    let tokens = position + 1;
    if shape.chooses_all(position) {
        return insert(words, 0..tokens);
    }
    let scored = shape.scored_tokens(position);
    insert(words, scored..tokens);
    KEYS.with_borrow_mut(|keys| {
        let count = scored.div_ceil(block);
        let local = count - local_blocks.min(count);
        let score = |index: usize, scores: &[f32]| {
            let of_block = || match shape.score {
                BlockScore::Highest => scores.iter().map(|score| ascending(*score)).max().unwrap_or(0),
                BlockScore::Last => scores.last().map_or(0, |score| ascending(*score)),
            };
            if index >= local { u32::MAX } else { of_block() }
        };
        keys.clear();
        let blocks_of = scores[..scored].chunks(block).enumerate();
        keys.extend(blocks_of.map(|(index, scores)| u64::from(!score(index, scores)) << 32 | index as u64));
        let (before, last, _) = keys.select_nth_unstable(blocks - 1);
        for key in before.iter().chain([&*last]) {
            let first = (key & u64::from(u32::MAX)) as usize * block;
            insert(words, first..(first + block).min(tokens));
        }
    });
}

/// Returns an integer that orders floats as their values do. NaN comes after infinity if its sign is positive, and before
/// all numbers if it is negative.
pub(crate) fn ascending(score: f32) -> u32 {
    // Adding 0 makes -0 equal to 0.
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// Sets the bits of a range of tokens.
fn insert(words: &mut [u16], tokens: Range<usize>) {
    let pages = tokens.start / PAGE_TOKENS..tokens.end.div_ceil(PAGE_TOKENS);
    for (page, word) in pages.clone().zip(&mut words[pages]) {
        *word |= token_bits(page, &tokens);
    }
}

/// Returns one bit for each token of page `page`, set for those in `tokens`.
pub(crate) fn token_bits(page: usize, tokens: &Range<usize>) -> u16 {
    let below = |position: usize| match position.saturating_sub(page * PAGE_TOKENS) {
        token @ 0..PAGE_TOKENS => (1 << token) - 1,
        _ => u16::MAX,
    };
    below(tokens.end) & !below(tokens.start)
}
