//! The header of a safetensors file, read and checked.
//!
//! Layout (<https://huggingface.co/docs/safetensors/index#format>): a little-endian u64 N; N bytes of JSON, one object
//! `{name: {"dtype", "shape", "data_offsets": [begin, end]}, ..., "__metadata__": {string: string}}`; the data, which
//! the tensors cover without hole or overlap.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::dtype::Dtype;
use crate::file::{FileError, LFS_POINTER, MAX_LFS_POINTER};
use crate::unique::{UniqueMap, check_new};

/// The limit that the format itself sets.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes before the header.
pub(crate) const LENGTH_BYTES: u64 = 8;
/// No model has more; unbounded, a shape of `1,1,1,...` would cost four times its text.
const MAX_DIMENSIONS: usize = 8;

/// The header of a safetensors file is wrong. Byte ranges of tensors count from the start of the data, just after the header.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum SafetensorsError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("is {bytes} bytes long; a safetensors file starts with 8 bytes that hold the header's length")]
    TooShort { bytes: u64 },
    #[error("says that its header has {bytes} bytes; the limit is {limit}")]
    HeaderTooLong { bytes: u64, limit: u64 },
    #[error(
        "says that its header has {header} bytes, but only {rest} bytes follow: the file is truncated or not safetensors"
    )]
    HeaderPastEnd { header: u64, rest: u64 },
    #[error("header is not UTF-8: the bytes from {offset} on are no character")]
    HeaderNotUtf8 { offset: usize },
    #[error("header starts with {found:?}, not with '{{'")]
    HeaderNotObject { found: char },
    #[error("header is malformed: {0}")]
    HeaderMalformed(serde_json::Error),
    #[error("tensor {tensor:?} has the unknown dtype {dtype:?} (known:{})", Dtype::NAMES)]
    UnknownDtype { tensor: String, dtype: String },
    #[error("tensor {tensor:?} has data_offsets [{begin}, {end}], which end before they begin")]
    OffsetsReversed { tensor: String, begin: u64, end: u64 },
    #[error(
        "tensor {tensor:?} ends at byte {end} of the data, of which the file has {data}: {} bytes are missing (truncated?)",
        end - data
    )]
    PastEnd { tensor: String, end: u64, data: u64 },
    #[error("tensor {tensor:?} has the shape {shape:?}, whose size in bytes as {dtype} exceeds 64 bits")]
    SizeOverflow { tensor: String, shape: Vec<usize>, dtype: Dtype },
    #[error("tensor {tensor:?} has the shape {shape:?} of {dtype}, which do not fill whole bytes")]
    PartialByte { tensor: String, shape: Vec<usize>, dtype: Dtype },
    #[error(
        "tensor {tensor:?} of shape {shape:?} and dtype {dtype} takes {needs} bytes, but its data_offsets span {span}"
    )]
    SizeMismatch { tensor: String, shape: Vec<usize>, dtype: Dtype, needs: u64, span: u64 },
    #[error("tensor {tensor:?} begins at byte {begin} of the data, inside another tensor that ends at {previous_end}")]
    Overlap { tensor: String, begin: u64, previous_end: u64 },
    #[error("bytes {begin} to {end} of the data, before tensor {tensor:?}, belong to no tensor")]
    Hole { tensor: String, begin: u64, end: u64 },
    #[error("has {extra} bytes after the last tensor, which ends at byte {end} of the data")]
    TrailingBytes { extra: u64, end: u64 },
}

/// One tensor: its type, and its bytes as a range of the file.
#[derive(Debug)]
pub(crate) struct Entry {
    pub dtype: Dtype,
    pub shape: Box<[usize]>,
    pub bytes: Range<usize>,
}

/// What the header says.
#[derive(Debug)]
pub(crate) struct Header {
    pub metadata: BTreeMap<String, String>,
    pub tensors: BTreeMap<String, Entry>,
    /// The byte of the file at which the data begins.
    pub data_start: u64,
}

/// Reads the header of `file`, which has `file_bytes` bytes, and checks every claim that it makes against them.
///
/// Takes memory for the header's text and the table, and reads nothing else.
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

/// The header's text: the length is believed only after it has been held against the file's.
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

/// Holds one tensor's shape and type against its span.
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
    // Both ends are at most the file's length here, which fits the address space once it has been mapped.
    let bytes = (data_start + begin) as usize..(data_start + end) as usize;
    Ok(Entry { dtype, shape: shape.into(), bytes })
}

/// Holds the spans of all tensors together against the data: each byte belongs to exactly one.
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

/// Metadata, and the tensors as the text claims them.
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
                            return Err(A::Error::custom("the key \"__metadata__\" comes twice"));
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
