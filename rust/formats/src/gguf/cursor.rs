//! Bytes that are taken one after the other, and never past their end.

use std::fmt::Arguments;

use super::error::GgufError;

/// A place in the bytes of a file.
#[derive(Clone, Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// At byte `at` of a file.
    ///
    /// # Panics
    /// If the file ends before.
    pub fn new(bytes: &'a [u8], at: usize) -> Self {
        assert!(at <= bytes.len(), "a place within the file");
        Self { bytes, at }
    }

    /// Bytes before it.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Bytes after it.
    pub fn rest(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The bytes from `start` up to here.
    pub fn since(&self, start: usize) -> &'a [u8] {
        &self.bytes[start..self.at]
    }

    /// The next `count` bytes, which are those of `field`.
    pub fn take(&mut self, count: u64, field: Arguments<'_>) -> Result<&'a [u8], GgufError> {
        let rest = self.rest();
        if count > rest as u64 {
            return Err(GgufError::Truncated { field: field.to_string(), offset: self.at, needs: count, rest });
        }
        let start = self.at;
        self.at += count as usize;
        Ok(self.since(start))
    }

    fn array<const N: usize>(&mut self, field: Arguments<'_>) -> Result<[u8; N], GgufError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, field)?);
        Ok(array)
    }

    pub fn u32(&mut self, field: Arguments<'_>) -> Result<u32, GgufError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, field: Arguments<'_>) -> Result<u64, GgufError> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// A count of things that take at least `each` bytes, all of which must be there.
    pub fn count(&mut self, each: u64, field: Arguments<'_>) -> Result<u64, GgufError> {
        let count = self.u64(field)?;
        let limit = self.rest() as u64 / each;
        if count > limit {
            return Err(GgufError::CountPastEnd { field: field.to_string(), count, rest: self.rest(), limit });
        }
        Ok(count)
    }

    /// A string: its length in bytes as u64, and its text.
    pub fn string(&mut self, field: Arguments<'_>) -> Result<&'a str, GgufError> {
        let length = self.u64(field)?;
        let bytes = self.take(length, field)?;
        str::from_utf8(bytes)
            .map_err(|error| GgufError::NotUtf8 { field: field.to_string(), offset: error.valid_up_to() })
    }
}
