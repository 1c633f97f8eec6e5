//! [`Pruning`]: how the weights of linear layers are set to zero before they are packed.

use ferrule_kernels::{Basis, Format, Sparsity};

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
    /// Returns whether the linear layer of these roles is pruned. What must be exact, such as a router, is in f32.
    pub(crate) fn applies_to(self, at: &str, parts: &[RolePart<'_>], columns: usize) -> bool {
        let is_exact = parts.iter().any(|(_, _, format)| *format == Format::F32);
        at.starts_with("layers.") && !is_exact && self.sparsity.fits(columns)
    }
}

#[cfg(test)]
mod tests {
    use ferrule_kernels::Format::{Bf16, F32};

    use super::*;

    #[test]
    fn only_linear_layers_of_layers_that_fit_are_pruned() {
        let pruning =
            |sparsity: &str| Pruning { sparsity: sparsity.parse().unwrap(), method: PruningMethod::Magnitude };
        let (half, two_of_four) = (pruning("0.5"), pruning("2:4"));
        let parts = |format| [("up", 8, format), ("gate", 8, format)];
        assert!(
            half.applies_to("layers.0.ffn.", &parts(Bf16), 30)
                && two_of_four.applies_to("layers.0.ffn.", &parts(Bf16), 32)
        );
        assert!(!two_of_four.applies_to("layers.0.ffn.", &parts(Bf16), 30), "columns");
        assert!(!half.applies_to("layers.0.ffn.", &parts(F32), 32), "routers");
        assert!(!half.applies_to("", &parts(Bf16), 32), "the lm_head");
    }

    #[test]
    fn methods_are_found_by_name() {
        for (name, method) in PruningMethod::ALL {
            assert_eq!(PruningMethod::named(name), Some(method));
        }
        assert_eq!(PruningMethod::named("SparseGPT"), None);
    }
}
