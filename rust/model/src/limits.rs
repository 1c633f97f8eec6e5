//! What a number of a spec may be, and the error that names the field, the value and the limit.

/// A field of a [`ModelSpec`](crate::ModelSpec) that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// Not the JSON of a spec: a switch that this build does not know, among other things.
    #[error("model spec: {0}")]
    Json(String),
    /// A number outside its limits.
    #[error("model spec: {field} is {value}; it must be {limit}")]
    Number {
        /// The field's path.
        field: String,
        /// What it holds.
        value: String,
        /// What it may hold.
        limit: String,
    },
    /// A role without a tensor.
    #[error("model spec: no tensor is named for the role {role:?}")]
    Role {
        /// The role.
        role: String,
    },
}

impl SpecError {
    /// A role whose tensor is a part of another, or is in parts.
    pub(crate) fn not_whole(role: &str) -> Self {
        Self::Role { role: format!("{role} as a whole tensor") }
    }
}

/// Wider than any model is: keeps every product of two sizes far from overflow.
const MAX_SIZE: usize = 1 << 28;

pub(crate) fn size(field: &str, value: usize) -> Result<(), SpecError> {
    require(field, value, (1..=MAX_SIZE).contains(&value), || format!("in 1..={MAX_SIZE}"))
}

pub(crate) fn finite(field: &str, value: f32) -> Result<(), SpecError> {
    require(field, value, value.is_finite(), || "finite".to_owned())
}

pub(crate) fn require(
    field: &str,
    value: impl ToString,
    holds: bool,
    limit: impl FnOnce() -> String,
) -> Result<(), SpecError> {
    if holds {
        return Ok(());
    }
    Err(SpecError::Number { field: field.to_owned(), value: value.to_string(), limit: limit() })
}
