//! The header of a GGUF file, read and checked.
//!
//! Layout (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>), all little-endian: `GGUF`; version, u32; number
//! of tensors and of keys, u64 each; the keys, each a string, the type of its value as u32, and the value; the tensors,
//! each a name, the number of dimensions as u32, the dimensions as u64 with the fastest first, the type as u32, and the
//! offset in the data as u64. The data begin at the next multiple of the alignment. A string is its length in bytes as
//! u64 and UTF-8.

use std::collections::BTreeMap;
use std::ops::Range;

use super::cursor::Cursor;
use super::error::GgufError;
use super::types::{TensorType, UnsupportedType};
use super::value::{Reader, Value};
use crate::file::{FileError, is_lfs_pointer};

/// The first bytes of every GGUF file.
pub(crate) const MAGIC: &[u8] = b"GGUF";

/// Largest length of a name in bytes. ggml itself allows 63 bytes for a tensor's name, and keys have about the same
/// length.
const MAX_NAME: usize = 255;
/// Limits for the number of keys and tensors. Published models have dozens of keys and thousands of tensors. With these
/// limits, the tables of a hostile file take a few megabytes more than the file.
const MAX_KEYS: u64 = 1 << 14;
const MAX_TENSORS: u64 = 1 << 14;
/// Smallest size in bytes of a key (name, type, value) and of a tensor (name, dimensions, type, offset).
const LEAST_KEY_BYTES: u64 = 8 + 4 + 1;
const LEAST_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;
/// Maximum number of dimensions in ggml.
const MAX_DIMENSIONS: u32 = 4;
const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u32 = 32;
/// Largest alignment, the larger of the common sizes of huge pages.
const MAX_ALIGNMENT: u32 = 2 << 20;

/// Keys and tensors of a file.
#[derive(Debug)]
pub(crate) struct Header {
    /// Offset of each key's value, which starts with its type, in bytes from the start of the file.
    pub keys: BTreeMap<String, usize>,
    pub tensors: BTreeMap<String, TensorInfo>,
}

/// Type, dimensions (slowest first) and byte range in the file of a tensor.
#[derive(Debug)]
pub(crate) struct TensorInfo {
    pub ty: TensorType,
    pub shape: Box<[usize]>,
    pub bytes: Range<usize>,
}

impl Header {
    /// Reads the header of a whole file and checks every claim against the bytes that are there.
    ///
    /// Allocates memory only for the names of keys and tensors, and reads none of the data.
    pub fn read(file: &[u8]) -> Result<Self, GgufError> {
        if file.is_empty() {
            return Err(FileError::Empty.into());
        }
        if is_lfs_pointer(file) {
            return Err(FileError::LfsPointer { bytes: file.len() as u64 }.into());
        }
        let mut cursor = Cursor::new(file, 0);
        check_start(&mut cursor)?;
        let tensors = cursor.count(LEAST_TENSOR_BYTES, format_args!("tensor_count"))?;
        let keys = cursor.count(LEAST_KEY_BYTES, format_args!("metadata_kv_count"))?;
        for (field, count, limit) in [("tensor_count", tensors, MAX_TENSORS), ("metadata_kv_count", keys, MAX_KEYS)] {
            if count > limit {
                return Err(GgufError::TooMany { field: field.to_owned(), count, limit });
            }
        }
        let (keys, alignment) = read_keys(&mut cursor, keys)?;
        let tensors = read_tensors(&mut cursor, tensors, alignment)?;
        Ok(Self { keys, tensors })
    }

    /// Reads the value of a key again from the file that this header was read from.
    ///
    /// # Errors
    /// [`GgufError`] if the file has been changed since.
    pub fn value<'a>(&'a self, file: &'a [u8], key: &str) -> Result<Option<Value<'a>>, GgufError> {
        let Some((key, &at)) = self.keys.get_key_value(key) else { return Ok(None) };
        Reader::new(Cursor::new(file, at), key).typed_value().map(Some)
    }
}

/// Checks magic and version.
fn check_start(cursor: &mut Cursor<'_>) -> Result<(), GgufError> {
    let found = cursor.take(MAGIC.len().min(cursor.rest()) as u64, format_args!("the magic"))?;
    if found != MAGIC {
        return Err(GgufError::Magic { found: found.to_vec() });
    }
    match cursor.u32(format_args!("the version"))? {
        2 | 3 => Ok(()),
        version if (1..=0xff).contains(&version.swap_bytes()) => {
            Err(GgufError::BigEndian { version: version.swap_bytes() })
        }
        version => Err(GgufError::Version { version }),
    }
}

/// Reads the name of a key or tensor.
fn read_name<'a>(cursor: &mut Cursor<'a>, what: &str, index: u64) -> Result<&'a str, GgufError> {
    let name = cursor.string(format_args!("the name of {what} {index}"))?;
    if name.len() > MAX_NAME {
        let field = format!("the name of {what} {index}");
        return Err(GgufError::NameTooLong { field, bytes: name.len(), limit: MAX_NAME });
    }
    Ok(name)
}

/// Reads all keys, and returns the offsets of their values and the alignment.
fn read_keys(cursor: &mut Cursor<'_>, count: u64) -> Result<(BTreeMap<String, usize>, u32), GgufError> {
    let mut keys = BTreeMap::new();
    let mut alignment = DEFAULT_ALIGNMENT;
    let mut reader = Reader::new(cursor.clone(), "");
    for index in 0..count {
        reader.key = read_name(&mut reader.cursor, "key", index)?;
        if keys.insert(reader.key.to_owned(), reader.cursor.at()).is_some() {
            return Err(GgufError::DuplicateKey { key: reader.key.to_owned() });
        }
        let value = reader.typed_value()?;
        if reader.key == ALIGNMENT_KEY {
            alignment = checked_alignment(value)?;
        }
    }
    *cursor = reader.cursor;
    Ok((keys, alignment))
}

fn checked_alignment(value: Value<'_>) -> Result<u32, GgufError> {
    match value {
        Value::U32(value) if value.is_power_of_two() && value <= MAX_ALIGNMENT => Ok(value),
        Value::U32(value) => Err(GgufError::Alignment { value, limit: MAX_ALIGNMENT }),
        other => {
            let found = other.value_type().name();
            Err(GgufError::WrongType { key: ALIGNMENT_KEY.to_owned(), found, expected: "UINT32" })
        }
    }
}

/// A tensor as the header declares it, unchecked.
struct RawTensor {
    ty: TensorType,
    /// Fastest first.
    dimensions: Vec<u64>,
    offset: u64,
    bytes: u64,
}

fn read_tensors(
    cursor: &mut Cursor<'_>,
    count: u64,
    alignment: u32,
) -> Result<BTreeMap<String, TensorInfo>, GgufError> {
    let mut raw = BTreeMap::new();
    for index in 0..count {
        let name = read_name(cursor, "tensor", index)?;
        let tensor = read_tensor(cursor, name)?;
        if !tensor.offset.is_multiple_of(u64::from(alignment)) {
            return Err(GgufError::Misaligned { tensor: name.to_owned(), offset: tensor.offset, alignment });
        }
        if raw.insert(name.to_owned(), tensor).is_some() {
            return Err(GgufError::DuplicateTensor { tensor: name.to_owned() });
        }
    }
    let start = cursor.at().next_multiple_of(alignment as usize);
    let data = (cursor.at() + cursor.rest()).saturating_sub(start) as u64;
    let mut tensors = BTreeMap::new();
    for (name, RawTensor { ty, dimensions, offset, bytes }) in raw {
        if offset.checked_add(bytes).is_none_or(|end| end > data) {
            return Err(GgufError::PastEnd { tensor: name, offset, bytes, data });
        }
        // All of these are at most the file's length, or that times the elements of a block, so they fit usize.
        let begin = start + offset as usize;
        let shape = dimensions.iter().rev().map(|&size| size as usize).collect();
        tensors.insert(name, TensorInfo { ty, shape, bytes: begin..begin + bytes as usize });
    }
    check_disjoint(&tensors, start)?;
    Ok(tensors)
}

/// Reads what follows a tensor's name, and computes its size in bytes.
fn read_tensor(cursor: &mut Cursor<'_>, name: &str) -> Result<RawTensor, GgufError> {
    let tensor = || name.to_owned();
    let count = cursor.u32(format_args!("the number of dimensions of tensor {name:?}"))?;
    if count > MAX_DIMENSIONS {
        return Err(GgufError::Dimensions { tensor: tensor(), dimensions: count, limit: MAX_DIMENSIONS });
    }
    let mut dimensions = Vec::with_capacity(count as usize);
    for _ in 0..count {
        dimensions.push(cursor.u64(format_args!("the dimensions of tensor {name:?}"))?);
    }
    let id = cursor.u32(format_args!("the type of tensor {name:?}"))?;
    let ty = TensorType::of_id(id).map_err(|error| match error {
        UnsupportedType::Unknown => GgufError::UnknownType { tensor: tensor(), id },
        UnsupportedType::Refused { name, reason } => GgufError::RefusedType { tensor: tensor(), id, name, reason },
    })?;
    let offset = cursor.u64(format_args!("the offset of tensor {name:?}"))?;
    if dimensions.contains(&0) {
        return Err(GgufError::ZeroDimension { tensor: tensor(), dimensions });
    }
    let row = dimensions.first().copied().unwrap_or(1);
    let elements = dimensions.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
    let (block, block_bytes) = ty.block();
    if row % block as u64 != 0 {
        return Err(GgufError::PartialBlock { tensor: tensor(), row, block, ty });
    }
    // The number of elements may overflow even if that of bytes does not: a block has more elements than bytes.
    match elements.and_then(|elements| (elements / block as u64).checked_mul(block_bytes as u64)) {
        Some(bytes) => Ok(RawTensor { ty, dimensions, offset, bytes }),
        None => Err(GgufError::SizeOverflow { tensor: tensor(), dimensions, ty }),
    }
}

/// Checks that no two tensors overlap. Bytes between tensors are allowed, mostly as padding.
fn check_disjoint(tensors: &BTreeMap<String, TensorInfo>, start: usize) -> Result<(), GgufError> {
    let mut spans: Vec<_> = tensors.iter().map(|(name, info)| (info.bytes.start, info.bytes.end, name)).collect();
    spans.sort_unstable();
    for pair in spans.windows(2) {
        let [(_, end, previous), (begin, _, name)] = pair else { continue };
        if begin < end {
            return Err(GgufError::Overlap {
                tensor: (*name).clone(),
                offset: (begin - start) as u64,
                previous: (*previous).clone(),
                previous_end: (end - start) as u64,
            });
        }
    }
    Ok(())
}
