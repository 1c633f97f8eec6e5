//! Limits of the numbers in a spec, and the error that names the field, the value and the limit.

/// A field of a [`ModelSpec`](crate::ModelSpec) is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// The JSON is not a spec; an unknown field is one of the reasons.
    #[error("model spec: {0}")]
    Json(String),
    /// A number is outside its limits.
    #[error("model spec: {field} must be {limit}, got {value}")]
    Number {
        /// Path of the field.
        field: String,
        /// Value found.
        value: String,
        /// Values that are allowed.
        limit: String,
    },
    /// The spec has no tensor for a role.
    #[error("model spec: no tensor for role {role:?}")]
    Role {
        /// Name of the role.
        role: String,
    },
}

impl SpecError {
    /// Returns the error for a role that must be one whole tensor and is not.
    pub(crate) fn not_whole(role: &str) -> Self {
        Self::Role { role: format!("{role} as a whole tensor") }
    }
}

/// Upper limit for sizes, above those of any known model; keeps products of two sizes from overflowing.
const MAX_SIZE: usize = 1 << 28;

pub(crate) fn size(field: &str, value: usize) -> Result<(), SpecError> {
    require(field, value, (1..=MAX_SIZE).contains(&value), || format!("in 1..={MAX_SIZE}"))
}

pub(crate) fn finite(field: &str, value: f32) -> Result<(), SpecError> {
    require(field, value, value.is_finite(), || "finite".to_owned())
}

/// Checks that an optional number is finite and > 0.
pub(crate) fn positive(field: &str, value: Option<f32>) -> Result<(), SpecError> {
    value
        .map_or(Ok(()), |value| require(field, value, value.is_finite() && value > 0.0, || "finite and > 0".to_owned()))
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
