//! The pages of one group: which are free, and how many hold each of the others.

use ferrule_kernels::kv::PageId;

/// Pages handed out one by one and counted by holder.
#[derive(Debug)]
pub struct PagePool {
    /// Free pages; the last is handed out next, so that pages in use stay few and warm.
    free: Vec<PageId>,
    /// Holders of each page.
    holders: Vec<u32>,
}

impl PagePool {
    /// A pool of pages that nobody holds.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        let last = PageId::try_from(pages).expect("the engine's configuration is checked for this");
        Self { free: (0..last).rev().collect(), holders: vec![0; pages] }
    }

    /// Pages of the pool.
    #[must_use]
    pub fn total(&self) -> usize {
        self.holders.len()
    }

    /// Pages that nobody holds.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// A page for its first holder, if one is free.
    pub fn allocate(&mut self) -> Option<PageId> {
        let page = self.free.pop()?;
        self.holders[page as usize] = 1;
        Some(page)
    }

    /// Adds a holder to a page that is held.
    ///
    /// # Panics
    /// If the page is free.
    pub fn share(&mut self, page: PageId) {
        let holders = &mut self.holders[page as usize];
        assert!(*holders > 0, "page {page} is free and cannot be shared");
        *holders += 1;
    }

    /// Takes a holder off a page, which is free after the last.
    ///
    /// # Panics
    /// If the page is free already.
    pub fn release(&mut self, page: PageId) {
        let holders = &mut self.holders[page as usize];
        *holders = holders.checked_sub(1).unwrap_or_else(|| panic!("page {page} is released more often than held"));
        if *holders == 0 {
            self.free.push(page);
        }
    }

    /// Whether a page has more than one holder: then it must not be written to.
    #[must_use]
    pub fn is_shared(&self, page: PageId) -> bool {
        self.holders[page as usize] > 1
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a map from pages to holders: no page is handed out twice, none is lost.
        #[test]
        fn pages_are_conserved(size in 0_usize..12, steps in prop::collection::vec((0_u8..3, 0_usize..12), 0..200)) {
            let mut pool = PagePool::new(size);
            let mut held: BTreeMap<PageId, u32> = BTreeMap::new();
            for (action, which) in steps {
                let chosen = held.keys().nth(which % held.len().max(1)).copied();
                match (action, chosen) {
                    (0, _) => match pool.allocate() {
                        Some(page) => prop_assert!((page as usize) < size && held.insert(page, 1).is_none()),
                        None => prop_assert_eq!(held.len(), size),
                    },
                    (1, Some(page)) => {
                        pool.share(page);
                        *held.get_mut(&page).unwrap() += 1;
                    }
                    (_, Some(page)) => {
                        pool.release(page);
                        let count = held.get_mut(&page).unwrap();
                        *count -= 1;
                        if *count == 0 {
                            held.remove(&page);
                        }
                    }
                    (_, None) => {}
                }
                prop_assert_eq!(pool.free() + held.len(), pool.total());
                prop_assert!(held.iter().all(|(&page, &count)| pool.is_shared(page) == (count > 1)));
            }
        }
    }

    #[test]
    #[should_panic(expected = "page 0 is released more often than held")]
    fn a_page_is_released_once_per_holder() {
        let mut pool = PagePool::new(1);
        let page = pool.allocate().unwrap();
        pool.release(page);
        pool.release(page);
    }
}
