//! Prompt lookup decoding: drafts the tokens that followed an earlier occurrence of the latest n-gram (Saxena 2023,
//! <https://github.com/apoorvumang/prompt-lookup-decoding>). Works well where text is quoted, edited or repeated.

use super::Drafter;

/// Drafts by n-gram lookup.
#[derive(Debug)]
pub(super) struct Ngram {
    /// Minimum and maximum n-gram length.
    shortest: usize,
    longest: usize,
}

impl Ngram {
    pub fn new(shortest: usize, longest: usize) -> Self {
        Self { shortest, longest }
    }

    /// Returns the position after the longest match, the latest among equals.
    fn find(&self, tokens: &[u32]) -> Option<usize> {
        let mut best = (self.shortest.max(1) - 1, None);
        for end in (1..tokens.len()).rev() {
            let matched = common_suffix(&tokens[..end], tokens, self.longest);
            if matched > best.0 {
                best = (matched, Some(end));
                if matched == self.longest {
                    break;
                }
            }
        }
        best.1
    }
}

/// Returns the length of the common suffix, up to `limit`.
pub(super) fn common_suffix(one: &[u32], other: &[u32], limit: usize) -> usize {
    one.iter().rev().zip(other.iter().rev()).take(limit).take_while(|(a, b)| a == b).count()
}

impl Drafter for Ngram {
    fn draft(&mut self, tokens: &[u32], limit: usize, drafts: &mut Vec<u32>) {
        let Some(end) = self.find(tokens) else { return };
        // If the match overlaps the end, the text is assumed to repeat with that period.
        let period = tokens.len() - end;
        drafts.extend((0..limit).map(|index| tokens[end + index % period]));
    }

    fn expected_acceptance(&self) -> f64 {
        0.4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(shortest: usize, longest: usize, tokens: &[u32], limit: usize) -> Vec<u32> {
        let mut drafts = Vec::new();
        Ngram::new(shortest, longest).draft(tokens, limit, &mut drafts);
        drafts
    }

    #[test]
    fn the_longest_then_latest_match_wins() {
        let tokens = [1, 2, 3, 10, 11, 9, 3, 20, 21, 9, 3, 30, 31, 1, 2, 3];
        assert_eq!(draft(1, 3, &tokens, 2), [10, 11]);
        assert_eq!(draft(1, 1, &tokens, 2), [30, 31]);
        assert_eq!(draft(4, 8, &tokens, 2), [] as [u32; 0]);
    }

    #[test]
    fn a_repeating_text_is_continued_periodically() {
        assert_eq!(draft(1, 4, &[5, 7, 7, 7], 4), [7, 7, 7, 7]);
        assert_eq!(draft(2, 4, &[5, 1, 2, 3, 1, 2], 5), [3, 1, 2, 3, 1]);
        assert_eq!(draft(1, 4, &[5], 4), [] as [u32; 0]);
        assert_eq!(draft(1, 4, &[], 4), [] as [u32; 0]);
    }
}
