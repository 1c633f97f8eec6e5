//! Linear layers by number, to which adapters and calibration refer.

/// A linear layer whose outputs are those of several roles, stacked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Site {
    /// Roles, without `.weight`, with the number of outputs of each.
    pub parts: Vec<(String, usize)>,
    pub columns: usize,
    /// Split of the outputs by head, if each head has separate matrices.
    pub heads: Option<HeadSplit>,
}

/// Outputs of each head in the projection from a latent to keys and values: `nope_dim` rows, then `value_dim` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeadSplit {
    pub heads: usize,
    pub nope_dim: usize,
    pub value_dim: usize,
}

impl HeadSplit {
    /// Returns the number of outputs of a head.
    pub fn rows(self) -> usize {
        self.nope_dim + self.value_dim
    }
}
