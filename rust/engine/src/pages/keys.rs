//! Keys of pages with features: the prefix cache finds pages by token ids, but ids of placeholders say nothing about an
//! image.

use ferrule_kernels::kv::PAGE_TOKENS;
use ferrule_model::Features;

use super::PageTokens;

/// Token ids of a sequence by which its pages are found. In full pages that overlap features, digests of the ids and the
/// features take the place of all ids.
#[derive(Debug, Clone)]
pub(crate) struct PageKeys {
    ids: Vec<u32>,
    features: Vec<Features>,
}

impl PageKeys {
    /// Returns the keys of a prompt.
    pub fn new(prompt: &[u32], features: &[Features]) -> Self {
        let mut keys = Self { ids: prompt.to_vec(), features: features.to_vec() };
        (0..prompt.len() / PAGE_TOKENS).for_each(|page| keys.digest_page(page));
        keys
    }

    /// Adds a token after those so far.
    pub fn push(&mut self, token: u32) {
        self.ids.push(token);
        if self.ids.len().is_multiple_of(PAGE_TOKENS) {
            self.digest_page(self.ids.len() / PAGE_TOKENS - 1);
        }
    }

    /// Returns the ids, or digests in their places.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Replaces the ids of a full page by digests if it overlaps features.
    fn digest_page(&mut self, page: usize) {
        let (start, end) = (page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS);
        let overlaps = |one: &&Features| one.positions().start < end && one.positions().end > start;
        let mut of_page = self.features.iter().filter(overlaps).peekable();
        if of_page.peek().is_none() {
            return;
        }
        let ids: &mut PageTokens = (&mut self.ids[start..end]).try_into().expect("a full page");
        let mut hasher = blake3::Hasher::new_derive_key("ferrule key of a page with features");
        hasher.update(ids.map(u32::to_le_bytes).as_flattened());
        for features in of_page {
            hasher.update(features.digest());
        }
        let mut digest = [0; size_of::<PageTokens>()];
        hasher.finalize_xof().fill(&mut digest);
        for (id, bytes) in ids.iter_mut().zip(digest.as_chunks().0) {
            *id = u32::from_le_bytes(*bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn features(first: usize, tokens: usize, value: f32) -> Features {
        Features::new(first, vec![value; tokens].into(), 1)
    }

    #[test]
    fn only_full_pages_with_features_have_digests_of_both() {
        let prompt: Vec<u32> = (0..70).collect();
        let keys = |features: &[Features]| PageKeys::new(&prompt, features).ids().to_vec();
        assert_eq!(keys(&[]), prompt);
        let (one, other) = (keys(&[features(31, 3, 1.0)]), keys(&[features(31, 3, 2.0)]));
        for page in 0..4 {
            let same =
                |a: &[u32], b: &[u32]| a[page * PAGE_TOKENS..][..PAGE_TOKENS] == b[page * PAGE_TOKENS..][..PAGE_TOKENS];
            let without = page == 0 || page == 3;
            assert_eq!((same(&one, &prompt), same(&one, &other)), (without, without), "page {page}");
        }
        assert_ne!(keys(&[features(32, 3, 1.0)])[32..48], one[32..48], "the place counts");
        let placeholders: Vec<u32> = prompt.iter().map(|id| if *id == 33 { 7 } else { *id }).collect();
        assert_ne!(PageKeys::new(&placeholders, &[features(31, 3, 1.0)]).ids()[32..48], one[32..48], "ids count too");
    }

    #[test]
    fn a_page_that_ends_with_output_has_a_digest_once_it_is_full() {
        let prompt: Vec<u32> = (0..20).collect();
        let mut grown = PageKeys::new(&prompt, &[features(17, 2, 1.0)]);
        assert_eq!(grown.ids()[16..], prompt[16..]);
        let whole: Vec<u32> = (0..40).collect();
        whole[20..].iter().for_each(|token| grown.push(*token));
        assert_eq!(grown.ids(), PageKeys::new(&whole, &[features(17, 2, 1.0)]).ids());
        assert_eq!(grown.ids()[32..], whole[32..]);
    }
}
