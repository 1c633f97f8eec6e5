//! Memory of state: a fixed number of floats per sequence for each layer.

use ferrule_kernels::kv::PageId;

/// States of one group. A page is the state of one sequence after some token, in all layers of the group.
pub(crate) struct StateStore {
    /// `[pages, floats]`
    data: Vec<f32>,
    /// Floats of one page.
    floats: usize,
}

impl StateStore {
    /// Allocates zeros, whose memory is used when they are first written; `None` if the address space is too small.
    pub fn new(floats: usize, pages: usize) -> Option<Self> {
        let data = bytemuck::allocation::try_zeroed_vec(floats.checked_mul(pages)?).ok()?;
        Some(Self { data, floats })
    }

    /// Returns `floats` floats of a page from `first` on, which belong to one layer.
    pub fn layer(&self, page: PageId, first: usize, floats: usize) -> &[f32] {
        &self.data[page as usize * self.floats..][..self.floats][first..][..floats]
    }

    /// Returns the same floats to be written.
    pub fn layer_mut(&mut self, page: PageId, first: usize, floats: usize) -> &mut [f32] {
        &mut self.data[page as usize * self.floats..][..self.floats][first..][..floats]
    }

    pub fn copy_page(&mut self, from: PageId, to: PageId) {
        let from = from as usize * self.floats;
        self.data.copy_within(from..from + self.floats, to as usize * self.floats);
    }

    /// Returns the bytes of a page.
    pub fn page(&self, page: PageId) -> &[u8] {
        bytemuck::cast_slice(self.layer(page, 0, self.floats))
    }

    /// Overwrites a page.
    ///
    /// # Panics
    /// If the number of bytes is not that of a page.
    pub fn set_page(&mut self, page: PageId, bytes: &[u8]) {
        let floats = self.floats;
        bytemuck::cast_slice_mut(self.layer_mut(page, 0, floats)).copy_from_slice(bytes);
    }
}
