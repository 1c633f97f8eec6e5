//! Saved states: the KV cache of a sequence as bytes, written by `save_state` and read by `restore_state`.
//!
//! Users keep states in files and restore them in other processes or builds, possibly after others had access. Every
//! length is checked against the bytes present before it is used, and a checksum covers everything. The checksum
//! detects damage, not tampering: anyone who can write a state can put any keys and values under any token ids, and the
//! ids are checked like a prompt's. The salt is stored in plain text.
//!
//! | bytes | |
//! |---|---|
//! | 8 | magic |
//! | 4 | version of the format, little-endian as all numbers |
//! | 32 | fingerprint of the model |
//! | 1, 8, … | whether there is a salt; its bytes; the salt |
//! | 1, 32 | whether there is an adapter; its fingerprint, or zeros |
//! | 8, 4 each | tokens; their ids |
//! | 8, 8, … | pages; bytes of each; the pages, each as in a record's payload |
//! | 8, … | bytes of the snapshot of states after the last page; the snapshot (since version 3) |
//! | 32 | BLAKE3 of all before it |

use ferrule_kernels::kv::PAGE_TOKENS;

use super::Namespace;

const MAGIC: &[u8; 8] = b"FERRULES";
const VERSION: u32 = 3;

/// Oldest version that can be read; it has no snapshot.
const OLDEST_VERSION: u32 = 2;
const CHECKSUM_BYTES: usize = 32;

/// A decoded state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct State<'a> {
    /// Namespace of its pages.
    pub namespace: Namespace,
    /// All tokens; those after the last full page must be computed again.
    pub tokens: Vec<u32>,
    /// Page contents for every `PAGE_TOKENS` tokens from the start, all groups concatenated.
    pub pages: Vec<&'a [u8]>,
    /// States after the last page, all groups concatenated; empty without groups of state or without pages.
    pub snapshot: &'a [u8],
}

/// Reason why bytes cannot be restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// The bytes do not start with the magic number.
    #[error("not a saved state of ferrule: its {bytes} bytes do not begin with {:?}", MAGIC.escape_ascii().to_string())]
    Magic {
        /// Number of bytes given.
        bytes: usize,
    },
    /// The state has an unsupported format version.
    #[error(
        "unsupported saved state format version {found}; this build supports versions {OLDEST_VERSION} to {supported}"
    )]
    Version {
        /// Version found.
        found: u32,
        /// Newest supported version.
        supported: u32,
    },
    /// The state is truncated.
    #[error("the saved state is truncated: {what} ends at byte {needed}, but it has only {found} bytes")]
    Truncated {
        /// The incomplete part.
        what: &'static str,
        /// Expected end in bytes from the start; `u64::MAX` on overflow.
        needed: u64,
        /// Bytes present.
        found: u64,
    },
    /// Bytes follow the end.
    #[error("the saved state is damaged: {extra} bytes follow its end")]
    Trailing {
        /// Number of extra bytes.
        extra: usize,
    },
    /// The checksum does not match.
    #[error("the saved state is damaged: checksum mismatch")]
    Checksum,
    /// The state was saved with another model or configuration.
    #[error(
        "the saved state belongs to another model: the weights, quantization, KV cache dtype, instruction set or ferrule \
         version differ (fingerprint {found}, the loaded model has {expected})"
    )]
    OtherModel {
        /// First digits of the state's fingerprint.
        found: String,
        /// First digits of the loaded model's fingerprint.
        expected: String,
    },
    /// A field has an invalid value.
    #[error("the saved state is invalid: {field} must be {required}, got {found}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// Value found.
        found: String,
        /// Allowed values.
        required: String,
    },
}

/// Encodes a sequence. `pages` are the pages of its first tokens, each of `payload_len` bytes, and `snapshot` the states
/// after them.
///
/// # Panics
/// If a page has another length, or there are more pages than full pages of tokens.
pub(crate) fn encode_state(
    fingerprint: &[u8; 32],
    namespace: &Namespace,
    tokens: &[u32],
    pages: impl ExactSizeIterator<Item: AsRef<[u8]>>,
    payload_len: usize,
    snapshot: &[u8],
) -> Vec<u8> {
    let count = pages.len();
    assert!(count <= tokens.len() / PAGE_TOKENS, "{count} pages of {} tokens", tokens.len());
    let Namespace { salt, adapter } = namespace;
    let salt_bytes = salt.as_deref().unwrap_or_default().as_bytes();
    let fixed = MAGIC.len() + 4 + 32 + 1 + 33 + 5 * 8 + CHECKSUM_BYTES;
    let contents = salt_bytes.len() + 4 * tokens.len() + count * payload_len + snapshot.len();
    let mut state = Vec::with_capacity(fixed + contents);
    state.extend_from_slice(MAGIC);
    state.extend_from_slice(&VERSION.to_le_bytes());
    state.extend_from_slice(fingerprint);
    state.push(u8::from(salt.is_some()));
    state.extend_from_slice(&(salt_bytes.len() as u64).to_le_bytes());
    state.extend_from_slice(salt_bytes);
    state.push(u8::from(adapter.is_some()));
    state.extend_from_slice(&adapter.unwrap_or_default());
    state.extend_from_slice(&(tokens.len() as u64).to_le_bytes());
    state.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    state.extend_from_slice(&(count as u64).to_le_bytes());
    state.extend_from_slice(&(payload_len as u64).to_le_bytes());
    for page in pages {
        assert_eq!(page.as_ref().len(), payload_len, "the bytes of a page");
        state.extend_from_slice(page.as_ref());
    }
    state.extend_from_slice(&(snapshot.len() as u64).to_le_bytes());
    state.extend_from_slice(snapshot);
    let checksum = blake3::hash(&state);
    state.extend_from_slice(checksum.as_bytes());
    state
}

/// Decodes a state of the model with this fingerprint, which is computed only if the bytes look like a state, with pages
/// of `payload_len` bytes and snapshots of `snapshot_len` bytes.
///
/// # Errors
/// Returns [`StateError`] for anything that [`encode_state`] did not write for the same model.
pub(crate) fn decode_state<'a>(
    bytes: &'a [u8],
    fingerprint: impl FnOnce() -> [u8; 32],
    payload_len: usize,
    snapshot_len: usize,
) -> Result<State<'a>, StateError> {
    let mut reader = Reader { bytes, at: 0 };
    if !bytes.starts_with(MAGIC) {
        return Err(StateError::Magic { bytes: bytes.len() });
    }
    reader.take("the magic", MAGIC.len() as u64)?;
    let version = u32::from_le_bytes(reader.array("the version")?);
    if !(OLDEST_VERSION..=VERSION).contains(&version) {
        return Err(StateError::Version { found: version, supported: VERSION });
    }
    let found: [u8; 32] = reader.array("the fingerprint")?;
    let [has_salt] = reader.array("the salt")?;
    let salt_len = reader.number("the salt")?;
    let salt = reader.take("the salt", salt_len)?;
    let [has_adapter] = reader.array("the adapter")?;
    let adapter: [u8; 32] = reader.array("the adapter")?;
    let token_count = reader.number("the tokens")?;
    let tokens = reader.take("the tokens", token_count.saturating_mul(4))?;
    let count = reader.number("the pages")?;
    let page_bytes = reader.number("the pages")?;
    let pages = reader.take("the pages", count.saturating_mul(page_bytes))?;
    let snapshot_bytes = if version == OLDEST_VERSION { 0 } else { reader.number("the snapshot")? };
    let snapshot = reader.take("the snapshot", snapshot_bytes)?;
    let end = reader.at;
    let checksum: [u8; CHECKSUM_BYTES] = reader.array("the checksum")?;
    if reader.at != bytes.len() {
        return Err(StateError::Trailing { extra: bytes.len() - reader.at });
    }
    if checksum != *blake3::hash(&bytes[..end]).as_bytes() {
        return Err(StateError::Checksum);
    }
    let fingerprint = fingerprint();
    if found != fingerprint {
        return Err(StateError::OtherModel { found: first_digits(&found), expected: first_digits(&fingerprint) });
    }
    // A valid checksum does not imply valid fields.
    let field = |field, found: String, required: String| StateError::Field { field, found, required };
    if page_bytes != payload_len as u64 {
        return Err(field("the length of a page", page_bytes.to_string(), format!("{payload_len} bytes")));
    }
    let most = token_count / PAGE_TOKENS as u64;
    if count > most {
        let required = format!("at most {most}, since there are {token_count} tokens");
        return Err(field("the number of pages", count.to_string(), required));
    }
    let expected = if count == 0 { 0 } else { snapshot_len };
    if snapshot.len() != expected {
        let required = format!("{expected} bytes for {count} pages");
        return Err(field("the length of the snapshot", snapshot.len().to_string(), required));
    }
    let salt = match (has_salt, std::str::from_utf8(salt)) {
        (0, _) if salt.is_empty() => None,
        (1, Ok(salt)) => Some(salt.into()),
        _ => {
            let found = format!("{} bytes, flagged {has_salt}", salt.len());
            return Err(field("the salt", found, "UTF-8 text flagged 1, or nothing flagged 0".to_owned()));
        }
    };
    let adapter = match has_adapter {
        0 if adapter == [0; 32] => None,
        1 => Some(adapter),
        _ => {
            let required = "a fingerprint flagged 1, or zeros flagged 0".to_owned();
            return Err(field("the adapter", format!("flagged {has_adapter}"), required));
        }
    };
    Ok(State {
        namespace: Namespace { salt, adapter },
        tokens: tokens.as_chunks().0.iter().map(|token| u32::from_le_bytes(*token)).collect(),
        // Without groups of pages, they are empty.
        pages: (0..count as usize).map(|index| &pages[index * payload_len..][..payload_len]).collect(),
        snapshot,
    })
}

/// Returns enough digits of a fingerprint to distinguish two in a message.
fn first_digits(fingerprint: &[u8; 32]) -> String {
    fingerprint[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Sequential reader of untrusted bytes.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, what: &'static str, len: u64) -> Result<&'a [u8], StateError> {
        let needed = (self.at as u64).saturating_add(len);
        let end = usize::try_from(needed).ok().filter(|end| *end <= self.bytes.len());
        let Some(end) = end else {
            return Err(StateError::Truncated { what, needed, found: self.bytes.len() as u64 });
        };
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], StateError> {
        let taken = self.take(what, N as u64)?;
        Ok(std::array::from_fn(|i| taken[i]))
    }

    fn number(&mut self, what: &'static str) -> Result<u64, StateError> {
        self.array(what).map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MODEL: [u8; 32] = [5; 32];
    const PAGE_BYTES: usize = 24;
    /// Offsets in a state whose salt has four bytes.
    const HAS_SALT: usize = 44;
    const SALT_LEN: usize = HAS_SALT + 1;
    const SALT: usize = SALT_LEN + 8;
    const HAS_ADAPTER: usize = SALT + 4;
    const TOKENS: usize = HAS_ADAPTER + 33;
    const PAGES: usize = TOKENS + 8 + 4 * 40;
    const SNAPSHOT_LEN: usize = PAGES + 16 + 2 * PAGE_BYTES;
    const SNAPSHOT: &[u8] = b"states";

    /// Returns the snapshot of a state with some pages.
    fn snapshot_of(pages: usize) -> &'static [u8] {
        if pages == 0 { &[] } else { SNAPSHOT }
    }

    fn namespace(salt: Option<&str>, adapter: Option<[u8; 32]>) -> Namespace {
        Namespace { salt: salt.map(Into::into), adapter }
    }

    fn saved(namespace: &Namespace, tokens: usize, pages: usize) -> (Vec<u32>, Vec<Vec<u8>>, Vec<u8>) {
        let tokens: Vec<u32> = (0..tokens as u32).map(|i| i * 977).collect();
        let pages: Vec<Vec<u8>> = (0..pages).map(|i| vec![i as u8; PAGE_BYTES]).collect();
        let bytes = encode_state(&MODEL, namespace, &tokens, pages.iter(), PAGE_BYTES, snapshot_of(pages.len()));
        (tokens, pages, bytes)
    }

    /// Returns `bytes` with other bytes at `at` and a matching checksum.
    fn forged(bytes: &[u8], at: usize, number: &[u8]) -> Vec<u8> {
        let mut forged = bytes[..bytes.len() - CHECKSUM_BYTES].to_vec();
        forged[at..at + number.len()].copy_from_slice(number);
        let checksum = blake3::hash(&forged);
        forged.extend_from_slice(checksum.as_bytes());
        forged
    }

    #[test]
    fn each_defect_has_its_error() {
        let (.., bytes) = saved(&namespace(Some("salt"), Some([4; 32])), 40, 2);
        let decode = |bytes: &[u8]| decode_state(bytes, || MODEL, PAGE_BYTES, SNAPSHOT.len()).map(|_| ()).unwrap_err();
        assert_eq!(decode(b""), StateError::Magic { bytes: 0 });
        assert_eq!(decode(b"PK\x03\x04 an archive"), StateError::Magic { bytes: 15 });
        assert_eq!(decode(&forged(&bytes, 8, &[9])), StateError::Version { found: 9, supported: 3 });
        assert_eq!(decode(&bytes[..20]), StateError::Truncated { what: "the fingerprint", needed: 44, found: 20 });
        let len = bytes.len() as u64;
        assert_eq!(
            decode(&bytes[..bytes.len() - 1]),
            StateError::Truncated { what: "the checksum", needed: len, found: len - 1 }
        );
        assert_eq!(decode(&[&bytes[..], b"\0"].concat()), StateError::Trailing { extra: 1 });
        let mut damaged = bytes.clone();
        *damaged.last_mut().unwrap() ^= 1;
        assert_eq!(decode(&damaged), StateError::Checksum);
        let other = StateError::OtherModel { found: "05050505".into(), expected: "06060606".into() };
        assert_eq!(decode_state(&bytes, || [6; 32], PAGE_BYTES, SNAPSHOT.len()), Err(other));
    }

    #[test]
    fn forged_lengths_are_checked_against_the_bytes_present() {
        let (.., bytes) = saved(&namespace(Some("salt"), Some([4; 32])), 40, 2);
        let decode = |at: usize, number: u64| {
            decode_state(&forged(&bytes, at, &number.to_le_bytes()), || MODEL, PAGE_BYTES, SNAPSHOT.len())
                .unwrap_err()
                .to_string()
        };
        for (at, what) in [
            (SALT_LEN, "the salt"),
            (TOKENS, "the tokens"),
            (PAGES, "the pages"),
            (PAGES + 8, "the pages"),
            (SNAPSHOT_LEN, "the snapshot"),
        ] {
            for number in [u64::MAX, u64::MAX / 4 + 1, 1 << 40, 1000] {
                let error = decode(at, number);
                assert!(error.contains("truncated") && error.contains(what), "{error}");
            }
        }
        assert!(decode(PAGES, 0).contains("follow its end"));
    }

    #[test]
    fn invalid_fields_are_rejected_despite_a_valid_checksum() {
        let (.., bytes) = saved(&namespace(Some("salt"), Some([4; 32])), 40, 2);
        for (forged, says) in [
            (forged(&bytes, SALT, b"\xff"), "the salt must be"),
            (forged(&bytes, HAS_SALT, &[0]), "flagged 0"),
            (forged(&bytes, HAS_SALT, &[2]), "flagged 2"),
            (forged(&bytes, HAS_ADAPTER, &[0]), "got flagged 0"),
            (forged(&bytes, HAS_ADAPTER, &[2]), "got flagged 2"),
            (forged(&bytes, PAGES + 8, &[0]), "follow its end"),
            // Four pages of half the length are as many bytes.
            (forged(&bytes, PAGES, &[4, 0, 0, 0, 0, 0, 0, 0, 12]), "the length of a page must be 24 bytes, got 12"),
        ] {
            let error = decode_state(&forged, || MODEL, PAGE_BYTES, SNAPSHOT.len()).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let halves = forged(&bytes, PAGES, &[4, 0, 0, 0, 0, 0, 0, 0, 12]);
        let error = decode_state(&halves, || MODEL, 12, SNAPSHOT.len()).unwrap_err();
        assert!(error.to_string().contains("the number of pages must be at most 2"));
    }

    #[test]
    fn snapshots_have_the_length_of_the_models_states() {
        let (.., bytes) = saved(&namespace(Some("salt"), Some([4; 32])), 40, 2);
        let decode =
            |snapshot_len| decode_state(&bytes, || MODEL, PAGE_BYTES, snapshot_len).map(|state| state.snapshot);
        assert_eq!(decode(6), Ok(SNAPSHOT));
        let error = decode(7).unwrap_err().to_string();
        assert!(error.contains("the length of the snapshot must be 7 bytes for 2 pages, got 6"), "{error}");
        assert!(decode(0).unwrap_err().to_string().contains("must be 0 bytes for 2 pages, got 6"));
    }

    #[test]
    fn version_2_is_read_as_a_state_without_snapshot() {
        let (.., bytes) = saved(&namespace(Some("salt"), Some([4; 32])), 40, 2);
        let version_2 = [&bytes[..SNAPSHOT_LEN], &[0; CHECKSUM_BYTES]].concat();
        let bytes = forged(&version_2, 8, &2_u32.to_le_bytes());
        let state = decode_state(&bytes, || MODEL, PAGE_BYTES, 0).unwrap();
        assert_eq!((state.pages.len(), state.snapshot), (2, &[][..]));
        assert!(decode_state(&bytes, || MODEL, PAGE_BYTES, 6).is_err());
    }

    #[test]
    #[should_panic(expected = "3 pages of 47 tokens")]
    fn more_pages_than_full_pages_of_tokens_panic() {
        saved(&Namespace::default(), 47, 3);
    }

    proptest! {
        #[test]
        fn states_round_trip(
            salt: Option<String>,
            adapter: Option<[u8; 32]>,
            tokens in 0_usize..100,
            part in 0_usize..=100,
        ) {
            let count = tokens / PAGE_TOKENS * part / 100;
            let namespace = namespace(salt.as_deref(), adapter);
            let (tokens, pages, bytes) = saved(&namespace, tokens, count);
            let state = decode_state(&bytes, || MODEL, PAGE_BYTES, SNAPSHOT.len());
            let snapshot = snapshot_of(count);
            let pages = pages.iter().map(Vec::as_slice).collect();
            prop_assert_eq!(state, Ok(State { namespace, tokens, pages, snapshot }));
        }

        #[test]
        fn any_changed_byte_or_length_is_rejected(
            salt: Option<String>,
            place in any::<prop::sample::Index>(),
            flip in 1_u8..,
            more in prop::collection::vec(any::<u8>(), 1..64),
        ) {
            let (.., bytes) = saved(&namespace(salt.as_deref(), None), 40, 2);
            let place = place.index(bytes.len());
            prop_assert!(decode_state(&bytes[..place], || MODEL, PAGE_BYTES, SNAPSHOT.len()).is_err());
            prop_assert!(decode_state(&[&bytes[..], &more].concat(), || MODEL, PAGE_BYTES, SNAPSHOT.len()).is_err());
            let mut damaged = bytes;
            damaged[place] ^= flip;
            prop_assert!(decode_state(&damaged, || MODEL, PAGE_BYTES, SNAPSHOT.len()).is_err());
        }

        #[test]
        fn arbitrary_bytes_are_rejected_without_a_panic(bytes: Vec<u8>, payload_len: usize) {
            prop_assert!(decode_state(&bytes, || MODEL, payload_len, 0).is_err());
            let begun = [&MAGIC[..], &VERSION.to_le_bytes(), &bytes].concat();
            prop_assert!(decode_state(&begun, || MODEL, payload_len, 0).is_err());
        }
    }
}
