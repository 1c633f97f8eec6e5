//! Fuzz targets of saved pages. `cargo fuzz` compiles them with `--cfg fuzzing`; the tests here replay their seeds.
//!
//! No search finds a valid checksum, so the last 32 bytes of an input are replaced by the checksum of the others.

use std::fs;
use std::path::{Path, PathBuf};

use ferrule_kernels::kv::PAGE_TOKENS;

use super::digest::Digest;
use super::record::{self, record_len};
use super::state::State;
use super::{DiskCache, Namespace, StateError, decode_state, encode_state};

const FINGERPRINT: [u8; 32] = [7; 32];
const TOKENS: [u32; PAGE_TOKENS] = [9; PAGE_TOKENS];
const STATE_PAGE_BYTES: usize = 4;
const SNAPSHOT_BYTES: usize = 3;

/// The file of one record in a cache directory.
#[derive(Debug)]
pub struct RecordFile {
    cache: DiskCache,
    parent: Digest,
    digest: Digest,
    path: PathBuf,
}

impl RecordFile {
    /// Opens a directory that only this user can access.
    ///
    /// # Panics
    /// If the directory cannot be used.
    #[must_use]
    pub fn new(directory: &Path) -> Self {
        let cache = DiskCache::open(directory, 1 << 30).expect("a usable directory");
        let parent = Digest::root(&FINGERPRINT, &Namespace::default());
        let digest = parent.child(&TOKENS);
        let name = digest.to_string();
        let folder = directory.join(&name[..2]);
        fs::create_dir_all(&folder).expect("a writable directory");
        Self { cache, parent, digest, path: folder.join(name) }
    }

    /// Loads the record from a file of these bytes, first as they are and then with their checksum. Returns whether the
    /// second was accepted.
    ///
    /// # Panics
    /// If the cache accepts another record than it writes for the same payload.
    pub fn load(&mut self, bytes: &[u8]) -> bool {
        self.load_exact(bytes);
        self.load_exact(&with_checksum(bytes))
    }

    fn load_exact(&mut self, bytes: &[u8]) -> bool {
        let payload_len = bytes.len().saturating_sub(record_len(0) as usize);
        fs::write(&self.path, bytes).expect("a writable directory");
        let payload = self.cache.load(&self.digest, &self.parent, &TOKENS, payload_len);
        payload.is_some_and(|payload| {
            assert!(record::encode(&self.parent, &TOKENS, &payload) == bytes, "accepted another record");
            true
        })
    }
}

/// Decodes a saved state after its checksum is corrected. Returns whether it was accepted.
///
/// # Panics
/// If the decoded state changes when it is encoded and decoded again.
pub fn restore_state(bytes: &[u8]) -> bool {
    let bytes = with_checksum(bytes);
    decode(&bytes).is_ok_and(|state| {
        let pages = state.pages.iter();
        let encoded =
            encode_state(&FINGERPRINT, &state.namespace, &state.tokens, pages, STATE_PAGE_BYTES, state.snapshot);
        assert_eq!(decode(&encoded).as_ref(), Ok(&state), "accepted another state");
        true
    })
}

fn decode(bytes: &[u8]) -> Result<State<'_>, StateError> {
    decode_state(bytes, || FINGERPRINT, STATE_PAGE_BYTES, SNAPSHOT_BYTES)
}

fn with_checksum(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if let Some((covered, checksum)) = bytes.split_last_chunk_mut::<32>() {
        *checksum = *blake3::hash(covered).as_bytes();
    }
    bytes
}

#[cfg(test)]
#[path = "../../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;
    use super::{RecordFile, restore_state};

    #[test]
    fn damaged_records_are_rejected_or_loaded_as_written() {
        let directory = tempfile::TempDir::new().unwrap();
        let mut file = RecordFile::new(&directory.path().join("cache"));
        replay("record", 5000, |bytes| file.load(bytes));
    }

    #[test]
    fn damaged_states_are_rejected_or_restored_as_saved() {
        replay("state", 50_000, restore_state);
    }
}
