//! [`Sparsity`]: how many weights of each group of inputs are zero.

use std::fmt;
use std::str::FromStr;

use crate::quant::integer::BLOCK;

/// Share of the weights that are zero, and the groups of consecutive inputs of a row in which they are counted.
///
/// # Examples
/// ```
/// use ferrule_kernels::Sparsity;
///
/// let half: Sparsity = "0.5".parse()?;
/// assert_eq!(half.zeros(300), 150);
/// let two_of_four: Sparsity = "2:4".parse()?;
/// assert_eq!((two_of_four.zeros(300), two_of_four.to_string()), (150, "2:4".to_owned()));
/// assert!(!two_of_four.fits(302) && half.fits(302));
/// # Ok::<(), ferrule_kernels::SparsityError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sparsity {
    /// Number of consecutive inputs of a row that are compared with each other.
    pub(super) group: usize,
    /// Share of the weights of a group that are zero.
    share: f64,
}

/// Text that is no sparsity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("sparsity must be {}, got {found}", Sparsity::REQUIREMENT)]
pub struct SparsityError {
    /// Text found.
    pub found: String,
}

impl Sparsity {
    /// Two zeros in each four consecutive inputs, the pattern of NVIDIA's sparse tensor cores.
    pub const TWO_OF_FOUR: Self = Self { group: 4, share: 0.5 };

    /// Requirement on a text, for messages.
    pub const REQUIREMENT: &str = "2:4 or a share of zeros from 0.05 to 0.95";

    /// Least and largest share of zeros.
    const SHARES: std::ops::RangeInclusive<f64> = 0.05..=0.95;

    /// Returns whether a matrix of `cols` inputs can have this sparsity: 2:4 needs whole groups.
    #[must_use]
    pub fn fits(self, cols: usize) -> bool {
        self != Self::TWO_OF_FOUR || cols.is_multiple_of(self.group)
    }

    /// Returns the number of zeros in each row of `cols` inputs.
    #[must_use]
    pub fn zeros(self, cols: usize) -> usize {
        cols / self.group * self.zeros_of_group(self.group) + self.zeros_of_group(cols % self.group)
    }

    /// Returns the number of zeros in a group of `inputs` inputs; those of the last group may be fewer than of others.
    pub(super) fn zeros_of_group(self, inputs: usize) -> usize {
        (self.share * inputs as f64).round() as usize
    }
}

impl fmt::Display for Sparsity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::TWO_OF_FOUR { f.write_str("2:4") } else { self.share.fmt(f) }
    }
}

impl FromStr for Sparsity {
    type Err = SparsityError;

    fn from_str(text: &str) -> Result<Self, SparsityError> {
        if text == "2:4" {
            return Ok(Self::TWO_OF_FOUR);
        }
        let share = text.parse().ok().filter(|share| Self::SHARES.contains(share));
        share.map(|share| Self { group: BLOCK, share }).ok_or_else(|| SparsityError { found: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_texts_are_refused() {
        for found in ["", "0", "1", "0.96", "-0.5", "nan", "1:4", "2:8", "50%"] {
            let error = found.parse::<Sparsity>().unwrap_err().to_string();
            assert_eq!(error, format!("sparsity must be 2:4 or a share of zeros from 0.05 to 0.95, got {found}"));
        }
    }

    #[test]
    fn zeros_of_rows_are_those_of_their_groups() {
        let third: Sparsity = "0.3".parse().unwrap();
        assert_eq!(third.to_string(), "0.3");
        assert_eq!([0, 1, 2, 128, 130, 256].map(|cols| third.zeros(cols)), [0, 0, 1, 38, 39, 76]);
        assert_eq!([4, 6, 8].map(|cols| Sparsity::TWO_OF_FOUR.zeros(cols)), [2, 3, 4]);
    }
}
