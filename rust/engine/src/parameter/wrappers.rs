//! Kinds around other kinds: optional and required parameters, and objects of parameters.

use serde_json::Value;

use super::{Bounds, Checked, InvalidParameterError, Kind, numbers};

/// A parameter that may be absent; its default is null, `None`.
#[derive(Clone, Copy)]
pub(crate) struct Optional<K>(pub K);

impl<K: Kind> Kind for Optional<K> {
    type Value = Option<K::Value>;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<Self::Value>> {
        Ok(self.0.read(field, value)?.map(Some))
    }

    fn write(&self, value: &Self::Value) -> Value {
        value.as_ref().map_or(Value::Null, |value| self.0.write(value))
    }

    fn check(&self, field: &str, value: &Self::Value) -> Checked<()> {
        value.as_ref().map_or(Ok(()), |value| self.0.check(field, value))
    }

    fn bounds(&self) -> Bounds {
        self.0.bounds()
    }
}

/// A parameter without a default.
#[derive(Clone, Copy)]
pub(crate) struct Required<K>(pub K);

impl<K: Kind> Kind for Required<K> {
    type Value = K::Value;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<Self::Value>> {
        let absent = || InvalidParameterError::new(field, Value::Null, self.bounds().requirement);
        self.0.read(field, value)?.map(Some).ok_or_else(absent)
    }

    fn write(&self, value: &Self::Value) -> Value {
        self.0.write(value)
    }

    fn check(&self, field: &str, value: &Self::Value) -> Checked<()> {
        self.0.check(field, value)
    }

    fn bounds(&self) -> Bounds {
        Bounds { required: true, ..self.0.bounds() }
    }
}

/// A count for which -1 stands for "no limit", `None`.
#[derive(Clone, Copy)]
pub(crate) struct MinusOneIsNone(pub numbers::Integer<usize>);

impl Kind for MinusOneIsNone {
    type Value = Option<usize>;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<Self::Value>> {
        if value.as_i64() == Some(-1) {
            return Ok(Some(None));
        }
        let read = self.0.read(field, value);
        let read = read.map_err(|error| InvalidParameterError { requirement: self.bounds().requirement, ..error });
        Ok(read?.map(Some))
    }

    fn write(&self, value: &Self::Value) -> Value {
        value.as_ref().map_or_else(|| Value::from(-1), |count| self.0.write(count))
    }

    fn bounds(&self) -> Bounds {
        self.0.or_minus_one().bounds()
    }
}

/// An object of parameters.
pub(crate) struct Nested<T> {
    /// Reads the object.
    pub read: fn(&Value) -> Checked<T>,
    /// Checks an object that a Rust program has created.
    pub check: fn(&T) -> Checked<()>,
    /// Name of what the object describes, for messages.
    pub requirement: &'static str,
}

impl<T> Kind for Nested<T> {
    type Value = T;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<T>> {
        match value {
            Value::Null => Ok(None),
            Value::Object(_) => (self.read)(value).map(Some),
            _ => Err(InvalidParameterError::new(field, value.clone(), self.requirement)),
        }
    }

    /// Returns null, because an object has no default.
    fn write(&self, _: &T) -> Value {
        Value::Object(serde_json::Map::new())
    }

    fn check(&self, _: &str, value: &T) -> Checked<()> {
        (self.check)(value)
    }

    fn bounds(&self) -> Bounds {
        Bounds { kind: "object", requirement: self.requirement.into(), ..Bounds::default() }
    }
}
