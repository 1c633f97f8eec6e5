//! JSON objects that refuse duplicate keys, because it would be undefined which of two values applies.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

/// Maximum number of entries in one object. The largest published checkpoints have about 10^5 tensors; a header of 100
/// MB could have millions of entries, each of which takes more memory than its text.
pub(crate) const MAX_ENTRIES: usize = 1 << 18;

/// An object with distinct keys and values of one type.
#[derive(Debug)]
pub(crate) struct UniqueMap<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
                let mut map = BTreeMap::new();
                while let Some(key) = access.next_key::<String>()? {
                    check_new(&map, &key)?;
                    let value = access.next_value()?;
                    map.insert(key, value);
                }
                Ok(UniqueMap(map))
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

/// Refuses a duplicate key and an entry above the limit.
pub(crate) fn check_new<V, E: Error>(map: &BTreeMap<String, V>, key: &str) -> Result<(), E> {
    if map.contains_key(key) {
        return Err(E::custom(format_args!("duplicate key {key:?}")));
    }
    if map.len() == MAX_ENTRIES {
        return Err(E::custom(format_args!("more than {MAX_ENTRIES} entries in one object")));
    }
    Ok(())
}
