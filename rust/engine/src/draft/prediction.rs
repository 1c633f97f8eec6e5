//! Drafts from the caller's predicted output, such as a file to be edited (OpenAI's "predicted outputs").
//!
//! A cursor in the prediction follows the output. A token that differs from the prediction is first taken for a
//! substitution; after several mismatches the latest tokens are searched in the prediction, so that an insertion or
//! deletion costs only a few tokens. How many mismatches trigger the search depends on the recent match rate: where
//! every second token matches, a few mismatches in a row are expected.

use super::Drafter;
use super::ngram::common_suffix;

/// Minimum and maximum number of tokens by which the cursor is realigned.
const SHORTEST: usize = 2;
const LONGEST: usize = 8;
/// A run of mismatches less likely than this means that the cursor is misaligned.
const MISALIGNED_BELOW: f64 = 0.005;
/// Initial match rate, and the weight of each new token in it.
const EXPECTED: f64 = 0.8;
const SMOOTHING: f64 = 0.06;

/// Drafts from a predicted output.
#[derive(Debug)]
pub(super) struct Prediction {
    tokens: Vec<u32>,
    /// Cursor: index of the next expected token.
    next: usize,
    /// Number of prompt and output tokens already compared.
    seen: usize,
    /// Number of consecutive mismatches at the end.
    mismatches: i32,
    /// Match rate of the tokens before them.
    match_rate: f64,
    prompt_len: usize,
}

impl Prediction {
    pub fn new(tokens: Vec<u32>, prompt_len: usize) -> Self {
        Self { tokens, next: 0, seen: prompt_len, mismatches: 0, match_rate: EXPECTED, prompt_len }
    }

    /// Compares new tokens and moves the cursor.
    fn align(&mut self, tokens: &[u32]) {
        for &token in &tokens[self.seen..] {
            if self.tokens.get(self.next) == Some(&token) {
                self.match_rate = self.match_rate * (1.0 - SMOOTHING).powi(self.mismatches + 1) + SMOOTHING;
                self.mismatches = 0;
            } else {
                self.mismatches = self.mismatches.saturating_add(1);
            }
            self.next += 1;
        }
        self.seen = tokens.len();
        if self.is_misaligned()
            && let Some(place) = self.find(&tokens[self.prompt_len..])
        {
            (self.next, self.mismatches) = (place, 0);
        }
    }

    /// Returns whether the latest mismatches are more than substitutions.
    fn is_misaligned(&self) -> bool {
        self.mismatches > 1 && (1.0 - self.match_rate).powi(self.mismatches) < MISALIGNED_BELOW
    }

    /// Returns the position after the longest match, the nearest among equals.
    fn find(&self, output: &[u32]) -> Option<usize> {
        let matched = |end: usize| common_suffix(&self.tokens[..end], output, LONGEST);
        let ends =
            (SHORTEST..self.tokens.len()).map(|end| (matched(end), std::cmp::Reverse(end.abs_diff(self.next)), end));
        ends.filter(|&(matched, ..)| matched >= SHORTEST).max().map(|(_, _, end)| end)
    }
}

impl Drafter for Prediction {
    fn draft(&mut self, tokens: &[u32], limit: usize, drafts: &mut Vec<u32>) {
        self.align(tokens);
        drafts.extend(self.tokens.iter().skip(self.next).take(limit));
    }

    fn expected_acceptance(&self) -> f64 {
        0.7
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the drafts after each prefix of the output, following a prompt of three tokens.
    fn drafts(prediction: impl IntoIterator<Item = u32>, output: &[u32], steps: &[usize]) -> Vec<Vec<u32>> {
        let mut drafter = Prediction::new(prediction.into_iter().collect(), 3);
        let tokens: Vec<u32> = [1, 1, 1].iter().chain(output).copied().collect();
        let draft = |&count: &usize| {
            let mut drafts = Vec::new();
            drafter.draft(&tokens[..3 + count], 2, &mut drafts);
            drafts
        };
        steps.iter().map(draft).collect()
    }

    #[test]
    fn the_cursor_skips_substituted_tokens() {
        assert_eq!(drafts(10..20, &[10, 11, 50, 13, 14], &[0, 1, 3, 5]), [[10, 11], [11, 12], [13, 14], [15, 16]]);
    }

    #[test]
    fn the_cursor_realigns_after_insertions_and_deletions() {
        // At first four mismatches realign, two do not; after twenty matches two do.
        assert_eq!(drafts(10..20, &[10, 11, 50, 51, 52, 53, 12, 13], &[8]), [[14, 15]]);
        assert_eq!(drafts(10..20, &[10, 11, 16, 17], &[2, 4]), [[12, 13], [14, 15]]);
        let left_out: Vec<u32> = (10..40).chain([50, 51]).collect();
        assert_eq!(drafts(10..60, &left_out, &[30, 32]), [[40, 41], [52, 53]]);
    }

    #[test]
    fn the_cursor_stays_where_half_the_tokens_match() {
        // A repetitive text, in which every token occurs in many positions.
        let output: Vec<u32> = (0..200).map(|index| index % 5).collect();
        let prediction = (0..200).map(|index| if index % 6 < 3 { 99 } else { index % 5 });
        let steps: Vec<usize> = (100..198).collect();
        for (&count, drafts) in steps.iter().zip(drafts(prediction, &output, &steps)) {
            assert!(
                drafts.iter().zip(&output[count..]).all(|(&draft, &token)| draft == 99 || draft == token),
                "{count}"
            );
            assert_eq!(drafts[0] == 99, count % 6 < 3, "{count}");
        }
    }

    #[test]
    fn nothing_is_drafted_beyond_the_end_of_the_prediction() {
        assert_eq!(drafts([10, 11, 12], &[10, 11, 12, 13], &[2, 3, 4]), [vec![12], vec![], vec![]]);
        // The end of the prediction is not a position to continue from.
        assert_eq!(drafts([10, 11, 12], &[50, 51, 52, 53, 11, 12], &[6]), [[] as [u32; 0]]);
    }
}
