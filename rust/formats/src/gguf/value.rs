//! Metadata values of a GGUF file: numbers, bools, strings, and arrays of them.
//!
//! An array refers to the file, so that a vocabulary is not copied; its elements are read and checked again on every
//! access.

use super::cursor::Cursor;
use super::error::GgufError;

/// Largest depth of nested arrays; the specification allows nesting, and no known file uses it.
const MAX_NESTING: usize = 4;
/// Maximum number of elements in all arrays of a file. The largest vocabularies have about 10^5 tokens, merges and
/// scores each. At one byte per element, a hostile file could declare billions, which take more memory once they are
/// read.
const MAX_ELEMENTS: u64 = 1 << 22;
/// Bytes of an empty string and of an empty array.
const STRING_BYTES: u64 = 8;
const ARRAY_BYTES: u64 = 12;

/// Declares each type once: variant, Rust type, id in the file; strings and arrays are added by hand.
macro_rules! value_types {
    ($($(#[$doc:meta])* $variant:ident($number:ty) = $id:literal, $name:literal;)*) => {
        /// Type of a metadata value.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum ValueType { $($(#[$doc])* $variant,)*
            /// Byte that is 0 or 1.
            Bool,
            /// Length in bytes, then UTF-8.
            String,
            /// Elements of one type.
            Array,
        }

        /// Metadata value.
        #[derive(Clone, Copy, Debug)]
        pub enum Value<'a> { $($(#[$doc])* $variant($number),)*
            /// Byte that is 0 or 1.
            Bool(bool),
            /// UTF-8 text.
            String(&'a str),
            /// Elements of one type.
            Array(Array<'a>),
        }

        impl ValueType {
            fn of_id(id: u32) -> Option<Self> {
                match id {
                    $($id => Some(Self::$variant),)*
                    7 => Some(Self::Bool),
                    8 => Some(Self::String),
                    9 => Some(Self::Array),
                    _ => None,
                }
            }

            /// Returns the name in the specification.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                    Self::Bool => "BOOL",
                    Self::String => "STRING",
                    Self::Array => "ARRAY",
                }
            }

            /// Returns the smallest size of a value in bytes.
            fn least_bytes(self) -> u64 {
                match self {
                    $(Self::$variant => size_of::<$number>() as u64,)*
                    Self::Bool => 1,
                    Self::String => STRING_BYTES,
                    Self::Array => ARRAY_BYTES,
                }
            }

            /// Returns whether every bit pattern is a valid value.
            fn is_number(self) -> bool {
                !matches!(self, Self::Bool | Self::String | Self::Array)
            }
        }

        impl<'a> Value<'a> {
            /// Returns the type of the value.
            pub fn value_type(&self) -> ValueType {
                match self {
                    $(Self::$variant(_) => ValueType::$variant,)*
                    Self::Bool(_) => ValueType::Bool,
                    Self::String(_) => ValueType::String,
                    Self::Array(_) => ValueType::Array,
                }
            }
        }

        impl<'a> Reader<'a> {
            /// Reads the next value of type `ty`, inside of `depth` arrays.
            fn value(&mut self, ty: ValueType, depth: usize) -> Result<Value<'a>, GgufError> {
                let key = self.key;
                Ok(match ty {
                    $(ValueType::$variant => {
                        let bytes = self.cursor.take(size_of::<$number>() as u64, format_args!("{key:?}"))?;
                        let mut number = [0; size_of::<$number>()];
                        number.copy_from_slice(bytes);
                        Value::$variant(<$number>::from_le_bytes(number))
                    })*
                    ValueType::Bool => match self.cursor.take(1, format_args!("{key:?}"))? {
                        [0] => Value::Bool(false),
                        [1] => Value::Bool(true),
                        other => return Err(GgufError::NotABool { key: key.to_owned(), byte: other[0] }),
                    },
                    ValueType::String => Value::String(self.cursor.string(format_args!("{key:?}"))?),
                    ValueType::Array => Value::Array(self.array(depth)?),
                })
            }
        }
    };
}

value_types! {
    /// Unsigned byte.
    U8(u8) = 0, "UINT8";
    /// Signed byte.
    I8(i8) = 1, "INT8";
    /// Unsigned 16 bits.
    U16(u16) = 2, "UINT16";
    /// Signed 16 bits.
    I16(i16) = 3, "INT16";
    /// Unsigned 32 bits.
    U32(u32) = 4, "UINT32";
    /// Signed 32 bits.
    I32(i32) = 5, "INT32";
    /// IEEE 754 single precision.
    F32(f32) = 6, "FLOAT32";
    /// Unsigned 64 bits.
    U64(u64) = 10, "UINT64";
    /// Signed 64 bits.
    I64(i64) = 11, "INT64";
    /// IEEE 754 double precision.
    F64(f64) = 12, "FLOAT64";
}

impl Value<'_> {
    /// Returns the value of an integer of any width.
    pub fn integer(&self) -> Option<i128> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::I8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::I16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::I32(value) => Some(value.into()),
            Self::U64(value) => Some(value.into()),
            Self::I64(value) => Some(value.into()),
            _ => None,
        }
    }
}

/// Array of elements of one type.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a> {
    key: &'a str,
    of: ValueType,
    len: usize,
    /// Elements as the file stores them.
    bytes: &'a [u8],
    depth: usize,
}

impl<'a> Array<'a> {
    /// Returns the type of the elements.
    pub fn of(&self) -> ValueType {
        self.of
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the array is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the elements.
    ///
    /// # Errors
    /// [`GgufError`] if the file has been changed since it was opened.
    pub fn iter(&self) -> impl Iterator<Item = Result<Value<'a>, GgufError>> {
        let mut reader = Reader::new(Cursor::new(self.bytes, 0), self.key);
        let (of, depth) = (self.of, self.depth);
        (0..self.len).map(move |_| reader.value(of, depth))
    }
}

/// Reads metadata values.
pub(super) struct Reader<'a> {
    pub cursor: Cursor<'a>,
    /// Key of the next value, for messages.
    pub key: &'a str,
    /// Number of elements in all arrays read so far.
    elements: u64,
}

impl<'a> Reader<'a> {
    pub fn new(cursor: Cursor<'a>, key: &'a str) -> Self {
        Self { cursor, key, elements: 0 }
    }

    /// Reads the next value, which starts with its type.
    pub fn typed_value(&mut self) -> Result<Value<'a>, GgufError> {
        let ty = self.value_type()?;
        self.value(ty, 0)
    }

    fn value_type(&mut self) -> Result<ValueType, GgufError> {
        let key = self.key;
        let id = self.cursor.u32(format_args!("the type of {key:?}"))?;
        ValueType::of_id(id).ok_or_else(|| GgufError::UnknownValueType { key: key.to_owned(), id })
    }

    fn array(&mut self, depth: usize) -> Result<Array<'a>, GgufError> {
        let (key, depth) = (self.key, depth + 1);
        if depth > MAX_NESTING {
            return Err(GgufError::TooDeep { key: key.to_owned(), limit: MAX_NESTING });
        }
        let of = self.value_type()?;
        let len = self.cursor.count(of.least_bytes(), format_args!("the length of {key:?}"))?;
        self.elements += len;
        if self.elements > MAX_ELEMENTS {
            let field = format!("the number of elements in arrays up to {key:?}");
            return Err(GgufError::TooMany { field, count: self.elements, limit: MAX_ELEMENTS });
        }
        let start = self.cursor.at();
        if of.is_number() {
            self.cursor.take(len * of.least_bytes(), format_args!("{key:?}"))?;
        } else {
            for _ in 0..len {
                self.value(of, depth)?;
            }
        }
        Ok(Array { key, of, len: len as usize, bytes: self.cursor.since(start), depth })
    }
}
