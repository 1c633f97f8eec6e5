//! Names for the tokens of a page and of all pages before it.
//!
//! Keys and values of a token depend on every token before it. A page's name is therefore a hash chain from the
//! sequence's start, so that two pages of one name hold the same bits, and begins with the model, the salt and the
//! adapter: nothing is found by another model, with another adapter, or by who does not know the salt.

use std::fmt;

use ferrule_kernels::kv::PAGE_TOKENS;

use super::Namespace;

/// What a page's file is found by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Digest([u8; 32]);

impl Digest {
    /// Of the empty sequence: `fingerprint` is the model's, and different namespaces share nothing.
    pub fn root(fingerprint: &[u8; 32], namespace: &Namespace) -> Self {
        let Namespace { salt, adapter } = namespace;
        let mut hasher = blake3::Hasher::new_derive_key("ferrule root of page digests");
        hasher.update(fingerprint);
        // No salt is another salt than the empty one.
        hasher.update(&[u8::from(salt.is_some())]);
        let salt = salt.as_deref().unwrap_or_default().as_bytes();
        hasher.update(&(salt.len() as u64).to_le_bytes()).update(salt);
        if let Some(adapter) = adapter {
            hasher.update(adapter);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// Of this sequence and the page of tokens that follows it.
    pub fn child(&self, tokens: &[u32; PAGE_TOKENS]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("ferrule page digest");
        hasher.update(&self.0);
        hasher.update(tokens.map(u32::to_le_bytes).as_flattened());
        Self(*hasher.finalize().as_bytes())
    }

    /// As it stands in files.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// In hexadecimal digits, as files are named.
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
    fn model_salt_and_adapter_are_told_apart() {
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
    fn a_digest_is_printed_as_files_are_named() {
        let digest = Digest([0xa5; 32]);
        assert_eq!(digest.to_string(), "a5".repeat(32));
        assert_eq!(format!("{digest:?}"), format!("Digest({})", "a5".repeat(32)));
    }

    proptest! {
        /// Chains are equal if and only if all tokens and the root are.
        #[test]
        fn a_digest_names_all_tokens_from_the_start(
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
