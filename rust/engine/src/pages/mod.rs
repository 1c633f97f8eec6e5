//! KV cache management: which sequence holds which page.
//!
//! The model reads and writes pages; this module allocates them. Every [group of layers](KvGroup) has its own
//! [`PagePool`], and every sequence a page table per group with the page of each `PAGE_TOKENS` positions. Several
//! sequences may hold a page (shared prefix). Such a page is copied on write; if no page is free for the copy and no
//! other sequence holds it, it is removed from the prefix cache and written in place. Groups with an attention window
//! release pages as soon as no later row can see them.
//!
//! With a `PrefixTree`, full pages stay cached after their last holder, indexed by their tokens, and sequences that
//! start with the same tokens reuse them. Cached pages are evicted least recently released first. In groups without a
//! window a sequence holds the page of every node on its path and releases the last one first, so a page is never
//! evicted before the pages that follow it. Below the tree there may be a disk tier (`disk`) that outlives the
//! process.
//!
//! A group of state has a page for a point in a sequence instead of a page for `PAGE_TOKENS` positions (`states`).

mod budget;
mod digest;
mod disk;
mod fetch;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod keys;
mod pool;
mod prefix;
mod record;
mod state;
mod states;
mod tables;
mod tier;

pub use budget::{bytes_of_one, divide, tokens_of_one};
pub(crate) use disk::DiskCache;
pub use disk::{DiskCacheError, DiskStatistics};
pub use ferrule_kernels::kv::PAGE_NONE;
pub(crate) use fetch::{FetchBudget, SavedPage};
pub(crate) use keys::PageKeys;
pub use pool::{Allocated, PagePool};
pub(crate) use prefix::{GroupPage, Namespace, NodeId, PageTokens};
pub use state::StateError;
pub(crate) use state::{decode_state, encode_state};
pub(crate) use tables::PageTables;
pub(crate) use tier::{Content, NewPages, PageMove, payload, payload_len};

use ferrule_kernels::kv::{PAGE_TOKENS, PageId};
use ferrule_model::KvGroup;

use digest::Digest;
use prefix::{ParentNode, PrefixTree};
use tier::DiskTier;

/// Page usage of one group of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct PageStatistics {
    /// Total number of pages.
    pub total: usize,
    /// Free pages, including cached ones.
    pub free: usize,
    /// Free pages that are cached for later requests.
    pub cached: usize,
}

/// A page copy to make before the next forward pass (copy on write).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageCopy {
    pub group: usize,
    pub from: PageId,
    pub to: PageId,
}

/// Manages the KV cache: page pools of all groups, the prefix cache and the disk tier.
#[derive(Debug)]
pub(crate) struct KvCacheManager {
    groups: Vec<Group>,
    /// Index of cached pages; `None` without prefix caching.
    tree: Option<PrefixTree>,
    /// Disk tier, if configured.
    tier: Option<DiskTier>,
}

#[derive(Debug)]
struct Group {
    pool: PagePool,
    window: Option<usize>,
    is_state: bool,
}

impl Group {
    /// Returns the first page that the row at position `computed` attends to.
    fn first_visible(&self, computed: usize) -> usize {
        self.window.map_or(0, |window| (computed + 1).saturating_sub(window) / PAGE_TOKENS)
    }

    /// Returns whether a write to a shared page makes a copy. Without a free page, only pages with other holders are
    /// copied (once those are preempted); otherwise the smallest pool that holds a sequence would be too small for it.
    fn is_copied(&self, page: PageId) -> bool {
        self.pool.holders(page) > 1 || self.pool.free() > 0
    }
}

/// Returns the pages that cover `tokens` positions from the start of a page.
fn pages_for(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS)
}

/// Returns the most pages that `tokens` consecutive positions can touch.
fn pages_touched(tokens: usize) -> usize {
    pages_for(tokens.saturating_sub(1)).saturating_add(1)
}

/// Returns the maximum number of pages that a sequence holds while it is computed up to `tokens` in chunks of `chunk`:
/// all of them, or with a window those that the chunk's rows attend to.
fn max_pages_held(window: Option<usize>, tokens: usize, chunk: usize) -> usize {
    let all = pages_for(tokens);
    window.map_or(all, |window| all.min(pages_touched((window - 1).saturating_add(chunk))))
}

/// Returns how many tokens of one sequence `pages` pages of a group hold.
fn capacity(window: Option<usize>, pages: usize) -> usize {
    match window {
        Some(window) if pages_touched(window) <= pages => usize::MAX,
        _ => pages.saturating_mul(PAGE_TOKENS),
    }
}

impl KvCacheManager {
    /// Creates pools of the given numbers of pages; with `prefix_caching` full pages outlive their holders.
    pub fn new(groups: &[KvGroup], pages: &[usize], prefix_caching: bool) -> Self {
        let group = |(group, &pages): (&KvGroup, &usize)| Group {
            pool: PagePool::new(pages),
            // A row always attends to itself.
            window: group.window().map(|window| window.max(1)),
            is_state: group.is_state(),
        };
        Self {
            groups: groups.iter().zip(pages).map(group).collect(),
            tree: prefix_caching.then(PrefixTree::default),
            tier: None,
        }
    }

    /// Returns empty tables of a sequence whose first `shareable` positions depend on its tokens alone.
    pub fn tables(&self, namespace: Namespace, shareable: usize) -> PageTables {
        let root = self.tier.as_ref().map(|tier| Digest::root(&tier.fingerprint, &namespace));
        PageTables::new(self.groups.len(), namespace, shareable, root)
    }

    /// Returns empty tables that share nothing.
    pub fn private_tables(&self) -> PageTables {
        self.tables(Namespace::default(), 0)
    }

    /// Returns how many tokens of a single sequence the pools hold; unlimited if all windows fit.
    pub fn tokens_of_one_sequence(&self) -> usize {
        let fits = |group: &Group| match group.is_state {
            true => states::capacity(group.pool.total()),
            false => capacity(group.window, group.pool.total()),
        };
        self.groups.iter().map(fits).min().unwrap_or(usize::MAX)
    }

    /// Returns how many of the `wanted` tokens after the first `computed` ones can get slots now.
    pub fn allocatable_slots(&self, tables: &PageTables, computed: usize, wanted: usize) -> usize {
        self.allocatable_slots_beside(&vec![0; self.groups.len()], tables, computed, wanted)
    }

    /// Returns how many of the `wanted` tokens after the first `computed` ones can get slots now, if new pages leave
    /// `reserved` pages of each group free.
    pub fn allocatable_slots_beside(
        &self,
        reserved: &[usize],
        tables: &PageTables,
        computed: usize,
        wanted: usize,
    ) -> usize {
        let fits = |((group, table), &reserved): ((&Group, &Vec<PageId>), &usize)| {
            let free = group.pool.free().saturating_sub(reserved);
            if group.is_state {
                return if table.len() > 1 || free > 0 { usize::MAX } else { 0 };
            }
            let shared = shared_from(&group.pool, table, computed / PAGE_TOKENS);
            let copies = shared.filter(|&place| group.is_copied(table[place])).count();
            let Some(free) = free.checked_sub(copies) else { return 0 };
            (table.len() + free).saturating_mul(PAGE_TOKENS) - computed
        };
        self.groups.iter().zip(tables.tables()).zip(reserved).map(fits).min().unwrap_or(wanted).min(wanted)
    }

    /// Allocates slots for `count` tokens after the first `computed` ones, as granted by
    /// [`KvCacheManager::allocatable_slots`]. Shared pages are replaced, and their copies added to `moves`.
    pub fn allocate_slots(
        &mut self,
        tables: &mut PageTables,
        computed: usize,
        count: usize,
        moves: &mut Vec<PageMove>,
    ) {
        let needed = pages_for(computed + count);
        for index in 0..self.groups.len() {
            if self.groups[index].is_state {
                self.allocate_state(index, tables);
                continue;
            }
            let table = &mut tables.tables[index];
            let shared: Vec<usize> = shared_from(&self.groups[index].pool, table, computed / PAGE_TOKENS).collect();
            for place in shared {
                if !self.groups[index].is_copied(table[place]) {
                    self.evict_page(index, table[place]);
                    continue;
                }
                let (from, to) = (table[place], self.allocate(index));
                moves.push(PageMove::Copy(PageCopy { group: index, from, to }));
                self.groups[index].pool.release(from);
                table[place] = to;
            }
            while table.len() < needed {
                table.push(self.allocate(index));
            }
        }
    }

    /// Allocates a page of a group that has a free one, evicting a cached page if needed.
    fn allocate(&mut self, group: usize) -> PageId {
        let pool = &mut self.groups[group].pool;
        let Allocated { page, was_cached } = pool.allocate().expect("the caller checked that a page is free");
        if was_cached {
            self.evict_page(group, page);
        }
        page
    }

    /// Removes a page from the prefix cache, with the pages that follow it in a group without window.
    fn evict_page(&mut self, group: usize, page: PageId) {
        let Group { pool, window, is_state } = &mut self.groups[group];
        pool.uncache(page);
        if let Some(tree) = &mut self.tree {
            let evicted = tree.remove_page((group, page), window.is_none() && !*is_state);
            self.uncache_all(evicted);
        }
    }

    fn uncache_all(&mut self, pages: Vec<GroupPage>) {
        for (group, page) in pages {
            self.groups[group].pool.uncache(page);
        }
    }

    /// Releases the pages that no row from position `computed` on attends to.
    pub fn release_out_of_window(&mut self, tables: &mut PageTables, computed: usize) {
        for ((group, table), out_of_window) in
            self.groups.iter_mut().zip(&mut tables.tables).zip(&mut tables.out_of_window)
        {
            for entry in table.iter_mut().take(group.first_visible(computed)).skip(*out_of_window) {
                group.pool.release(std::mem::replace(entry, PAGE_NONE));
                *out_of_window += 1;
            }
        }
    }

    /// Releases the pages behind the first `computed` tokens, which held rejected drafts.
    pub fn release_beyond(&mut self, tables: &mut PageTables, computed: usize) {
        let needed = pages_for(computed);
        for (group, table) in self.groups.iter_mut().zip(&mut tables.tables).filter(|(group, _)| !group.is_state) {
            table.drain(needed.min(table.len())..).rev().for_each(|page| group.pool.release(page));
        }
    }

    /// Releases all pages of a sequence, last page first.
    pub fn release(&mut self, tables: &mut PageTables) {
        for ((group, table), out_of_window) in
            self.groups.iter_mut().zip(&mut tables.tables).zip(&mut tables.out_of_window)
        {
            table.drain(..).skip(*out_of_window).rev().for_each(|page| group.pool.release(page));
            *out_of_window = 0;
        }
        if let (Some(tree), ParentNode::Node(last)) = (&mut self.tree, tables.parent_node()) {
            // Without groups of pages, the nodes behind the last snapshot are empty.
            tree.prune(last);
        }
        tables.reset();
    }

    /// Takes cached pages for the tokens after the first `computed` ones, up to position `limit`. Returns the number of
    /// tokens computed then.
    pub fn reuse(&mut self, tables: &mut PageTables, tokens: &[u32], computed: usize, limit: usize) -> usize {
        let Some(tree) = &self.tree else { return computed };
        if !tables.is_cached_to(computed) {
            return computed;
        }
        let first = tables.cached_pages();
        let mut nodes = Vec::new();
        // `whole_from`: per group, the page from which on no page is missing. `usable`: the number of nodes at which
        // all windows are complete.
        let mut whole_from = vec![0; self.groups.len()];
        let mut usable = 0;
        let mut parent = tables.parent_node();
        for page_tokens in tables.shareable_pages(tokens, limit) {
            let Some(node) = tree.find(parent, page_tokens) else { break };
            nodes.push(node);
            parent = ParentNode::Node(node);
            let end = first + nodes.len();
            for (whole_from, &page) in whole_from.iter_mut().zip(tree.pages(node)) {
                if page == PAGE_NONE {
                    *whole_from = end;
                }
            }
            let is_whole = |(group, &whole_from): (&Group, &usize)| match group.is_state {
                true => whole_from < end,
                false => whole_from <= group.first_visible(end * PAGE_TOKENS),
            };
            if self.groups.iter().zip(&whole_from).all(is_whole) {
                usable = nodes.len();
            }
        }
        nodes.truncate(usable);
        if nodes.is_empty() {
            return computed;
        }
        let end = first + usable;
        self.release_out_of_window(tables, end * PAGE_TOKENS);
        let tree = self.tree.as_ref().expect("the tree was checked above");
        for (index, group) in self.groups.iter_mut().enumerate() {
            if let (true, Some(&last)) = (group.is_state, nodes.last()) {
                states::take(&mut group.pool, tables, index, tree.pages(last)[index]);
                continue;
            }
            let seen = group.first_visible(end * PAGE_TOKENS);
            let (table, out_of_window) = (&mut tables.tables[index], &mut tables.out_of_window[index]);
            while table.len() < seen {
                table.push(PAGE_NONE);
                *out_of_window += 1;
            }
            for (place, &node) in (first..end).zip(&nodes).filter(|&(place, _)| place >= seen) {
                let page = tree.pages(node)[index];
                group.pool.hold(page);
                match table.get_mut(place) {
                    // The sequence had started to compute this page.
                    Some(own) => group.pool.release(std::mem::replace(own, page)),
                    None => table.push(page),
                }
            }
        }
        let pages: Vec<&PageTokens> = tables.shareable_pages(tokens, end * PAGE_TOKENS).collect();
        nodes.into_iter().zip(pages).for_each(|(node, page_tokens)| tables.push_cached(node, page_tokens));
        end * PAGE_TOKENS
    }

    /// Caches the full pages of a sequence's first `computed` tokens, of which `prompt_len` are the prompt. Where the
    /// same page is cached already, the sequence takes it and releases its own. With a disk tier, returns the pages to
    /// be [written](KvCacheManager::write_to_disk).
    pub fn cache_full_pages(
        &mut self,
        tables: &mut PageTables,
        tokens: &[u32],
        prompt_len: usize,
        computed: usize,
    ) -> Vec<NewPages> {
        let new_pages = self.cache_pages(tables, tokens, prompt_len, computed);
        self.release_snapshots(tables);
        new_pages
    }

    fn cache_pages(
        &mut self,
        tables: &mut PageTables,
        tokens: &[u32],
        prompt_len: usize,
        computed: usize,
    ) -> Vec<NewPages> {
        let mut new_pages = Vec::new();
        let Some(tree) = &mut self.tree else { return new_pages };
        let first = tables.cached_pages();
        let pages: Vec<&PageTokens> = tables.shareable_pages(tokens, computed).collect();
        let snapshot = states::snapshot(first, computed, prompt_len);
        let is_lasting = snapshot.is_some_and(|snapshot| snapshot.is_lasting);
        let are_states: Vec<bool> = self.groups.iter().map(|group| group.is_state).collect();
        // Place in a group's table of the page for the node of page `index`, if it has one.
        let place = |group: usize, table: &[PageId], index: usize| match are_states[group] {
            true => snapshot
                .filter(|snapshot| index + 1 == computed / PAGE_TOKENS && snapshot.place < table.len())
                .map(|snapshot| snapshot.place),
            false => Some(index),
        };
        for (index, page_tokens) in (first..).zip(pages) {
            let parent = tables.parent_node();
            let mut is_written = false;
            let node = if let Some(node) = tree.find(parent.clone(), page_tokens) {
                for (group, table) in tables.tables.iter_mut().enumerate() {
                    let pool = &mut self.groups[group].pool;
                    let Some(place) = place(group, table, index) else { continue };
                    match (table[place], tree.pages(node)[group]) {
                        (own, kept) if own == kept || own == PAGE_NONE => {}
                        (own, PAGE_NONE) => {
                            tree.set_page(node, group, own);
                            pool.mark_cached(own);
                            pool.set_cheap(own, are_states[group] && !is_lasting);
                            is_written |= are_states[group];
                        }
                        (own, kept) => {
                            pool.hold(kept);
                            pool.release(own);
                            table[place] = kept;
                            if are_states[group] && is_lasting {
                                pool.set_cheap(kept, false);
                                is_written = true;
                            }
                        }
                    }
                }
                node
            } else {
                let tables_of_groups = tables.tables.iter().enumerate();
                let pages = tables_of_groups
                    .map(|(group, table)| place(group, table, index).map_or(PAGE_NONE, |place| table[place]));
                let pages: Vec<PageId> = pages.collect();
                let Some(node) = tree.insert(parent, page_tokens, &pages) else {
                    // The parent page has been evicted.
                    tables.stop_sharing();
                    return new_pages;
                };
                for (group, &page) in self.groups.iter_mut().zip(&pages).filter(|&(_, &page)| page != PAGE_NONE) {
                    group.pool.mark_cached(page);
                    group.pool.set_cheap(page, group.is_state && !is_lasting);
                }
                // The first node may have been evicted while this sequence waited after a preemption.
                if tables.first_cached.is_none_or(|first| !tree.contains(first)) {
                    tables.first_cached = Some(node);
                }
                is_written = true;
                node
            };
            if let (true, Some(parent)) = (is_written, tables.digest()) {
                let mut pages = tree.pages(node).to_vec();
                // Snapshots that are cheap to compute again are not worth their room on disk.
                pages.iter_mut().zip(&are_states).for_each(|(page, is_state)| {
                    if *is_state && !is_lasting {
                        *page = PAGE_NONE;
                    }
                });
                new_pages.push(NewPages { parent, digest: parent.child(page_tokens), tokens: *page_tokens, pages });
            }
            tables.push_cached(node, page_tokens);
        }
        new_pages
    }

    /// Removes a sequence's pages, and all cached pages that follow them, from the prefix cache and the disk tier.
    pub fn invalidate(&mut self, tables: &mut PageTables) {
        if let (Some(tree), Some(first)) = (&mut self.tree, tables.first_cached.take()) {
            let evicted = tree.remove(first);
            self.uncache_all(evicted);
        }
        self.delete_from_disk(tables);
    }

    /// Gives a sequence the pages of another sequence's first `computed` tokens, which must be the same. Returns false
    /// if the other has released some of them.
    pub fn fork(&mut self, tables: &mut PageTables, donor: &PageTables, computed: usize) -> bool {
        let needed = pages_for(computed);
        // A state is that of one point, and the other sequence has gone on.
        let has_all = |(index, group): (usize, &Group)| {
            !group.is_state
                && donor.out_of_window[index] <= group.first_visible(computed)
                && donor.tables[index].len() >= needed
        };
        if !self.groups.iter().enumerate().all(has_all) {
            return false;
        }
        for (index, group) in self.groups.iter_mut().enumerate() {
            let seen = group.first_visible(computed).min(needed);
            let taken = &donor.tables[index][seen..needed];
            taken.iter().for_each(|&page| group.pool.hold(page));
            let table = std::iter::repeat_n(PAGE_NONE, seen).chain(taken.iter().copied()).collect();
            let own = std::mem::replace(&mut tables.tables[index], table);
            let out_of_window = std::mem::replace(&mut tables.out_of_window[index], seen);
            own.into_iter().skip(out_of_window).for_each(|page| group.pool.release(page));
        }
        true
    }

    /// Returns tables of a forked sequence that holds the same pages.
    pub fn share(&mut self, donor: &PageTables) -> PageTables {
        for ((group, table), &out_of_window) in self.groups.iter_mut().zip(&donor.tables).zip(&donor.out_of_window) {
            table[out_of_window..].iter().for_each(|&page| group.pool.hold(page));
        }
        donor.clone()
    }

    /// Returns the pages needed and available in a group that cannot hold `sequences` sequences with a common prompt of
    /// `tokens`; `None` if all groups can.
    pub fn missing_pages(&self, sequences: usize, tokens: usize) -> Option<(usize, usize)> {
        let needed = |group: &Group| match group.is_state {
            true => states::PER_STEP * sequences,
            false => max_pages_held(group.window, tokens, 1).saturating_sub(1) + sequences,
        };
        let demands = self.groups.iter().map(|group| (needed(group), group.pool.total()));
        demands.into_iter().find(|(needed, total)| needed > total)
    }

    /// Returns whether the free pages suffice to compute a sequence up to `tokens` in chunks of `chunk`, when others need
    /// `reserved` pages per group.
    pub fn can_allocate(&self, tables: &PageTables, tokens: usize, chunk: usize, reserved: &[usize]) -> bool {
        let mut needed = reserved.to_vec();
        self.add_reserved(tables, tokens, chunk, &mut needed);
        self.groups.iter().zip(needed).all(|(group, needed)| needed <= group.pool.free())
    }

    /// Adds to `reserved`, per group, the pages that a sequence still needs up to `tokens`, or the states that it still
    /// needs for a step.
    pub fn add_reserved(&self, tables: &PageTables, tokens: usize, chunk: usize, reserved: &mut [usize]) {
        for (index, (group, reserved)) in self.groups.iter().zip(reserved).enumerate() {
            let most = if group.is_state { states::PER_STEP } else { max_pages_held(group.window, tokens, chunk) };
            *reserved += most.saturating_sub(tables.held(index));
        }
    }

    /// Returns the number of groups.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Returns the page usage of each group.
    pub fn statistics(&self) -> Vec<PageStatistics> {
        let of = |Group { pool, .. }: &Group| PageStatistics {
            total: pool.total(),
            free: pool.free(),
            cached: pool.evictable(),
        };
        self.groups.iter().map(of).collect()
    }

    /// Checks the pools against the tables of all holders: reference counts match, and exactly the pages in the tree
    /// are cached.
    pub fn audit<'a>(&self, holders: impl Iterator<Item = &'a PageTables> + Clone) -> Result<(), String> {
        for (index, Group { pool, .. }) in self.groups.iter().enumerate() {
            let mut named = vec![0; pool.total()];
            for tables in holders.clone() {
                for &page in tables.tables[index].iter().skip(tables.out_of_window[index]) {
                    named[page as usize] += 1;
                }
            }
            if let Some(page) = (0..pool.total()).find(|&page| pool.holders(page as PageId) != named[page]) {
                let counted = pool.holders(page as PageId);
                return Err(format!(
                    "group {index}: page {page} has {counted} holders, but {} tables contain it",
                    named[page]
                ));
            }
            let held = named.iter().filter(|&&holders| holders > 0).count();
            if pool.free() + held != pool.total() {
                return Err(format!("group {index}: {} pages free, {held} held of {}", pool.free(), pool.total()));
            }
        }
        let mut in_tree: Vec<GroupPage> = self.tree.iter().flat_map(PrefixTree::all_pages).collect();
        in_tree.sort_unstable();
        let pages = self.groups.iter().enumerate();
        let kept = pages.flat_map(|(index, Group { pool, .. })| {
            let kept = (0..pool.total() as PageId).filter(|&page| pool.is_cached(page));
            kept.map(move |page| (index, page))
        });
        if kept.collect::<Vec<_>>() == in_tree {
            Ok(())
        } else {
            Err("the cached pages differ from the pages in the prefix tree".into())
        }
    }
}

/// Returns the indices in a table, from `first` on, of pages that must not be written to.
fn shared_from<'a>(pool: &'a PagePool, table: &'a [PageId], first: usize) -> impl Iterator<Item = usize> + 'a {
    (first..table.len()).filter(|&place| table[place] != PAGE_NONE && !pool.is_writable(table[place]))
}

#[cfg(test)]
mod tests;
