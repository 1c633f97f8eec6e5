//! [`GgufError`]: what is wrong with a GGUF file.

use super::types::TensorType;
use crate::file::FileError;

/// A GGUF file is malformed or unsupported. Offsets of tensors count from the start of the data; other offsets from the
/// start of the file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum GgufError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("is not a GGUF file: it begins with \"{}\", not with \"GGUF\"", found.escape_ascii())]
    Magic { found: Vec<u8> },
    #[error("has unsupported GGUF version {version}; supported: 2 and 3")]
    Version { version: u32 },
    #[error("is a big-endian GGUF file (version {version}); only little-endian files are supported")]
    BigEndian { version: u32 },
    #[error("is truncated in {field}: {needs} bytes are needed from byte {offset} on, but the file has only {rest}")]
    Truncated { field: String, offset: usize, needs: u64, rest: usize },
    #[error("{field} is {count}, but the {rest} bytes after it hold at most {limit}")]
    CountPastEnd { field: String, count: u64, rest: usize, limit: u64 },
    #[error("{field} is {count}; the limit is {limit}")]
    TooMany { field: String, count: u64, limit: u64 },
    #[error("{field} is {bytes} bytes long; the limit is {limit}")]
    NameTooLong { field: String, bytes: usize, limit: usize },
    #[error("{field} is not valid UTF-8 at its byte {offset}")]
    NotUtf8 { field: String, offset: usize },

    // Metadata.
    #[error("duplicate key {key:?}")]
    DuplicateKey { key: String },
    #[error("{key:?} has a value of unknown type {id}; known: 0 to 12")]
    UnknownValueType { key: String, id: u32 },
    #[error("bool in {key:?} must be 0 or 1, got {byte}")]
    NotABool { key: String, byte: u8 },
    #[error("arrays in {key:?} are nested deeper than {limit} levels")]
    TooDeep { key: String, limit: usize },
    #[error("{key:?} must be {expected}, got {found}")]
    WrongType { key: String, found: &'static str, expected: &'static str },
    #[error("general.alignment must be a power of two up to {limit}, got {value}")]
    Alignment { value: u32, limit: u32 },

    // Tensors.
    #[error("duplicate tensor {tensor:?}")]
    DuplicateTensor { tensor: String },
    #[error("tensor {tensor:?} has {dimensions} dimensions; the limit is {limit}")]
    Dimensions { tensor: String, dimensions: u32, limit: u32 },
    #[error("dimensions of tensor {tensor:?} must be > 0, got {dimensions:?}")]
    ZeroDimension { tensor: String, dimensions: Vec<u64> },
    #[error("tensor {tensor:?} of dimensions {dimensions:?} and type {ty} has a size in bytes that exceeds 64 bits")]
    SizeOverflow { tensor: String, dimensions: Vec<u64>, ty: TensorType },
    #[error("tensor {tensor:?} has unknown type {id}")]
    UnknownType { tensor: String, id: u32 },
    #[error("tensor {tensor:?} has unsupported type {name} ({id}): {reason}")]
    RefusedType { tensor: String, id: u32, name: &'static str, reason: &'static str },
    #[error("rows of tensor {tensor:?} must be a multiple of {block} elements for {ty}, got {row}")]
    PartialBlock { tensor: String, row: u64, block: usize, ty: TensorType },
    #[error("offset of tensor {tensor:?} must be a multiple of the alignment {alignment}, got {offset}")]
    Misaligned { tensor: String, offset: u64, alignment: u32 },
    #[error(
        "tensor {tensor:?} at offset {offset} takes {bytes} bytes, but the file has only {data} bytes of data: is it \
         truncated?"
    )]
    PastEnd { tensor: String, offset: u64, bytes: u64, data: u64 },
    #[error("tensor {tensor:?} at offset {offset} overlaps tensor {previous:?}, which ends at {previous_end}")]
    Overlap { tensor: String, offset: u64, previous: String, previous_end: u64 },

    // Models in several parts.
    #[error("{key} must be in {least}..={most}, got {value}")]
    SplitRange { key: &'static str, value: i128, least: u64, most: u64 },
    #[error("is part {number} of {count} (split.no and split.count), so its name must end in {expected:?}")]
    SplitName { number: u64, count: u64, expected: String },
    #[error("is one of {count} parts, but part {missing:?} is missing: download it to the same folder")]
    PartMissing { count: u64, missing: String },
    #[error("has {key} = {found}, but {first:?} says {expected}")]
    PartDiffers { key: &'static str, found: String, first: String, expected: u64 },
    #[error("split.tensors.count is {expected}, but its {count} parts have {found} tensors")]
    PartsLackTensors { count: u64, expected: u64, found: u64 },
    #[error("tensor {tensor:?} is also in {other:?}")]
    TensorInTwoParts { tensor: String, other: String },
}
