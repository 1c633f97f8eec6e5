//! Rows of logits on their way to the process that samples.
//!
//! Where only the largest logits of a row are needed, only these are sent: for a greedy request and 128,000 tokens about
//! 20 bytes instead of half a megabyte. The words of 32 bits, row by row:
//!
//! | needed logits of the row | words |
//! |---|---|
//! | all, or half of them | the logits of the worker's tokens |
//! | the largest | number of pairs, then pairs of an index among the worker's tokens and its logit |

use std::io::Read;
use std::ops::Range;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::logits::{BLOCK, block_maxima};

use super::link::{LinkError, read_word};
use crate::batch::{LogitRows, SequenceChunk};

/// Returns for each wanted row of a batch how many of the largest logits are needed; 0 for all.
pub(super) fn needed_logits(sequences: &[SequenceChunk<'_>]) -> Vec<u32> {
    let of_chunk = |chunk: &SequenceChunk<'_>| {
        let needed = if let LogitRows::LastLargest(count) = chunk.logits { count.get() } else { 0 };
        std::iter::repeat_n(needed, chunk.logits.of(chunk.tokens.len()).len())
    };
    sequences.iter().flat_map(of_chunk).collect()
}

/// Returns the words of a worker's logits `[needed.len(), own tokens]`. Writes them to `words` unless they are the logits
/// themselves.
pub(super) fn words_of<'a>(isa: Isa, logits: &'a [f32], needed: &[u32], words: &'a mut Vec<u32>) -> &'a [u32] {
    if needed.iter().all(|needed| *needed == 0) {
        return bytemuck::cast_slice(logits);
    }
    words.clear();
    let mut maxima = Vec::new();
    for (row, needed) in logits.chunks_exact(logits.len() / needed.len()).zip(needed) {
        if all_are_sent(*needed, row.len()) {
            words.extend_from_slice(bytemuck::cast_slice(row));
            continue;
        }
        let begin = words.len();
        words.push(0);
        // NaN and infinity end the request with an error that counts them.
        if block_maxima(isa, row, &mut maxima) {
            // At least as many logits as are needed reach the lowest of so many maxima.
            let lowest = nth_highest(&maxima, *needed as usize);
            let blocks = row.chunks(BLOCK).zip((0..).step_by(BLOCK)).zip(&maxima);
            for ((logits, first), _) in blocks.filter(|(_, maximum)| **maximum >= lowest) {
                let pairs = (first..).zip(logits);
                push_pairs(pairs.filter(|(_, logit)| **logit >= lowest && **logit > f32::NEG_INFINITY), words);
            }
        } else {
            push_pairs((0..).zip(row), words);
        }
        words[begin] = ((words.len() - begin) / 2) as u32;
    }
    words
}

/// Returns whether all logits of `tokens` tokens are sent, since so many are needed that pairs would be longer.
fn all_are_sent(needed: u32, tokens: usize) -> bool {
    needed == 0 || 2 * needed as usize >= tokens
}

fn push_pairs<'a>(pairs: impl Iterator<Item = (usize, &'a f32)>, words: &mut Vec<u32>) {
    pairs.for_each(|(index, logit)| words.extend([index as u32, logit.to_bits()]));
}

/// Returns the `count`-th highest number, or negative infinity if there are fewer.
fn nth_highest(numbers: &[f32], count: usize) -> f32 {
    if count == 1 {
        return numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    }
    let mut numbers = numbers.to_vec();
    if count > numbers.len() {
        return f32::NEG_INFINITY;
    }
    *numbers.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a)).1
}

/// Writes negative infinity to rows `[needed.len(), vocab_size]` of which only the largest logits are needed.
pub(super) fn write_unsent(needed: &[u32], rows: &mut [f32]) {
    let width = rows.len() / needed.len().max(1);
    for (row, _) in rows.chunks_exact_mut(width.max(1)).zip(needed).filter(|(_, needed)| **needed > 0) {
        row.fill(f32::NEG_INFINITY);
    }
}

/// Reads `count` words of a worker's logits, and writes these to rows `[needed.len(), vocab_size]` at its tokens, after
/// [`write_unsent`].
pub(super) fn read_rows(
    reader: &mut impl Read,
    count: usize,
    needed: &[u32],
    own: &Range<usize>,
    rows: &mut [f32],
) -> Result<(), LinkError> {
    let mut left = count;
    let mut take = |words: usize| {
        left = left.checked_sub(words).ok_or_else(|| {
            LinkError::Protocol(format!("{count} words of logits, too few for {} rows of {}", needed.len(), own.len()))
        })?;
        Ok::<_, LinkError>(())
    };
    for (row, needed) in rows.chunks_exact_mut(rows.len() / needed.len()).zip(needed) {
        let row = &mut row[own.clone()];
        if all_are_sent(*needed, row.len()) {
            take(row.len())?;
            reader.read_exact(bytemuck::cast_slice_mut(row))?;
            continue;
        }
        take(1)?;
        let pairs = read_word(reader)? as usize;
        take(2 * pairs)?;
        for _ in 0..pairs {
            let [index, logit] = [read_word(reader)?, read_word(reader)?];
            let Some(place) = row.get_mut(index as usize) else {
                let what = format!("a logit of token {index} of {}", row.len());
                return Err(LinkError::Protocol(what));
            };
            *place = f32::from_bits(logit);
        }
    }
    match left {
        0 => Ok(()),
        left => Err(LinkError::Protocol(format!("{left} words after the logits of {} rows", needed.len()))),
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Sends logits `[needed.len(), own tokens]` of a worker whose tokens begin with 2, and returns the rows that arrive.
    fn sent(logits: &[f32], needed: &[u32]) -> Vec<f32> {
        let tokens = logits.len() / needed.len();
        let words = words_of(Isa::best(), logits, needed, &mut Vec::new()).to_vec();
        let mut rows = vec![7.0; needed.len() * (tokens + 3)];
        write_unsent(needed, &mut rows);
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        read_rows(&mut &*bytes, words.len(), needed, &(2..2 + tokens), &mut rows).unwrap();
        rows
    }

    proptest! {
        #[test]
        fn needed_logits_arrive_and_no_others_are_changed(
            row in vec((-30..30).prop_map(|number| number as f32 / 4.0), 1..400),
            needed in vec(0..120_u32, 1..4),
        ) {
            let logits = vec![&row[..]; needed.len()].concat();
            let mut sorted = row.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            for (rows, needed) in sent(&logits, &needed).chunks(row.len() + 3).zip(needed) {
                let unsent = if needed == 0 { 7.0 } else { f32::NEG_INFINITY };
                prop_assert_eq!((&rows[..2], &rows[row.len() + 2..]), (&[unsent; 2][..], &[unsent][..]));
                let lowest = if needed == 0 { f32::MIN } else { sorted[(needed as usize).min(row.len()) - 1] };
                for (logit, found) in row.iter().zip(&rows[2..]) {
                    prop_assert!(found == logit || *logit < lowest && *found == f32::NEG_INFINITY);
                }
            }
        }
    }

    #[test]
    fn one_needed_logit_is_one_pair() {
        let logits: Vec<f32> = (0..1000).map(|index| (index * 7919 % 1000) as f32).collect();
        let mut words = Vec::new();
        let expected = logits.iter().position(|logit| *logit == 999.0).unwrap() as u32;
        assert_eq!(words_of(Isa::best(), &logits, &[1], &mut words), [1, expected, 999.0_f32.to_bits()]);
    }

    #[test]
    fn numbers_that_are_not_finite_arrive() {
        let mut logits = vec![1.0; 300];
        (logits[7], logits[250]) = (f32::NAN, f32::INFINITY);
        let rows = sent(&logits, &[1]);
        assert!(rows[9].is_nan() && rows[252] == f32::INFINITY && rows[10] == 1.0);
        let forbidden = vec![f32::NEG_INFINITY; 300];
        assert_eq!(sent(&forbidden, &[1])[2..302], forbidden);
    }

    #[test]
    fn words_that_do_not_fit_the_rows_are_refused() {
        let error = |words: &[u32], needed: &[u32]| {
            let bytes: &[u8] = bytemuck::cast_slice(words);
            let mut rows = vec![0.0; 10 * needed.len()];
            read_rows(&mut &*bytes, words.len(), needed, &(0..8), &mut rows).unwrap_err().to_string()
        };
        assert!(error(&[0; 7], &[0]).contains("7 words of logits, too few for 1 rows of 8"));
        assert!(error(&[0; 9], &[0]).contains("1 words after the logits of 1 rows"));
        assert!(error(&[9, 0, 0], &[1]).contains("3 words of logits, too few"));
        assert!(error(&[u32::MAX, 0, 0], &[1]).contains("3 words of logits, too few"));
        assert!(error(&[1, 8, 0], &[1]).contains("a logit of token 8 of 8"));
    }
}
