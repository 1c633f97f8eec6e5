//! Digests that identify a page by its tokens and all tokens before it.
//!
//! Keys and values of a token depend on every token before it. A digest is therefore a hash chain from the start of the
//! sequence, so that pages of equal digest hold the same bits. The chain starts with the model's fingerprint, the salt
//! and the adapter, so pages are never found with another model or adapter, or without the salt.

use std::fmt;

use ferrule_kernels::kv::PAGE_TOKENS;

use super::Namespace;

/// Hash chain value that identifies a page's file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Digest([u8; 32]);

impl Digest {
    /// Returns the digest of the empty sequence for a model's fingerprint and a namespace.
    pub fn root(fingerprint: &[u8; 32], namespace: &Namespace) -> Self {
        let Namespace { salt, adapter } = namespace;
        let mut hasher = blake3::Hasher::new_derive_key("ferrule root of page digests");
        hasher.update(fingerprint);
        // No salt and an empty salt are different.
        hasher.update(&[u8::from(salt.is_some())]);
        let salt = salt.as_deref().unwrap_or_default().as_bytes();
        hasher.update(&(salt.len() as u64).to_le_bytes()).update(salt);
        if let Some(adapter) = adapter {
            hasher.update(adapter);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// Returns the digest of this prefix extended by a page of tokens.
    pub fn child(&self, tokens: &[u32; PAGE_TOKENS]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("ferrule page digest");
        hasher.update(&self.0);
        hasher.update(tokens.map(u32::to_le_bytes).as_flattened());
        Self(*hasher.finalize().as_bytes())
    }

    /// Returns the digest of the snapshot of states after these tokens.
    pub fn snapshot(&self) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("ferrule snapshot digest");
        hasher.update(&self.0);
        Self(*hasher.finalize().as_bytes())
    }

    /// Returns the bytes as stored in records.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Formats the digest in hexadecimal, as in file names.
impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn roots_differ_by_model_salt_and_adapter() {
        let models = [[0; 32], [1; 32]];
        let salts = [None, Some(""), Some("\0"), Some("a"), Some("aa")];
        let adapters = [None, Some([0; 32]), Some([1; 32])];
        let mut roots = BTreeSet::new();
        for model in &models {
            for salt in salts {
                for adapter in adapters {
                    roots.insert(Digest::root(model, &Namespace { salt: salt.map(Into::into), adapter }));
                }
            }
        }
        assert_eq!(roots.len(), models.len() * salts.len() * adapters.len());
    }

    #[test]
    fn digests_are_formatted_as_in_file_names() {
        let digest = Digest([0xa5; 32]);
        assert_eq!(digest.to_string(), "a5".repeat(32));
        assert_eq!(format!("{digest:?}"), format!("Digest({})", "a5".repeat(32)));
    }

    proptest! {
        /// Digests are equal if and only if the root and all tokens are.
        #[test]
        fn a_digest_depends_on_all_tokens_from_the_start(
            pages in prop::collection::vec(any::<[u32; PAGE_TOKENS]>(), 1..4),
            place in any::<prop::sample::Index>(),
            slot in 0..PAGE_TOKENS,
            bit in 0_u32..32,
        ) {
            let chain = |root: Digest, pages: &[[u32; PAGE_TOKENS]]| pages.iter().fold(root, |digest, page| digest.child(page));
            let root = Digest::root(&[3; 32], &Namespace::default());
            let digest = chain(root, &pages);
            prop_assert_eq!(digest, chain(root, &pages));
            let salted = Namespace { salt: Some("salt".into()), adapter: None };
            prop_assert_ne!(digest, chain(Digest::root(&[3; 32], &salted), &pages));
            prop_assert_ne!(digest, chain(root, &pages[1..]));
            let mut other = pages.clone();
            other[place.index(pages.len())][slot] ^= 1 << bit;
            prop_assert_ne!(digest, chain(root, &other));
        }
    }
}
