//! [`Features`]: rows that take the place of token embeddings.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Rows that take the place of the embeddings of consecutive tokens, such as those of an image. The ids of these tokens are
/// placeholders, and what the model does with rows of its table, such as scaling them, it does with these rows too.
#[derive(Debug, Clone)]
pub struct Features {
    first: usize,
    width: usize,
    rows: Arc<[f32]>,
    digest: OnceLock<[u8; 32]>,
}

impl Features {
    /// Returns features `rows: [tokens, width]` of the tokens from position `first` on.
    ///
    /// # Panics
    /// If `width` is zero, or does not divide the number of floats.
    #[must_use]
    pub fn new(first: usize, rows: Arc<[f32]>, width: usize) -> Self {
        assert!(rows.len().is_multiple_of(width), "features are whole rows");
        Self { first, width, rows, digest: OnceLock::new() }
    }

    /// Returns the positions of the tokens in their sequence.
    #[must_use]
    pub fn positions(&self) -> Range<usize> {
        self.first..self.first + self.rows.len() / self.width
    }

    /// Returns the number of floats in a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns a digest of positions and rows: features of equal digest are equal. It is computed when first needed.
    #[must_use]
    pub fn digest(&self) -> &[u8; 32] {
        self.digest.get_or_init(|| {
            let mut hasher = blake3::Hasher::new_derive_key("ferrule features");
            for number in [self.first, self.width] {
                hasher.update(&(number as u64).to_le_bytes());
            }
            hasher.update(bytemuck::cast_slice(&self.rows));
            *hasher.finalize().as_bytes()
        })
    }

    /// Overwrites the embeddings `[positions, width]` of a chunk of the sequence with the rows of its tokens.
    pub(crate) fn overwrite(&self, positions: Range<usize>, embeddings: &mut [f32]) {
        let own = self.positions();
        let (first, end) = (own.start.max(positions.start), own.end.min(positions.end));
        if first < end {
            let rows = &self.rows[(first - own.start) * self.width..(end - own.start) * self.width];
            embeddings[(first - positions.start) * self.width..][..rows.len()].copy_from_slice(rows);
        }
    }
}

/// Compares positions and rows.
impl PartialEq for Features {
    fn eq(&self, other: &Self) -> bool {
        (self.first, self.width, &self.rows) == (other.first, other.width, &other.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_get_the_rows_of_their_tokens() {
        let rows: Arc<[f32]> = (0..8).map(|i| i as f32).collect();
        let features = Features::new(3, rows, 2);
        assert_eq!(features.positions(), 3..7);
        for (positions, expected) in [
            (0..3, vec![9.0; 6]),
            (2..5, vec![9.0, 9.0, 0.0, 1.0, 2.0, 3.0]),
            (4..6, vec![2.0, 3.0, 4.0, 5.0]),
            (6..8, vec![6.0, 7.0, 9.0, 9.0]),
            (7..8, vec![9.0, 9.0]),
        ] {
            let mut embeddings = vec![9.0; positions.len() * 2];
            features.overwrite(positions, &mut embeddings);
            assert_eq!(embeddings, expected);
        }
    }

    #[test]
    fn digests_differ_by_position_and_content() {
        let rows: Arc<[f32]> = Arc::new([1.0, 2.0]);
        let other: Arc<[f32]> = Arc::new([1.0, 2.5]);
        let digests = [(0, &rows, 1), (1, &rows, 1), (0, &rows, 2), (0, &other, 1)]
            .map(|(first, rows, width)| *Features::new(first, Arc::clone(rows), width).digest());
        for (index, digest) in digests.iter().enumerate() {
            assert!(!digests[..index].contains(digest));
        }
    }
}
