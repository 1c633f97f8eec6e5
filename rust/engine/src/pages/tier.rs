//! Storing cached pages: the disk tier below the prefix tree, and the contents of records and saved states.
//!
//! A page boundary has a record with the pages of all groups of pages and, where a snapshot was taken, another one with
//! the states of all groups of state. Both have the same format.

use ferrule_kernels::kv::PageId;
use ferrule_model::LanguageModel;

use super::digest::Digest;
use super::disk::{DiskCache, DiskStatistics};
use super::{KvCacheManager, PAGE_NONE, PageCopy, PageTables, PageTokens};

/// A page operation to apply, in order, before the next forward pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PageMove {
    /// Copies another page.
    Copy(PageCopy),
    /// Loads saved contents.
    Load(PageLoad),
}

/// Saved contents of a page in all groups of a kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PageLoad {
    pub content: Content,
    /// Page per group, or [`PAGE_NONE`].
    pub pages: Vec<PageId>,
    /// Bytes of the page of each group of the kind, concatenated.
    pub payload: Vec<u8>,
}

/// The groups of layers whose pages are saved together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// All groups of pages.
    Pages,
    /// All groups of state.
    States,
}

impl Content {
    pub const ALL: [Self; 2] = [Self::Pages, Self::States];

    /// Returns whether a group is one of these.
    pub fn includes(self, is_state: bool) -> bool {
        (self == Self::States) == is_state
    }

    /// Returns the digest of the contents after a prefix.
    pub fn digest(self, prefix: &Digest) -> Digest {
        match self {
            Self::Pages => *prefix,
            Self::States => prefix.snapshot(),
        }
    }

    /// Returns the indices of the model's groups.
    fn groups(self, model: &impl LanguageModel) -> impl Iterator<Item = usize> {
        let groups = model.kv_groups().iter().enumerate();
        groups.filter(move |(_, group)| self.includes(group.is_state())).map(|(index, _)| index)
    }
}

impl PageMove {
    /// Applies the operation to the model's KV store.
    pub fn apply(&self, model: &mut impl LanguageModel) {
        match self {
            Self::Copy(copy) => model.copy_page(copy.group, copy.from, copy.to),
            Self::Load(load) => {
                let mut rest = load.payload.as_slice();
                for group in load.content.groups(model).collect::<Vec<_>>() {
                    let (bytes, after) = rest.split_at(page_bytes(model, group));
                    rest = after;
                    if load.pages[group] != PAGE_NONE {
                        model.set_page(group, load.pages[group], bytes);
                    }
                }
            }
        }
    }
}

/// Newly cached pages, to be written to disk.
#[derive(Debug)]
pub(crate) struct NewPages {
    pub parent: Digest,
    pub digest: Digest,
    pub tokens: PageTokens,
    pub pages: Vec<PageId>,
}

/// The disk cache, with the model's fingerprint and record sizes.
#[derive(Debug)]
pub(super) struct DiskTier {
    pub disk: DiskCache,
    pub fingerprint: [u8; 32],
    /// Bytes of the pages in a record.
    pub pages_len: usize,
    /// Bytes of the states in a record.
    pub states_len: usize,
    /// Number of tokens found so far, with pages or a later snapshot that were read from disk.
    pub found_tokens: u64,
}

fn page_bytes(model: &impl LanguageModel, group: usize) -> usize {
    model.kv_groups()[group].page_bytes as usize
}

/// Returns the bytes of one page in all groups of a kind together.
pub(crate) fn payload_len(model: &impl LanguageModel, content: Content) -> usize {
    content.groups(model).map(|group| page_bytes(model, group)).sum()
}

/// Returns the concatenated bytes of a page in all groups of a kind, zeros for a missing one. `pages` has the page of
/// every group.
pub(crate) fn payload(model: &impl LanguageModel, content: Content, pages: &[PageId]) -> Vec<u8> {
    let mut payload = Vec::with_capacity(payload_len(model, content));
    for group in content.groups(model) {
        if pages[group] == PAGE_NONE {
            payload.resize(payload.len() + page_bytes(model, group), 0);
        } else {
            payload.extend_from_slice(model.page(group, pages[group]));
        }
    }
    payload
}

impl KvCacheManager {
    /// Adds a disk tier.
    pub fn attach_disk(&mut self, disk: DiskCache, model: &impl LanguageModel) {
        let [pages_len, states_len] = Content::ALL.map(|content| payload_len(model, content));
        self.tier = Some(DiskTier { disk, fingerprint: model.fingerprint(), pages_len, states_len, found_tokens: 0 });
    }

    /// Takes the disk tier of another manager.
    pub fn take_disk_from(&mut self, other: Self) {
        self.tier = other.tier;
    }

    /// Returns the disk tier's statistics.
    pub fn disk_statistics(&self) -> Option<DiskStatistics> {
        self.tier.as_ref().map(|tier| tier.disk.statistics())
    }

    /// Returns the number of tokens that need not be computed because of what was read from disk.
    pub fn tokens_from_disk(&self) -> u64 {
        self.tier.as_ref().map_or(0, |tier| tier.found_tokens)
    }

    /// Queues pages and snapshots for writing to disk, unless it has them.
    pub fn write_to_disk(&mut self, tables: &mut PageTables, new_pages: &NewPages, model: &impl LanguageModel) {
        let Some(tier) = &mut self.tier else { return };
        for content in Content::ALL {
            let mut pages = content.groups(model).map(|group| new_pages.pages[group]).peekable();
            let digest = content.digest(&new_pages.digest);
            if pages.peek().is_none() || pages.any(|page| page == PAGE_NONE) || tier.disk.contains(&digest) {
                continue;
            }
            let payload = payload(model, content, &new_pages.pages);
            if tier.disk.store(&digest, &content.digest(&new_pages.parent), &new_pages.tokens, payload) {
                tables.saved.push(digest);
            }
        }
    }

    /// Deletes the records that a sequence has written from disk.
    pub(super) fn delete_from_disk(&mut self, tables: &mut PageTables) {
        if let Some(tier) = &mut self.tier {
            tier.disk.discard(&std::mem::take(&mut tables.saved));
        }
    }
}
