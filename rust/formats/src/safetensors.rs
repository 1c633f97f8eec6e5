//! Reading and checking the header of a safetensors file.
//!
//! Layout (<https://huggingface.co/docs/safetensors/index#format>): a little-endian u64 N; N bytes of JSON, one object
//! `{name: {"dtype", "shape", "data_offsets": [begin, end]}, ..., "__metadata__": {string: string}}`; the data, which
//! the tensors cover without holes or overlaps.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::dtype::Dtype;
use crate::file::{FileError, LFS_POINTER, MAX_LFS_POINTER};
use crate::unique::{UniqueMap, check_new};

/// Maximum size of a header in bytes, as defined by the format.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes of the header's length field.
pub(crate) const LENGTH_BYTES: u64 = 8;
/// Maximum number of dimensions, above that of any known model. Without a limit, a shape of `1,1,1,...` would take four
/// times the memory of its text.
const MAX_DIMENSIONS: usize = 8;

/// The header of a safetensors file is malformed. Byte ranges of tensors count from the start of the data, after the
/// header.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum SafetensorsError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("is {bytes} bytes long; a safetensors file starts with 8 bytes that hold the header's length")]
    TooShort { bytes: u64 },
    #[error("has a header of {bytes} bytes; the limit is {limit}")]
    HeaderTooLong { bytes: u64, limit: u64 },
    #[error("has a header of {header} bytes, but only {rest} bytes follow: the file is truncated or not safetensors")]
    HeaderPastEnd { header: u64, rest: u64 },
    #[error("header is not valid UTF-8 at byte {offset}")]
    HeaderNotUtf8 { offset: usize },
    #[error("header must start with '{{', got {found:?}")]
    HeaderNotObject { found: char },
    #[error("header is invalid: {0}")]
    HeaderMalformed(serde_json::Error),
    #[error("tensor {tensor:?} has unknown dtype {dtype:?}; known:{}", Dtype::NAMES)]
    UnknownDtype { tensor: String, dtype: String },
    #[error("tensor {tensor:?} has data_offsets [{begin}, {end}], which are reversed")]
    OffsetsReversed { tensor: String, begin: u64, end: u64 },
    #[error(
        "tensor {tensor:?} ends at byte {end} of the data, but the file has only {data}: {} bytes are missing, is the file truncated?",
        end - data
    )]
    PastEnd { tensor: String, end: u64, data: u64 },
    #[error("tensor {tensor:?} of shape {shape:?} and dtype {dtype} has a size in bytes that exceeds 64 bits")]
    SizeOverflow { tensor: String, shape: Vec<usize>, dtype: Dtype },
    #[error("tensor {tensor:?} of shape {shape:?} and dtype {dtype} does not have a whole number of bytes")]
    PartialByte { tensor: String, shape: Vec<usize>, dtype: Dtype },
    #[error(
        "tensor {tensor:?} of shape {shape:?} and dtype {dtype} takes {needs} bytes, but its data_offsets span {span}"
    )]
    SizeMismatch { tensor: String, shape: Vec<usize>, dtype: Dtype, needs: u64, span: u64 },
    #[error("tensor {tensor:?} begins at byte {begin} of the data, inside another tensor that ends at {previous_end}")]
    Overlap { tensor: String, begin: u64, previous_end: u64 },
    #[error("bytes {begin} to {end} of the data, before tensor {tensor:?}, are not part of any tensor")]
    Hole { tensor: String, begin: u64, end: u64 },
    #[error("has {extra} bytes after the last tensor, which ends at byte {end} of the data")]
    TrailingBytes { extra: u64, end: u64 },
}

/// Type, shape and byte range in the file of a tensor.
#[derive(Debug)]
pub(crate) struct Entry {
    pub dtype: Dtype,
    pub shape: Box<[usize]>,
    pub bytes: Range<usize>,
}

/// Contents of the header.
#[derive(Debug)]
pub(crate) struct Header {
    pub metadata: BTreeMap<String, String>,
    pub tensors: BTreeMap<String, Entry>,
    /// Offset of the data in the file.
    pub data_start: u64,
}

/// Reads the header of a file of `file_bytes` bytes and checks all sizes and offsets against that length.
///
/// Allocates memory only for the header's text and the table, and reads nothing else.
pub(crate) fn read_header(file: &mut impl Read, file_bytes: u64) -> Result<Header, SafetensorsError> {
    if file_bytes == 0 {
        return Err(FileError::Empty.into());
    }
    let text = read_text(file, file_bytes)?;
    let text =
        str::from_utf8(&text).map_err(|error| SafetensorsError::HeaderNotUtf8 { offset: error.valid_up_to() })?;
    if let Some(found) = text.chars().next().filter(|&first| first != '{') {
        return Err(SafetensorsError::HeaderNotObject { found });
    }
    let RawHeader { metadata, tensors: raw } = serde_json::from_str(text).map_err(SafetensorsError::HeaderMalformed)?;
    let data_start = LENGTH_BYTES + text.len() as u64;
    let data_bytes = file_bytes - data_start;

    let mut tensors = BTreeMap::new();
    for (name, tensor) in raw {
        let entry = checked_entry(&name, tensor, data_start, data_bytes)?;
        tensors.insert(name, entry);
    }
    check_cover(&tensors, data_start, data_bytes)?;
    Ok(Header { metadata, tensors, data_start })
}

/// Reads the header's text. Its length is checked against the file before memory is allocated.
fn read_text(file: &mut impl Read, file_bytes: u64) -> Result<Vec<u8>, SafetensorsError> {
    let mut start = Vec::new();
    file.by_ref().take(LENGTH_BYTES).read_to_end(&mut start).map_err(FileError::from)?;
    if file_bytes <= MAX_LFS_POINTER && LFS_POINTER.starts_with(&start) {
        file.take(LFS_POINTER.len() as u64 - start.len() as u64).read_to_end(&mut start).map_err(FileError::from)?;
        if start == LFS_POINTER {
            return Err(FileError::LfsPointer { bytes: file_bytes }.into());
        }
    }
    let Ok(length) = start[..].try_into().map(u64::from_le_bytes) else {
        return Err(SafetensorsError::TooShort { bytes: file_bytes });
    };
    if length > MAX_HEADER {
        return Err(SafetensorsError::HeaderTooLong { bytes: length, limit: MAX_HEADER });
    }
    let rest = file_bytes.saturating_sub(LENGTH_BYTES);
    if length > rest {
        return Err(SafetensorsError::HeaderPastEnd { header: length, rest });
    }
    let mut text = vec![0; length as usize];
    file.read_exact(&mut text).map_err(FileError::from)?;
    Ok(text)
}

/// Checks a tensor's shape and type against its byte range.
fn checked_entry(name: &str, raw: RawTensor, data_start: u64, data_bytes: u64) -> Result<Entry, SafetensorsError> {
    let tensor = || name.to_owned();
    let Some(dtype) = Dtype::named(&raw.dtype) else {
        return Err(SafetensorsError::UnknownDtype { tensor: tensor(), dtype: raw.dtype });
    };
    let (begin, end) = raw.data_offsets;
    if end < begin {
        return Err(SafetensorsError::OffsetsReversed { tensor: tensor(), begin, end });
    }
    let shape = raw.shape.0;
    let bits = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size as u64));
    let Some(bits) = bits.and_then(|elements| elements.checked_mul(dtype.bits())) else {
        return Err(SafetensorsError::SizeOverflow { tensor: tensor(), shape, dtype });
    };
    if bits % 8 != 0 {
        return Err(SafetensorsError::PartialByte { tensor: tensor(), shape, dtype });
    }
    let (needs, span) = (bits / 8, end - begin);
    if needs != span {
        return Err(SafetensorsError::SizeMismatch { tensor: tensor(), shape, dtype, needs, span });
    }
    if end > data_bytes {
        return Err(SafetensorsError::PastEnd { tensor: tensor(), end, data: data_bytes });
    }
    // Both ends are at most the file's length here, which fits the address space once the file is mapped.
    let bytes = (data_start + begin) as usize..(data_start + end) as usize;
    Ok(Entry { dtype, shape: shape.into(), bytes })
}

/// Checks that each byte of the data belongs to exactly one tensor.
fn check_cover(entries: &BTreeMap<String, Entry>, data_start: u64, data_bytes: u64) -> Result<(), SafetensorsError> {
    let mut spans: Vec<_> = entries.iter().map(|(name, entry)| (entry.bytes.start, entry.bytes.end, name)).collect();
    spans.sort_unstable();
    let mut covered = 0;
    for (begin, end, name) in spans {
        let (begin, end) = (begin as u64 - data_start, end as u64 - data_start);
        if begin < covered {
            return Err(SafetensorsError::Overlap { tensor: name.clone(), begin, previous_end: covered });
        }
        if begin > covered {
            return Err(SafetensorsError::Hole { tensor: name.clone(), begin: covered, end: begin });
        }
        covered = end;
    }
    if covered < data_bytes {
        return Err(SafetensorsError::TrailingBytes { extra: data_bytes - covered, end: covered });
    }
    Ok(())
}

/// Metadata and tensors as the JSON declares them, unchecked.
struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, RawTensor>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor {
    dtype: String,
    shape: Shape,
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tensors;
        impl<'de> Visitor<'de> for Tensors {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<RawHeader, A::Error> {
                let mut tensors = BTreeMap::new();
                let mut metadata = None;
                while let Some(key) = access.next_key::<String>()? {
                    if key == "__metadata__" {
                        if metadata.is_some() {
                            return Err(A::Error::custom("duplicate key \"__metadata__\""));
                        }
                        let found = access.next_value::<Option<UniqueMap<String>>>()?;
                        metadata = Some(found.map_or_else(BTreeMap::new, |found| found.0));
                        continue;
                    }
                    check_new(&tensors, &key)?;
                    let tensor = access.next_value()?;
                    tensors.insert(key, tensor);
                }
                Ok(RawHeader { metadata: metadata.unwrap_or_default(), tensors })
            }
        }
        deserializer.deserialize_map(Tensors)
    }
}

struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sizes;
        impl<'de> Visitor<'de> for Sizes {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a shape of at most {MAX_DIMENSIONS} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Shape, A::Error> {
                let mut sizes = Vec::new();
                while let Some(size) = access.next_element::<usize>()? {
                    if sizes.len() == MAX_DIMENSIONS {
                        return Err(A::Error::invalid_length(MAX_DIMENSIONS + 1, &self));
                    }
                    sizes.push(size);
                }
                Ok(Shape(sizes))
            }
        }
        deserializer.deserialize_seq(Sizes)
    }
}
