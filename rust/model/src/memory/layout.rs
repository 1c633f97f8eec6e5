//! Groups of mixers that share a page table.

use ferrule_kernels::kv::{KvFormat, KvShape, KvStore};

use super::{MemoryNeed, Place};
use crate::batch::KvGroup;
use crate::spec::LayerSpec;

/// Groups of sequence memory: the mixers of a group have keys and values of the same shape, and the same window.
pub(crate) struct MemoryLayout {
    /// Place of the memory of each block of each layer.
    pub places: Vec<Vec<Option<Place>>>,
    pub shapes: Vec<KvShape>,
    pub groups: Vec<KvGroup>,
}

impl MemoryLayout {
    /// Returns the layout for some layers of a model that is `causal` or not.
    pub fn new(layers: &[LayerSpec], causal: bool, kv_format: KvFormat) -> Self {
        let (mut shapes, mut windows) = (Vec::new(), Vec::new());
        let mut place_of = |need: MemoryNeed| {
            let MemoryNeed::Pages { shape, window } = need;
            // A bidirectional sequence is computed in one chunk, so no page of it leaves the window.
            let window = window.filter(|_| causal);
            let same = |(other, others): (&KvShape, &Option<usize>)| {
                (KvShape { layers: 1, ..*other }, *others) == (shape, window)
            };
            let group = shapes.iter().zip(&windows).position(same).unwrap_or_else(|| {
                shapes.push(KvShape { layers: 0, ..shape });
                windows.push(window);
                shapes.len() - 1
            });
            shapes[group].layers += 1;
            Place { group, index: shapes[group].layers - 1 }
        };
        let places = layers.iter().map(|layer| {
            let needs = layer.blocks.iter().map(|block| block.mixer.memory());
            needs.map(|need| need.map(&mut place_of)).collect()
        });
        let places = places.collect();
        let groups = shapes.iter().zip(&windows).map(|(shape, window)| KvGroup {
            layers: shape.layers,
            window: *window,
            page_bytes: KvStore::page_bytes(kv_format, *shape).unwrap_or(u64::MAX),
        });
        Self { groups: groups.collect(), places, shapes }
    }
}
