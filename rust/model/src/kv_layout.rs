//! Groups of layers that share a page table in the KV cache.

use ferrule_kernels::kv::{KvFormat, KvShape, KvStore};

use crate::batch::KvGroup;
use crate::spec::ModelSpec;

/// KV cache groups: the layers of a group have keys and values of the same shape, and the same window.
pub(crate) struct KvLayout {
    /// Group of each layer, and the layer's index in the group.
    pub places: Vec<(usize, usize)>,
    pub shapes: Vec<KvShape>,
    pub groups: Vec<KvGroup>,
}

impl KvLayout {
    pub fn new(spec: &ModelSpec, kv_format: KvFormat) -> Self {
        let mut shapes: Vec<KvShape> = Vec::new();
        let mut windows = Vec::new();
        let mut places = Vec::with_capacity(spec.layers.len());
        for layer in &spec.layers {
            // A bidirectional sequence is computed in one chunk, so no page of it leaves the window.
            let window = layer.attention.window.filter(|_| spec.causal);
            let shape = layer.attention.kv_shape();
            let same = |(other, others): (&KvShape, &Option<usize>)| {
                (KvShape { layers: 1, ..*other }, *others) == (shape, window)
            };
            let group = shapes.iter().zip(&windows).position(same).unwrap_or_else(|| {
                shapes.push(KvShape { layers: 0, ..shape });
                windows.push(window);
                shapes.len() - 1
            });
            places.push((group, shapes[group].layers));
            shapes[group].layers += 1;
        }
        let groups = shapes.iter().zip(windows).map(|(shape, window)| KvGroup {
            layers: shape.layers,
            window,
            page_bytes: KvStore::page_bytes(kv_format, *shape).unwrap_or(u64::MAX),
        });
        Self { groups: groups.collect(), places, shapes }
    }
}
