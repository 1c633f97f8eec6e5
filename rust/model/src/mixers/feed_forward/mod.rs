//! Feed-forward networks: dense, and mixture of experts.

mod dense;
mod experts;
mod router;

pub use dense::{ClampSpec, DenseSpec, XieluSpec};
pub use experts::{ExpertsSpec, LatentSpec};
pub use router::{GroupScore, RouterSpec, Scoring};
