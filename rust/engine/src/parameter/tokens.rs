//! Token ids: [`TokenIds`], [`TokenSequences`], [`TokenBias`].
//!
//! Ids are read as 32-bit numbers; [`check_ids`] checks them against the vocabulary of a model.

use serde_json::{Map, Value};

use super::numbers::whole;
use super::{Bounds, Checked, InvalidParameterError, Kind, Real};

/// A list of token ids.
#[derive(Clone, Copy)]
pub(crate) struct TokenIds {
    /// Smallest number of ids.
    pub min_items: usize,
    /// Maximum number of ids.
    pub max_items: usize,
}

impl TokenIds {
    fn requirement(self) -> String {
        format!("a list of {} to {} token ids", self.min_items, self.max_items)
    }

    fn check_count<T: Clone + Into<Value>>(self, field: &str, items: &[T]) -> Checked<()> {
        if (self.min_items..=self.max_items).contains(&items.len()) {
            return Ok(());
        }
        Err(InvalidParameterError::new(field, items, self.requirement()))
    }
}

impl Kind for TokenIds {
    type Value = Vec<u32>;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<Vec<u32>>> {
        match value {
            Value::Null => Ok(None),
            Value::Array(items) => {
                self.check_count(field, items)?;
                let id = |(index, item)| token_id(|| format!("{field}[{index}]"), whole(item), item);
                items.iter().enumerate().map(id).collect::<Checked<Vec<u32>>>().map(Some)
            }
            _ => Err(InvalidParameterError::new(field, value.clone(), self.requirement())),
        }
    }

    fn write(&self, value: &Vec<u32>) -> Value {
        value.as_slice().into()
    }

    fn check(&self, field: &str, value: &Vec<u32>) -> Checked<()> {
        self.check_count(field, value)
    }

    fn bounds(&self) -> Bounds {
        let requirement = self.requirement();
        Bounds { kind: "token_ids", max_items: Some(self.max_items), requirement, ..Bounds::default() }
    }
}

/// A list of sequences of token ids.
#[derive(Clone, Copy)]
pub(crate) struct TokenSequences {
    /// Maximum number of sequences.
    pub max_items: usize,
    /// The sequences.
    pub each: TokenIds,
}

impl TokenSequences {
    fn check_count<T: Clone + Into<Value>>(self, field: &str, items: &[T]) -> Checked<()> {
        if items.len() <= self.max_items {
            return Ok(());
        }
        Err(InvalidParameterError::new(field, items, self.requirement()))
    }

    fn requirement(self) -> String {
        format!("a list of at most {} lists of token ids", self.max_items)
    }
}

impl Kind for TokenSequences {
    type Value = Vec<Vec<u32>>;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<Self::Value>> {
        let refused = || InvalidParameterError::new(field, value.clone(), self.requirement());
        match value {
            Value::Null => Ok(None),
            Value::Array(items) => {
                self.check_count(field, items)?;
                let sequence = |(index, item)| self.each.read(&format!("{field}[{index}]"), item)?.ok_or_else(refused);
                items.iter().enumerate().map(sequence).collect::<Checked<_>>().map(Some)
            }
            _ => Err(refused()),
        }
    }

    fn write(&self, value: &Self::Value) -> Value {
        value.iter().map(|sequence| Value::from(sequence.as_slice())).collect()
    }

    fn check(&self, field: &str, value: &Self::Value) -> Checked<()> {
        self.check_count(field, value)?;
        let check = |(index, sequence)| self.each.check(&format!("{field}[{index}]"), sequence);
        value.iter().enumerate().try_for_each(check)
    }

    fn bounds(&self) -> Bounds {
        let requirement = self.requirement();
        Bounds { kind: "token_sequences", max_items: Some(self.max_items), requirement, ..Bounds::default() }
    }
}

/// A map from token ids to numbers; read in ascending order of ids.
#[derive(Clone, Copy)]
pub(crate) struct TokenBias(pub Real);

impl Kind for TokenBias {
    type Value = Vec<(u32, f64)>;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<Self::Value>> {
        let refused = || InvalidParameterError::new(field, value.clone(), self.bounds().requirement);
        let entry = |(key, bias): (&String, &Value)| {
            let name = || format!("{field}[{key}]");
            let id = token_id(name, key.parse().ok(), &Value::from(key.as_str()))?;
            Ok((id, self.0.read(&name(), bias)?.ok_or_else(refused)?))
        };
        let mut entries = match value {
            Value::Null => return Ok(None),
            Value::Object(map) => Map::iter(map).map(entry).collect::<Checked<Vec<_>>>()?,
            _ => return Err(refused()),
        };
        entries.sort_by_key(|&(id, _)| id);
        // "7" and "07" are the same id. Refuse such an object, since it is unclear which number applies.
        match entries.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            Some(pair) => Err(InvalidParameterError::new(field, pair[0].0, "a map that has each token id once")),
            None => Ok(Some(entries)),
        }
    }

    fn write(&self, value: &Self::Value) -> Value {
        value.iter().map(|(id, bias)| (id.to_string(), self.0.write(bias))).collect::<Map<_, _>>().into()
    }

    fn check(&self, field: &str, value: &Self::Value) -> Checked<()> {
        value.iter().try_for_each(|(id, bias)| self.0.check(&format!("{field}[{id}]"), bias))
    }

    fn bounds(&self) -> Bounds {
        let each = self.0.bounds();
        let requirement = "a map from token ids to numbers".into();
        Bounds { kind: "token_bias", minimum: each.minimum, maximum: each.maximum, requirement, ..Bounds::default() }
    }
}

fn token_id(field: impl Fn() -> String, id: Option<i128>, written: &Value) -> Checked<u32> {
    let refused = || InvalidParameterError::new(field(), written.clone(), format!("a token id from 0 to {}", u32::MAX));
    id.and_then(|id| u32::try_from(id).ok()).ok_or_else(refused)
}

/// Checks that every id is one of the model's.
pub(crate) fn check_ids(field: &str, ids: &[u32], vocab_size: usize) -> Checked<()> {
    match ids.iter().position(|&id| id as usize >= vocab_size) {
        Some(index) => Err(outside_vocabulary(format!("{field}[{index}]"), ids[index].into(), vocab_size)),
        None => Ok(()),
    }
}

/// Returns the error of a token id that the model does not have.
pub(crate) fn outside_vocabulary(field: String, id: i64, vocab_size: usize) -> InvalidParameterError {
    InvalidParameterError::new(field, id, format!("a token id of the model, 0 to {}", vocab_size.saturating_sub(1)))
}
