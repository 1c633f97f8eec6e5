//! Page pool of one group of layers: free pages, reference counts, and cached pages.
//!
//! A page whose contents may be reused is *cached*: when its last holder releases it, it becomes free but is evicted
//! only if no page without contents is left, least recently released first. Until then it can be held again. Pages that
//! are cheap to compute again can be evicted before all others.

use std::collections::BTreeMap;

use ferrule_kernels::kv::PageId;

/// Reference-counted pages of one group of layers.
///
/// # Examples
/// ```
/// use ferrule_engine::pages::{Allocated, PagePool};
///
/// let mut pool = PagePool::new(2);
/// let Allocated { page, .. } = pool.allocate().unwrap();
/// pool.mark_cached(page);
/// pool.release(page);
/// assert_eq!((pool.free(), pool.evictable()), (2, 1));
///
/// // A later request with the same tokens takes the cached page.
/// pool.hold(page);
/// assert_eq!((pool.free(), pool.holders(page)), (1, 1));
/// ```
#[derive(Debug)]
pub struct PagePool {
    /// Free pages without contents, used last in, first out, so that few pages are touched and stay warm.
    empty: Vec<PageId>,
    /// Free cached pages in the order of their eviction.
    evictable: BTreeMap<EvictionRank, PageId>,
    pages: Vec<Page>,
    /// Number of releases so far, as a clock.
    time: u64,
}

/// Rank of a free cached page: whether it is kept longer than pages that are cheap to compute again, and the time of its
/// release.
type EvictionRank = (bool, u64);

#[derive(Debug, Clone, Copy, Default)]
struct Page {
    holders: u32,
    is_cached: bool,
    /// Whether the page is evicted before others.
    is_cheap: bool,
    /// Time of release.
    since: u64,
}

impl Page {
    fn eviction_rank(self) -> EvictionRank {
        (!self.is_cheap, self.since)
    }
}

/// A newly allocated page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocated {
    /// The page.
    pub page: PageId,
    /// Whether a cached page was evicted; its entry in the prefix cache must be removed.
    pub was_cached: bool,
}

impl PagePool {
    /// Creates a pool of free pages.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        let last = PageId::try_from(pages).expect("the engine's configuration is checked for this");
        Self {
            empty: (0..last).rev().collect(),
            evictable: BTreeMap::new(),
            pages: vec![Page::default(); pages],
            time: 0,
        }
    }

    /// Returns the number of pages.
    #[must_use]
    pub fn total(&self) -> usize {
        self.pages.len()
    }

    /// Returns the number of free pages, including cached ones.
    #[must_use]
    pub fn free(&self) -> usize {
        self.empty.len() + self.evictable.len()
    }

    /// Returns the number of free pages that are cached.
    #[must_use]
    pub fn evictable(&self) -> usize {
        self.evictable.len()
    }

    /// Returns the number of holders of a page.
    #[must_use]
    pub fn holders(&self, page: PageId) -> u32 {
        self.pages[page as usize].holders
    }

    /// Returns whether a page is cached.
    #[must_use]
    pub fn is_cached(&self, page: PageId) -> bool {
        self.pages[page as usize].is_cached
    }

    /// Returns whether the holder of a page may write to it: it has one holder and is not cached.
    #[must_use]
    pub fn is_writable(&self, page: PageId) -> bool {
        let Page { holders, is_cached, .. } = self.pages[page as usize];
        holders == 1 && !is_cached
    }

    /// Allocates a free page with one holder; `None` if no page is free.
    pub fn allocate(&mut self) -> Option<Allocated> {
        let (page, was_cached) = match self.empty.pop() {
            Some(page) => (page, false),
            None => (self.evictable.pop_first()?.1, true),
        };
        self.pages[page as usize] = Page { holders: 1, ..Page::default() };
        Some(Allocated { page, was_cached })
    }

    /// Adds a holder to a page that is held or cached.
    ///
    /// # Panics
    /// If the page is free and not cached.
    pub fn hold(&mut self, page: PageId) {
        let page_state = &mut self.pages[page as usize];
        if page_state.holders == 0 {
            assert!(page_state.is_cached, "page {page} is free and cannot be held");
            self.evictable.remove(&page_state.eviction_rank());
        }
        page_state.holders += 1;
    }

    /// Removes a holder from a page, which becomes free without holders.
    ///
    /// # Panics
    /// If the page is already free.
    pub fn release(&mut self, page: PageId) {
        let page_state = &mut self.pages[page as usize];
        let left = page_state.holders.checked_sub(1);
        page_state.holders = left.unwrap_or_else(|| panic!("page {page} is released more often than held"));
        if page_state.holders > 0 {
            return;
        }
        if page_state.is_cached {
            self.time += 1;
            page_state.since = self.time;
            self.evictable.insert(page_state.eviction_rank(), page);
        } else {
            self.empty.push(page);
        }
    }

    /// Marks a held page as cached: its contents outlive its last holder.
    ///
    /// # Panics
    /// If the page has no holder.
    pub fn mark_cached(&mut self, page: PageId) {
        let Page { holders, is_cached, .. } = &mut self.pages[page as usize];
        assert!(*holders > 0, "page {page} is free and has no contents to cache");
        *is_cached = true;
    }

    /// Sets whether a held page is cheap to compute again, so that it is evicted before pages that are not.
    ///
    /// # Panics
    /// If the page has no holder.
    pub fn set_cheap(&mut self, page: PageId, is_cheap: bool) {
        assert!(self.holders(page) > 0, "page {page} is free and has its place in the order of eviction");
        self.pages[page as usize].is_cheap = is_cheap;
    }

    /// Removes the cached mark of a page.
    pub fn uncache(&mut self, page: PageId) {
        let page_state = &mut self.pages[page as usize];
        if std::mem::take(&mut page_state.is_cached) && page_state.holders == 0 {
            let rank = page_state.eviction_rank();
            self.evictable.remove(&rank);
            self.empty.push(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compares with a simple model: no page is allocated twice or lost, and cached pages are evicted last, by age.
        #[test]
        fn pages_are_conserved(size in 0_usize..12, steps in prop::collection::vec((0_u8..6, 0_usize..12), 0..300)) {
            let mut pool = PagePool::new(size);
            let mut held: BTreeMap<PageId, u32> = BTreeMap::new();
            let mut cached: BTreeSet<PageId> = BTreeSet::new();
            let mut evictable: Vec<PageId> = Vec::new();
            for (action, which) in steps {
                let chosen = held.keys().nth(which % held.len().max(1)).copied();
                match (action, chosen) {
                    (0, _) => match pool.allocate() {
                        Some(Allocated { page, was_cached }) => {
                            prop_assert!((page as usize) < size && held.insert(page, 1).is_none());
                            prop_assert_eq!(was_cached, held.len() + evictable.len() > size);
                            if was_cached {
                                prop_assert_eq!(page, evictable.remove(0));
                                cached.remove(&page);
                            }
                        }
                        None => prop_assert_eq!(held.len(), size),
                    },
                    (1, Some(page)) => {
                        pool.hold(page);
                        *held.get_mut(&page).unwrap() += 1;
                    }
                    (2, Some(page)) => {
                        pool.mark_cached(page);
                        cached.insert(page);
                    }
                    (3, _) if !evictable.is_empty() => {
                        let page = evictable.remove(which % evictable.len());
                        pool.hold(page);
                        held.insert(page, 1);
                    }
                    (4, _) if which < size => {
                        let page = which as PageId;
                        pool.uncache(page);
                        cached.remove(&page);
                        evictable.retain(|&other| other != page);
                    }
                    (_, Some(page)) => {
                        pool.release(page);
                        let count = held.get_mut(&page).unwrap();
                        *count -= 1;
                        if *count == 0 {
                            held.remove(&page);
                            if cached.contains(&page) {
                                evictable.push(page);
                            }
                        }
                    }
                    (_, None) => {}
                }
                prop_assert_eq!(pool.free() + held.len(), pool.total());
                prop_assert_eq!(pool.evictable(), evictable.len());
                let is_writable = |(page, &count): (&PageId, &u32)| count == 1 && !cached.contains(page);
                prop_assert!(held.iter().all(|one| pool.is_writable(*one.0) == is_writable(one)));
                prop_assert!((0..size as PageId).all(|page| pool.is_cached(page) == cached.contains(&page)));
            }
        }
    }

    #[test]
    fn cheap_pages_are_evicted_before_all_others() {
        let mut pool = PagePool::new(3);
        let pages: Vec<PageId> = (0..3).map(|_| pool.allocate().unwrap().page).collect();
        for &page in &pages {
            pool.mark_cached(page);
            pool.set_cheap(page, page != pages[0]);
            pool.release(page);
        }
        // The page is no longer cheap.
        pool.hold(pages[1]);
        pool.set_cheap(pages[1], false);
        pool.release(pages[1]);
        let evicted: Vec<PageId> = (0..3).map(|_| pool.allocate().unwrap().page).collect();
        assert_eq!(evicted, [pages[2], pages[0], pages[1]]);
    }

    #[test]
    #[should_panic(expected = "page 0 is released more often than held")]
    fn releasing_a_free_page_panics() {
        let mut pool = PagePool::new(1);
        let page = pool.allocate().unwrap().page;
        pool.release(page);
        pool.release(page);
    }
}
