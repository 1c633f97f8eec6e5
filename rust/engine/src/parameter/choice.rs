//! Named values: [`Choice`].

use serde_json::Value;

use super::{Bounds, Checked, InvalidParameterError, Kind};

/// One of several named values.
#[derive(Clone, Copy)]
pub(crate) struct Choice<T> {
    /// Returns all names.
    pub names: fn() -> Vec<&'static str>,
    /// Returns the value of a name.
    pub named: fn(&str) -> Option<T>,
    /// Returns the name of a value.
    pub name: fn(&T) -> &'static str,
}

impl<T> Kind for Choice<T> {
    type Value = T;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<T>> {
        if value.is_null() {
            return Ok(None);
        }
        let refused = || InvalidParameterError::new(field, value.clone(), self.bounds().requirement);
        value.as_str().and_then(self.named).map(Some).ok_or_else(refused)
    }

    fn write(&self, value: &T) -> Value {
        (self.name)(value).into()
    }

    fn bounds(&self) -> Bounds {
        let choices = (self.names)();
        let requirement = format!("one of {}", choices.join(", "));
        Bounds { kind: "choice", choices, requirement, ..Bounds::default() }
    }
}
