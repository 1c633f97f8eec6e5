//! From a description of an architecture and a checkpoint to a forward pass over a ragged batch.
#![forbid(unsafe_code)]

mod batch;

pub use batch::{Batch, ForwardError, KvGroup, LanguageModel, LogitRows, SequenceChunk};
