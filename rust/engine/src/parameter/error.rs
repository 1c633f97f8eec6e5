//! The error of an invalid parameter, as data.

use serde_json::Value;

/// Maximum number of characters of a value in a message.
const SHOWN_LENGTH: usize = 64;

/// A parameter has an invalid value.
///
/// ```
/// use ferrule_engine::SamplingParams;
///
/// let params = SamplingParams { temperature: -1.0, ..SamplingParams::default() };
/// let error = params.validate(32_000).unwrap_err();
/// assert_eq!(error.field, "temperature");
/// assert_eq!(error.to_string(), "temperature must be a number from 0 to 100, got -1.0");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} must be {requirement}, got {}", shown(value))]
pub struct InvalidParameterError {
    /// Name of the parameter; `stop_token_ids[2]` for an item of a list.
    pub field: String,
    /// Value that was found. Numbers that JSON cannot express are the strings `nan`, `inf` and `-inf`.
    pub value: Value,
    /// Requirement, as it reads after "must be".
    pub requirement: String,
}

impl InvalidParameterError {
    pub(crate) fn new(field: impl Into<String>, value: impl Into<Value>, requirement: impl Into<String>) -> Self {
        Self { field: field.into(), value: value.into(), requirement: requirement.into() }
    }
}

/// Formats a value for a message. A long value is truncated; for a long list the number of items is added.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    let Some((end, _)) = text.char_indices().nth(SHOWN_LENGTH) else { return text };
    let items = value.as_array().map_or(String::new(), |items| format!(" ({} items)", items.len()));
    format!("{}...{items}", &text[..end])
}
