//! Token masks: sets of tokens, one bit each.

/// Set of allowed tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    /// `[ceil(vocab / 32)]`; the lowest bit of the first word is token 0. Bits beyond the vocabulary are zero.
    words: Vec<u32>,
    count: usize,
}

impl TokenMask {
    /// Creates the set of tokens below `vocab_size` whose bits are set.
    pub(crate) fn new(mut words: Vec<u32>, vocab_size: usize) -> Self {
        words.truncate(vocab_size.div_ceil(32));
        if let (Some(last), rest @ 1..) = (words.last_mut(), vocab_size % 32) {
            *last &= (1 << rest) - 1;
        }
        let count = count(&words);
        Self { words, count }
    }

    /// Adds tokens of the vocabulary.
    pub(super) fn with(mut self, tokens: &[u32]) -> Self {
        for &token in tokens {
            if let Some(word) = self.words.get_mut(token as usize / 32) {
                *word |= 1 << (token % 32);
            }
        }
        self.count = count(&self.words);
        self
    }

    /// Removes tokens.
    pub(super) fn without(mut self, tokens: &[u32]) -> Self {
        for &token in tokens {
            if let Some(word) = self.words.get_mut(token as usize / 32) {
                *word &= !(1 << (token % 32));
            }
        }
        self.count = count(&self.words);
        self
    }

    /// Returns the number of tokens in the set.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns whether a token is in the set.
    #[must_use]
    pub fn allows(&self, token: u32) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Returns the bits, 32 tokens per word, lowest bit first.
    pub(crate) fn words(&self) -> &[u32] {
        &self.words
    }

    /// Returns the tokens in ascending order.
    pub fn tokens(&self) -> impl Iterator<Item = u32> {
        (0..).step_by(32).zip(&self.words).flat_map(|(first, &word)| Bits(word).map(move |bit| first + bit))
    }
}

fn count(words: &[u32]) -> usize {
    words.iter().map(|word| word.count_ones() as usize).sum()
}

/// Indices of the set bits, ascending.
struct Bits(u32);

impl Iterator for Bits {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        let bit = (self.0 != 0).then(|| self.0.trailing_zeros())?;
        self.0 &= self.0 - 1;
        Some(bit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_beyond_the_vocabulary_are_cleared() {
        for vocab_size in [1, 31, 32, 33, 64, 70] {
            let mask = TokenMask::new(vec![u32::MAX; 4], vocab_size);
            assert_eq!(mask.count(), vocab_size);
            assert_eq!(mask.tokens().collect::<Vec<_>>(), (0..vocab_size as u32).collect::<Vec<_>>());
            assert!(mask.allows(vocab_size as u32 - 1) && !mask.allows(vocab_size as u32) && !mask.allows(u32::MAX));
        }
    }

    #[test]
    fn tokens_are_added_and_removed() {
        let mask = TokenMask::new(vec![0b101, 0], 40).with(&[33, 0]);
        assert_eq!((mask.count(), mask.tokens().collect::<Vec<_>>()), (3, vec![0, 2, 33]));
        let mask = mask.without(&[2, 5]);
        assert_eq!((mask.count(), mask.tokens().collect::<Vec<_>>()), (2, vec![0, 33]));
    }
}
