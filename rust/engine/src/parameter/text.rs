//! Strings: [`Text`], [`Directory`].

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;

use super::{Bounds, Checked, InvalidParameterError, Kind};

/// A string that is not empty.
#[derive(Clone, Copy)]
pub(crate) struct Text {
    /// Maximum number of bytes.
    pub max_bytes: usize,
}

impl Kind for Text {
    type Value = Arc<str>;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<Arc<str>>> {
        match value {
            Value::Null => Ok(None),
            Value::String(text) if (1..=self.max_bytes).contains(&text.len()) => Ok(Some(text.as_str().into())),
            _ => Err(InvalidParameterError::new(field, value.clone(), self.bounds().requirement)),
        }
    }

    fn write(&self, value: &Arc<str>) -> Value {
        (**value).into()
    }

    fn bounds(&self) -> Bounds {
        let requirement = format!("a string of 1 to {} bytes", self.max_bytes);
        Bounds { kind: "str", requirement, ..Bounds::default() }
    }
}

/// Path of a directory.
#[derive(Clone, Copy)]
pub(crate) struct Directory;

impl Kind for Directory {
    type Value = PathBuf;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<PathBuf>> {
        match value {
            Value::Null => Ok(None),
            Value::String(path) if !path.is_empty() => Ok(Some(path.into())),
            _ => Err(InvalidParameterError::new(field, value.clone(), self.bounds().requirement)),
        }
    }

    fn write(&self, value: &PathBuf) -> Value {
        value.to_string_lossy().into()
    }

    fn bounds(&self) -> Bounds {
        Bounds { kind: "str", requirement: "the path of a directory".into(), ..Bounds::default() }
    }
}
