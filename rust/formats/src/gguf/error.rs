//! What can be wrong with a GGUF file.

use super::types::TensorType;
use crate::file::FileError;

/// The violated fact. Offsets of tensors count from the start of the data; other offsets from the file's start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum GgufError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("begins with \"{}\", not with \"GGUF\": it is no GGUF file", found.escape_ascii())]
    Magic { found: Vec<u8> },
    #[error("is of GGUF version {version}; ferrule reads versions 2 and 3")]
    Version { version: u32 },
    #[error("is a big-endian GGUF file (version {version}); ferrule reads little-endian ones")]
    BigEndian { version: u32 },
    #[error("ends within {field}: that takes {needs} bytes from byte {offset} on, of which the file has {rest}")]
    Truncated { field: String, offset: usize, needs: u64, rest: usize },
    #[error("{field} is {count}, but the {rest} bytes after it hold at most {limit}")]
    CountPastEnd { field: String, count: u64, rest: usize, limit: u64 },
    #[error("{field} is {count}; the limit is {limit}")]
    TooMany { field: String, count: u64, limit: u64 },
    #[error("{field} is {bytes} bytes long; the limit is {limit}")]
    NameTooLong { field: String, bytes: usize, limit: usize },
    #[error("{field} is not UTF-8: its bytes from {offset} on are no character")]
    NotUtf8 { field: String, offset: usize },

    // Metadata.
    #[error("the key {key:?} comes twice")]
    DuplicateKey { key: String },
    #[error("{key:?} has a value of the unknown type {id} (known: 0 to 12)")]
    UnknownValueType { key: String, id: u32 },
    #[error("{key:?} has a bool that is {byte}; it must be 0 or 1")]
    NotABool { key: String, byte: u8 },
    #[error("{key:?} has arrays within arrays deeper than {limit}")]
    TooDeep { key: String, limit: usize },
    #[error("{key:?} is of type {found}; it must be of type {expected}")]
    WrongType { key: String, found: &'static str, expected: &'static str },
    #[error("general.alignment is {value}; it must be a power of two up to {limit}")]
    Alignment { value: u32, limit: u32 },

    // Tensors.
    #[error("tensor {tensor:?} comes twice")]
    DuplicateTensor { tensor: String },
    #[error("tensor {tensor:?} has {dimensions} dimensions; the limit is {limit}")]
    Dimensions { tensor: String, dimensions: u32, limit: u32 },
    #[error("tensor {tensor:?} has the dimensions {dimensions:?}, one of which is 0")]
    ZeroDimension { tensor: String, dimensions: Vec<u64> },
    #[error("tensor {tensor:?} has the dimensions {dimensions:?}, whose size in bytes as {ty} exceeds 64 bits")]
    SizeOverflow { tensor: String, dimensions: Vec<u64>, ty: TensorType },
    #[error("tensor {tensor:?} has the unknown type {id}")]
    UnknownType { tensor: String, id: u32 },
    #[error("tensor {tensor:?} has the type {name} ({id}), which ferrule does not read: {reason}")]
    RefusedType { tensor: String, id: u32, name: &'static str, reason: &'static str },
    #[error("tensor {tensor:?} has rows of {row} elements, which are not whole blocks of {block} as {ty} needs")]
    PartialBlock { tensor: String, row: u64, block: usize, ty: TensorType },
    #[error("tensor {tensor:?} has the offset {offset}, which is not a multiple of the alignment {alignment}")]
    Misaligned { tensor: String, offset: u64, alignment: u32 },
    #[error(
        "tensor {tensor:?} has the offset {offset} and takes {bytes} bytes, but the file has {data} bytes of data: is it \
         truncated?"
    )]
    PastEnd { tensor: String, offset: u64, bytes: u64, data: u64 },
    #[error("tensor {tensor:?} has the offset {offset}, inside tensor {previous:?}, which ends at {previous_end}")]
    Overlap { tensor: String, offset: u64, previous: String, previous_end: u64 },

    // Models in several files.
    #[error("{key} is {value}; it must be in {least}..={most}")]
    SplitRange { key: &'static str, value: i128, least: u64, most: u64 },
    #[error("is part {number} of {count} (split.no and split.count), so that its name must end in {expected:?}")]
    SplitName { number: u64, count: u64, expected: String },
    #[error("is one of {count} parts, of which {missing:?} does not exist beside it: download the missing file")]
    PartMissing { count: u64, missing: String },
    #[error("has {key} = {found}, but {first:?} says {expected}")]
    PartDiffers { key: &'static str, found: String, first: String, expected: u64 },
    #[error("split.tensors.count is {expected}, but its {count} parts have {found} tensors")]
    PartsLackTensors { count: u64, expected: u64, found: u64 },
    #[error("tensor {tensor:?} is in {other:?} too")]
    TensorInTwoParts { tensor: String, other: String },
}
