//! Sequence memory: what layers keep of earlier tokens.

mod layout;
mod state;

use ferrule_kernels::indexer::Selection;
use ferrule_kernels::kv::{KvFormat, KvShape, KvStore, PageId};

pub(crate) use layout::MemoryLayout;
pub(crate) use state::StateStore;

/// The sequence memory that a mixer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryNeed {
    /// Keys and values of every token within the window, in pages.
    Pages {
        /// Keys and values of one token, for one layer.
        shape: KvShape,
        /// Sliding window: number of positions that a row attends to, including its own; `None` for all.
        window: Option<usize>,
    },
    /// The pages of an earlier layer, whose keys and values are read.
    PagesOf {
        /// Index of the layer, which has keys and values of one mixer.
        layer: usize,
        /// Keys and values of one token, as the layer stores them.
        shape: KvShape,
        /// Sliding window, that of the layer.
        window: Option<usize>,
    },
    /// A fixed number of floats per sequence, zeros before the first token.
    State {
        /// Number of floats.
        floats: usize,
    },
}

/// Place of a mixer's sequence memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub group: usize,
    /// In pages, the index of the mixer among those of the group; in state, its first float.
    pub index: usize,
}

/// Shape of the pages of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageShape {
    Pages(KvShape),
    /// Floats of a state.
    State(usize),
}

/// The memory of one group.
pub(crate) enum Store {
    Pages(KvStore),
    State(StateStore),
}

impl Store {
    pub fn copy_page(&mut self, from: PageId, to: PageId) {
        match self {
            Self::Pages(store) => store.copy_page(from, to),
            Self::State(store) => store.copy_page(from, to),
        }
    }

    /// Returns the bytes of a page.
    pub fn page(&self, page: PageId) -> &[u8] {
        match self {
            Self::Pages(store) => store.page(page),
            Self::State(store) => store.page(page),
        }
    }

    /// Overwrites a page.
    ///
    /// # Panics
    /// If the number of bytes is not that of a page.
    pub fn set_page(&mut self, page: PageId, bytes: &[u8]) {
        match self {
            Self::Pages(store) => store.set_page(page, bytes),
            Self::State(store) => store.set_page(page, bytes),
        }
    }
}

/// The sequence memory of all groups.
#[derive(Default)]
pub(crate) struct Memory {
    stores: Vec<Store>,
    /// Tokens that the last indexer chose for the rows of the batch, which later layers may reuse.
    selection: Selection,
}

impl Memory {
    /// Allocates `pages[i]` empty pages for group `i` of a layout. Memory is used when a page is first written.
    ///
    /// # Errors
    /// The bytes of a group for which the address space is too small.
    pub fn new(layout: &MemoryLayout, kv_format: KvFormat, pages: &[usize]) -> Result<Self, u64> {
        let stores = layout.groups.iter().zip(&layout.shapes).zip(pages).map(|((group, shape), &pages)| {
            let store = match *shape {
                PageShape::Pages(shape) => KvStore::new(kv_format, shape, pages).ok().map(Store::Pages),
                PageShape::State(floats) => StateStore::new(floats, pages).map(Store::State),
            };
            store.ok_or(group.page_bytes.saturating_mul(pages as u64))
        });
        Ok(Self { stores: stores.collect::<Result<_, _>>()?, selection: Selection::default() })
    }

    /// Returns the keys and values of a group, and the tokens that the last indexer chose.
    ///
    /// # Panics
    /// If the group is state.
    pub fn pages(&mut self, group: usize) -> (&mut KvStore, &mut Selection) {
        match &mut self.stores[group] {
            Store::Pages(store) => (store, &mut self.selection),
            Store::State(_) => panic!("group {group} is state"),
        }
    }

    /// Returns the states of a group.
    ///
    /// # Panics
    /// If the group is pages.
    pub fn state(&mut self, group: usize) -> &mut StateStore {
        match &mut self.stores[group] {
            Store::State(store) => store,
            Store::Pages(_) => panic!("group {group} is pages"),
        }
    }

    /// Returns the memory of a group.
    pub fn store(&self, group: usize) -> &Store {
        &self.stores[group]
    }

    /// Returns the memory of a group to be written.
    pub fn store_mut(&mut self, group: usize) -> &mut Store {
        &mut self.stores[group]
    }
}
