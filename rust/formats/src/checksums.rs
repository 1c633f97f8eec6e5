//! Checksums of packed files: CRC-32C (Castagnoli, RFC 3720) of the header and of each tensor with its padding.
//!
//! They detect damage: flipped bits of a disk or of memory, and torn writes. They do not detect intent.

use std::collections::BTreeMap;

use crate::safetensors::Entry;

/// Name of the tensor that holds the checksums, the last of the file.
pub(crate) const CHECKSUMS: &str = "checksums";

/// Bytes of a checksum in the file, little-endian.
const WIDTH: usize = size_of::<u32>();

/// Checksums of the parts of a file, in the order of the file: the header, then the tensors.
#[derive(Debug, Default)]
pub(crate) struct Checksums(Vec<u32>);

impl Checksums {
    /// Returns the bytes that the checksums of `tensors` tensors take.
    pub fn bytes(tensors: usize) -> usize {
        (tensors + 1) * WIDTH
    }

    /// Appends the checksum of the next part.
    pub fn push(&mut self, sum: u32) {
        self.0.push(sum);
    }

    /// Returns the checksums as they are stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|sum| sum.to_le_bytes()).collect()
    }

    /// Reads the checksums of a file with `tensors` tensors.
    ///
    /// # Panics
    /// If `bytes` is shorter than [`Checksums::bytes`].
    pub fn read(bytes: &[u8], tensors: usize) -> Self {
        Self(bytes[..Self::bytes(tensors)].as_chunks().0.iter().map(|sum| u32::from_le_bytes(*sum)).collect())
    }

    /// Returns the checksum of the header.
    pub fn header(&self) -> u32 {
        self.0[0]
    }

    /// Returns the checksum of tensor `index`, counted in the order of the file.
    pub fn tensor(&self, index: usize) -> u32 {
        self.0[index + 1]
    }
}

/// Returns the names of the tensors that have checksums, in the order of the file.
pub(crate) fn file_order(tensors: &BTreeMap<String, Entry>) -> Vec<String> {
    let mut order: Vec<_> = tensors.iter().filter(|(name, _)| *name != CHECKSUMS).collect();
    // An empty tensor begins where the next one does.
    order.sort_by_key(|(_, entry)| (entry.bytes.start, entry.bytes.end));
    order.into_iter().map(|(name, _)| name.clone()).collect()
}
