//! The linear maps of a model by number: where adapters find what they add to.

/// A linear map whose rows are those of several roles, one below the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Site {
    /// The roles, without `.weight`, and how many rows each has.
    pub parts: Vec<(String, usize)>,
    pub columns: usize,
    /// How the rows are split, where each head has a part of them as matrices of its own.
    pub heads: Option<HeadSplit>,
}

/// What each head has of the rows that lead from a latent to keys and values: `nope_dim` rows, then `value_dim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeadSplit {
    pub heads: usize,
    pub nope_dim: usize,
    pub value_dim: usize,
}

impl HeadSplit {
    /// A head's rows.
    pub fn rows(self) -> usize {
        self.nope_dim + self.value_dim
    }
}
