//! The values of a GGUF file's metadata: numbers, bools, strings, and arrays of them.
//!
//! An array stays where it is in the file, so that a vocabulary takes no memory twice; its elements are read anew, and
//! checked anew, whenever they are asked for.

use super::cursor::Cursor;
use super::error::GgufError;

/// Arrays within arrays; the specification has them, and no known file does.
const MAX_NESTING: usize = 4;
/// Elements of all arrays of a file. The largest vocabularies have some 10^5 tokens, merges and scores each; one byte
/// an element, a file could claim billions, each of which is many bytes to whoever reads them.
const MAX_ELEMENTS: u64 = 1 << 22;
/// Bytes of a string or an array of no elements.
const STRING_BYTES: u64 = 8;
const ARRAY_BYTES: u64 = 12;

/// Declares the types once: variant, Rust type, number in the file; then strings and arrays by hand.
macro_rules! value_types {
    ($($(#[$doc:meta])* $variant:ident($number:ty) = $id:literal, $name:literal;)*) => {
        /// The type of a value.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum ValueType { $($(#[$doc])* $variant,)*
            /// A byte that is 0 or 1.
            Bool,
            /// A length in bytes and UTF-8.
            String,
            /// Values of one type.
            Array,
        }

        /// A value of the metadata.
        #[derive(Clone, Copy, Debug)]
        pub enum Value<'a> { $($(#[$doc])* $variant($number),)*
            /// A byte that is 0 or 1.
            Bool(bool),
            /// A length in bytes and UTF-8.
            String(&'a str),
            /// Values of one type.
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

            /// Its name in the specification.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                    Self::Bool => "BOOL",
                    Self::String => "STRING",
                    Self::Array => "ARRAY",
                }
            }

            /// Bytes that a value takes at least.
            fn least_bytes(self) -> u64 {
                match self {
                    $(Self::$variant => size_of::<$number>() as u64,)*
                    Self::Bool => 1,
                    Self::String => STRING_BYTES,
                    Self::Array => ARRAY_BYTES,
                }
            }

            /// Whether any bytes of the right number are such a value.
            fn is_number(self) -> bool {
                !matches!(self, Self::Bool | Self::String | Self::Array)
            }
        }

        impl<'a> Value<'a> {
            /// The type of this value.
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
            /// The next value, of a type and within so many arrays.
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
    /// An integer of any width.
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

/// Values of one type.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a> {
    key: &'a str,
    of: ValueType,
    len: usize,
    /// Its elements, as they lie in the file.
    bytes: &'a [u8],
    depth: usize,
}

impl<'a> Array<'a> {
    /// The type of its elements.
    pub fn of(&self) -> ValueType {
        self.of
    }

    /// The number of its elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its elements.
    ///
    /// # Errors
    /// A [`GgufError`] where the file has been changed since it was opened.
    pub fn iter(&self) -> impl Iterator<Item = Result<Value<'a>, GgufError>> {
        let mut reader = Reader::new(Cursor::new(self.bytes, 0), self.key);
        let (of, depth) = (self.of, self.depth);
        (0..self.len).map(move |_| reader.value(of, depth))
    }
}

/// Reads the values of keys.
pub(super) struct Reader<'a> {
    pub cursor: Cursor<'a>,
    /// That of the next value.
    pub key: &'a str,
    /// Elements of all arrays that it has read.
    elements: u64,
}

impl<'a> Reader<'a> {
    pub fn new(cursor: Cursor<'a>, key: &'a str) -> Self {
        Self { cursor, key, elements: 0 }
    }

    /// The next value with its type before it.
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
