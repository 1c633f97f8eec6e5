//! From rows, as they come out of the model chunk by chunk, to the numbers of each text.
//!
//! Sums run over a text's tokens in their order, in f64: they are the same however the text was cut.

use ferrule_model::{LogitRows, Pooling};

use super::task::EncodeTask;
use crate::sampling::Sampler;

/// Lengths below this count as this, so that what is all zeros stays so.
const SHORTEST: f64 = 1e-12;

/// What is gathered of a text's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gather<'a> {
    /// One row.
    Row(Pooling),
    /// All rows.
    Rows,
    /// Some numbers of the last row.
    Columns(&'a [u32]),
    /// The most likely tokens of every row of logits, so many of each, and their log-probabilities.
    Top(usize),
}

impl<'a> Gather<'a> {
    /// For a task of a model whose classifier, if it has one, reads what `classified` says.
    pub fn of(task: &'a EncodeTask, classified: Pooling) -> Self {
        match task {
            EncodeTask::Embedding { pooling, .. } => Self::Row(*pooling),
            EncodeTask::TokenEmbeddings { .. } => Self::Rows,
            EncodeTask::Scores {} => Self::Row(classified),
            EncodeTask::Logits { tokens } => Self::Columns(tokens),
            EncodeTask::TopLogprobs { count } => Self::Top(*count),
        }
    }

    /// Numbers of a text of so many tokens, where a row has `width`.
    pub fn numbers(self, tokens: usize, width: usize) -> usize {
        match self {
            Self::Row(_) => width,
            Self::Rows => tokens * width,
            Self::Columns(columns) => columns.len(),
            Self::Top(count) => tokens.saturating_mul(2 * count),
        }
    }

    /// Whether the rows are those of logits, not hidden states.
    pub fn reads_logits(self) -> bool {
        matches!(self, Self::Columns(_) | Self::Top(_))
    }

    /// Whether only a text's last row is read, so that those before it need not be computed here.
    pub fn is_last(self) -> bool {
        matches!(self, Self::Row(Pooling::Last) | Self::Columns(_))
    }

    /// The rows that are read of a chunk: whether the text begins and ends with it.
    pub fn rows(self, begins: bool, ends: bool) -> LogitRows {
        match self {
            Self::Row(Pooling::Mean) | Self::Rows | Self::Top(_) => LogitRows::All,
            Self::Row(Pooling::Cls) if begins => LogitRows::First,
            Self::Row(Pooling::Last) | Self::Columns(_) if ends => LogitRows::Last,
            _ => LogitRows::None,
        }
    }

    /// Whether a sound model can have made these numbers. Among the most likely tokens may be some that it forbids.
    pub fn is_sound(self, made: &[f32]) -> bool {
        let forbids = matches!(self, Self::Top(_));
        made.iter().all(|x| x.is_finite() || (forbids && *x == f32::NEG_INFINITY))
    }
}

/// The numbers of all texts so far, one after the other.
#[derive(Debug)]
pub(super) struct Gathered<'a> {
    pub gather: Gather<'a>,
    pub numbers: Vec<f32>,
    /// Of the text that is under way, where its mean is wanted.
    sum: Vec<f64>,
    sampler: Sampler,
}

impl<'a> Gathered<'a> {
    pub fn new(gather: Gather<'a>, room: Vec<f32>) -> Self {
        Self { gather, numbers: room, sum: Vec::new(), sampler: Sampler::default() }
    }

    /// Takes the rows of a text's next chunk, each `width` long. With its last one, gives the place of what was made of
    /// the text; `tokens` is the text's length.
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

    /// Ids and log-probabilities of a row's most likely tokens; NaN for a row that has no such thing.
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

/// Keeps the first `kept` numbers of each row of `width`.
pub(super) fn truncate(rows: Vec<f32>, width: usize, kept: usize) -> Vec<f32> {
    if kept == width {
        return rows;
    }
    rows.chunks_exact(width).flat_map(|row| &row[..kept]).copied().collect()
}

/// Divides each row of `width` by its length.
pub(super) fn normalize(rows: &mut [f32], width: usize) {
    for row in rows.chunks_exact_mut(width) {
        let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
        let length = squares.sqrt().max(SHORTEST);
        row.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What comes of a text's rows when they are cut into chunks of these lengths.
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
        /// Against the plainest form, bit for bit, however the text is cut.
        #[test]
        fn chunks_change_nothing(
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
    fn lengths_become_1_and_zeros_stay() {
        let mut rows = vec![3.0, 4.0, 0.0, 0.0, -1e-30, 0.0];
        normalize(&mut rows, 2);
        assert_eq!(rows[..4], [0.6, 0.8, 0.0, 0.0]);
        assert!(rows[4] < 0.0 && rows[4].is_finite());
        assert_eq!(truncate(rows, 2, 1)[..2], [0.6, 0.0]);
    }
}
