//! Groups of state: the pages of convolution tails and recurrent states.
//!
//! A page holds the state after one token and is never written again: a step reads one and writes another, so a failed
//! step can be repeated, forks share pages, and every page can be kept as a snapshot at no cost. The table of a
//! sequence in such a group is, between steps, empty or the page of the state after its computed tokens. During a step
//! it is that page ([`PAGE_NONE`] at the start of the sequence), the page to be written, and perhaps a page for a
//! snapshot at the last page boundary within the chunk.
//!
//! Snapshots are cached at page boundaries: the last one of every chunk of a prompt, and one every [`SNAPSHOT_TOKENS`]
//! tokens of an output. Most of them are cheap to compute again and are evicted before all others. Those at the end of
//! a prompt, every [`LASTING_TOKENS`] tokens, and those that another request continued from last longer; the former two
//! are also written to disk. Rejected drafts return a sequence to the state before the step; the accepted ones are
//! computed again with the next tokens.

use ferrule_kernels::kv::{PAGE_TOKENS, PageId};

use super::{KvCacheManager, PAGE_NONE, PagePool, PageTables};

/// Pages that a sequence needs in a step: the state before it and the state after it.
pub(super) const PER_STEP: usize = 2;

/// Pages for each sequence in a pool that is not limited by memory, with room for snapshots.
pub(super) const PER_SEQUENCE: usize = 2 * PER_STEP;

/// Distance in tokens between the snapshots of an output.
const SNAPSHOT_TOKENS: usize = 256;

/// Distance in tokens between snapshots that are not evicted before others.
const LASTING_TOKENS: usize = 4096;

/// A state that is worth caching.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Snapshot {
    /// Place in the table.
    pub place: usize,
    /// Whether much would have to be computed again without it.
    pub is_lasting: bool,
}

/// Returns how many tokens of one sequence a pool of `pages` pages holds.
pub(super) fn capacity(pages: usize) -> usize {
    if pages < PER_STEP { 0 } else { usize::MAX }
}

/// Replaces a sequence's state by the one in `page`, which is cached or held.
pub(super) fn take(pool: &mut PagePool, tables: &mut PageTables, group: usize, page: PageId) {
    pool.hold(page);
    // Others may continue there too.
    pool.set_cheap(page, false);
    let own = std::mem::replace(&mut tables.tables[group], vec![page]);
    let skipped = std::mem::replace(&mut tables.out_of_window[group], 0);
    own.into_iter().skip(skipped).for_each(|page| pool.release(page));
}

/// Returns the state after the last full page of the first `computed` tokens, if it is worth caching; the first
/// `cached` pages are cached already.
pub(super) fn snapshot(cached: usize, computed: usize, prompt_len: usize) -> Option<Snapshot> {
    let full = computed / PAGE_TOKENS;
    let passes = |distance: usize| cached * PAGE_TOKENS / distance < full * PAGE_TOKENS / distance;
    let ends_prompt = (cached + 1..=full).contains(&(prompt_len / PAGE_TOKENS));
    let is_lasting = ends_prompt || passes(LASTING_TOKENS);
    if !computed.is_multiple_of(PAGE_TOKENS) {
        return Some(Snapshot { place: 1, is_lasting });
    }
    let is_chunk = full > cached + 1;
    (is_chunk || is_lasting || passes(SNAPSHOT_TOKENS)).then_some(Snapshot { place: 0, is_lasting })
}

impl KvCacheManager {
    /// Allocates the state that a step writes, as granted by [`KvCacheManager::allocatable_slots`].
    pub(super) fn allocate_state(&mut self, group: usize, tables: &mut PageTables) {
        if tables.tables[group].is_empty() {
            tables.tables[group].push(PAGE_NONE);
            tables.out_of_window[group] = 1;
        }
        let pool = &mut self.groups[group].pool;
        tables.tables[group].drain(1..).for_each(|page| pool.release(page));
        tables.tables[group].push(self.allocate(group));
    }

    /// Allocates the pages of the snapshots of a step that computes the tokens `from..end` and has its states, unless
    /// other sequences need them: `reserved` pages of each group must stay free.
    pub fn allocate_snapshots(&mut self, tables: &mut PageTables, from: usize, end: usize, reserved: &[usize]) {
        let boundary = end / PAGE_TOKENS * PAGE_TOKENS;
        if self.tree.is_none() || boundary <= from || boundary == end {
            return;
        }
        for (group, &reserved) in reserved.iter().enumerate() {
            if self.groups[group].is_state && self.groups[group].pool.free() > reserved {
                let page = self.allocate(group);
                tables.tables[group].push(page);
            }
        }
    }

    /// Keeps the states that a step has written. The step computed the tokens `from..end`, of which the first
    /// `computed` of the sequence are valid. Returns the number of tokens that are computed now: if the last ones are
    /// not valid, the states before the step are kept.
    pub fn keep_states(&mut self, tables: &mut PageTables, from: usize, end: usize, computed: usize) -> usize {
        let mut kept = computed;
        for (index, group) in self.groups.iter_mut().enumerate().filter(|(_, group)| group.is_state) {
            let (table, skipped) = (&mut tables.tables[index], &mut tables.out_of_window[index]);
            if computed == end {
                table.drain(..1).skip(*skipped).for_each(|page| group.pool.release(page));
                *skipped = 0;
            } else {
                table.drain(1..).for_each(|page| group.pool.release(page));
                kept = from;
            }
        }
        kept
    }

    /// Releases the snapshots of the latest step.
    pub(super) fn release_snapshots(&mut self, tables: &mut PageTables) {
        for (group, table) in self.groups.iter_mut().zip(&mut tables.tables).filter(|(group, _)| group.is_state) {
            table.drain(1.min(table.len())..).for_each(|page| group.pool.release(page));
        }
    }

    /// Returns tables that hold the states of a sequence after its computed tokens, so that it can return to them.
    pub fn hold_states(&mut self, tables: &PageTables) -> PageTables {
        let mut held = self.private_tables();
        for (index, group) in self.groups.iter_mut().enumerate().filter(|(_, group)| group.is_state) {
            // A cancelled step leaves pages behind the first one.
            held.tables[index].extend(tables.tables[index].iter().take(1).skip(tables.out_of_window[index]));
            held.tables[index].iter().for_each(|&page| group.pool.hold(page));
        }
        held
    }

    /// Returns a sequence to the states that `held` holds.
    pub fn return_to_states(&mut self, tables: &mut PageTables, held: &PageTables) {
        for (index, group) in self.groups.iter_mut().enumerate().filter(|(_, group)| group.is_state) {
            match held.tables[index].first() {
                Some(&page) => take(&mut group.pool, tables, index, page),
                None => {
                    let skipped = std::mem::take(&mut tables.out_of_window[index]);
                    tables.tables[index].drain(..).skip(skipped).for_each(|page| group.pool.release(page));
                }
            }
        }
    }

    /// Returns whether the model has groups of state.
    pub fn has_states(&self) -> bool {
        self.groups.iter().any(|group| group.is_state)
    }
}
