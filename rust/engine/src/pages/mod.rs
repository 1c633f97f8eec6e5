//! Who holds which page of the key-value cache.
//!
//! The model reads and writes pages; what is in which is decided here. Every [group of layers](KvGroup) has a
//! [`PagePool`] of its own and every sequence a table per group, which names the page of each `PAGE_TOKENS` positions.
//! A page may be held by several sequences (a shared prefix); then nobody writes to it: the one who would gets a copy
//! first, or if no page is free for one and nobody else holds it, what was kept there is forgotten. Groups with a
//! window give pages back as soon as no later row can see them.
//!
//! With a [`PrefixTree`] full pages are kept under their tokens after their last holder, until the room is needed, and
//! a sequence that begins with the same tokens takes them as they are: what they hold depends on nothing else. A
//! sequence holds the page of every node on its way in groups without a window, and gives its pages back the last one
//! first. So the page given back longest ago never has one behind it that is younger or in use. Below the tree there may
//! be a disk ([`disk`]), which outlives the process.

mod budget;
mod digest;
mod disk;
mod pool;
mod prefix;
mod record;
mod state;
mod tables;
mod tier;

pub use budget::{bytes_of_one, divide, tokens_of_one};
pub(crate) use disk::DiskCache;
pub use disk::{DiskCacheError, DiskStatistics};
pub use ferrule_kernels::kv::PAGE_NONE;
pub use pool::PagePool;
pub(crate) use prefix::{GroupPage, Namespace, NodeId, PageTokens};
pub use state::StateError;
pub(crate) use state::{decode_state, encode_state};
pub(crate) use tables::PageTables;
pub(crate) use tier::{FetchBudget, NewPages, PageMove, payload, payload_len};

use ferrule_kernels::kv::{PAGE_TOKENS, PageId};
use ferrule_model::KvGroup;

use digest::Digest;
use pool::Allocated;
use prefix::{ParentNode, PrefixTree};
use tier::Tier;

/// How the pages of one group are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct PageStatistics {
    /// Pages of the pool.
    pub total: usize,
    /// Pages that nobody holds.
    pub free: usize,
    /// Those of the free pages that are kept for requests that begin with the same tokens.
    pub cached: usize,
}

/// A page to be copied before the next forward pass, since its other holders must not see what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageCopy {
    pub group: usize,
    pub from: PageId,
    pub to: PageId,
}

/// The pools of all groups.
#[derive(Debug)]
pub(crate) struct Pages {
    groups: Vec<Group>,
    /// What is kept, if anything is.
    tree: Option<PrefixTree>,
    /// The disk below, if there is one.
    tier: Option<Tier>,
}

#[derive(Debug)]
struct Group {
    pool: PagePool,
    window: Option<usize>,
}

impl Group {
    /// The first page that the row at position `computed` sees.
    fn first_visible(&self, computed: usize) -> usize {
        self.window.map_or(0, |window| (computed + 1).saturating_sub(window) / PAGE_TOKENS)
    }

    /// Whether who writes to a page that is not its own alone gets a copy. Without a free page only what others hold is
    /// copied, once they give way; else the smallest pool that holds a sequence could be too small for it.
    fn is_copied(&self, page: PageId) -> bool {
        self.pool.holders(page) > 1 || self.pool.free() > 0
    }
}

/// Pages that cover `tokens` positions from the start of a page.
fn pages_for(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS)
}

/// Pages that `tokens` consecutive positions can touch, wherever they start.
fn pages_touched(tokens: usize) -> usize {
    pages_for(tokens.saturating_sub(1)).saturating_add(1)
}

/// Pages a sequence holds at the most while it is computed up to `tokens`, in chunks of `chunk`: all of them, or with a
/// window what the chunk and the rows before it can see.
fn max_pages_held(window: Option<usize>, tokens: usize, chunk: usize) -> usize {
    let all = pages_for(tokens);
    window.map_or(all, |window| all.min(pages_touched((window - 1).saturating_add(chunk))))
}

/// Tokens of one sequence that so many pages of a group hold.
fn capacity(window: Option<usize>, pages: usize) -> usize {
    match window {
        Some(window) if pages_touched(window) <= pages => usize::MAX,
        _ => pages.saturating_mul(PAGE_TOKENS),
    }
}

impl Pages {
    /// Pools of so many pages for the model's groups; with `keep` full pages outlive their holders.
    pub fn new(groups: &[KvGroup], pages: &[usize], keep: bool) -> Self {
        let group = |(group, &pages): (&KvGroup, &usize)| Group {
            pool: PagePool::new(pages),
            // A row always sees itself.
            window: group.window.map(|window| window.max(1)),
        };
        Self { groups: groups.iter().zip(pages).map(group).collect(), tree: keep.then(PrefixTree::default), tier: None }
    }

    /// Tables that hold nothing yet, of a sequence whose first `shareable` positions depend on its tokens alone.
    pub fn tables(&self, namespace: Namespace, shareable: usize) -> PageTables {
        let root = self.tier.as_ref().map(|tier| Digest::root(&tier.fingerprint, &namespace));
        PageTables::new(self.groups.len(), namespace, shareable, root)
    }

    /// Tables that hold nothing yet and share nothing.
    pub fn private_tables(&self) -> PageTables {
        self.tables(Namespace::default(), 0)
    }

    /// Tokens of one sequence that the pools hold when it has no neighbours. Endless for a window that fits.
    pub fn tokens_of_one_sequence(&self) -> usize {
        self.groups.iter().map(|group| capacity(group.window, group.pool.total())).min().unwrap_or(usize::MAX)
    }

    /// How many of the `wanted` tokens after the `computed` ones can get pages now.
    pub fn allocatable_slots(&self, tables: &PageTables, computed: usize, wanted: usize) -> usize {
        let fits = |(group, table): (&Group, &Vec<PageId>)| {
            let shared = shared_from(&group.pool, table, computed / PAGE_TOKENS);
            let copies = shared.filter(|&place| group.is_copied(table[place])).count();
            let Some(free) = group.pool.free().checked_sub(copies) else { return 0 };
            (table.len() + free).saturating_mul(PAGE_TOKENS) - computed
        };
        self.groups.iter().zip(tables.tables()).map(fits).min().unwrap_or(wanted).min(wanted)
    }

    /// Gives a sequence the pages to write `count` tokens after the `computed` ones, which [`Pages::allocatable_slots`] has granted.
    /// Pages that it shares with others are replaced; what must be copied is added to `moves`.
    pub fn allocate_slots(
        &mut self,
        tables: &mut PageTables,
        computed: usize,
        count: usize,
        moves: &mut Vec<PageMove>,
    ) {
        let needed = pages_for(computed + count);
        for index in 0..self.groups.len() {
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

    /// A page of a group, where one is known to be free. What was kept there is forgotten.
    fn allocate(&mut self, group: usize) -> PageId {
        let pool = &mut self.groups[group].pool;
        let Allocated { page, was_cached } = pool.allocate().expect("a page was granted that is not free");
        if was_cached {
            self.evict_page(group, page);
        }
        page
    }

    /// Forgets what was kept in a page.
    fn evict_page(&mut self, group: usize, page: PageId) {
        let Group { pool, window } = &mut self.groups[group];
        pool.uncache(page);
        if let Some(tree) = &mut self.tree {
            let gone = tree.remove_page((group, page), window.is_none());
            self.uncache(gone);
        }
    }

    fn uncache(&mut self, pages: Vec<GroupPage>) {
        for (group, page) in pages {
            self.groups[group].pool.uncache(page);
        }
    }

    /// Gives back the pages that no row from position `computed` on can see.
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

    /// Gives back the pages behind the `computed` tokens, whose drafts were not accepted.
    pub fn release_beyond(&mut self, tables: &mut PageTables, computed: usize) {
        let needed = pages_for(computed);
        for (group, table) in self.groups.iter_mut().zip(&mut tables.tables) {
            table.drain(needed.min(table.len())..).rev().for_each(|page| group.pool.release(page));
        }
    }

    /// Gives back all pages of a sequence, the last one first.
    pub fn release(&mut self, tables: &mut PageTables) {
        for ((group, table), out_of_window) in
            self.groups.iter_mut().zip(&mut tables.tables).zip(&mut tables.out_of_window)
        {
            table.drain(..).skip(*out_of_window).rev().for_each(|page| group.pool.release(page));
            *out_of_window = 0;
        }
        tables.reset();
    }

    /// Takes kept pages in the place of what a sequence would compute after its `computed` tokens, no further than
    /// `most`; says how many tokens are computed then.
    pub fn reuse(&mut self, tables: &mut PageTables, tokens: &[u32], computed: usize, limit: usize) -> usize {
        let Some(tree) = &self.tree else { return computed };
        if !tables.is_cached_to(computed) {
            return computed;
        }
        let first = tables.cached_pages();
        let mut nodes = Vec::new();
        // For each group, the page from which on none is missing; and with how many nodes all windows are whole.
        let mut whole_from = vec![0; self.groups.len()];
        let mut usable = 0;
        let mut place = tables.parent_node();
        for page_tokens in tables.shareable_pages(tokens, limit) {
            let Some(node) = tree.find(place, page_tokens) else { break };
            nodes.push(node);
            place = ParentNode::Node(node);
            let end = first + nodes.len();
            for (whole_from, &page) in whole_from.iter_mut().zip(tree.pages(node)) {
                if page == PAGE_NONE {
                    *whole_from = end;
                }
            }
            let seen = self.groups.iter().map(|group| group.first_visible(end * PAGE_TOKENS));
            if seen.zip(&whole_from).all(|(seen, &whole_from)| whole_from <= seen) {
                usable = nodes.len();
            }
        }
        nodes.truncate(usable);
        if nodes.is_empty() {
            return computed;
        }
        let end = first + usable;
        self.release_out_of_window(tables, end * PAGE_TOKENS);
        let tree = self.tree.as_ref().expect("it was there above");
        for (index, group) in self.groups.iter_mut().enumerate() {
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
                    // It had begun to compute this one itself.
                    Some(own) => group.pool.release(std::mem::replace(own, page)),
                    None => table.push(page),
                }
            }
        }
        let pages: Vec<&PageTokens> = tables.shareable_pages(tokens, end * PAGE_TOKENS).collect();
        nodes.into_iter().zip(pages).for_each(|(node, page_tokens)| tables.push_cached(node, page_tokens));
        end * PAGE_TOKENS
    }

    /// Keeps the full pages of a sequence's `computed` tokens under these tokens. Where they are kept already, it takes
    /// those and gives its own back. With a disk below, says which ones are to be [saved](Pages::write_to_disk).
    pub fn cache_full_pages(&mut self, tables: &mut PageTables, tokens: &[u32], computed: usize) -> Vec<NewPages> {
        let mut fresh = Vec::new();
        let Some(tree) = &mut self.tree else { return fresh };
        let first = tables.cached_pages();
        let pages: Vec<&PageTokens> = tables.shareable_pages(tokens, computed).collect();
        for (index, page_tokens) in (first..).zip(pages) {
            let place = tables.parent_node();
            let node = if let Some(node) = tree.find(place.clone(), page_tokens) {
                for (group, table) in tables.tables.iter_mut().enumerate() {
                    let pool = &mut self.groups[group].pool;
                    match (table[index], tree.pages(node)[group]) {
                        (own, kept) if own == kept || own == PAGE_NONE => {}
                        (own, PAGE_NONE) => {
                            tree.set_page(node, group, own);
                            pool.mark_cached(own);
                        }
                        (own, kept) => {
                            pool.hold(kept);
                            pool.release(own);
                            table[index] = kept;
                        }
                    }
                }
                node
            } else {
                let pages: Vec<PageId> = tables.tables.iter().map(|table| table[index]).collect();
                let Some(node) = tree.insert(place, page_tokens, &pages) else {
                    // What came before it has been forgotten.
                    tables.stop_sharing();
                    return fresh;
                };
                for (group, &page) in self.groups.iter_mut().zip(&pages).filter(|&(_, &page)| page != PAGE_NONE) {
                    group.pool.mark_cached(page);
                }
                // The first may have been forgotten while this one waited to be computed again.
                if tables.first_cached.is_none_or(|first| !tree.contains(first)) {
                    tables.first_cached = Some(node);
                }
                if let Some(parent) = tables.digest() {
                    fresh.push(NewPages { parent, digest: parent.child(page_tokens), tokens: *page_tokens, pages });
                }
                node
            };
            tables.push_cached(node, page_tokens);
        }
        fresh
    }

    /// Forgets what was kept of a sequence, and of all that went on from there.
    pub fn invalidate(&mut self, tables: &mut PageTables) {
        if let (Some(tree), Some(first)) = (&mut self.tree, tables.first_cached.take()) {
            let gone = tree.remove(first);
            self.uncache(gone);
        }
        self.delete_from_disk(tables);
    }

    /// Lets a sequence that holds nothing, or less, have the first `computed` tokens of another, whose tokens are the
    /// same so far. False if the other has given them back already.
    pub fn fork(&mut self, tables: &mut PageTables, donor: &PageTables, computed: usize) -> bool {
        let needed = pages_for(computed);
        let has_all = |(index, group): (usize, &Group)| {
            donor.out_of_window[index] <= group.first_visible(computed) && donor.tables[index].len() >= needed
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

    /// Tables of another sequence of the same tokens, which holds the same pages.
    pub fn share(&mut self, donor: &PageTables) -> PageTables {
        for ((group, table), &out_of_window) in self.groups.iter_mut().zip(&donor.tables).zip(&donor.out_of_window) {
            table[out_of_window..].iter().for_each(|&page| group.pool.hold(page));
        }
        donor.clone()
    }

    /// The least pages of a group that so many sequences need which share a prompt of `tokens`, and the pages that there
    /// are, where these are fewer.
    pub fn missing_pages(&self, sequences: usize, tokens: usize) -> Option<(usize, usize)> {
        let needed = |group: &Group| max_pages_held(group.window, tokens, 1).saturating_sub(1) + sequences;
        let lacking = self.groups.iter().map(|group| (needed(group), group.pool.total()));
        lacking.into_iter().find(|(needed, total)| needed > total)
    }

    /// Whether a sequence can be computed up to `tokens` in chunks of `chunk` with the pages that are free, when
    /// `reserved` says how many of each group others still need for their own prefill.
    pub fn can_allocate(&self, tables: &PageTables, tokens: usize, chunk: usize, reserved: &[usize]) -> bool {
        let mut needed = reserved.to_vec();
        self.add_reserved(tables, tokens, chunk, &mut needed);
        self.groups.iter().zip(needed).all(|(group, needed)| needed <= group.pool.free())
    }

    /// Adds to `reserved`, for each group, the pages that a sequence will still take on its way to `tokens`.
    pub fn add_reserved(&self, tables: &PageTables, tokens: usize, chunk: usize, reserved: &mut [usize]) {
        for (index, (group, reserved)) in self.groups.iter().zip(reserved).enumerate() {
            *reserved += max_pages_held(group.window, tokens, chunk).saturating_sub(tables.held(index));
        }
    }

    /// How many groups there are.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// How the pages of each group are used.
    pub fn statistics(&self) -> Vec<PageStatistics> {
        let of = |Group { pool, .. }: &Group| PageStatistics {
            total: pool.total(),
            free: pool.free(),
            cached: pool.evictable(),
        };
        self.groups.iter().map(of).collect()
    }

    /// Checks the books against the tables of all holders: every page has as many holders as tables name it, and those
    /// that are kept are those in the tree.
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
                    "group {index}: page {page} has {counted} holders, {} tables name it",
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
        if kept.collect::<Vec<_>>() == in_tree { Ok(()) } else { Err("pages are kept that nobody can find".into()) }
    }
}

/// The places in a table, from `first` on, of pages that must not be written to.
fn shared_from<'a>(pool: &'a PagePool, table: &'a [PageId], first: usize) -> impl Iterator<Item = usize> + 'a {
    (first..table.len()).filter(|&place| table[place] != PAGE_NONE && !pool.is_writable(table[place]))
}

#[cfg(test)]
mod tests;
