//! Loading cached pages from disk and from saved states.
//!
//! Loaded pages are inserted into the tree as if they had been computed and released, and sequences with the same
//! tokens reuse them like any others. The disk is consulted only where the tree has no page. With groups of state,
//! pages are of use only up to a snapshot, so they are loaded together with it.

use super::digest::Digest;
use super::prefix::ParentNode;
use super::tier::{DiskTier, PageLoad};
use super::{Content, GroupPage, KvCacheManager, NodeId, PAGE_NONE, PAGE_TOKENS, PageMove, PageTables, PageTokens};

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

/// Saved contents of a page boundary.
#[derive(Debug)]
pub(crate) struct SavedPage<'a> {
    pub tokens: &'a PageTokens,
    /// Pages of the groups of pages; `None` if the tree has them.
    pub pages: Option<Vec<u8>>,
    /// Snapshot of the groups of state.
    pub states: Option<Vec<u8>>,
}

/// A page that may be loaded.
struct Candidate<'a> {
    page: SavedPage<'a>,
    parent: Digest,
    digest: Digest,
    /// Whether its pages must be read from disk.
    is_on_disk: bool,
}

impl Candidate<'_> {
    /// Reads the pages if they are not in memory. Returns false if the disk does not have them.
    fn load_pages(&mut self, tier: &mut DiskTier) -> bool {
        if self.is_on_disk && self.page.pages.is_none() {
            self.page.pages = tier.disk.load(&self.digest, &self.parent, self.page.tokens, tier.pages_len);
        }
        !self.is_on_disk || self.page.pages.is_some()
    }
}

impl KvCacheManager {
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
        if self.tier.is_none() || !tables.is_cached_to(computed) {
            return false;
        }
        let has_states = self.has_states();
        let (found, has_more) = match has_states {
            true => self.load_to_snapshot(tables, tokens, limit, budget),
            false => self.load_pages(tables, tokens, limit, budget),
        };
        let count = found.len();
        let inserted = self.insert_saved(tables, found, moves);
        // Without the snapshot, which is in the last page, the pages before it save no computation.
        if let Some(tier) = &mut self.tier
            && (inserted == count || !has_states)
        {
            tier.found_tokens += (inserted * PAGE_TOKENS) as u64;
        }
        inserted == count && has_more
    }

    /// Reads pages one by one. Returns them, and whether the budget ended before the pages on disk.
    fn load_pages<'a>(
        &mut self,
        tables: &PageTables,
        tokens: &'a [u32],
        limit: usize,
        budget: &mut FetchBudget,
    ) -> (Vec<SavedPage<'a>>, bool) {
        let free_pages = self.free_pages();
        let mut found = Vec::new();
        let (Some(tier), Some(mut parent)) = (&mut self.tier, tables.digest()) else { return (found, false) };
        for tokens in tables.shareable_pages(tokens, limit).take(free_pages) {
            let digest = parent.child(tokens);
            if !tier.disk.contains(&digest) {
                break;
            }
            if !budget.allows(tier.pages_len) {
                return (found, true);
            }
            let Some(pages) = tier.disk.load(&digest, &parent, tokens, tier.pages_len) else { break };
            budget.spend(tier.pages_len);
            found.push(SavedPage { tokens, pages: Some(pages), states: None });
            parent = digest;
        }
        (found, false)
    }

    /// Reads the last snapshot that can be reached, and the pages up to it that are not in memory. Returns them, and
    /// whether they must wait for the budget of the next step.
    fn load_to_snapshot<'a>(
        &mut self,
        tables: &PageTables,
        tokens: &'a [u32],
        limit: usize,
        budget: &mut FetchBudget,
    ) -> (Vec<SavedPage<'a>>, bool) {
        let mut candidates = self.candidates(tables, tokens, limit);
        let Some(tier) = &mut self.tier else { return (Vec::new(), false) };
        loop {
            let is_snapshot = |candidate: &Candidate<'_>| tier.disk.contains(&candidate.digest.snapshot());
            let Some(last) = candidates.iter().rposition(is_snapshot) else { return (Vec::new(), false) };
            candidates.truncate(last + 1);
            let missing = candidates.iter().filter(|candidate| candidate.is_on_disk).count();
            let bytes = missing.saturating_mul(tier.pages_len).saturating_add(tier.states_len);
            if !budget.allows(bytes) {
                return (Vec::new(), true);
            }
            let Candidate { page, parent, digest, .. } = &mut candidates[last];
            page.states = tier.disk.load(&digest.snapshot(), &parent.snapshot(), page.tokens, tier.states_len);
            if page.states.is_none() {
                // The snapshot is damaged: continue at an earlier one.
                candidates.truncate(last);
            } else if let Some(damaged) = candidates.iter_mut().position(|candidate| !candidate.load_pages(tier)) {
                candidates.truncate(damaged);
            } else {
                budget.spend(bytes);
                return (candidates.into_iter().map(|candidate| candidate.page).collect(), false);
            }
        }
    }

    /// Returns the pages after a sequence's cached ones that are in memory or on disk.
    fn candidates<'a>(&self, tables: &PageTables, tokens: &'a [u32], limit: usize) -> Vec<Candidate<'a>> {
        let mut candidates = Vec::new();
        let (Some(tier), Some(tree), Some(mut parent)) = (&self.tier, &self.tree, tables.digest()) else {
            return candidates;
        };
        let has_free_state = self.groups.iter().all(|group| !group.is_state || group.pool.free() > 0);
        let count = if has_free_state { self.free_pages() } else { 0 };
        let mut parent_node = Some(tables.parent_node());
        for tokens in tables.shareable_pages(tokens, limit).take(count) {
            let digest = parent.child(tokens);
            let node = parent_node.and_then(|parent| tree.find(parent, tokens));
            let has_page = |(index, group): (usize, &super::Group)| {
                group.is_state || node.is_some_and(|node| tree.pages(node)[index] != PAGE_NONE)
            };
            let is_on_disk = !self.groups.iter().enumerate().all(has_page);
            if is_on_disk && !tier.disk.contains(&digest) {
                break;
            }
            let page = SavedPage { tokens, pages: None, states: None };
            candidates.push(Candidate { page, parent, digest, is_on_disk });
            (parent, parent_node) = (digest, node.map(ParentNode::Node));
        }
        candidates
    }

    /// Returns the number of pages that are free in every group of pages.
    fn free_pages(&self) -> usize {
        let paged = self.groups.iter().filter(|group| !group.is_state);
        paged.map(|group| group.pool.free()).min().unwrap_or(usize::MAX)
    }

    /// Inserts saved pages into the tree after a sequence's cached pages, as far as pages are free. Returns how many.
    /// They have no holders then.
    pub fn insert_saved(&mut self, tables: &PageTables, saved: Vec<SavedPage<'_>>, moves: &mut Vec<PageMove>) -> usize {
        if self.tree.is_none() {
            return 0;
        }
        let first = tables.cached_pages();
        let end = first + saved.len().min(self.free_pages());
        let mut held: Vec<GroupPage> = Vec::new();
        let mut parent_node = tables.parent_node();
        let mut inserted = 0;
        for (index, page) in (first..end).zip(saved) {
            let Some(node) = self.insert_saved_page(parent_node.clone(), (index, end), page, &mut held, moves) else {
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
    fn insert_saved_page(
        &mut self,
        parent: ParentNode,
        (index, end): (usize, usize),
        saved: SavedPage<'_>,
        held: &mut Vec<GroupPage>,
        moves: &mut Vec<PageMove>,
    ) -> Option<NodeId> {
        let SavedPage { tokens, pages, states } = saved;
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
            let is_wanted = match self.groups[group].is_state {
                true => states.is_some(),
                false => index >= self.groups[group].first_visible(end * PAGE_TOKENS),
            };
            if old[group] == PAGE_NONE && is_wanted {
                // A page that was in the tree may have been evicted for an earlier one.
                let is_missing = !self.groups[group].is_state && pages.is_none();
                if is_missing || self.groups[group].pool.free() == 0 {
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
        for (content, payload) in [(Content::Pages, pages), (Content::States, states)] {
            let is_new = |(group, &page): (&super::Group, &_)| content.includes(group.is_state) && page != PAGE_NONE;
            if let Some(payload) = payload.filter(|_| self.groups.iter().zip(&new).any(is_new)) {
                moves.push(PageMove::Load(PageLoad { content, pages: new.clone(), payload }));
            }
        }
        Some(node)
    }
}
