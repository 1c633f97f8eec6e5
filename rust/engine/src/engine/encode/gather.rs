//! Collects the model's output rows, chunk by chunk, into the result of each text.
//!
//! Sums run over a text's tokens in order and in f64, so that results do not depend on chunking.

use ferrule_model::{LogitRows, Pooling};

use super::task::EncodeTask;
use crate::sampling::Sampler;

/// Lower bound of vector lengths in normalization, so that a zero vector stays zero.
const MIN_LENGTH: f64 = 1e-12;

/// Rows or values of a text to collect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gather<'a> {
    /// One pooled row.
    Row(Pooling),
    /// All rows.
    Rows,
    /// Selected columns of the last row.
    Columns(&'a [u32]),
    /// The given number of most likely tokens of every row of logits, with their log-probabilities.
    Top(usize),
}

impl<'a> Gather<'a> {
    /// Returns what a task collects; `classified` is the pooling that the model's classifier reads.
    pub fn of(task: &'a EncodeTask, classified: Pooling) -> Self {
        match task {
            EncodeTask::Embedding { pooling, .. } => Self::Row(*pooling),
            EncodeTask::TokenEmbeddings { .. } | EncodeTask::Features {} => Self::Rows,
            EncodeTask::Scores {} => Self::Row(classified),
            EncodeTask::Logits { tokens } => Self::Columns(tokens),
            EncodeTask::TopLogprobs { count } => Self::Top(*count),
        }
    }

    /// Returns the number of values collected for a text of `tokens` tokens and rows of `width`.
    pub fn numbers(self, tokens: usize, width: usize) -> usize {
        match self {
            Self::Row(_) => width,
            Self::Rows => tokens * width,
            Self::Columns(columns) => columns.len(),
            Self::Top(count) => tokens.saturating_mul(2 * count),
        }
    }

    /// Returns whether the rows are logits rather than hidden states.
    pub fn reads_logits(self) -> bool {
        matches!(self, Self::Columns(_) | Self::Top(_))
    }

    /// Returns whether only the last row is read, so that earlier rows may come from the prefix cache.
    pub fn is_last(self) -> bool {
        matches!(self, Self::Row(Pooling::Last) | Self::Columns(_))
    }

    /// Returns which rows of a chunk are read, given whether the text begins or ends in it.
    pub fn rows(self, begins: bool, ends: bool) -> LogitRows {
        match self {
            Self::Row(Pooling::Mean) | Self::Rows | Self::Top(_) => LogitRows::All,
            Self::Row(Pooling::Cls) if begins => LogitRows::First,
            Self::Row(Pooling::Last) | Self::Columns(_) if ends => LogitRows::Last,
            _ => LogitRows::None,
        }
    }

    /// Returns whether the values are valid: finite, or negative infinity for top log-probabilities of forbidden
    /// tokens.
    pub fn is_valid(self, made: &[f32]) -> bool {
        let forbids = matches!(self, Self::Top(_));
        made.iter().all(|x| x.is_finite() || (forbids && *x == f32::NEG_INFINITY))
    }
}

/// Results of all texts so far, one after another.
#[derive(Debug)]
pub(super) struct Gathered<'a> {
    pub gather: Gather<'a>,
    pub numbers: Vec<f32>,
    /// Running sum of the current text for mean pooling.
    sum: Vec<f64>,
    sampler: Sampler,
}

impl<'a> Gathered<'a> {
    pub fn new(gather: Gather<'a>, buffer: Vec<f32>) -> Self {
        Self { gather, numbers: buffer, sum: Vec::new(), sampler: Sampler::default() }
    }

    /// Adds the rows of a text's next chunk, each `width` long. With the last chunk, returns the text's result;
    /// `tokens` is the text's length.
    pub fn take(&mut self, rows: &[f32], width: usize, tokens: usize, ends: bool) -> Option<&[f32]> {
        match self.gather {
            Gather::Row(Pooling::Mean) => {
                self.sum.resize(width, 0.0);
                for row in rows.chunks_exact(width) {
                    self.sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
                }
                if ends {
                    self.numbers.extend(self.sum.drain(..).map(|sum| (sum / tokens as f64) as f32));
                }
            }
            Gather::Columns(columns) if ends => self.numbers.extend(columns.iter().map(|&id| rows[id as usize])),
            Gather::Top(count) => {
                for row in rows.chunks_exact(width) {
                    self.take_top(row, count);
                }
            }
            Gather::Row(_) | Gather::Rows | Gather::Columns(_) => self.numbers.extend_from_slice(rows),
        }
        ends.then(|| &self.numbers[self.numbers.len() - self.gather.numbers(tokens, width)..])
    }

    /// Appends ids and log-probabilities of a row's most likely tokens; NaN if the row contains NaN.
    fn take_top(&mut self, logits: &[f32], count: usize) {
        match self.sampler.top_logprobs(logits, count, 0) {
            Ok(top) => {
                self.numbers.extend(top.iter().map(|token| f32::from_bits(token.id)));
                self.numbers.extend(top.iter().map(|token| token.logprob as f32));
            }
            Err(_) => self.numbers.extend(std::iter::repeat_n(f32::NAN, 2 * count)),
        }
    }
}

/// Truncates each row of `width` to its first `kept` values.
pub(super) fn truncate(rows: Vec<f32>, width: usize, kept: usize) -> Vec<f32> {
    if kept == width {
        return rows;
    }
    rows.chunks_exact(width).flat_map(|row| &row[..kept]).copied().collect()
}

/// Normalizes each row of `width` to unit length.
pub(super) fn normalize(rows: &mut [f32], width: usize) {
    for row in rows.chunks_exact_mut(width) {
        let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
        let length = squares.sqrt().max(MIN_LENGTH);
        row.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Result of a text whose rows arrive in chunks of these lengths.
    fn in_chunks(gather: Gather<'_>, rows: &[f32], width: usize, cuts: &[usize]) -> Vec<f32> {
        let tokens = rows.len() / width;
        let mut gathered = Gathered::new(gather, Vec::new());
        let (mut first, mut cuts) = (0, cuts.iter().cycle());
        while first < tokens {
            let count = (*cuts.next().unwrap()).min(tokens - first);
            let wanted = gather.rows(first == 0, first + count == tokens).of(count);
            let rows = &rows[(first + wanted.start) * width..(first + wanted.end) * width];
            first += count;
            gathered.take(rows, width, tokens, first == tokens);
        }
        gathered.numbers
    }

    proptest! {
        /// Compares with a direct computation, bit for bit, for any chunking.
        #[test]
        fn results_do_not_depend_on_chunking(
            rows in prop::collection::vec(-4.0_f32..4.0, 1..200),
            width in 1_usize..5,
            cuts in prop::collection::vec(1_usize..9, 1..5),
        ) {
            let rows = &rows[..rows.len() / width * width];
            prop_assume!(!rows.is_empty());
            let tokens = rows.len() / width;
            let column = |i| rows.iter().skip(i).step_by(width).map(|x| f64::from(*x));
            let mean: Vec<f32> = (0..width).map(|i| (column(i).sum::<f64>() / tokens as f64) as f32).collect();
            prop_assert_eq!(in_chunks(Gather::Row(Pooling::Mean), rows, width, &cuts), mean);
            prop_assert_eq!(in_chunks(Gather::Row(Pooling::Cls), rows, width, &cuts), &rows[..width]);
            let last = &rows[rows.len() - width..];
            prop_assert_eq!(in_chunks(Gather::Row(Pooling::Last), rows, width, &cuts), last);
            prop_assert_eq!(in_chunks(Gather::Rows, rows, width, &cuts), rows);
            let columns = [width as u32 - 1, 0];
            let expected = vec![last[width - 1], last[0]];
            prop_assert_eq!(in_chunks(Gather::Columns(&columns), rows, width, &cuts), expected);
        }
    }

    #[test]
    fn rows_are_normalized_to_unit_length_and_zeros_stay_zero() {
        let mut rows = vec![3.0, 4.0, 0.0, 0.0, -1e-30, 0.0];
        normalize(&mut rows, 2);
        assert_eq!(rows[..4], [0.6, 0.8, 0.0, 0.0]);
        assert!(rows[4] < 0.0 && rows[4].is_finite());
        assert_eq!(truncate(rows, 2, 1)[..2], [0.6, 0.0]);
    }
}
