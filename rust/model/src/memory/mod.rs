//! Sequence memory: what layers keep of earlier tokens.

mod floats;
mod layout;

use ferrule_kernels::indexer::Selection;
use ferrule_kernels::kv::{KvFormat, KvShape, KvStore, PageId};
use ferrule_kernels::{Rows, RowsMut};

pub(crate) use floats::FloatStore;
pub(crate) use layout::MemoryLayout;

/// Sequence memory that a mixer needs.
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
    /// Floats in pages, which the mixer lays out itself.
    Floats {
        /// Number of floats of a page.
        floats: usize,
        /// Sliding window: number of positions, up to that of a row, whose pages the row reads; `None` for all.
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
    /// In pages of keys and values, the index of the mixer among those of the group; elsewhere, its first float of a page.
    pub index: usize,
}

/// Shape of the pages of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageShape {
    Pages(KvShape),
    /// Number of floats, or of those of a state.
    Floats(usize),
}

/// The memory of one group.
pub(crate) enum Store {
    Pages(KvStore),
    Floats(FloatStore),
}

impl Store {
    pub fn copy_page(&mut self, from: PageId, to: PageId) {
        match self {
            Self::Pages(store) => store.copy_page(from, to),
            Self::Floats(store) => store.copy_page(from, to),
        }
    }

    /// Returns the bytes of a page.
    pub fn page(&self, page: PageId) -> &[u8] {
        match self {
            Self::Pages(store) => store.page(page),
            Self::Floats(store) => store.page(page),
        }
    }

    /// Overwrites a page.
    ///
    /// # Panics
    /// If the number of bytes is not that of a page.
    pub fn set_page(&mut self, page: PageId, bytes: &[u8]) {
        match self {
            Self::Pages(store) => store.set_page(page, bytes),
            Self::Floats(store) => store.set_page(page, bytes),
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
                PageShape::Floats(floats) => FloatStore::new(floats, pages).map(Store::Floats),
            };
            store.ok_or(group.page_bytes.saturating_mul(pages as u64))
        });
        Ok(Self { stores: stores.collect::<Result<_, _>>()?, selection: Selection::default() })
    }

    /// Returns the keys and values of a group, and the tokens that the last indexer chose.
    ///
    /// # Panics
    /// If the group has floats.
    pub fn pages(&mut self, group: usize) -> (&mut KvStore, &mut Selection) {
        match &mut self.stores[group] {
            Store::Pages(store) => (store, &mut self.selection),
            Store::Floats(_) => panic!("group {group} has floats"),
        }
    }

    /// Returns all pages of a group from a place on, one per row.
    ///
    /// # Panics
    /// If the group has keys and values.
    pub fn floats(&self, Place { group, index }: Place) -> Rows<'_> {
        match &self.stores[group] {
            Store::Floats(store) => store.rows(index),
            Store::Pages(_) => panic!("group {group} has keys and values"),
        }
    }

    /// Returns all pages of a group from a place on, one per row, to be written.
    ///
    /// # Panics
    /// If the group has keys and values.
    pub fn floats_mut(&mut self, Place { group, index }: Place) -> RowsMut<'_> {
        match &mut self.stores[group] {
            Store::Floats(store) => store.rows_mut(index),
            Store::Pages(_) => panic!("group {group} has keys and values"),
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
