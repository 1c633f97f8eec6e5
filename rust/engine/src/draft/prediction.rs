//! A text that the caller expects, such as the file that is to be edited (OpenAI's "predicted outputs").
//!
//! A place in the prediction goes along with the output. A token that is not the predicted one is first taken for
//! another in its place; if so many follow that it has lost its place, the latest tokens are looked for in the
//! prediction, so that what was put in or left out throws it off for a few tokens only. How many are so many depends on
//! how often the tokens of this place came so far: where each second one does, a few in a row are no surprise.

use super::Drafter;
use super::ngram::common_suffix;

/// Tokens by which a place is found again, at the least and at the most.
const SHORTEST: usize = 2;
const LONGEST: usize = 8;
/// A row of misses that is less likely than this says that the place is lost.
const SURPRISE: f64 = 0.005;
/// The share of tokens that come as predicted: before any came, and what each weighs.
const EXPECTED: f64 = 0.8;
const SMOOTHING: f64 = 0.06;

/// See the module.
#[derive(Debug)]
pub(super) struct Prediction {
    tokens: Vec<u32>,
    /// Place of the token that is expected next.
    next: usize,
    /// Tokens of prompt and continuation that were compared.
    seen: usize,
    /// Tokens at the end of these that were not the predicted ones.
    missed: i32,
    /// The share of the tokens before these that were.
    match_rate: f64,
    prompt_len: usize,
}

impl Prediction {
    pub fn new(tokens: Vec<u32>, prompt_len: usize) -> Self {
        Self { tokens, next: 0, seen: prompt_len, missed: 0, match_rate: EXPECTED, prompt_len }
    }

    /// Goes along with the tokens that have come.
    fn follow(&mut self, tokens: &[u32]) {
        for &token in &tokens[self.seen..] {
            if self.tokens.get(self.next) == Some(&token) {
                self.match_rate = self.match_rate * (1.0 - SMOOTHING).powi(self.missed + 1) + SMOOTHING;
                self.missed = 0;
            } else {
                self.missed = self.missed.saturating_add(1);
            }
            self.next += 1;
        }
        self.seen = tokens.len();
        if self.is_lost()
            && let Some(place) = self.find(&tokens[self.prompt_len..])
        {
            (self.next, self.missed) = (place, 0);
        }
    }

    /// Whether the latest misses are more than a token here and there.
    fn is_lost(&self) -> bool {
        self.missed > 1 && (1.0 - self.match_rate).powi(self.missed) < SURPRISE
    }

    /// The place after the longest match, and of equals after the nearest.
    fn find(&self, output: &[u32]) -> Option<usize> {
        let matched = |end: usize| common_suffix(&self.tokens[..end], output, LONGEST);
        let ends =
            (SHORTEST..self.tokens.len()).map(|end| (matched(end), std::cmp::Reverse(end.abs_diff(self.next)), end));
        ends.filter(|&(matched, ..)| matched >= SHORTEST).max().map(|(_, _, end)| end)
    }
}

impl Drafter for Prediction {
    fn draft(&mut self, tokens: &[u32], most: usize, drafts: &mut Vec<u32>) {
        self.follow(tokens);
        drafts.extend(self.tokens.iter().skip(self.next).take(most));
    }

    fn expected(&self) -> f64 {
        0.7
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is drafted after each of the outputs in turn, after a prompt of three tokens.
    fn drafts(prediction: impl IntoIterator<Item = u32>, output: &[u32], steps: &[usize]) -> Vec<Vec<u32>> {
        let mut drafter = Prediction::new(prediction.into_iter().collect(), 3);
        let tokens: Vec<u32> = [1, 1, 1].iter().chain(output).copied().collect();
        let draft = |&come: &usize| {
            let mut drafts = Vec::new();
            drafter.draft(&tokens[..3 + come], 2, &mut drafts);
            drafts
        };
        steps.iter().map(draft).collect()
    }

    #[test]
    fn it_goes_along_and_passes_over_another_token_in_its_place() {
        assert_eq!(drafts(10..20, &[10, 11, 50, 13, 14], &[0, 1, 3, 5]), [[10, 11], [11, 12], [13, 14], [15, 16]]);
    }

    #[test]
    fn it_finds_its_place_again_after_something_put_in_or_left_out() {
        // Two misses are no surprise at first, four are; and two are after twenty tokens that came.
        assert_eq!(drafts(10..20, &[10, 11, 50, 51, 52, 53, 12, 13], &[8]), [[14, 15]]);
        assert_eq!(drafts(10..20, &[10, 11, 16, 17], &[2, 4]), [[12, 13], [14, 15]]);
        let left_out: Vec<u32> = (10..40).chain([50, 51]).collect();
        assert_eq!(drafts(10..60, &left_out, &[30, 32]), [[40, 41], [52, 53]]);
    }

    #[test]
    fn where_each_second_token_comes_true_it_keeps_its_place() {
        // A text that goes in circles, so that its tokens stand in many places.
        let output: Vec<u32> = (0..200).map(|index| index % 5).collect();
        let prediction = (0..200).map(|index| if index % 6 < 3 { 99 } else { index % 5 });
        let steps: Vec<usize> = (100..198).collect();
        for (&come, drafts) in steps.iter().zip(drafts(prediction, &output, &steps)) {
            assert!(drafts.iter().zip(&output[come..]).all(|(&draft, &token)| draft == 99 || draft == token), "{come}");
            assert_eq!(drafts[0] == 99, come % 6 < 3, "{come}");
        }
    }

    #[test]
    fn it_has_nothing_to_say_beyond_its_end() {
        assert_eq!(drafts([10, 11, 12], &[10, 11, 12, 13], &[2, 3, 4]), [vec![12], vec![], vec![]]);
        // The end of the prediction, which nothing follows, is no place to go on from.
        assert_eq!(drafts([10, 11, 12], &[50, 51, 52, 53, 11, 12], &[6]), [[] as [u32; 0]]);
    }
}
