//! Groups of mixers that share a page table, and the group of states.

use std::ops::Range;

use ferrule_kernels::kv::{KvFormat, KvShape, KvStore};

use super::{MemoryNeed, PageShape, Place};
use crate::batch::{GroupKind, KvGroup};
use crate::spec::LayerSpec;

/// Groups of sequence memory: mixers that have keys and values of the same shape, and the same window, are in one; the
/// states of all mixers are in one. A mixer that reads the keys and values of another layer has the place of that
/// layer's.
pub(crate) struct MemoryLayout {
    /// Places of the memory of each block of each layer, in the order of its needs; empty for a layer outside of the
    /// layout.
    pub places: Vec<Vec<Vec<Place>>>,
    pub shapes: Vec<PageShape>,
    pub groups: Vec<KvGroup>,
}

impl MemoryLayout {
    /// Returns the layout for the layers `held` of a model that is `causal` or not. The groups are those of all layers,
    /// in the same order; one of which no layer is held has pages of 0 bytes.
    pub fn new(layers: &[LayerSpec], held: Range<usize>, causal: bool, kv_format: KvFormat) -> Self {
        let mut layout = Self::empty(layers);
        for need in layers.iter().flat_map(|layer| &layer.blocks).flat_map(|block| block.mixer.memory()) {
            layout.group(need, causal);
        }
        layout.with(layers, |index| held.contains(&index), causal, kv_format)
    }

    /// Returns the layout for some of a model's layers: those whose index is `chosen`, with the layers that they read.
    /// It has no other groups.
    pub fn of(layers: &[LayerSpec], chosen: impl Fn(usize) -> bool, causal: bool, kv_format: KvFormat) -> Self {
        Self::empty(layers).with(layers, chosen, causal, kv_format)
    }

    fn empty(layers: &[LayerSpec]) -> Self {
        Self { places: vec![Vec::new(); layers.len()], shapes: Vec::new(), groups: Vec::new() }
    }

    /// Adds the memory of the layers whose index is `chosen`.
    fn with(mut self, layers: &[LayerSpec], chosen: impl Fn(usize) -> bool, causal: bool, kv_format: KvFormat) -> Self {
        for (index, layer) in layers.iter().enumerate().filter(|(index, _)| chosen(*index)) {
            let needs = layer.blocks.iter().map(|block| block.mixer.memory());
            self.places[index] =
                needs.map(|needs| needs.into_iter().map(|need| self.add(need, causal)).collect()).collect();
        }
        self.measure(kv_format);
        self
    }

    /// Divides the heads of keys and values among `ranks` workers, if each layer has a multiple of that number and chooses
    /// no tokens; if not, each worker has all heads.
    pub fn divided(mut self, ranks: usize, kv_format: KvFormat) -> Self {
        let is_divisible = |shape: &PageShape| match shape {
            PageShape::Pages(shape) => shape.kv_heads.is_multiple_of(ranks) && shape.index_dim == 0,
            PageShape::Floats(_) => true,
        };
        if self.shapes.iter().all(is_divisible) {
            for shape in &mut self.shapes {
                if let PageShape::Pages(shape) = shape {
                    shape.kv_heads /= ranks;
                }
            }
            self.measure(kv_format);
        }
        self
    }

    /// Computes the bytes of the pages of each group.
    fn measure(&mut self, kv_format: KvFormat) {
        for (group, shape) in self.groups.iter_mut().zip(&self.shapes) {
            group.page_bytes = match *shape {
                PageShape::Pages(shape) => KvStore::page_bytes(kv_format, shape).unwrap_or(u64::MAX),
                PageShape::Floats(floats) => (floats as u64).saturating_mul(size_of::<f32>() as u64),
            };
        }
    }

    /// Adds the memory of one mixer and returns its place.
    fn add(&mut self, need: MemoryNeed, causal: bool) -> Place {
        let group = self.group(need, causal);
        let index = match (&mut self.shapes[group], need) {
            (
                PageShape::Floats(floats),
                MemoryNeed::State { floats: more } | MemoryNeed::Floats { floats: more, .. },
            ) => {
                *floats = floats.saturating_add(more);
                *floats - more
            }
            (PageShape::Pages(shape), MemoryNeed::Pages { .. }) => {
                shape.layers += 1;
                shape.layers - 1
            }
            (_, MemoryNeed::PagesOf { layer, .. }) => {
                let of_layer = self.places[layer].iter().flatten();
                let pages = of_layer.copied().find(|place| place.group == group);
                return pages.expect("a layer that is read has keys and values");
            }
            _ => unreachable!("a group has one kind of memory"),
        };
        self.groups[group].layers += 1;
        Place { group, index }
    }

    /// Returns the group of a mixer's memory, and adds it if there is none yet.
    fn group(&mut self, need: MemoryNeed, causal: bool) -> usize {
        let (kind, empty) = match need {
            // A bidirectional sequence is computed in one chunk, so no page of it leaves the window.
            MemoryNeed::Pages { shape, window } | MemoryNeed::PagesOf { shape, window, .. } => {
                let kind = GroupKind::Pages { window: window.filter(|_| causal) };
                (kind, PageShape::Pages(KvShape { layers: 0, ..shape }))
            }
            MemoryNeed::Floats { window, .. } => {
                (GroupKind::Pages { window: window.filter(|_| causal) }, PageShape::Floats(0))
            }
            MemoryNeed::State { .. } => (GroupKind::State, PageShape::Floats(0)),
        };
        let is_alike = |(group, shape): (&KvGroup, &PageShape)| {
            let of_none = match *shape {
                PageShape::Pages(shape) => PageShape::Pages(KvShape { layers: 0, ..shape }),
                PageShape::Floats(_) => PageShape::Floats(0),
            };
            (group.kind, of_none) == (kind, empty)
        };
        let found = self.groups.iter().zip(&self.shapes).position(is_alike);
        found.unwrap_or_else(|| {
            self.groups.push(KvGroup { layers: 0, kind, page_bytes: 0 });
            self.shapes.push(empty);
            self.groups.len() - 1
        })
    }
}
