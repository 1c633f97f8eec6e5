//! [`Cursor`]: reads bytes in order and never past their end.

use std::fmt::Arguments;

use super::error::GgufError;

/// A position in the bytes of a file.
#[derive(Clone, Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// Creates a cursor at byte `at` of a file.
    ///
    /// # Panics
    /// If the file is shorter.
    pub fn new(bytes: &'a [u8], at: usize) -> Self {
        assert!(at <= bytes.len(), "a place within the file");
        Self { bytes, at }
    }

    /// Returns the position in bytes.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Returns the number of bytes that are left.
    pub fn rest(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Returns the bytes from `start` up to the position.
    pub fn since(&self, start: usize) -> &'a [u8] {
        &self.bytes[start..self.at]
    }

    /// Takes the next `count` bytes; errors name them `field`.
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

    /// Reads a count of items that take at least `each` bytes, and checks that so many bytes are left.
    pub fn count(&mut self, each: u64, field: Arguments<'_>) -> Result<u64, GgufError> {
        let count = self.u64(field)?;
        let limit = self.rest() as u64 / each;
        if count > limit {
            return Err(GgufError::CountPastEnd { field: field.to_string(), count, rest: self.rest(), limit });
        }
        Ok(count)
    }

    /// Reads a string: its length in bytes as u64, then UTF-8.
    pub fn string(&mut self, field: Arguments<'_>) -> Result<&'a str, GgufError> {
        let length = self.u64(field)?;
        let bytes = self.take(length, field)?;
        str::from_utf8(bytes)
            .map_err(|error| GgufError::NotUtf8 { field: field.to_string(), offset: error.valid_up_to() })
    }
}
