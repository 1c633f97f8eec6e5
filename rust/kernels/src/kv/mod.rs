//! Paged key-value cache.
//!
//! A page holds [`PAGE_TOKENS`] tokens in every layer of a group of layers: layer by layer, and head by head within a
//! layer. K of a head is stored as `[key_dim][token]`, so that one vector register per column holds a whole page and the
//! lanes of a score vector are tokens. V is stored as `[token][value_dim]`, so that lanes are output columns. Rows of V
//! are zero-padded to a multiple of [`LANES`] columns: a head of 20 columns takes the space of 32. int8 codes are stored
//! in quads ([`int8`]). The keys of an indexer follow the heads of a layer, `[index_dim][token]`.

mod element;
pub(crate) mod int8;

pub(crate) use element::{Bf16, F16, F32, KvElement};
use int8::CodePage;

use std::ops::Range;

use crate::arch::{Isa, Kernel, LANES, LINE, Simd};
use crate::disjoint::Tiles;
use crate::math::load_padded;
use crate::memory::PageSlice;
use crate::rows::Rows;
use crate::{AllocError, Exec, PoolError};

/// Number of tokens of a page: one vector, so that one register holds the scores of a page.
pub const PAGE_TOKENS: usize = LANES;

/// Index of a page of a [`KvStore`], valid in every layer of the group.
pub type PageId = u32;

/// Page table entry of a page that was released because it is out of the attention window.
pub const PAGE_NONE: PageId = PageId::MAX;

/// Storage format of the elements of K and V.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvFormat {
    /// IEEE single precision, without rounding.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16: the upper half of an f32.
    Bf16,
    /// int8 codes, with a scale for each token and head.
    Int8,
}

impl KvFormat {
    /// All formats, the exact one first.
    pub const ALL: &'static [Self] = &[Self::F32, Self::F16, Self::Bf16, Self::Int8];

    /// Returns the name of the format in options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => F32::NAME,
            Self::F16 => F16::NAME,
            Self::Bf16 => Bf16::NAME,
            Self::Int8 => int8::NAME,
        }
    }

    /// Returns the bytes of an element of the indexer's keys. They decide which tokens a row attends to, so they are bf16
    /// if the format is int8.
    fn index_bytes(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::F16 | Self::Bf16 | Self::Int8 => size_of::<u16>(),
        }
    }

    /// Returns the format called `name`, if there is one.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|format| format.name() == name)
    }
}

/// Shape of K and V of a token in a group of layers that share a page table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Number of layers in the group.
    pub layers: usize,
    /// Number of heads of K and V in a layer.
    pub kv_heads: usize,
    /// Columns of a head of K.
    pub key_dim: usize,
    /// Columns of a head of V.
    pub value_dim: usize,
    /// Columns of the key of the [indexer](crate::indexer) in a layer; 0 without an indexer.
    pub index_dim: usize,
}

/// Location of the K and V of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvRow {
    /// Page of the token.
    pub page: PageId,
    /// Slot of the token in the page, below [`PAGE_TOKENS`].
    pub slot: usize,
}

/// Sizes in bytes, from K of one head up to a page.
#[derive(Debug, Clone, Copy)]
struct Layout {
    /// K of a head, including scales that precede it.
    key: usize,
    /// K and V of a head.
    head: usize,
    /// Keys of the indexer, after the heads.
    index: usize,
    layer: usize,
    page: usize,
}

impl Layout {
    /// Returns `None` if the size of a page overflows.
    fn new(format: KvFormat, shape: KvShape) -> Option<Self> {
        let KvShape { layers, kv_heads, key_dim, value_dim, index_dim } = shape;
        let (key, value) = match format {
            KvFormat::F32 => float_bytes::<F32>(key_dim, value_dim)?,
            KvFormat::F16 => float_bytes::<F16>(key_dim, value_dim)?,
            KvFormat::Bf16 => float_bytes::<Bf16>(key_dim, value_dim)?,
            KvFormat::Int8 => (int8::key_bytes(key_dim)?, int8::value_bytes(value_dim)?),
        };
        let head = key.checked_add(value)?;
        let index = index_dim.checked_mul(PAGE_TOKENS * format.index_bytes())?;
        let layer = head.checked_mul(kv_heads)?.checked_add(index.checked_next_multiple_of(LINE)?)?;
        let page = layer.checked_mul(layers)?.checked_next_multiple_of(LINE)?;
        Some(Self { key, head, index, layer, page })
    }
}

/// Returns the bytes of K and of V of a head.
fn float_bytes<E: KvElement>(key_dim: usize, value_dim: usize) -> Option<(usize, usize)> {
    let vector = size_of::<[E::Stored; LANES]>();
    Some((key_dim.checked_mul(vector)?, value_vectors(value_dim).checked_mul(PAGE_TOKENS * vector)?))
}

/// Number of elements below which waking worker threads for a write costs more than it saves.
const INLINE_ELEMENTS: usize = 16 * 1024;

/// Returns the number of vectors of [`LANES`] that hold `value_dim` columns.
pub(crate) fn value_vectors(value_dim: usize) -> usize {
    value_dim.div_ceil(LANES)
}

/// Paged K and V of a group of layers. Memory is zero-initialized and committed when it is first written.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
///
/// use ferrule_kernels::arch::Isa;
/// use ferrule_kernels::kv::{KvFormat, KvRow, KvShape, KvStore};
/// use ferrule_kernels::{Cancel, Exec, Pool, Rows};
///
/// let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
/// let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
/// let shape = KvShape { layers: 1, kv_heads: 1, key_dim: 2, value_dim: 2, index_dim: 0 };
/// let mut store = KvStore::new(KvFormat::F32, shape, 4).unwrap();
///
/// // One row of K and V, side by side, into the first slot of page 3.
/// let kv = [1.0, 2.0, 3.0, 4.0];
/// let (keys, values) = (Rows::new(&kv, 4, 0), Rows::new(&kv, 4, 2));
/// store.write(&exec, 0, &[KvRow { page: 3, slot: 0 }], keys, values)?;
/// assert!(store.page(3).iter().any(|byte| *byte != 0));
/// # Ok::<(), ferrule_kernels::PoolError>(())
/// ```
#[derive(Debug)]
pub struct KvStore {
    format: KvFormat,
    shape: KvShape,
    pages: usize,
    layout: Layout,
    memory: PageSlice<u8>,
}

impl KvStore {
    /// Returns the bytes of a page, including all layers of the group, or `None` if they overflow.
    #[must_use]
    pub fn page_bytes(format: KvFormat, shape: KvShape) -> Option<u64> {
        Layout::new(format, shape).map(|layout| layout.page as u64)
    }

    /// Allocates `pages` pages.
    ///
    /// # Errors
    /// [`AllocError`] if the size overflows or the system refuses the memory.
    pub fn new(format: KvFormat, shape: KvShape, pages: usize) -> Result<Self, AllocError> {
        let overflow = AllocError { bytes: u64::MAX };
        let layout = Layout::new(format, shape).ok_or(overflow)?;
        // Heads of a page are read separately: with small pages each of them would be a TLB miss (an eighth of the time
        // of a long decode).
        let memory = PageSlice::zeroed_in_huge_pages(layout.page.checked_mul(pages).ok_or(overflow)?)?;
        Ok(Self { format, shape, pages, layout, memory })
    }

    /// Returns the storage format of elements.
    #[must_use]
    pub fn format(&self) -> KvFormat {
        self.format
    }

    /// Returns the shape of K and V.
    #[must_use]
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Returns the number of pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Copies a page, in all layers.
    ///
    /// # Panics
    /// If a page is out of bounds.
    pub fn copy_page(&mut self, from: PageId, to: PageId) {
        let (from, to) = (self.page_offset(from), self.page_offset(to));
        self.memory.copy_within(from..from + self.layout.page, to);
    }

    /// Returns the bytes of a page in all layers. They are valid for [`KvStore::set_page`] of a store of the same format
    /// and shape, on the same instruction set.
    ///
    /// # Panics
    /// If the page is out of bounds.
    #[must_use]
    pub fn page(&self, page: PageId) -> &[u8] {
        &self.memory[self.page_offset(page)..][..self.layout.page]
    }

    /// Overwrites a page, in all layers, with bytes that [`KvStore::page`] returned.
    ///
    /// # Panics
    /// If the page is out of bounds or the length of `bytes` is not the size of a page.
    pub fn set_page(&mut self, page: PageId, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.layout.page, "length must be the size of a page");
        let start = self.page_offset(page);
        self.memory[start..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Writes K and V of one layer: row i of `keys` (`[rows, kv_heads * key_dim]`) and of `values`
    /// (`[rows, kv_heads * value_dim]`) goes to `rows[i]`. Elements are rounded to nearest, ties to even; int8 codes to
    /// the nearest multiple of the scale of their token and head.
    ///
    /// # Errors
    /// [`PoolError`] if the run was cancelled or a task panicked.
    ///
    /// # Panics
    /// If a page, a slot or the layer is out of bounds, or the views are too small.
    pub fn write(
        &mut self,
        exec: &Exec<'_>,
        layer: usize,
        rows: &[KvRow],
        keys: Rows<'_>,
        values: Rows<'_>,
    ) -> Result<(), PoolError> {
        self.check_places(layer, rows);
        if rows.is_empty() {
            return Ok(());
        }
        let write = match self.format {
            KvFormat::F32 => write_float::<F32>,
            KvFormat::F16 => write_float::<F16>,
            KvFormat::Bf16 => write_float::<Bf16>,
            KvFormat::Int8 => int8::write,
        };
        let KvShape { kv_heads, key_dim, value_dim, .. } = self.shape;
        let Layout { head, layer: layer_bytes, page, .. } = self.layout;
        let layer = layer * layer_bytes..layer * layer_bytes + kv_heads * head;
        // Tasks own one head of all pages rather than rows, so they never overlap, even if `rows` repeats a location.
        let tiles = Tiles::new(&mut self.memory, page, layer, self.pages, head);
        let task = |head: usize| {
            let mut tile = tiles.take(head);
            for (index, row) in rows.iter().enumerate() {
                let key = &keys.row(index, (head + 1) * key_dim)[head * key_dim..];
                let value = &values.row(index, (head + 1) * value_dim)[head * value_dim..];
                write(exec.isa, tile.row(row.page as usize), row.slot, key, value);
            }
        };
        if rows.len() * kv_heads * (key_dim + value_dim) < INLINE_ELEMENTS {
            (0..kv_heads).for_each(task);
            return Ok(());
        }
        exec.pool.run(kv_heads, &task, exec.cancel)
    }

    /// Writes the keys of the indexer of one layer: row i of `keys`, `[rows, index_dim]`, goes to `rows[i]`. Elements are
    /// rounded to nearest, ties to even; to bf16 in an int8 store.
    ///
    /// # Panics
    /// If a page, a slot or the layer is out of bounds, or the view is too small.
    pub fn write_index(&mut self, isa: Isa, layer: usize, rows: &[KvRow], keys: Rows<'_>) {
        self.check_places(layer, rows);
        let write = match self.format {
            KvFormat::F32 => write_float::<F32>,
            KvFormat::F16 => write_float::<F16>,
            KvFormat::Bf16 | KvFormat::Int8 => write_float::<Bf16>,
        };
        for (index, row) in rows.iter().enumerate() {
            let place = self.index_place(layer, row.page);
            write(isa, &mut self.memory[place], row.slot, keys.row(index, self.shape.index_dim), &[]);
        }
    }

    /// Panics if a place or the layer is out of bounds.
    fn check_places(&self, layer: usize, rows: &[KvRow]) {
        assert!(layer < self.shape.layers, "layer {layer} is out of bounds for {} layers", self.shape.layers);
        for KvRow { page, slot } in rows {
            assert!(*slot < PAGE_TOKENS, "slot {slot} is out of bounds for a page of {PAGE_TOKENS} tokens");
            assert!((*page as usize) < self.pages, "page {page} is out of bounds for {} pages", self.pages);
        }
    }

    fn page_offset(&self, page: PageId) -> usize {
        assert!((page as usize) < self.pages, "page {page} is out of bounds for {} pages", self.pages);
        page as usize * self.layout.page
    }

    /// Returns the bytes of one head in one page.
    #[inline]
    fn head(&self, layer: usize, page: PageId, head: usize) -> &[u8] {
        let start = self.page_offset(page) + layer * self.layout.layer + head * self.layout.head;
        &self.memory[start..][..self.layout.head]
    }

    /// Returns K of one head in one page, `[key_dim][token]`.
    #[inline]
    pub(crate) fn keys<E: KvElement>(&self, layer: usize, page: PageId, head: usize) -> &[[E::Stored; LANES]] {
        bytemuck::cast_slice(&self.head(layer, page, head)[..self.layout.key])
    }

    /// Returns V of one head in one page, `[token][value_vectors]` vectors of [`LANES`] columns.
    #[inline]
    pub(crate) fn values<E: KvElement>(&self, layer: usize, page: PageId, head: usize) -> &[[E::Stored; LANES]] {
        bytemuck::cast_slice(&self.head(layer, page, head)[self.layout.key..])
    }

    /// Returns the keys of the indexer in one page, `[index_dim][token]`.
    #[inline]
    pub(crate) fn index_keys<E: KvElement>(&self, layer: usize, page: PageId) -> &[[E::Stored; LANES]] {
        bytemuck::cast_slice(&self.memory[self.index_place(layer, page)])
    }

    /// Returns the place of the indexer's keys in one page.
    #[inline]
    fn index_place(&self, layer: usize, page: PageId) -> Range<usize> {
        let start = self.page_offset(page) + layer * self.layout.layer + self.shape.kv_heads * self.layout.head;
        start..start + self.layout.index
    }

    /// Returns K and V of one head in one page of an int8 store.
    #[inline]
    pub(crate) fn codes(&self, layer: usize, page: PageId, head: usize) -> CodePage<'_> {
        CodePage::new(self.head(layer, page, head), self.shape.key_dim)
    }
}

/// Writes K and V of a token into `slot` of a head of a floating-point store.
fn write_float<E: KvElement>(isa: Isa, head: &mut [u8], slot: usize, key: &[f32], value: &[f32]) {
    let (keys, values) = bytemuck::cast_slice_mut(head).split_at_mut(key.len() * PAGE_TOKENS);
    isa.run(WriteFloat::<E> { keys, values, slot, key, value });
}

struct WriteFloat<'a, E: KvElement> {
    /// K of the page, `[key_dim][token]`.
    keys: &'a mut [E::Stored],
    /// V of the page, `[token][value_vectors]` vectors.
    values: &'a mut [E::Stored],
    slot: usize,
    key: &'a [f32],
    value: &'a [f32],
}

impl<E: KvElement> Kernel for WriteFloat<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (columns, from) in self.keys.chunks_mut(LANES * PAGE_TOKENS).zip(self.key.chunks(LANES)) {
            let mut stored = [E::Stored::default(); LANES];
            E::narrow(simd, load_padded(simd, from), &mut stored);
            for (to, value) in columns[self.slot..].iter_mut().step_by(PAGE_TOKENS).zip(stored) {
                *to = value;
            }
        }
        let vectors = self.values.as_chunks_mut().0;
        let width = value_vectors(self.value.len());
        for (to, from) in vectors[self.slot * width..].iter_mut().zip(self.value.chunks(LANES)) {
            E::narrow(simd, load_padded(simd, from), to);
        }
    }
}
