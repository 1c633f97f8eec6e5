//! Limits of tokenizer.json, checked before a tokenizer library reads the file.
//!
//! Tokenizer libraries trust this file. A chain of replacements that each double a text, a table with a declared size of
//! gigabytes, or a token of millions of characters exhausts memory or time, or aborts the process, when the file is read
//! or with the first text.

use std::fmt;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

/// Maximum length of a string in bytes, such as a token, a pattern or a replacement.
pub const MAX_STRING: usize = 16 << 10;

/// Maximum size of a normalizer, pre-tokenizer, post-processor or decoder, in bytes of JSON.
pub const MAX_COMPONENT: usize = 8 << 20;

/// Maximum number of steps of a component.
pub const MAX_STEPS: usize = 64;

/// Maximum factor by which the replacements of a component can make a text longer, in bytes.
pub const MAX_GROWTH: usize = 64;

/// A tokenizer.json exceeds a limit or is malformed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum TokenizerJsonError {
    #[error("is not a valid tokenizer: {0}")]
    Malformed(serde_json::Error),
    #[error("{component} must have at most {MAX_COMPONENT} bytes, got {bytes}")]
    Component { component: &'static str, bytes: usize },
    #[error("{component} must have at most {MAX_STEPS} steps")]
    Steps { component: &'static str },
    #[error("strings of {component} must have at most {MAX_STRING} bytes, got {bytes}")]
    Text { component: &'static str, bytes: usize },
    #[error("replacements of {component} must make a text at most {MAX_GROWTH} times as long")]
    Growth { component: &'static str },
    #[error("precompiled_charsmap must be base64")]
    CharsmapText,
    #[error(transparent)]
    Charsmap(#[from] CharsmapError),
}

/// A character map of SentencePiece is malformed.
#[derive(Debug, thiserror::Error)]
#[error("precompiled_charsmap must begin with the bytes of its trie, a multiple of 4 up to {rest}, got {found}")]
pub struct CharsmapError {
    /// Bytes that follow the length.
    rest: usize,
    /// Length of the trie in bytes.
    found: String,
}

/// Checks the header of a `precompiled_charsmap`: a little-endian u32, the bytes of the trie, and normalized strings
/// (<https://github.com/google/sentencepiece/blob/master/src/normalizer.cc>).
///
/// # Errors
/// [`CharsmapError`] if the trie is longer than the map or not of whole numbers.
pub fn check_charsmap(map: &[u8]) -> Result<(), CharsmapError> {
    let Some((length, rest)) = map.split_first_chunk() else {
        return Err(CharsmapError { rest: 0, found: format!("{} bytes in all", map.len()) });
    };
    let trie = u32::from_le_bytes(*length);
    if trie % 4 == 0 && trie as usize <= rest.len() {
        return Ok(());
    }
    Err(CharsmapError { rest: rest.len(), found: trie.to_string() })
}

/// Checks the limits of a tokenizer.json.
///
/// # Errors
/// [`TokenizerJsonError`] for the first violation.
///
/// # Examples
/// ```
/// use ferrule_formats::check_tokenizer_json;
///
/// let double = r#"{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}"#;
/// let chain = [double; 40].join(",");
/// let file = format!(r#"{{"normalizer": {{"type": "Sequence", "normalizers": [{chain}]}}}}"#);
/// let error = check_tokenizer_json(file.as_bytes()).unwrap_err();
/// assert_eq!(error.to_string(), "replacements of normalizer must make a text at most 64 times as long");
/// ```
pub fn check_tokenizer_json(content: &[u8]) -> Result<(), TokenizerJsonError> {
    let file: Contents<'_> = serde_json::from_slice(content).map_err(TokenizerJsonError::Malformed)?;
    let components = [
        ("normalizer", file.normalizer),
        ("pre_tokenizer", file.pre_tokenizer),
        ("post_processor", file.post_processor),
        ("decoder", file.decoder),
    ];
    for (component, text) in components {
        let Some(text) = text.map(RawValue::get) else { continue };
        if text.len() > MAX_COMPONENT {
            return Err(TokenizerJsonError::Component { component, bytes: text.len() });
        }
        let value = serde_json::from_str(text).map_err(TokenizerJsonError::Malformed)?;
        Component { name: component, steps: 0, growth: 1 }.check(&value)?;
    }
    Ok(())
}

#[derive(Deserialize)]
struct Contents<'a> {
    #[serde(borrow, default)]
    normalizer: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pre_tokenizer: Option<&'a RawValue>,
    #[serde(borrow, default)]
    post_processor: Option<&'a RawValue>,
    #[serde(borrow, default)]
    decoder: Option<&'a RawValue>,
    #[serde(default, rename = "model")]
    _model: Limited,
    #[serde(default, rename = "added_tokens")]
    _added_tokens: Limited,
}

/// A component while it is checked.
struct Component {
    name: &'static str,
    steps: usize,
    growth: usize,
}

impl Component {
    fn check(&mut self, value: &Value) -> Result<(), TokenizerJsonError> {
        match value {
            Value::Object(fields) => {
                let text = |name: &str| fields.get(name).and_then(Value::as_str);
                if text("type").is_some() {
                    self.steps += 1;
                    if self.steps > MAX_STEPS {
                        return Err(TokenizerJsonError::Steps { component: self.name });
                    }
                }
                if let (Some(pattern), Some(content)) = (fields.get("pattern"), text("content")) {
                    self.replaces(pattern, content)?;
                }
                for (name, field) in fields {
                    match field {
                        Value::String(map) if name == "precompiled_charsmap" => {
                            let map = BASE64_STANDARD.decode(map).map_err(|_| TokenizerJsonError::CharsmapText)?;
                            check_charsmap(&map)?;
                        }
                        _ => self.check(field)?,
                    }
                }
                Ok(())
            }
            Value::Array(items) => items.iter().try_for_each(|item| self.check(item)),
            Value::String(text) if text.len() > MAX_STRING => {
                Err(TokenizerJsonError::Text { component: self.name, bytes: text.len() })
            }
            _ => Ok(()),
        }
    }

    /// Multiplies the growth by the growth of a replacement. A regular expression may match between all bytes.
    fn replaces(&mut self, pattern: &Value, content: &str) -> Result<(), TokenizerJsonError> {
        let growth = match pattern.get("String").and_then(Value::as_str) {
            Some(pattern) if !pattern.is_empty() => content.len().div_ceil(pattern.len()).max(1),
            _ => content.len() + 1,
        };
        self.growth = self.growth.saturating_mul(growth);
        if self.growth > MAX_GROWTH {
            return Err(TokenizerJsonError::Growth { component: self.name });
        }
        Ok(())
    }
}

/// Any value whose strings and keys have at most [`MAX_STRING`] bytes. Nothing is kept.
#[derive(Default)]
struct Limited;

impl<'de> Deserialize<'de> for Limited {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Limited {
    type Value = Self;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "any value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self, E> {
        if text.len() > MAX_STRING {
            return Err(Error::custom(format!("a string must have at most {MAX_STRING} bytes, got {}", text.len())));
        }
        Ok(Self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self, A::Error> {
        while items.next_element::<Self>()?.is_some() {}
        Ok(Self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self, A::Error> {
        while entries.next_entry::<Self, Self>()?.is_some() {}
        Ok(Self)
    }
}
