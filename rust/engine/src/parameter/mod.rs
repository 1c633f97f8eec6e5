//! Parameters that callers set, with one table row for each.
//!
//! A row of [`parameters!`] has the name, the type, the default, the kind with its bounds, and the documentation. The
//! struct, its `Default`, the conversion from JSON, the validation and the rows that Python reads are generated from it:
//!
//! ```text
//! /// Divides the logits; 0 always selects the most likely token.
//! temperature: f64 = 1.0, Real::closed(0.0, 100.0);
//! ```
//!
//! A [`Kind`] is a type of value with its bounds; each file of this folder has the kinds of one type.

mod choice;
mod error;
mod numbers;
mod text;
mod tokens;
mod wrappers;

use serde_json::Value;

pub(crate) use choice::Choice;
pub use error::InvalidParameterError;
pub(crate) use numbers::{Flag, Integer, Real, Seconds};
pub(crate) use text::{Directory, Text};
pub(crate) use tokens::{TokenBias, TokenIds, TokenSequences, check_ids, outside_vocabulary};
pub(crate) use wrappers::{MinusOneIsNone, Nested, Optional, Required};

/// Result of reading or checking a value.
pub(crate) type Checked<T> = Result<T, InvalidParameterError>;

/// Maximum of parameters that count tokens. It fits every integer type that is used, and no context is longer.
pub(crate) const MAX_COUNT: u64 = i32::MAX as u64;

/// A row of a parameter table.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterRow {
    /// Name of the parameter.
    pub name: &'static str,
    /// Default value; null if there is no default.
    pub default: Value,
    /// Type and bounds.
    pub bounds: Bounds,
    /// Documentation of the parameter in one sentence.
    pub doc: &'static str,
}

/// Type and bounds of a parameter.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Bounds {
    /// Type: `float`, `int`, `bool`, `str`, `choice`, `token_ids`, `token_sequences`, `token_bias` or `object`.
    pub kind: &'static str,
    /// Whether the parameter has no default.
    pub required: bool,
    /// Minimum value; null if there is no minimum.
    pub minimum: Value,
    /// Maximum value; null if there is no maximum.
    pub maximum: Value,
    /// Whether `minimum` itself is excluded.
    pub exclusive_minimum: bool,
    /// Maximum number of items of a list.
    pub max_items: Option<usize>,
    /// Names to choose from.
    pub choices: Vec<&'static str>,
    /// Requirement of the value, as it reads after "must be".
    pub requirement: String,
}

/// A type of parameter with its bounds.
pub(crate) trait Kind {
    /// Type of the field.
    type Value;

    /// Reads a JSON value. Null stands for the default, `None`.
    fn read(&self, field: &str, value: &Value) -> Checked<Option<Self::Value>>;

    /// Writes a value in the form that [`Kind::read`] reads.
    fn write(&self, value: &Self::Value) -> Value;

    /// Checks a value that a Rust program has set.
    fn check(&self, field: &str, value: &Self::Value) -> Checked<()> {
        self.read(field, &self.write(value)).map(drop)
    }

    /// Describes the type and its bounds.
    fn bounds(&self) -> Bounds;
}

/// Declares a struct of parameters: fields with a kind, then, after `unlisted`, fields that JSON cannot express.
macro_rules! parameters {
    (
        $(#[$meta:meta])*
        pub struct $name:ident ($label:literal) {
            $( $(#[doc = $doc:literal])+ $field:ident: $ty:ty = $default:expr, $kind:expr; )*
        }
        $( unlisted { $( $(#[doc = $more_doc:literal])+ $more:ident: $more_ty:ty = $more_default:expr; )* } )?
    ) => {
        $(#[$meta])*
        pub struct $name {
            $( $(#[doc = $doc])+ pub $field: $ty, )*
            $( $( $(#[doc = $more_doc])+ pub $more: $more_ty, )* )?
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: $default, )* $( $( $more: $more_default, )* )? }
            }
        }

        impl $name {
            /// Returns the table of these parameters: names, defaults, bounds and doc lines.
            #[must_use]
            pub fn rows() -> Vec<$crate::ParameterRow> {
                use $crate::parameter::Kind as _;
                let default = Self::default();
                vec![ $( {
                    let kind = $kind;
                    let bounds = kind.bounds();
                    let written = kind.write(&default.$field);
                    $crate::ParameterRow {
                        name: stringify!($field),
                        default: if bounds.required { serde_json::Value::Null } else { written },
                        bounds,
                        doc: concat!($($doc),+).trim_ascii(),
                    }
                } ),* ]
            }

            /// Reads a JSON object and checks each value against its bounds.
            fn read_object<'de, D: serde::Deserializer<'de>>(source: D) -> $crate::parameter::Checked<Self> {
                use $crate::parameter::Kind as _;
                #[derive(Default, serde::Deserialize)]
                #[serde(deny_unknown_fields, default, expecting = "a JSON object")]
                struct Written { $( $field: serde_json::Value, )* }
                let written: Written = serde::Deserialize::deserialize(source)
                    .map_err(|error| $crate::parameter::malformed($label, &error))?;
                let default = Self::default();
                Ok(Self {
                    $( $field: ($kind).read(stringify!($field), &written.$field)?.unwrap_or(default.$field), )*
                    $( $( $more: default.$more, )* )?
                })
            }

            /// Returns the value of a parameter as JSON; for an unlisted parameter, a placeholder.
            #[allow(dead_code, reason = "not every table needs single values")]
            fn written(&self, name: &str) -> serde_json::Value {
                use $crate::parameter::Kind as _;
                match name {
                    $( stringify!($field) => ($kind).write(&self.$field), )*
                    _ => "a value".into(),
                }
            }

            /// Checks each value against its bounds.
            fn check_bounds(&self) -> $crate::parameter::Checked<()> {
                use $crate::parameter::Kind as _;
                $( ($kind).check(stringify!($field), &self.$field)?; )*
                Ok(())
            }
        }
    };
}
pub(crate) use parameters;

/// Returns the error of a text that is not an object of known parameters.
pub(crate) fn malformed(label: &str, error: &dyn std::fmt::Display) -> InvalidParameterError {
    InvalidParameterError::new(label, Value::Null, format!("a JSON object of known parameters ({error})"))
}
