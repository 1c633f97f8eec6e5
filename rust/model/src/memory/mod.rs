//! Sequence memory: what layers keep of earlier tokens.

mod layout;

use ferrule_kernels::kv::{KvFormat, KvShape, KvStore};

pub(crate) use layout::MemoryLayout;

use crate::batch::KvGroup;

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
}

/// Place of a mixer's sequence memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub group: usize,
    /// Index of the mixer among those of the group.
    pub index: usize,
}

/// The sequence memory of all groups.
#[derive(Default)]
pub(crate) struct Memory {
    stores: Vec<KvStore>,
}

impl Memory {
    /// Allocates `pages[i]` empty pages for group `i` of a layout. Memory is used when a page is first written.
    ///
    /// # Errors
    /// The bytes of a group for which the address space is too small.
    pub fn new(layout: &MemoryLayout, kv_format: KvFormat, pages: &[usize]) -> Result<Self, u64> {
        let stores = layout.groups.iter().zip(&layout.shapes).zip(pages).map(|((group, shape), &pages)| {
            let KvGroup { page_bytes, .. } = *group;
            KvStore::new(kv_format, *shape, pages).map_err(|_| page_bytes.saturating_mul(pages as u64))
        });
        Ok(Self { stores: stores.collect::<Result<_, _>>()? })
    }

    /// Returns the pages of a group.
    pub fn pages(&mut self, group: usize) -> &mut KvStore {
        &mut self.stores[group]
    }

    /// Returns the pages of a group for reading.
    pub fn store(&self, group: usize) -> &KvStore {
        &self.stores[group]
    }

    /// Returns the number of groups.
    pub fn groups(&self) -> usize {
        self.stores.len()
    }
}
