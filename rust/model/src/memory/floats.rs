//! Memory of floats: states, or vectors that lie row by row in pages.

use ferrule_kernels::kv::PageId;
use ferrule_kernels::memory::PageSlice;
use ferrule_kernels::{Rows, RowsMut};

/// Floats of one group. A page of a group of state is the state of one sequence after some token, in all layers of the group.
pub(crate) struct FloatStore {
    /// `[pages, floats]`
    data: PageSlice<f32>,
    /// Floats of one page.
    floats: usize,
}

impl FloatStore {
    /// Allocates zeros, whose memory is used when they are first written; `None` if the address space is too small.
    pub fn new(floats: usize, pages: usize) -> Option<Self> {
        let data = PageSlice::zeroed_in_huge_pages(floats.checked_mul(pages)?).ok()?;
        Some(Self { data, floats })
    }

    /// Returns all pages from float `first` on, one per row.
    pub fn rows(&self, first: usize) -> Rows<'_> {
        Rows::new(&self.data, self.floats, first)
    }

    /// Returns all pages from float `first` on, one per row, to be written.
    pub fn rows_mut(&mut self, first: usize) -> RowsMut<'_> {
        RowsMut::new(&mut self.data, self.floats, first)
    }

    pub fn copy_page(&mut self, from: PageId, to: PageId) {
        let from = from as usize * self.floats;
        self.data.copy_within(from..from + self.floats, to as usize * self.floats);
    }

    /// Returns the bytes of a page.
    pub fn page(&self, page: PageId) -> &[u8] {
        bytemuck::cast_slice(&self.data[page as usize * self.floats..][..self.floats])
    }

    /// Overwrites a page.
    ///
    /// # Panics
    /// If the number of bytes is not that of a page.
    pub fn set_page(&mut self, page: PageId, bytes: &[u8]) {
        let page = &mut self.data[page as usize * self.floats..][..self.floats];
        bytemuck::cast_slice_mut(page).copy_from_slice(bytes);
    }
}
