//! Groups of mixers that share a page table, and the group of states.

use ferrule_kernels::kv::{KvFormat, KvShape, KvStore};

use super::{MemoryNeed, PageShape, Place};
use crate::batch::{GroupKind, KvGroup};
use crate::spec::LayerSpec;

/// Groups of sequence memory: mixers that have keys and values of the same shape, and the same window, are in one; the
/// states of all mixers are in one. A mixer that reads the keys and values of another layer has the place of that
/// layer's.
pub(crate) struct MemoryLayout {
    /// Place of the memory of each block of each layer; empty for a layer outside of the layout.
    pub places: Vec<Vec<Option<Place>>>,
    pub shapes: Vec<PageShape>,
    pub groups: Vec<KvGroup>,
}

impl MemoryLayout {
    /// Returns the layout for all layers of a model that is `causal` or not.
    pub fn new(layers: &[LayerSpec], causal: bool, kv_format: KvFormat) -> Self {
        Self::of(layers, |_| true, causal, kv_format)
    }

    /// Returns the layout for some of a model's layers: those whose index is `chosen`, with the layers that they read.
    pub fn of(layers: &[LayerSpec], chosen: impl Fn(usize) -> bool, causal: bool, kv_format: KvFormat) -> Self {
        let mut layout = Self { places: vec![Vec::new(); layers.len()], shapes: Vec::new(), groups: Vec::new() };
        for (index, layer) in layers.iter().enumerate().filter(|(index, _)| chosen(*index)) {
            let needs = layer.blocks.iter().map(|block| block.mixer.memory());
            layout.places[index] = needs.map(|need| need.map(|need| layout.add(need, causal))).collect();
        }
        for (group, shape) in layout.groups.iter_mut().zip(&layout.shapes) {
            group.page_bytes = match *shape {
                PageShape::Pages(shape) => KvStore::page_bytes(kv_format, shape).unwrap_or(u64::MAX),
                PageShape::State(floats) => (floats as u64).saturating_mul(size_of::<f32>() as u64),
            };
        }
        layout
    }

    /// Adds the memory of one mixer and returns its place.
    fn add(&mut self, need: MemoryNeed, causal: bool) -> Place {
        let (kind, empty) = match need {
            MemoryNeed::PagesOf { layer, .. } => {
                let of_layer = self.places[layer].iter().flatten();
                let pages = of_layer.copied().find(|place| !self.groups[place.group].is_state());
                return pages.expect("a layer that is read has keys and values");
            }
            // A bidirectional sequence is computed in one chunk, so no page of it leaves the window.
            MemoryNeed::Pages { shape, window } => {
                let kind = GroupKind::Pages { window: window.filter(|_| causal) };
                (kind, PageShape::Pages(KvShape { layers: 0, ..shape }))
            }
            MemoryNeed::State { .. } => (GroupKind::State, PageShape::State(0)),
        };
        let is_alike = |(group, shape): (&KvGroup, &PageShape)| {
            let of_none = match *shape {
                PageShape::Pages(shape) => PageShape::Pages(KvShape { layers: 0, ..shape }),
                PageShape::State(_) => PageShape::State(0),
            };
            (group.kind, of_none) == (kind, empty)
        };
        let found = self.groups.iter().zip(&self.shapes).position(is_alike);
        let group = found.unwrap_or_else(|| {
            self.groups.push(KvGroup { layers: 0, kind, page_bytes: 0 });
            self.shapes.push(empty);
            self.groups.len() - 1
        });
        self.groups[group].layers += 1;
        let index = match (&mut self.shapes[group], need) {
            (PageShape::State(floats), MemoryNeed::State { floats: more }) => {
                *floats = floats.saturating_add(more);
                *floats - more
            }
            (PageShape::Pages(shape), MemoryNeed::Pages { .. }) => {
                shape.layers += 1;
                shape.layers - 1
            }
            _ => unreachable!("a group has one kind of memory"),
        };
        Place { group, index }
    }
}
