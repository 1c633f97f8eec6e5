//! What can be wrong with a checkpoint: the file, and the fact that it violates.

use std::path::{Path, PathBuf};

use crate::dtype::Dtype;
use crate::gguf::GgufFault;

/// A file of a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {fault}", file.display())]
pub struct CheckpointError {
    /// The file (or folder) at fault.
    pub file: PathBuf,
    /// What is wrong with it.
    pub fault: Box<Fault>,
}

/// The violated fact. Byte ranges of tensors count from the start of the data, just after the header.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum Fault {
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("cannot be written: {0}")]
    Write(std::io::Error),
    #[error("is not a regular file")]
    NotAFile,
    #[error("is empty (0 bytes): the download was interrupted or never started")]
    Empty,
    #[error(
        "is a Git LFS pointer of {bytes} bytes, not the weights. Download the weights: run `git lfs pull` in its folder"
    )]
    LfsPointer { bytes: u64 },

    // The folder.
    #[error(
        "has neither model.safetensors nor model.safetensors.index.json (safetensors files there: {})",
        listed(others)
    )]
    NoWeights { others: Vec<String> },
    #[error("has no {name} (safetensors files there: {})", listed(others))]
    NoFile { name: String, others: Vec<String> },
    #[error(
        "has only pickle files ({}). Reading a pickle can run any code that its author put in, so ferrule does not: \
         convert the model to safetensors or look for a repository that has them",
        listed(files)
    )]
    PickleOnly { files: Vec<String> },
    #[error("is not a folder beside the model's files")]
    NotAFolder,
    #[error("is a link to {}, which is outside of the model's folder: refused", target.display())]
    LeavesFolder { target: PathBuf },

    // model.safetensors.index.json
    #[error("is {bytes} bytes long; the limit for an index is {limit}")]
    IndexTooLong { bytes: u64, limit: u64 },
    #[error("is not a valid index: {0}")]
    IndexMalformed(serde_json::Error),
    #[error("weight_map names no tensor")]
    IndexEmpty,
    #[error(
        "weight_map puts tensor {tensor:?} into {shard:?}, which is not a plain file name inside the folder: refused"
    )]
    ShardName { tensor: String, shard: String },
    #[error("weight_map puts tensor {tensor:?} into {shard:?}, which does not exist: download the missing file")]
    ShardMissing { tensor: String, shard: String },
    #[error("lacks tensor {tensor:?}, which {index} says is in it")]
    ShardLacks { tensor: String, index: String },

    // The header of a safetensors file.
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

    #[error(transparent)]
    Gguf(#[from] GgufFault),

    // A packed file.
    #[error("has the layout {found:?}, where this build of ferrule reads {known:?}: pack the model anew")]
    PackedLayout { found: String, known: String },
    #[error("has data that begins at byte {begin}, which is no multiple of 4096")]
    PackedStart { begin: u64 },
    #[error("tensor {tensor:?} takes {bytes} bytes, which is no multiple of 64")]
    PackedLine { tensor: String, bytes: usize },
    #[error(
        "tensor {tensor:?} takes {bytes} bytes, where the config asks for {expected}, filled up to a multiple of 64"
    )]
    PackedLength { tensor: String, bytes: usize, expected: usize },
    #[error("tensor {tensor:?} holds {rows} rows, where the config leaves at most {expected} for it")]
    PackedRows { tensor: String, rows: usize, expected: usize },
    #[error("tensor {tensor:?} is in a format that cannot stand for {asked}, which is asked for")]
    PackedFormat { tensor: String, asked: &'static str },
    #[error("tensor {tensor:?} is in blocks of {block} inputs, where the config asks for {inputs}")]
    PackedBlocks { tensor: String, block: usize, inputs: usize },

    // A tensor that a caller asked for.
    #[error("has no tensor {tensor:?}{}", did_you_mean(nearest))]
    NoTensor { tensor: String, nearest: Option<String> },
    #[error("tensor {tensor:?} is stored as {dtype}; weights must be F32, F16 or BF16")]
    NotFloat { tensor: String, dtype: Dtype },

    // The tensors of a quantized weight.
    #[error("has no tensor {part:?}, without which {weight:?} of {method} cannot be read")]
    PartMissing { method: &'static str, weight: String, part: String },
    #[error("tensor {tensor:?} is stored as {dtype}; of {method} it must be {}", either(allowed))]
    PartDtype { method: &'static str, tensor: String, dtype: Dtype, allowed: Vec<Dtype> },
    #[error("tensor {tensor:?} has the shape {shape:?}; it must be {expected}")]
    PartShape { tensor: String, shape: Vec<usize>, expected: String },
    #[error("element {index} of tensor {tensor:?} is {value}; it must be {limit}")]
    PartValue { tensor: String, index: usize, value: String, limit: String },
    #[error("tensor {tensor:?} is stored as {dtype}, and quantization_config describes no weights of that kind")]
    PartKind { tensor: String, dtype: Dtype },
    #[error("tensor {tensor:?} holds no quantization state: {error}")]
    QuantState { tensor: String, error: String },
}

impl Fault {
    /// This fault in that file.
    pub(crate) fn of(self, file: &Path) -> CheckpointError {
        CheckpointError { file: file.to_owned(), fault: Box::new(self) }
    }
}

fn listed(files: &[String]) -> String {
    if files.is_empty() { "none".to_owned() } else { files.join(", ") }
}

fn either(dtypes: &[Dtype]) -> String {
    let names: Vec<_> = dtypes.iter().map(|dtype| dtype.name()).collect();
    names.join(" or ")
}

fn did_you_mean(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or_else(String::new, |name| format!("; the nearest name is {name:?}"))
}
