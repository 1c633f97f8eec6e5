//! A set of tokens, one bit each.

/// The tokens that may come next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    /// `[ceil(vocab / 32)]`; the lowest bit of the first word is token 0. No bit beyond the vocabulary is set.
    words: Vec<u32>,
    count: usize,
}

impl TokenMask {
    /// The tokens below `vocab_size` whose bits are set.
    pub(crate) fn new(mut words: Vec<u32>, vocab_size: usize) -> Self {
        words.truncate(vocab_size.div_ceil(32));
        if let (Some(last), rest @ 1..) = (words.last_mut(), vocab_size % 32) {
            *last &= (1 << rest) - 1;
        }
        let count = count(&words);
        Self { words, count }
    }

    /// The same with other tokens, all of the vocabulary.
    pub(super) fn with(mut self, tokens: &[u32]) -> Self {
        for &token in tokens {
            if let Some(word) = self.words.get_mut(token as usize / 32) {
                *word |= 1 << (token % 32);
            }
        }
        self.count = count(&self.words);
        self
    }

    /// The same without some tokens.
    pub(super) fn without(mut self, tokens: &[u32]) -> Self {
        for &token in tokens {
            if let Some(word) = self.words.get_mut(token as usize / 32) {
                *word &= !(1 << (token % 32));
            }
        }
        self.count = count(&self.words);
        self
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Whether a token is one of them.
    #[must_use]
    pub fn allows(&self, token: u32) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Thirty-two tokens a word, the lowest bit first.
    pub(crate) fn words(&self) -> &[u32] {
        &self.words
    }

    /// All of them, ascending.
    pub fn tokens(&self) -> impl Iterator<Item = u32> {
        (0..).step_by(32).zip(&self.words).flat_map(|(first, &word)| Bits(word).map(move |bit| first + bit))
    }
}

fn count(words: &[u32]) -> usize {
    words.iter().map(|word| word.count_ones() as usize).sum()
}

/// The places of the bits that are set, ascending.
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
    fn bits_beyond_the_vocabulary_are_not_there() {
        for vocab_size in [1, 31, 32, 33, 64, 70] {
            let mask = TokenMask::new(vec![u32::MAX; 4], vocab_size);
            assert_eq!(mask.count(), vocab_size);
            assert_eq!(mask.tokens().collect::<Vec<_>>(), (0..vocab_size as u32).collect::<Vec<_>>());
            assert!(mask.allows(vocab_size as u32 - 1) && !mask.allows(vocab_size as u32) && !mask.allows(u32::MAX));
        }
    }

    #[test]
    fn tokens_come_and_go() {
        let mask = TokenMask::new(vec![0b101, 0], 40).with(&[33, 0]);
        assert_eq!((mask.count(), mask.tokens().collect::<Vec<_>>()), (3, vec![0, 2, 33]));
        let mask = mask.without(&[2, 5]);
        assert_eq!((mask.count(), mask.tokens().collect::<Vec<_>>()), (2, vec![0, 33]));
    }
}
