//! Pages that come from elsewhere: from the disk below the tree, or from a saved state.
//!
//! They are inserted in the tree as if they had been computed here and given back; whoever begins with their tokens then
//! takes them like any others. Between the two the disk is looked at only where the tree has nothing.

use ferrule_kernels::kv::PageId;
use ferrule_model::LanguageModel;

use super::digest::Digest;
use super::disk::{DiskCache, DiskStatistics};
use super::prefix::ParentNode;
use super::{GroupPage, PAGE_NONE, PageCopy, PageTables, PageTokens, Pages};

/// What must be done to pages before the next forward pass, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PageMove {
    /// Contents of another page.
    Copy(PageCopy),
    /// Contents that were saved.
    Load(PageLoad),
}

/// Contents for the pages of all groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PageLoad {
    /// For each group its page, or [`PAGE_NONE`].
    pages: Vec<PageId>,
    /// The bytes of each, one after the other.
    payload: Vec<u8>,
}

/// Bytes that a step reads from a disk at the most, so that those who decode do not wait for it long. Whatever the limit
/// and the size of a page, one is read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FetchBudget {
    left: usize,
    is_fresh: bool,
}

impl FetchBudget {
    pub fn new(bytes: usize) -> Self {
        Self { left: bytes, is_fresh: true }
    }

    fn allows(self, bytes: usize) -> bool {
        self.is_fresh || bytes <= self.left
    }

    fn spend(&mut self, bytes: usize) {
        *self = Self { left: self.left.saturating_sub(bytes), is_fresh: false };
    }
}

impl PageMove {
    /// Does it.
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

/// Pages that the tree did not have before, to be written to the disk.
#[derive(Debug)]
pub(crate) struct NewPages {
    pub parent: Digest,
    pub digest: Digest,
    pub tokens: PageTokens,
    pub pages: Vec<PageId>,
}

/// The disk, and what a record on it holds.
#[derive(Debug)]
pub(super) struct Tier {
    disk: DiskCache,
    pub fingerprint: [u8; 32],
    payload_len: usize,
}

fn page_bytes(model: &impl LanguageModel, group: usize) -> usize {
    model.kv_groups()[group].page_bytes as usize
}

/// Bytes of the pages of all groups together.
pub(crate) fn payload_len(model: &impl LanguageModel) -> usize {
    (0..model.kv_groups().len()).map(|group| page_bytes(model, group)).sum()
}

/// The bytes of the pages of all groups, zeros where there is none.
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

impl Pages {
    /// Keeps pages on a disk too.
    pub fn attach_disk(&mut self, disk: DiskCache, model: &impl LanguageModel) {
        self.tier = Some(Tier { disk, fingerprint: model.fingerprint(), payload_len: payload_len(model) });
    }

    /// Takes over the disk of pages that are given up.
    pub fn take_disk_from(&mut self, other: Self) {
        self.tier = other.tier;
    }

    /// What the disk did so far.
    pub fn disk_statistics(&self) -> Option<DiskStatistics> {
        self.tier.as_ref().map(|tier| tier.disk.statistics())
    }

    /// Hands pages over to the disk, unless it has them.
    pub fn write_to_disk(&mut self, tables: &mut PageTables, fresh: &NewPages, model: &impl LanguageModel) {
        let Some(tier) = &mut self.tier else { return };
        if fresh.pages.contains(&PAGE_NONE) || tier.disk.contains(&fresh.digest) {
            return;
        }
        let payload = payload(model, fresh.pages.iter().copied());
        if tier.disk.store(&fresh.digest, &fresh.parent, &fresh.tokens, payload) {
            tables.saved.push(fresh.digest);
        }
    }

    /// Takes what a sequence has handed over back from the disk.
    pub(super) fn delete_from_disk(&mut self, tables: &mut PageTables) {
        if let Some(tier) = &mut self.tier {
            tier.disk.discard(&std::mem::take(&mut tables.saved));
        }
    }

    /// Plants what the disk has of a sequence after its `computed` tokens, no further than `most`, as far as pages are
    /// free and `budget` allows. True if it has more for the next step; whoever is told so has been given some, or another
    /// sequence has.
    pub fn fetch(
        &mut self,
        tables: &PageTables,
        tokens: &[u32],
        (computed, most): (usize, usize),
        budget: &mut FetchBudget,
        moves: &mut Vec<PageMove>,
    ) -> bool {
        let room = self.room();
        let (Some(tier), Some(mut parent)) = (&mut self.tier, tables.digest()) else { return false };
        if !tables.is_cached_to(computed) {
            return false;
        }
        let mut found = Vec::new();
        let mut has_more = false;
        for page_tokens in tables.shareable_pages(tokens, most).take(room) {
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

    /// Pages of a sequence for which there is room in every group.
    fn room(&self) -> usize {
        self.groups.iter().map(|group| group.pool.free()).min().unwrap_or(usize::MAX)
    }

    /// Enters pages in the tree behind those of a sequence that are there, as far as pages are free; how many. Nobody
    /// holds them then.
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
        let end = first + records.len().min(self.room());
        let mut held: Vec<GroupPage> = Vec::new();
        let mut place = tables.parent_node();
        let mut inserted = 0;
        for (index, (tokens, payload)) in (first..end).zip(records) {
            let Some(node) = self.insert_loaded_page(place.clone(), (index, end), tokens, payload, &mut held, moves)
            else {
                break;
            };
            place = ParentNode::Node(node);
            inserted += 1;
        }
        if let (ParentNode::Node(last), Some(tree)) = (place, &mut self.tree) {
            tree.prune(last);
        }
        // The last one first, as a sequence gives them back.
        for (group, page) in held.into_iter().rev() {
            self.groups[group].pool.release(page);
        }
        inserted
    }

    /// Enters the page of an index among those that end at another. None if no page is free for it.
    fn insert_loaded_page(
        &mut self,
        place: ParentNode,
        (index, end): (usize, usize),
        tokens: &PageTokens,
        payload: Vec<u8>,
        held: &mut Vec<GroupPage>,
        moves: &mut Vec<PageMove>,
    ) -> Option<super::NodeId> {
        let tree = self.tree.as_ref()?;
        let old = tree
            .find(place.clone(), tokens)
            .map_or_else(|| vec![PAGE_NONE; self.groups.len()], |node| tree.pages(node).to_vec());
        for (group, &page) in old.iter().enumerate().filter(|&(_, &page)| page != PAGE_NONE) {
            self.groups[group].pool.hold(page);
            held.push((group, page));
        }
        let mut new = vec![PAGE_NONE; self.groups.len()];
        for group in 0..self.groups.len() {
            let is_seen = index >= self.groups[group].first_visible(end * super::PAGE_TOKENS);
            if old[group] == PAGE_NONE && is_seen {
                if self.groups[group].pool.free() == 0 {
                    return None;
                }
                new[group] = self.allocate(group);
                held.push((group, new[group]));
            }
        }
        let tree = self.tree.as_mut()?;
        // Only now: making room may have taken the node away.
        let node = match tree.find(place.clone(), tokens) {
            Some(node) => node,
            None => tree.insert(place, tokens, &vec![PAGE_NONE; new.len()])?,
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
