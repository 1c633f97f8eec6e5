//! The pages of one group: which are free, how many hold each of the others, and which are worth keeping.
//!
//! A page whose contents may be of use again is *cached*: given back by its last holder it is free, but handed out only
//! when no page without contents is left, the one given back longest ago first. Until then it can be held again as it
//! is.

use std::collections::BTreeMap;

use ferrule_kernels::kv::PageId;

/// Pages handed out one by one and counted by holder.
#[derive(Debug)]
pub struct PagePool {
    /// Free pages without contents; the last is handed out next, so that pages in use stay few and warm.
    empty: Vec<PageId>,
    /// Free pages with contents, by the time at which they were given back.
    evictable: BTreeMap<u64, PageId>,
    pages: Vec<Page>,
    /// Pages given back so far.
    time: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Page {
    holders: u32,
    is_cached: bool,
    /// When it was given back; its key among the evictable ones.
    since: u64,
}

/// A page for a new holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocated {
    /// The page.
    pub page: PageId,
    /// Whether it was cached for its contents, which nobody must look for any more.
    pub was_cached: bool,
}

impl PagePool {
    /// A pool of pages that nobody holds.
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

    /// Pages of the pool.
    #[must_use]
    pub fn total(&self) -> usize {
        self.pages.len()
    }

    /// Pages that nobody holds.
    #[must_use]
    pub fn free(&self) -> usize {
        self.empty.len() + self.evictable.len()
    }

    /// Those of the free pages that are cached.
    #[must_use]
    pub fn evictable(&self) -> usize {
        self.evictable.len()
    }

    /// Holders of a page.
    #[must_use]
    pub fn holders(&self, page: PageId) -> u32 {
        self.pages[page as usize].holders
    }

    /// Whether a page is cached.
    #[must_use]
    pub fn is_cached(&self, page: PageId) -> bool {
        self.pages[page as usize].is_cached
    }

    /// Whether a page may be written to by its holder: nobody else holds it or will look for what is there.
    #[must_use]
    pub fn is_writable(&self, page: PageId) -> bool {
        let Page { holders, is_cached, .. } = self.pages[page as usize];
        holders == 1 && !is_cached
    }

    /// A page for its first holder, if one is free.
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
    /// If the page is free and has no contents.
    pub fn hold(&mut self, page: PageId) {
        let Page { holders, is_cached, since } = &mut self.pages[page as usize];
        if *holders == 0 {
            assert!(*is_cached, "page {page} is free and cannot be held");
            self.evictable.remove(since);
        }
        *holders += 1;
    }

    /// Takes a holder off a page, which is free after the last.
    ///
    /// # Panics
    /// If the page is free already.
    pub fn release(&mut self, page: PageId) {
        let Page { holders, is_cached, since } = &mut self.pages[page as usize];
        *holders = holders.checked_sub(1).unwrap_or_else(|| panic!("page {page} is released more often than held"));
        if *holders > 0 {
            return;
        }
        if *is_cached {
            self.time += 1;
            *since = self.time;
            self.evictable.insert(self.time, page);
        } else {
            self.empty.push(page);
        }
    }

    /// Keeps the contents of a page that is held, beyond its last holder.
    ///
    /// # Panics
    /// If nobody holds it.
    pub fn mark_cached(&mut self, page: PageId) {
        let Page { holders, is_cached, .. } = &mut self.pages[page as usize];
        assert!(*holders > 0, "page {page} is free and has nothing to keep");
        *is_cached = true;
    }

    /// Keeps a page no longer.
    pub fn uncache(&mut self, page: PageId) {
        let Page { holders, is_cached, since } = &mut self.pages[page as usize];
        if std::mem::take(is_cached) && *holders == 0 {
            self.evictable.remove(since);
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
        /// Against a map from pages to holders and a queue of evictable ones: no page is handed out twice, none is lost, and
        /// what is cached goes last and by age.
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
    #[should_panic(expected = "page 0 is released more often than held")]
    fn a_page_is_released_once_per_holder() {
        let mut pool = PagePool::new(1);
        let page = pool.allocate().unwrap().page;
        pool.release(page);
        pool.release(page);
    }
}
