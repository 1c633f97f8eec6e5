//! [`Pruning`]: how the weights of linear layers are set to zero before they are packed.

use std::fmt;

use ferrule_kernels::Format::{self, Bf16, F16, F32, Int4, Int4TwoOfFour, Int6, Int8, Int8Sparse, Int8TwoOfFour};
use ferrule_kernels::arch::LANES;
use ferrule_kernels::{Basis, Sparsity};

use crate::recipe::MatrixFormats;
use crate::spec::ModelSpec;
use crate::weights::{LoadError, Loader, MatrixPlan, MatrixSize, Packer, RolePart, Site, Source, refuse_packed};

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

    /// Returns the formats of the parts of a linear layer if it is pruned, or why it stays dense.
    pub(crate) fn formats(self, at: &str, parts: &[RolePart<'_>], columns: usize) -> Result<Vec<Format>, StaysDense> {
        // What must be exact, such as a router, is in f32.
        if !at.starts_with("layers.") || parts.iter().any(|(_, _, usual)| *usual == F32) {
            return Err(StaysDense::Exempt);
        }
        let multiple = |format: Format| match (format.stored_block(), self.sparsity.fits(columns)) {
            (Some(block), _) if !columns.is_multiple_of(block.inputs) => Some(block.inputs),
            (_, false) => Some(TWO_OF_FOUR_INPUTS),
            _ => None,
        };
        let formats = parts.iter().map(|&(_, _, usual)| {
            let format = self.sparse_format(usual).ok_or(StaysDense::NoFormat(usual))?;
            match multiple(format) {
                Some(multiple) => Err(StaysDense::Inputs { columns, multiple, format }),
                None => Ok(format),
            }
        });
        let formats = formats.collect::<Result<Vec<_>, _>>()?;
        // Formats of bands that end within a panel would be replaced by a wider one, which may not be sparse.
        let whole = parts.iter().rev().skip(1).all(|(_, rows, _)| rows.is_multiple_of(LANES));
        let same = formats.windows(2).all(|pair| pair[0] == pair[1]);
        if same || whole { Ok(formats) } else { Err(StaysDense::Rows) }
    }
}

/// Number of inputs that are compared with each other in 2:4.
const TWO_OF_FOUR_INPUTS: usize = 4;

/// Reason that a matrix is not pruned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StaysDense {
    /// Matrix outside of what pruning is for.
    Exempt,
    /// Format that has no sparse one for the sparsity.
    NoFormat(Format),
    /// Inputs that are not whole blocks.
    Inputs { columns: usize, multiple: usize, format: Format },
    /// Parts of different formats that do not begin at whole panels.
    Rows,
}

impl fmt::Display for StaysDense {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exempt => f.write_str("it is never pruned"),
            Self::NoFormat(format) => write!(f, "{} has no sparse format for this sparsity", format.name()),
            Self::Inputs { columns, multiple, format } => {
                write!(f, "its {columns} inputs are not a multiple of {multiple}, as {} needs", format.name())
            }
            Self::Rows => write!(f, "its parts have two formats and are not multiples of {LANES} rows"),
        }
    }
}

/// Number of matrices of a model that are pruned.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct PrunedShare {
    /// Number of matrices that are pruned.
    pub pruned_matrices: usize,
    /// Number of matrices of the linear layers that pruning is for.
    pub matrices: usize,
    /// Number of weights, zeros included, of the matrices that are pruned.
    pub pruned_weights: u64,
    /// Number of weights of all of these matrices.
    pub weights: u64,
    /// The first matrix that is not pruned and why, if there is one.
    pub first_dense: Option<String>,
}

impl fmt::Display for PrunedShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pruned_matrices, matrices, pruned_weights, weights, first_dense } = self;
        write!(f, "{pruned_matrices} of {matrices} matrices pruned")?;
        match first_dense {
            Some(first) => write!(f, " ({pruned_weights} of {weights} weights); the first that is not: {first}"),
            None => Ok(()),
        }
    }
}

impl PrunedShare {
    /// Counts the matrices that are pruned when the weights of a source are packed.
    ///
    /// # Errors
    /// [`LoadError`] if the files do not fit the spec, or the source is packed already.
    pub fn of(spec: &ModelSpec, source: Source<'_>, formats: MatrixFormats<'_>) -> Result<Self, LoadError> {
        refuse_packed(source)?;
        let mut list = PrunedMatrices::default();
        Loader::new(spec, source, formats).without_vectors().weights(&mut list)?;
        Ok(list.share)
    }
}

/// Counts matrices that are pruned.
#[derive(Default)]
struct PrunedMatrices {
    share: PrunedShare,
    sites: Vec<Site>,
}

impl Packer for PrunedMatrices {
    type Matrix = MatrixSize;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<MatrixSize, LoadError> {
        let share = &mut self.share;
        let rows: usize = plan.bands.iter().map(|(_, rows)| rows).sum();
        let weights = (rows as u64).saturating_mul(plan.columns as u64);
        let is_pruned = plan.pruning.is_some();
        if !plan.is_again && (is_pruned || plan.stays_dense.is_some()) {
            share.matrices += 1;
            share.weights = share.weights.saturating_add(weights);
        }
        if !plan.is_again && is_pruned {
            share.pruned_matrices += 1;
            share.pruned_weights = share.pruned_weights.saturating_add(weights);
        }
        if let (None, Some(why)) = (&share.first_dense, plan.stays_dense) {
            share.first_dense = Some(format!("{}, because {why}", plan.name));
        }
        Ok(plan.size())
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_linear_layers_that_fit_are_pruned() {
        let pruning =
            |sparsity: &str| Pruning { sparsity: sparsity.parse().unwrap(), method: PruningMethod::Magnitude };
        let (half, two_of_four) = (pruning("0.5"), pruning("2:4"));
        let of = |format, other| [("up", 16, format), ("gate", 24, other)];
        let inputs = |columns, multiple, format| StaysDense::Inputs { columns, multiple, format };
        let at = "layers.0.ffn.";
        assert_eq!(half.formats(at, &of(Bf16, Bf16), 30), Ok(vec![Bf16, Bf16]));
        assert_eq!(half.formats(at, &of(Int8, Int8), 256), Ok(vec![Int8Sparse, Int8Sparse]));
        assert_eq!(half.formats(at, &of(Int8, Int8), 192), Err(inputs(192, 128, Int8Sparse)), "columns of blocks");
        assert_eq!(half.formats(at, &of(Int4, Int4), 256), Err(StaysDense::NoFormat(Int4)), "no format");
        assert_eq!(half.formats(at, &of(F32, F32), 256), Err(StaysDense::Exempt), "routers");
        assert_eq!(half.formats("", &of(Bf16, Bf16), 256), Err(StaysDense::Exempt), "the lm_head");
        assert_eq!(two_of_four.formats(at, &of(Bf16, Bf16), 30), Err(inputs(30, 4, Bf16)), "columns of groups");
        assert_eq!(two_of_four.formats(at, &of(Int4, Int6), 192), Ok(vec![Int4TwoOfFour, Int8TwoOfFour]));
        let within_panel = [("q", 24, Int4), ("v", 16, Int6)];
        assert_eq!(two_of_four.formats(at, &within_panel, 192), Err(StaysDense::Rows), "rows of panels");
    }

    #[test]
    fn methods_are_found_by_name() {
        for (name, method) in PruningMethod::ALL {
            assert_eq!(PruningMethod::named(name), Some(method));
        }
        assert_eq!(PruningMethod::named("SparseGPT"), None);
    }
}
