//! Loading and storing cached pages: the disk tier below the prefix tree, and saved states.
//!
//! Loaded pages are inserted into the tree as if they had been computed and released, and sequences with the same
//! tokens reuse them like any others. The disk is consulted only where the tree has no page.

use ferrule_kernels::kv::PageId;
use ferrule_model::LanguageModel;

use super::digest::Digest;
use super::disk::{DiskCache, DiskStatistics};
use super::prefix::ParentNode;
use super::{GroupPage, KvCacheManager, PAGE_NONE, PageCopy, PageTables, PageTokens};

/// A page operation to apply, in order, before the next forward pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PageMove {
    /// Copies another page.
    Copy(PageCopy),
    /// Loads saved contents.
    Load(PageLoad),
}

/// Saved contents of a page in all groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PageLoad {
    /// Page per group, or [`PAGE_NONE`].
    pages: Vec<PageId>,
    /// Bytes of each page, concatenated.
    payload: Vec<u8>,
}

/// Limit on the bytes that a step reads from disk, because running sequences wait for the read. One page may always be
/// read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FetchBudget {
    left: usize,
    is_unused: bool,
}

impl FetchBudget {
    pub fn new(bytes: usize) -> Self {
        Self { left: bytes, is_unused: true }
    }

    fn allows(self, bytes: usize) -> bool {
        self.is_unused || bytes <= self.left
    }

    fn spend(&mut self, bytes: usize) {
        *self = Self { left: self.left.saturating_sub(bytes), is_unused: false };
    }
}

impl PageMove {
    /// Applies the operation to the model's KV store.
    pub fn apply(&self, model: &mut impl LanguageModel) {
        match self {
            Self::Copy(copy) => model.copy_page(copy.group, copy.from, copy.to),
            Self::Load(load) => {
                let mut rest = load.payload.as_slice();
                for (group, &page) in load.pages.iter().enumerate() {
                    let (bytes, after) = rest.split_at(page_bytes(model, group));
                    rest = after;
                    if page != PAGE_NONE {
                        model.set_page(group, page, bytes);
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

/// The disk cache, with the model's fingerprint and record size.
#[derive(Debug)]
pub(super) struct DiskTier {
    disk: DiskCache,
    pub fingerprint: [u8; 32],
    payload_len: usize,
}

fn page_bytes(model: &impl LanguageModel, group: usize) -> usize {
    model.kv_groups()[group].page_bytes as usize
}

/// Returns the bytes of one page in all groups together.
pub(crate) fn payload_len(model: &impl LanguageModel) -> usize {
    (0..model.kv_groups().len()).map(|group| page_bytes(model, group)).sum()
}

/// Returns the concatenated bytes of a page in all groups, zeros for a missing one.
pub(crate) fn payload(model: &impl LanguageModel, pages: impl Iterator<Item = PageId>) -> Vec<u8> {
    let mut payload = Vec::with_capacity(payload_len(model));
    for (group, page) in pages.enumerate() {
        if page == PAGE_NONE {
            payload.resize(payload.len() + page_bytes(model, group), 0);
        } else {
            payload.extend_from_slice(model.page(group, page));
        }
    }
    payload
}

impl KvCacheManager {
    /// Adds a disk tier.
    pub fn attach_disk(&mut self, disk: DiskCache, model: &impl LanguageModel) {
        self.tier = Some(DiskTier { disk, fingerprint: model.fingerprint(), payload_len: payload_len(model) });
    }

    /// Takes the disk tier of another manager.
    pub fn take_disk_from(&mut self, other: Self) {
        self.tier = other.tier;
    }

    /// Returns the disk tier's statistics.
    pub fn disk_statistics(&self) -> Option<DiskStatistics> {
        self.tier.as_ref().map(|tier| tier.disk.statistics())
    }

    /// Queues pages for writing to disk, unless it has them.
    pub fn write_to_disk(&mut self, tables: &mut PageTables, new_pages: &NewPages, model: &impl LanguageModel) {
        let Some(tier) = &mut self.tier else { return };
        if new_pages.pages.contains(&PAGE_NONE) || tier.disk.contains(&new_pages.digest) {
            return;
        }
        let payload = payload(model, new_pages.pages.iter().copied());
        if tier.disk.store(&new_pages.digest, &new_pages.parent, &new_pages.tokens, payload) {
            tables.saved.push(new_pages.digest);
        }
    }

    /// Deletes the records that a sequence has written from disk.
    pub(super) fn delete_from_disk(&mut self, tables: &mut PageTables) {
        if let Some(tier) = &mut self.tier {
            tier.disk.discard(&std::mem::take(&mut tables.saved));
        }
    }

    /// Loads the pages that the disk has for a sequence after its `computed` tokens, up to `limit`, as far as free
    /// pages and `budget` allow. Returns true if the disk has more for the next step; then this sequence or another one
    /// received pages in this step, so the engine makes progress.
    pub fn fetch(
        &mut self,
        tables: &PageTables,
        tokens: &[u32],
        (computed, limit): (usize, usize),
        budget: &mut FetchBudget,
        moves: &mut Vec<PageMove>,
    ) -> bool {
        let free_pages = self.free_pages();
        let (Some(tier), Some(mut parent)) = (&mut self.tier, tables.digest()) else { return false };
        if !tables.is_cached_to(computed) {
            return false;
        }
        let mut found = Vec::new();
        let mut has_more = false;
        for page_tokens in tables.shareable_pages(tokens, limit).take(free_pages) {
            let digest = parent.child(page_tokens);
            if !tier.disk.contains(&digest) {
                break;
            }
            if !budget.allows(tier.payload_len) {
                has_more = true;
                break;
            }
            let Some(payload) = tier.disk.load(&digest, &parent, page_tokens, tier.payload_len) else { break };
            budget.spend(tier.payload_len);
            found.push((page_tokens, payload));
            parent = digest;
        }
        let count = found.len();
        self.insert_loaded(tables, found.into_iter(), moves) == count && has_more
    }

    /// Returns the number of pages that are free in every group.
    fn free_pages(&self) -> usize {
        self.groups.iter().map(|group| group.pool.free()).min().unwrap_or(usize::MAX)
    }

    /// Inserts loaded pages into the tree after a sequence's cached pages, as far as pages are free. Returns how many.
    /// They have no holders then.
    pub fn insert_loaded<'a>(
        &mut self,
        tables: &PageTables,
        records: impl ExactSizeIterator<Item = (&'a PageTokens, Vec<u8>)>,
        moves: &mut Vec<PageMove>,
    ) -> usize {
        if self.tree.is_none() {
            return 0;
        }
        let first = tables.cached_pages();
        let end = first + records.len().min(self.free_pages());
        let mut held: Vec<GroupPage> = Vec::new();
        let mut parent_node = tables.parent_node();
        let mut inserted = 0;
        for (index, (tokens, payload)) in (first..end).zip(records) {
            let Some(node) =
                self.insert_loaded_page(parent_node.clone(), (index, end), tokens, payload, &mut held, moves)
            else {
                break;
            };
            parent_node = ParentNode::Node(node);
            inserted += 1;
        }
        if let (ParentNode::Node(last), Some(tree)) = (parent_node, &mut self.tree) {
            tree.prune(last);
        }
        // Last page first, in the order in which a sequence releases them.
        for (group, page) in held.into_iter().rev() {
            self.groups[group].pool.release(page);
        }
        inserted
    }

    /// Inserts the page at `index` of a run that ends at `end`. Returns `None` if no page is free.
    fn insert_loaded_page(
        &mut self,
        parent: ParentNode,
        (index, end): (usize, usize),
        tokens: &PageTokens,
        payload: Vec<u8>,
        held: &mut Vec<GroupPage>,
        moves: &mut Vec<PageMove>,
    ) -> Option<super::NodeId> {
        let tree = self.tree.as_ref()?;
        let old = tree
            .find(parent.clone(), tokens)
            .map_or_else(|| vec![PAGE_NONE; self.groups.len()], |node| tree.pages(node).to_vec());
        for (group, &page) in old.iter().enumerate().filter(|&(_, &page)| page != PAGE_NONE) {
            self.groups[group].pool.hold(page);
            held.push((group, page));
        }
        let mut new = vec![PAGE_NONE; self.groups.len()];
        for group in 0..self.groups.len() {
            let is_visible = index >= self.groups[group].first_visible(end * super::PAGE_TOKENS);
            if old[group] == PAGE_NONE && is_visible {
                if self.groups[group].pool.free() == 0 {
                    return None;
                }
                new[group] = self.allocate(group);
                held.push((group, new[group]));
            }
        }
        let tree = self.tree.as_mut()?;
        // Look up the node only now: the allocation above may have evicted it.
        let node = match tree.find(parent.clone(), tokens) {
            Some(node) => node,
            None => tree.insert(parent, tokens, &vec![PAGE_NONE; new.len()])?,
        };
        for (group, &page) in new.iter().enumerate().filter(|&(_, &page)| page != PAGE_NONE) {
            tree.set_page(node, group, page);
            self.groups[group].pool.mark_cached(page);
        }
        if new.iter().any(|&page| page != PAGE_NONE) {
            moves.push(PageMove::Load(PageLoad { pages: new, payload }));
        }
        Some(node)
    }
}
