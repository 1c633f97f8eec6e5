//! On-disk records: one page of every group of pages, for the same tokens, or the states of every group of state after
//! them. The parent of a record of states is the digest of the snapshot before the page, whether it exists or not.
//!
//! Files are untrusted: they may be torn by a crash, damaged, or written by another version. A record therefore
//! contains what it belongs to, readers accept exactly the expected record only, and a checksum covers everything.
//!
//! | bytes | |
//! |---|---|
//! | 8 | magic |
//! | 4 | version of the format, little-endian as all numbers |
//! | 32 | digest of all tokens before the page |
//! | 64 | the page's tokens |
//! | 8 | bytes of the payload |
//! | … | the payload: the page, or the state, of every such group, one after the other |
//! | 32 | BLAKE3 of all before it |

use ferrule_kernels::kv::PAGE_TOKENS;

use super::digest::Digest;

const MAGIC: &[u8; 8] = b"FERRULEP";
const VERSION: u32 = 1;

const PARENT: usize = 12;
const TOKENS: usize = PARENT + 32;
const PAYLOAD_LEN: usize = TOKENS + 4 * PAGE_TOKENS;

/// Offset of the payload.
pub(crate) const PAYLOAD: usize = PAYLOAD_LEN + 8;
const CHECKSUM_BYTES: usize = 32;

/// Reason why bytes are not the expected record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RecordError {
    #[error("the record has {found} bytes, expected {expected}")]
    Length { found: u64, expected: u64 },
    #[error("not a record: it begins with {found:02x?}")]
    Magic { found: [u8; 8] },
    #[error("unsupported record format version {found}; this build supports {VERSION}")]
    Version { found: u32 },
    #[error("the record belongs to another prefix")]
    Parent,
    #[error("the record belongs to other tokens")]
    Tokens,
    #[error("the record's payload has {found} bytes, expected {expected}")]
    PayloadLength { found: u64, expected: u64 },
    #[error("checksum mismatch")]
    Checksum,
}

/// Returns the size of a record in bytes.
pub(crate) fn record_len(payload_len: usize) -> u64 {
    (payload_len as u64).saturating_add((PAYLOAD + CHECKSUM_BYTES) as u64)
}

/// Encodes the page of `tokens` that follows the prefix `parent`.
pub(crate) fn encode(parent: &Digest, tokens: &[u32; PAGE_TOKENS], payload: &[u8]) -> Vec<u8> {
    let mut record = Vec::with_capacity(payload.len() + PAYLOAD + CHECKSUM_BYTES);
    record.extend_from_slice(MAGIC);
    record.extend_from_slice(&VERSION.to_le_bytes());
    record.extend_from_slice(parent.as_bytes());
    record.extend_from_slice(tokens.map(u32::to_le_bytes).as_flattened());
    record.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    record.extend_from_slice(payload);
    let checksum = blake3::hash(&record);
    record.extend_from_slice(checksum.as_bytes());
    record
}

/// Returns the payload of a record (at offset [`PAYLOAD`]) if it is complete and the expected one.
///
/// # Errors
/// Returns [`RecordError`] otherwise.
pub(crate) fn decode<'a>(
    bytes: &'a [u8],
    parent: &Digest,
    tokens: &[u32; PAGE_TOKENS],
    payload_len: usize,
) -> Result<&'a [u8], RecordError> {
    let expected = record_len(payload_len);
    let (Some((header, rest)), true) = (bytes.split_first_chunk::<PAYLOAD>(), bytes.len() as u64 == expected) else {
        return Err(RecordError::Length { found: bytes.len() as u64, expected });
    };
    if header[..8] != *MAGIC {
        return Err(RecordError::Magic { found: array(header, 0) });
    }
    let found = u32::from_le_bytes(array(header, 8));
    if found != VERSION {
        return Err(RecordError::Version { found });
    }
    if header[PARENT..TOKENS] != *parent.as_bytes() {
        return Err(RecordError::Parent);
    }
    if header[TOKENS..PAYLOAD_LEN] != *tokens.map(u32::to_le_bytes).as_flattened() {
        return Err(RecordError::Tokens);
    }
    let found = u64::from_le_bytes(array(header, PAYLOAD_LEN));
    if found != payload_len as u64 {
        return Err(RecordError::PayloadLength { found, expected: payload_len as u64 });
    }
    let (payload, checksum) = rest.split_at(payload_len);
    if *checksum != *blake3::hash(&bytes[..PAYLOAD + payload_len]).as_bytes() {
        return Err(RecordError::Checksum);
    }
    Ok(payload)
}

/// Returns `N` bytes of a header from `start` on.
fn array<const N: usize>(header: &[u8; PAYLOAD], start: usize) -> [u8; N] {
    std::array::from_fn(|i| header[start + i])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pages::Namespace;

    const PAGE: [u32; PAGE_TOKENS] = [9; PAGE_TOKENS];

    fn parent() -> Digest {
        Digest::root(&[5; 32], &Namespace { salt: Some("salt".into()), adapter: None })
    }

    #[test]
    fn the_format_is_as_documented() {
        let record = encode(&parent(), &PAGE, b"payload");
        assert_eq!(record.len() as u64, record_len(7));
        assert_eq!((PAYLOAD, &record[..12]), (116, &b"FERRULEP\x01\0\0\0"[..]));
        assert_eq!(record[108..123], *b"\x07\0\0\0\0\0\0\0payload");
    }

    #[test]
    fn each_defect_has_its_error() {
        let record = encode(&parent(), &PAGE, b"payload");
        let changed = |at: usize| {
            let mut record = record.clone();
            record[at] ^= 1;
            decode(&record, &parent(), &PAGE, 7).map(<[u8]>::to_vec).unwrap_err()
        };
        assert_eq!(changed(0), RecordError::Magic { found: *b"GERRULEP" });
        assert_eq!(changed(8), RecordError::Version { found: 0 });
        assert_eq!(changed(PARENT), RecordError::Parent);
        assert_eq!(changed(TOKENS), RecordError::Tokens);
        assert_eq!(changed(PAYLOAD_LEN), RecordError::PayloadLength { found: 6, expected: 7 });
        assert_eq!(changed(PAYLOAD), RecordError::Checksum);
        assert_eq!(changed(record.len() - 1), RecordError::Checksum);
        assert_eq!(decode(&record, &parent().child(&PAGE), &PAGE, 7), Err(RecordError::Parent));
        assert_eq!(decode(&record, &parent(), &[8; PAGE_TOKENS], 7), Err(RecordError::Tokens));
        assert_eq!(decode(&record, &parent(), &PAGE, 8), Err(RecordError::Length { found: 155, expected: 156 }));
        assert_eq!(decode(&[], &parent(), &PAGE, 0), Err(RecordError::Length { found: 0, expected: 148 }));
    }

    proptest! {
        #[test]
        fn records_round_trip(tokens in any::<[u32; PAGE_TOKENS]>(), payload: Vec<u8>) {
            let record = encode(&parent(), &tokens, &payload);
            prop_assert_eq!(decode(&record, &parent(), &tokens, payload.len()), Ok(&payload[..]));
        }

        #[test]
        fn any_changed_byte_or_length_is_rejected(
            payload in prop::collection::vec(any::<u8>(), 0..64),
            place in any::<prop::sample::Index>(),
            flip in 1_u8..,
            more in prop::collection::vec(any::<u8>(), 1..64),
        ) {
            let record = encode(&parent(), &PAGE, &payload);
            let place = place.index(record.len());
            prop_assert!(decode(&record[..place], &parent(), &PAGE, payload.len()).is_err());
            let longer = [&record[..], &more].concat();
            prop_assert!(decode(&longer, &parent(), &PAGE, payload.len()).is_err());
            prop_assert!(decode(&longer, &parent(), &PAGE, payload.len() + more.len()).is_err());
            let mut damaged = record;
            damaged[place] ^= flip;
            prop_assert!(decode(&damaged, &parent(), &PAGE, payload.len()).is_err());
        }

        #[test]
        fn arbitrary_bytes_are_rejected_without_a_panic(bytes: Vec<u8>, payload_len: usize) {
            prop_assert!(decode(&bytes, &parent(), &PAGE, payload_len).is_err());
        }
    }
}
