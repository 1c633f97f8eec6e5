//! [`Pruning`]: how the weights of linear layers are set to zero before they are packed.

use ferrule_kernels::Format::{self, Bf16, F16, Int4, Int4TwoOfFour, Int6, Int8, Int8Sparse, Int8TwoOfFour};
use ferrule_kernels::arch::LANES;
use ferrule_kernels::{Basis, Sparsity};

use crate::weights::RolePart;

/// Pruning of the linear layers in the layers of a model. Embeddings, the lm_head, routers, norms and biases stay as they
/// are, and so do matrices that the sparsity does not fit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pruning {
    /// Share of the weights that are zero.
    pub sparsity: Sparsity,
    /// Method that chooses the zeros.
    pub method: PruningMethod,
}

/// Method that chooses the weights to set to zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PruningMethod {
    /// The least magnitude.
    Magnitude,
    /// The least magnitude times norm of the input (<https://arxiv.org/abs/2306.11695>).
    Wanda,
    /// The least error of outputs after later weights compensated for it (<https://arxiv.org/abs/2301.00774>).
    SparseGpt,
}

/// Statistics of inputs that a matrix is packed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WantedInputs {
    Hessian(Basis),
    Norms,
}

impl PruningMethod {
    /// All methods with their names.
    pub const ALL: [(&'static str, Self); 3] =
        [("magnitude", Self::Magnitude), ("wanda", Self::Wanda), ("sparsegpt", Self::SparseGpt)];

    /// Returns the method with this name, if there is one.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, method)| *method)
    }

    /// Returns the statistics of inputs that the method needs.
    pub(crate) fn inputs(self) -> Option<WantedInputs> {
        match self {
            Self::Magnitude => None,
            Self::Wanda => Some(WantedInputs::Norms),
            Self::SparseGpt => Some(WantedInputs::Hessian(Basis::Plain)),
        }
    }
}

impl Pruning {
    /// Returns the format of pruned weights for which the quantization says `usual`, if there is one. What must be exact,
    /// such as a router, is in f32 and not pruned.
    fn sparse_format(self, usual: Format) -> Option<Format> {
        let two_of_four = self.sparsity == Sparsity::TWO_OF_FOUR;
        match usual {
            Bf16 | F16 => Some(usual),
            // In int4, the few matrices in six bits are those where errors hurt most.
            Int6 | Int8 => Some(if two_of_four { Int8TwoOfFour } else { Int8Sparse }),
            Int4 if two_of_four => Some(Int4TwoOfFour),
            _ => None,
        }
    }

    /// Returns the formats of the parts of a linear layer if it is pruned, or `None` if it stays as it is.
    pub(crate) fn formats(self, at: &str, parts: &[RolePart<'_>], columns: usize) -> Option<Vec<Format>> {
        let fits = |format: &Format| format.stored_block().is_none_or(|block| columns.is_multiple_of(block.inputs));
        // Formats of bands that end within a panel would be replaced by a wider one, which may not be sparse.
        let whole = parts.iter().rev().skip(1).all(|(_, rows, _)| rows.is_multiple_of(LANES));
        let formats = parts.iter().map(|(_, _, usual)| self.sparse_format(*usual).filter(fits));
        let formats = formats.collect::<Option<Vec<_>>>()?;
        let same = formats.windows(2).all(|pair| pair[0] == pair[1]);
        (at.starts_with("layers.") && self.sparsity.fits(columns) && (same || whole)).then_some(formats)
    }
}

#[cfg(test)]
mod tests {
    use ferrule_kernels::Format::F32;

    use super::*;

    #[test]
    fn only_linear_layers_that_fit_are_pruned() {
        let pruning =
            |sparsity: &str| Pruning { sparsity: sparsity.parse().unwrap(), method: PruningMethod::Magnitude };
        let (half, two_of_four) = (pruning("0.5"), pruning("2:4"));
        let of = |format, other| [("up", 16, format), ("gate", 24, other)];
        let at = "layers.0.ffn.";
        assert_eq!(half.formats(at, &of(Bf16, Bf16), 30), Some(vec![Bf16, Bf16]));
        assert_eq!(half.formats(at, &of(Int8, Int8), 256), Some(vec![Int8Sparse, Int8Sparse]));
        assert_eq!(half.formats(at, &of(Int8, Int8), 192), None, "columns of blocks");
        assert_eq!(half.formats(at, &of(Int4, Int4), 256), None, "no format");
        assert_eq!(half.formats(at, &of(F32, F32), 256), None, "routers");
        assert_eq!(half.formats("", &of(Bf16, Bf16), 256), None, "the lm_head");
        assert_eq!(two_of_four.formats(at, &of(Bf16, Bf16), 30), None, "columns of groups");
        assert_eq!(two_of_four.formats(at, &of(Int4, Int6), 192), Some(vec![Int4TwoOfFour, Int8TwoOfFour]));
        let within_panel = [("q", 24, Int4), ("v", 16, Int6)];
        assert_eq!(two_of_four.formats(at, &within_panel, 192), None, "rows of panels");
    }

    #[test]
    fn methods_are_found_by_name() {
        for (name, method) in PruningMethod::ALL {
            assert_eq!(PruningMethod::named(name), Some(method));
        }
        assert_eq!(PruningMethod::named("SparseGPT"), None);
    }
}
