//! Rows of logits on their way to the process that samples.
//!
//! Where only the largest logit of a row is needed, only that of each worker is sent: for a greedy request and 128,000
//! tokens 12 bytes of each worker instead of half a megabyte in all. The words of 32 bits, row by row:
//!
//! | needed logits of the row | words |
//! |---|---|
//! | all | the logits of the worker's tokens |
//! | the largest one | number of pairs, then pairs of an index among the worker's tokens and its logit |
//!
//! There is one pair, none if all logits are negative infinity, or one for each token if a logit is NaN or infinite.

use std::io::Read;
use std::ops::Range;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::logits::{BLOCK, block_maxima};

use super::link::{LinkError, read_word};
use crate::batch::{LogitRows, SequenceChunk};

/// Logits of a row that are needed. The numbers are those of requests; see [`link`](super::link).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NeededLogits {
    /// All logits.
    All = 0,
    /// The largest one, as for [`LogitRows::LastLargest`].
    Largest = 1,
}

/// Returns the needed logits of each wanted row of a batch.
pub(super) fn needed_per_row(sequences: &[SequenceChunk<'_>]) -> Vec<NeededLogits> {
    let of_chunk = |chunk: &SequenceChunk<'_>| {
        let largest = chunk.logits == LogitRows::LastLargest;
        let needed = if largest { NeededLogits::Largest } else { NeededLogits::All };
        std::iter::repeat_n(needed, chunk.logits.of(chunk.tokens.len()).len())
    };
    sequences.iter().flat_map(of_chunk).collect()
}

/// Returns the words of a worker's logits `[needed.len(), own tokens]`. Writes them to `words` unless they are the logits
/// themselves.
pub(super) fn words_of<'a>(isa: Isa, logits: &'a [f32], needed: &[NeededLogits], words: &'a mut Vec<u32>) -> &'a [u32] {
    if !needed.contains(&NeededLogits::Largest) {
        return bytemuck::cast_slice(logits);
    }
    words.clear();
    let mut maxima = Vec::new();
    for (row, needed) in logits.chunks_exact(logits.len() / needed.len()).zip(needed) {
        if *needed == NeededLogits::All {
            words.extend_from_slice(bytemuck::cast_slice(row));
        } else if block_maxima(isa, row, &mut maxima) {
            // Of equal logits the lowest token is the most likely one.
            let highest = maxima.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let block = maxima.iter().position(|maximum| *maximum == highest).unwrap_or(0);
            let found = row.iter().enumerate().skip(block * BLOCK).find(|(_, logit)| **logit == highest);
            push_pairs(found.filter(|_| highest > f32::NEG_INFINITY).as_slice(), words);
        } else {
            // NaN and infinity end the request with an error that counts them.
            push_pairs(&row.iter().enumerate().collect::<Vec<_>>(), words);
        }
    }
    words
}

fn push_pairs(pairs: &[(usize, &f32)], words: &mut Vec<u32>) {
    words.push(pairs.len() as u32);
    words.extend(pairs.iter().flat_map(|(index, logit)| [*index as u32, logit.to_bits()]));
}

/// Writes negative infinity to rows `[needed.len(), vocab_size]` of which only the largest logits are needed.
pub(super) fn clear_unsent(needed: &[NeededLogits], rows: &mut [f32]) {
    if rows.is_empty() {
        return;
    }
    for (row, needed) in rows.chunks_exact_mut(rows.len() / needed.len()).zip(needed) {
        if *needed == NeededLogits::Largest {
            row.fill(f32::NEG_INFINITY);
        }
    }
}

/// Reads `count` words of a worker's logits, and writes these to rows `[needed.len(), vocab_size]` at its tokens, after
/// [`clear_unsent`].
pub(super) fn read_rows(
    reader: &mut impl Read,
    count: usize,
    needed: &[NeededLogits],
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
        if *needed == NeededLogits::All {
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

    use super::NeededLogits::{All, Largest};
    use super::*;

    /// Sends logits `[needed.len(), own tokens]` of a worker whose tokens begin with 2. Returns the number of words, and the
    /// rows that arrive.
    fn sent(logits: &[f32], needed: &[NeededLogits]) -> (usize, Vec<f32>) {
        let tokens = logits.len() / needed.len();
        let words = words_of(Isa::best(), logits, needed, &mut Vec::new()).to_vec();
        let mut rows = vec![7.0; needed.len() * (tokens + 3)];
        clear_unsent(needed, &mut rows);
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        read_rows(&mut &*bytes, words.len(), needed, &(2..2 + tokens), &mut rows).unwrap();
        (words.len(), rows)
    }

    proptest! {
        #[test]
        fn needed_logits_arrive_and_no_others_are_changed(
            row in vec((-30..30).prop_map(|number| number as f32 / 4.0), 1..400),
            needed in vec(prop_oneof![Just(All), Just(Largest)], 1..4),
        ) {
            let logits = vec![&row[..]; needed.len()].concat();
            let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let first = row.iter().position(|logit| *logit == highest).unwrap();
            let (words, rows) = sent(&logits, &needed);
            prop_assert_eq!(words, needed.iter().map(|needed| if *needed == All { row.len() } else { 3 }).sum::<usize>());
            for (rows, needed) in rows.chunks(row.len() + 3).zip(needed) {
                let (unsent, mut expected) = match needed {
                    All => (7.0, row.clone()),
                    Largest => (f32::NEG_INFINITY, vec![f32::NEG_INFINITY; row.len()]),
                };
                expected[first] = highest;
                prop_assert_eq!(rows, [&[unsent; 2][..], &expected, &[unsent]].concat());
            }
        }
    }

    #[test]
    fn numbers_that_are_not_finite_arrive() {
        let mut logits = vec![1.0; 300];
        (logits[7], logits[250]) = (f32::NAN, f32::INFINITY);
        let (_, rows) = sent(&logits, &[Largest]);
        assert!(rows[9].is_nan() && rows[252] == f32::INFINITY && rows[10] == 1.0);
        let forbidden = vec![f32::NEG_INFINITY; 300];
        let (words, rows) = sent(&forbidden, &[Largest]);
        assert_eq!((words, &rows[2..302]), (1, &forbidden[..]));
    }

    #[test]
    fn words_that_do_not_fit_the_rows_are_refused() {
        let error = |words: &[u32], needed: NeededLogits| {
            let bytes: &[u8] = bytemuck::cast_slice(words);
            read_rows(&mut &*bytes, words.len(), &[needed], &(0..8), &mut [0.0; 10]).unwrap_err().to_string()
        };
        assert!(error(&[0; 7], All).contains("7 words of logits, too few for 1 rows of 8"));
        assert!(error(&[0; 9], All).contains("1 words after the logits of 1 rows"));
        assert!(error(&[9, 0, 0], Largest).contains("3 words of logits, too few"));
        assert!(error(&[u32::MAX, 0, 0], Largest).contains("3 words of logits, too few"));
        assert!(error(&[1, 8, 0], Largest).contains("a logit of token 8 of 8"));
    }
}
