//! The key-value cache in pages.
//!
//! A page holds [`PAGE_TOKENS`] tokens in every layer of a group of layers, one layer after the other. In a layer, K lies
//! as `[kv_head][key_dim][token]`, so that one vector register per column holds a whole page and the scores of a page's
//! tokens are its lanes; V lies as `[kv_head][token][value_dim]`, so that the output's columns are lanes. Rows of V are
//! filled up with zeros to a multiple of [`LANES`] columns: a head of 20 columns takes the room of 32.

mod element;

pub(crate) use element::{Bf16, F16, F32, KvElement};

use crate::arch::{Kernel, LANES, Simd};
use crate::disjoint::Tiles;
use crate::math::load_padded;
use crate::memory::PageSlice;
use crate::rows::Rows;
use crate::{AllocError, Exec, PoolError};

/// Tokens of a page: one vector of lanes, so that a page's scores come out of one register per head.
pub const PAGE_TOKENS: usize = LANES;

/// A page of a [`KvStore`]; the same number names the page in every layer of the group.
pub type PageId = u32;

/// What a page table holds where a page was given back because no row will ever look at it again.
pub const PAGE_NONE: PageId = PageId::MAX;

/// How a number of K or V is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvFormat {
    /// As computed.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
}

impl KvFormat {
    /// Every format, the exact one first.
    pub const ALL: &'static [Self] = &[Self::F32, Self::F16, Self::Bf16];

    /// The name that users write.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => F32::NAME,
            Self::F16 => F16::NAME,
            Self::Bf16 => Bf16::NAME,
        }
    }

    /// The format of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|format| format.name() == name)
    }

    fn element_bytes(self) -> usize {
        match self {
            Self::F32 => size_of::<<F32 as KvElement>::Stored>(),
            Self::F16 => size_of::<<F16 as KvElement>::Stored>(),
            Self::Bf16 => size_of::<<Bf16 as KvElement>::Stored>(),
        }
    }
}

/// What a group of layers that share a page table keeps of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Layers of the group.
    pub layers: usize,
    /// Heads of K and V in a layer.
    pub kv_heads: usize,
    /// Columns of a head's K.
    pub key_dim: usize,
    /// Columns of a head's V.
    pub value_dim: usize,
}

/// Where a token's K and V go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvRow {
    /// The page.
    pub page: PageId,
    /// The token's place in the page, below [`PAGE_TOKENS`].
    pub slot: usize,
}

/// Sizes in bytes, from one head's K up to a page.
#[derive(Debug, Clone, Copy)]
struct Layout {
    key_head: usize,
    value_head: usize,
    layer: usize,
    page: usize,
}

impl Layout {
    /// `None` if a page has more bytes than an address can count.
    fn new(format: KvFormat, shape: KvShape) -> Option<Self> {
        let vector = LANES * format.element_bytes();
        let key_head = shape.key_dim.checked_mul(vector)?;
        let value_head = value_vectors(shape.value_dim).checked_mul(PAGE_TOKENS * vector)?;
        let layer = key_head.checked_add(value_head)?.checked_mul(shape.kv_heads)?;
        let page = layer.checked_mul(shape.layers)?.checked_next_multiple_of(64)?;
        Some(Self { key_head, value_head, layer, page })
    }
}

/// Columns of K that one task writes.
const TASK_COLUMNS: usize = 4 * LANES;

/// Numbers below which waking the threads for a write costs more than it saves.
const INLINE_ELEMENTS: usize = 16 * 1024;

/// Vectors of [`LANES`] that hold `value_dim` columns.
pub(crate) fn value_vectors(value_dim: usize) -> usize {
    value_dim.div_ceil(LANES)
}

/// K and V of a group of layers, in pages. The memory is zero and taken from the system when it is first written.
#[derive(Debug)]
pub struct KvStore {
    format: KvFormat,
    shape: KvShape,
    pages: usize,
    layout: Layout,
    memory: PageSlice<u8>,
}

impl KvStore {
    /// Bytes of a page, all layers of the group together; `None` if they cannot be counted.
    #[must_use]
    pub fn page_bytes(format: KvFormat, shape: KvShape) -> Option<u64> {
        Layout::new(format, shape).map(|layout| layout.page as u64)
    }

    /// Room for `pages` pages.
    ///
    /// # Errors
    /// [`AllocError`] if the size cannot be addressed or the system refuses the memory.
    pub fn new(format: KvFormat, shape: KvShape, pages: usize) -> Result<Self, AllocError> {
        let uncountable = AllocError { bytes: u64::MAX };
        let layout = Layout::new(format, shape).ok_or(uncountable)?;
        let memory = PageSlice::zeroed(layout.page.checked_mul(pages).ok_or(uncountable)?)?;
        // Each head of each page is read on its own: with small pages of the system every one would be a miss in the
        // translation cache (an eighth of the time of a long decode).
        memory.prefer_huge_pages();
        Ok(Self { format, shape, pages, layout, memory })
    }

    /// How numbers are stored.
    #[must_use]
    pub fn format(&self) -> KvFormat {
        self.format
    }

    /// What a page keeps of a token.
    #[must_use]
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// How many pages there are.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Copies a page, in all layers.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn copy_page(&mut self, from: PageId, to: PageId) {
        let (from, to) = (self.page_offset(from), self.page_offset(to));
        self.memory.copy_within(from..from + self.layout.page, to);
    }

    /// Stores K and V of one layer: row i of `keys` (`[rows, kv_heads * key_dim]`) and of `values`
    /// (`[rows, kv_heads * value_dim]`) goes to `rows[i]`. Numbers are rounded to nearest, ties to even.
    ///
    /// # Errors
    /// [`PoolError`] if the run was cancelled or a task panicked.
    ///
    /// # Panics
    /// If a page, a slot or the layer does not exist, or the views are too small.
    pub fn write(
        &mut self,
        exec: &Exec<'_>,
        layer: usize,
        rows: &[KvRow],
        keys: Rows<'_>,
        values: Rows<'_>,
    ) -> Result<(), PoolError> {
        match self.format {
            KvFormat::F32 => self.write_as::<F32>(exec, layer, rows, keys, values),
            KvFormat::F16 => self.write_as::<F16>(exec, layer, rows, keys, values),
            KvFormat::Bf16 => self.write_as::<Bf16>(exec, layer, rows, keys, values),
        }
    }

    fn write_as<E: KvElement>(
        &mut self,
        exec: &Exec<'_>,
        layer: usize,
        rows: &[KvRow],
        keys: Rows<'_>,
        values: Rows<'_>,
    ) -> Result<(), PoolError> {
        assert!(layer < self.shape.layers, "layer {layer} of {}", self.shape.layers);
        assert!(rows.iter().all(|row| row.slot < PAGE_TOKENS), "a slot beyond the page");
        assert!(rows.iter().all(|row| (row.page as usize) < self.pages), "a page beyond the store");
        if rows.is_empty() {
            return Ok(());
        }
        let KvShape { kv_heads, key_dim, value_dim, .. } = self.shape;
        let parallel = rows.len() * kv_heads * (key_dim + value_dim) >= INLINE_ELEMENTS;
        let run = |tasks: usize, task: &(dyn Fn(usize) + Sync)| {
            if parallel {
                return exec.pool.run(tasks, task, exec.cancel);
            }
            (0..tasks).for_each(task);
            Ok(())
        };
        let size = size_of::<E::Stored>();
        let stride = self.layout.page / size;
        let k_start = layer * self.layout.layer / size;
        let v_start = k_start + kv_heads * self.layout.key_head / size;
        let v_end = v_start + kv_heads * self.layout.value_head / size;
        let pages: &mut [E::Stored] = bytemuck::cast_slice_mut(&mut self.memory);

        // Tasks own columns of all pages, not rows: whatever `rows` says, even the same place twice, no two tasks meet.
        let columns = kv_heads * key_dim;
        let tiles = Tiles::new(pages, stride, k_start..v_start, self.pages.max(1), TASK_COLUMNS * PAGE_TOKENS);
        run(tiles.len(), &|index| {
            let mut tile = tiles.take(index);
            let columns = index * TASK_COLUMNS..columns.min((index + 1) * TASK_COLUMNS);
            let mut stored = [E::Stored::default(); TASK_COLUMNS];
            for (index, row) in rows.iter().enumerate() {
                let from = &keys.row(index, columns.end)[columns.clone()];
                exec.isa.run(Narrow::<E> { from, to: &mut stored });
                let to = &mut tile.row(row.page as usize)[row.slot..];
                for (to, value) in to.iter_mut().step_by(PAGE_TOKENS).zip(&stored) {
                    *to = *value;
                }
            }
        })?;

        let width = value_vectors(value_dim) * LANES;
        let tiles = Tiles::new(pages, stride, v_start..v_end, self.pages.max(1), (PAGE_TOKENS * width).max(1));
        run(tiles.len(), &|head| {
            let mut tile = tiles.take(head);
            for (index, row) in rows.iter().enumerate() {
                let from = &values.row(index, (head + 1) * value_dim)[head * value_dim..];
                let to = &mut tile.row(row.page as usize)[row.slot * width..][..width];
                exec.isa.run(Narrow::<E> { from, to });
            }
        })
    }

    fn page_offset(&self, page: PageId) -> usize {
        assert!((page as usize) < self.pages, "page {page} of {}", self.pages);
        page as usize * self.layout.page
    }

    /// K of one head in one page: `[key_dim][token]`.
    #[inline]
    pub(crate) fn keys<E: KvElement>(&self, layer: usize, page: PageId, head: usize) -> &[[E::Stored; LANES]] {
        let start = self.page_offset(page) + layer * self.layout.layer + head * self.layout.key_head;
        bytemuck::cast_slice(&self.memory[start..][..self.layout.key_head])
    }

    /// V of one head in one page: `[token][value_vectors]`, vectors of [`LANES`] columns.
    #[inline]
    pub(crate) fn values<E: KvElement>(&self, layer: usize, page: PageId, head: usize) -> &[[E::Stored; LANES]] {
        let values = self.shape.kv_heads * self.layout.key_head;
        let start = self.page_offset(page) + layer * self.layout.layer + values + head * self.layout.value_head;
        bytemuck::cast_slice(&self.memory[start..][..self.layout.value_head])
    }

    /// Every bit of every page set: NaN in all formats, and a canary for reads of what was never written.
    #[cfg(test)]
    pub(crate) fn poison(&mut self) {
        self.memory.fill(0xff);
    }
}

/// Rounds a row's columns to what is stored.
struct Narrow<'a, E: KvElement> {
    from: &'a [f32],
    to: &'a mut [E::Stored],
}

impl<E: KvElement> Kernel for Narrow<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (from, to) in self.from.chunks(LANES).zip(self.to.as_chunks_mut::<LANES>().0) {
            E::narrow(simd, load_padded(simd, from), to);
        }
    }
}

#[cfg(test)]
mod tests;
