//! The key-value cache in pages.
//!
//! A page holds [`PAGE_TOKENS`] tokens in every layer of a group of layers, one layer after the other, and in a layer
//! one head after the other. Of a head, K lies as `[key_dim][token]`, so that one vector register per column holds a
//! whole page and the scores of a page's tokens are its lanes; V lies as `[token][value_dim]`, so that the output's
//! columns are lanes. Rows of V are filled up with zeros to a multiple of [`LANES`] columns: a head of 20 columns takes
//! the room of 32. Codes of one byte lie in quads ([`int8`]).

mod element;
pub(crate) mod int8;

pub(crate) use element::{Bf16, F16, F32, KvElement};
use int8::CodePage;

use crate::arch::{Isa, Kernel, LANES, LINE, Simd};
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
    /// Codes of one byte, with a scale for each token and head.
    Int8,
}

impl KvFormat {
    /// Every format, the exact one first.
    pub const ALL: &'static [Self] = &[Self::F32, Self::F16, Self::Bf16, Self::Int8];

    /// The name that users write.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => F32::NAME,
            Self::F16 => F16::NAME,
            Self::Bf16 => Bf16::NAME,
            Self::Int8 => int8::NAME,
        }
    }

    /// The format of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|format| format.name() == name)
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
    /// K, and what else comes before V.
    key: usize,
    /// K and V.
    head: usize,
    layer: usize,
    page: usize,
}

impl Layout {
    /// `None` if a page has more bytes than an address can count.
    fn new(format: KvFormat, shape: KvShape) -> Option<Self> {
        let KvShape { layers, kv_heads, key_dim, value_dim } = shape;
        let (key, value) = match format {
            KvFormat::F32 => float_bytes::<F32>(key_dim, value_dim)?,
            KvFormat::F16 => float_bytes::<F16>(key_dim, value_dim)?,
            KvFormat::Bf16 => float_bytes::<Bf16>(key_dim, value_dim)?,
            KvFormat::Int8 => (int8::key_bytes(key_dim)?, int8::value_bytes(value_dim)?),
        };
        let head = key.checked_add(value)?;
        let layer = head.checked_mul(kv_heads)?;
        let page = layer.checked_mul(layers)?.checked_next_multiple_of(LINE)?;
        Some(Self { key, head, layer, page })
    }
}

/// Bytes of K and of V of a head.
fn float_bytes<E: KvElement>(key_dim: usize, value_dim: usize) -> Option<(usize, usize)> {
    let vector = size_of::<[E::Stored; LANES]>();
    Some((key_dim.checked_mul(vector)?, value_vectors(value_dim).checked_mul(PAGE_TOKENS * vector)?))
}

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
        // Each head of each page is read on its own: with small pages of the system every one would be a miss in the
        // translation cache (an eighth of the time of a long decode).
        let memory = PageSlice::zeroed_in_huge_pages(layout.page.checked_mul(pages).ok_or(uncountable)?)?;
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

    /// The bytes of a page, all layers: what [`KvStore::set_page`] takes in a store of the same format and shape, on the
    /// same instruction set.
    ///
    /// # Panics
    /// If there is no such page.
    #[must_use]
    pub fn page(&self, page: PageId) -> &[u8] {
        &self.memory[self.page_offset(page)..][..self.layout.page]
    }

    /// Overwrites a page, in all layers, with bytes that [`KvStore::page`] gave.
    ///
    /// # Panics
    /// If there is no such page, or `bytes` are not as many as a page has.
    pub fn set_page(&mut self, page: PageId, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.layout.page, "the bytes of a page");
        let start = self.page_offset(page);
        self.memory[start..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Stores K and V of one layer: row i of `keys` (`[rows, kv_heads * key_dim]`) and of `values`
    /// (`[rows, kv_heads * value_dim]`) goes to `rows[i]`. Numbers are rounded to nearest, ties to even; as codes, to
    /// nearest multiples of the scale of their token and head.
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
        assert!(layer < self.shape.layers, "layer {layer} of {}", self.shape.layers);
        assert!(rows.iter().all(|row| row.slot < PAGE_TOKENS), "a slot beyond the page");
        assert!(rows.iter().all(|row| (row.page as usize) < self.pages), "a page beyond the store");
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
        let layer = layer * layer_bytes..(layer + 1) * layer_bytes;
        // Tasks own a head of all pages, not rows: whatever `rows` says, even the same place twice, no two tasks meet.
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

    fn page_offset(&self, page: PageId) -> usize {
        assert!((page as usize) < self.pages, "page {page} of {}", self.pages);
        page as usize * self.layout.page
    }

    /// Bytes of one head in one page.
    #[inline]
    fn head(&self, layer: usize, page: PageId, head: usize) -> &[u8] {
        let start = self.page_offset(page) + layer * self.layout.layer + head * self.layout.head;
        &self.memory[start..][..self.layout.head]
    }

    /// K of one head in one page: `[key_dim][token]`.
    #[inline]
    pub(crate) fn keys<E: KvElement>(&self, layer: usize, page: PageId, head: usize) -> &[[E::Stored; LANES]] {
        bytemuck::cast_slice(&self.head(layer, page, head)[..self.layout.key])
    }

    /// V of one head in one page: `[token][value_vectors]`, vectors of [`LANES`] columns.
    #[inline]
    pub(crate) fn values<E: KvElement>(&self, layer: usize, page: PageId, head: usize) -> &[[E::Stored; LANES]] {
        bytemuck::cast_slice(&self.head(layer, page, head)[self.layout.key..])
    }

    /// K and V of one head in one page of a store of codes.
    #[inline]
    pub(crate) fn codes(&self, layer: usize, page: PageId, head: usize) -> CodePage<'_> {
        CodePage::new(self.head(layer, page, head), self.shape.key_dim)
    }

    /// Every bit of every page set: NaN in all formats, and a canary for reads of what was never written.
    #[cfg(test)]
    pub(crate) fn poison(&mut self) {
        self.memory.fill(0xff);
    }
}

/// Writes K and V of a token into `slot` of a head.
fn write_float<E: KvElement>(isa: Isa, head: &mut [u8], slot: usize, key: &[f32], value: &[f32]) {
    let (keys, values) = bytemuck::cast_slice_mut(head).split_at_mut(key.len() * PAGE_TOKENS);
    isa.run(WriteFloat::<E> { keys, values, slot, key, value });
}

struct WriteFloat<'a, E: KvElement> {
    /// `[key_dim][token]`
    keys: &'a mut [E::Stored],
    /// `[token][value_vectors]` vectors
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

#[cfg(test)]
mod tests;
