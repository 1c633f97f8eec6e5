//! Prompt lookup: what followed the latest tokens where they stood before (Saxena 2023,
//! <https://github.com/apoorvumang/prompt-lookup-decoding>). Good where a text is quoted, edited or goes round in
//! circles.

use super::Drafter;

/// See the module.
#[derive(Debug)]
pub(super) struct Ngram {
    /// Tokens that must be the same, at least and at the most.
    shortest: usize,
    longest: usize,
}

impl Ngram {
    pub fn new(shortest: usize, longest: usize) -> Self {
        Self { shortest, longest }
    }

    /// The position after the latest of the longest matches.
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

/// Tokens at the ends of both that are the same; more than `most` are not counted.
pub(super) fn common_suffix(one: &[u32], other: &[u32], most: usize) -> usize {
    one.iter().rev().zip(other.iter().rev()).take(most).take_while(|(a, b)| a == b).count()
}

impl Drafter for Ngram {
    fn draft(&mut self, tokens: &[u32], most: usize, drafts: &mut Vec<u32>) {
        let Some(end) = self.find(tokens) else { return };
        // Where the match is close to the end, the drafts themselves are what goes on: the text is taken to repeat.
        let period = tokens.len() - end;
        drafts.extend((0..most).map(|index| tokens[end + index % period]));
    }

    fn expected(&self) -> f64 {
        0.4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(shortest: usize, longest: usize, tokens: &[u32], most: usize) -> Vec<u32> {
        let mut drafts = Vec::new();
        Ngram::new(shortest, longest).draft(tokens, most, &mut drafts);
        drafts
    }

    #[test]
    fn the_longest_match_wins_and_of_equals_the_latest() {
        let tokens = [1, 2, 3, 10, 11, 9, 3, 20, 21, 9, 3, 30, 31, 1, 2, 3];
        assert_eq!(draft(1, 3, &tokens, 2), [10, 11]);
        assert_eq!(draft(1, 1, &tokens, 2), [30, 31]);
        assert_eq!(draft(4, 8, &tokens, 2), [] as [u32; 0]);
    }

    #[test]
    fn a_text_that_repeats_is_continued_beyond_its_end() {
        assert_eq!(draft(1, 4, &[5, 7, 7, 7], 4), [7, 7, 7, 7]);
        assert_eq!(draft(2, 4, &[5, 1, 2, 3, 1, 2], 5), [3, 1, 2, 3, 1]);
        assert_eq!(draft(1, 4, &[5], 4), [] as [u32; 0]);
        assert_eq!(draft(1, 4, &[], 4), [] as [u32; 0]);
    }
}
