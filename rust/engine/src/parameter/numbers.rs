//! Numbers: [`Real`], [`Integer`], [`Seconds`], and [`Flag`].

use std::marker::PhantomData;
use std::time::Duration;

use serde_json::{Number, Value};

use super::{Bounds, Checked, InvalidParameterError, Kind};

/// A floating-point number within a range. NaN is never within.
#[derive(Clone, Copy)]
pub(crate) struct Real {
    low: f64,
    excludes_low: bool,
    high: f64,
}

impl Real {
    /// Returns the range from `low` to `high`, both included.
    pub const fn closed(low: f64, high: f64) -> Self {
        Self { low, excludes_low: false, high }
    }

    /// Returns the range from `low`, excluded, to `high`, included.
    pub const fn above(low: f64, high: f64) -> Self {
        Self { low, excludes_low: true, high }
    }

    fn contains(self, value: f64) -> bool {
        value <= self.high && if self.excludes_low { value > self.low } else { value >= self.low }
    }

    fn requirement(self) -> String {
        let Self { low, high, .. } = self;
        if self.excludes_low {
            format!("a number > {low} and <= {high}")
        } else {
            format!("a number from {low} to {high}")
        }
    }
}

impl Kind for Real {
    type Value = f64;

    /// JSON has no NaN and no infinities: the strings `nan`, `inf` and `-inf` stand for them, so that the error names
    /// them and the field.
    fn read(&self, field: &str, value: &Value) -> Checked<Option<f64>> {
        let number = match value {
            Value::Null => return Ok(None),
            Value::Number(number) => number.as_f64(),
            _ => None,
        };
        let refused = || InvalidParameterError::new(field, value.clone(), self.requirement());
        number.filter(|number| self.contains(*number)).map(Some).ok_or_else(refused)
    }

    fn write(&self, value: &f64) -> Value {
        Number::from_f64(*value).map_or_else(|| Value::from(value.to_string().to_lowercase()), Value::Number)
    }

    fn bounds(&self) -> Bounds {
        Bounds {
            kind: "float",
            minimum: self.low.into(),
            maximum: self.high.into(),
            exclusive_minimum: self.excludes_low,
            requirement: self.requirement(),
            ..Bounds::default()
        }
    }
}

/// An integer within a range.
#[derive(Clone, Copy)]
pub(crate) struct Integer<T> {
    low: i128,
    high: i128,
    minus_one_is_zero: bool,
    kind: PhantomData<T>,
}

impl<T> Integer<T> {
    /// Returns the range from `low` to `high`, both included.
    pub const fn new(low: i128, high: i128) -> Self {
        Self { low, high, minus_one_is_zero: false, kind: PhantomData }
    }

    /// Accepts -1 as another way to write 0.
    pub const fn or_minus_one(self) -> Self {
        Self { minus_one_is_zero: true, ..self }
    }

    fn smallest(&self) -> i128 {
        if self.minus_one_is_zero { -1 } else { self.low }
    }

    pub(super) fn requirement(&self) -> String {
        format!("an integer from {} to {}", self.smallest(), self.high)
    }
}

impl<T: Copy + TryFrom<i128> + TryInto<i128>> Kind for Integer<T> {
    type Value = T;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<T>> {
        if value.is_null() {
            return Ok(None);
        }
        let number = match whole(value) {
            Some(-1) if self.minus_one_is_zero => Some(0),
            number => number.filter(|number| (self.low..=self.high).contains(number)),
        };
        let refused = || InvalidParameterError::new(field, value.clone(), self.requirement());
        number.and_then(|number| T::try_from(number).ok()).map(Some).ok_or_else(refused)
    }

    fn write(&self, value: &T) -> Value {
        (*value).try_into().ok().map_or(Value::Null, number)
    }

    fn bounds(&self) -> Bounds {
        Bounds {
            kind: "int",
            minimum: number(self.smallest()),
            maximum: number(self.high),
            requirement: self.requirement(),
            ..Bounds::default()
        }
    }
}

/// Returns an integer that JSON has written without a point or an exponent.
pub(super) fn whole(value: &Value) -> Option<i128> {
    let Value::Number(number) = value else { return None };
    number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from))
}

fn number(value: i128) -> Value {
    u64::try_from(value).map(Value::from).or_else(|_| i64::try_from(value).map(Value::from)).unwrap_or(Value::Null)
}

/// A duration in seconds.
#[derive(Clone, Copy)]
pub(crate) struct Seconds(pub Real);

impl Kind for Seconds {
    type Value = Duration;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<Duration>> {
        Ok(self.0.read(field, value)?.map(Duration::from_secs_f64))
    }

    fn write(&self, value: &Duration) -> Value {
        self.0.write(&value.as_secs_f64())
    }

    fn bounds(&self) -> Bounds {
        self.0.bounds()
    }
}

/// True or false.
#[derive(Clone, Copy)]
pub(crate) struct Flag;

impl Kind for Flag {
    type Value = bool;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<bool>> {
        match value {
            Value::Null => Ok(None),
            Value::Bool(flag) => Ok(Some(*flag)),
            _ => Err(InvalidParameterError::new(field, value.clone(), self.bounds().requirement)),
        }
    }

    fn write(&self, value: &bool) -> Value {
        Value::Bool(*value)
    }

    fn bounds(&self) -> Bounds {
        Bounds { kind: "bool", requirement: "true or false".into(), ..Bounds::default() }
    }
}
