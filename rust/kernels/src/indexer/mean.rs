//! Mean of the keys of consecutive tokens.

// Index loops over small arrays of registers are more readable here than iterators over several arrays.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use crate::arch::{Isa, Kernel, LANES, Simd};
use crate::kv::{Bf16, F16, F32, KvElement, KvFormat, KvStore, PAGE_TOKENS, PageId};

/// Writes the mean of the indexer's keys of the tokens at `positions` to `out: [index_dim]`. `pages` are those of the
/// sequence. The sum of a column is one chain over the tokens.
///
/// # Panics
/// If there are no positions, a page is missing or out of bounds, or `out` does not have the length of a key.
pub fn mean_key(isa: Isa, store: &KvStore, layer: usize, pages: &[PageId], positions: Range<usize>, out: &mut [f32]) {
    assert!(!positions.is_empty(), "a mean must have at least one position");
    assert_eq!(out.len(), store.shape().index_dim, "out must have the length of a key");
    out.fill(0.0);
    let mut next = positions.start;
    while next < positions.end {
        let page = next / PAGE_TOKENS;
        let end = positions.end.min((page + 1) * PAGE_TOKENS);
        let slots = next % PAGE_TOKENS..next % PAGE_TOKENS + end - next;
        match store.format() {
            KvFormat::F32 => add::<F32>(isa, store, (layer, pages[page]), slots, out),
            KvFormat::F16 => add::<F16>(isa, store, (layer, pages[page]), slots, out),
            KvFormat::Bf16 | KvFormat::Int8 => add::<Bf16>(isa, store, (layer, pages[page]), slots, out),
        }
        next = end;
    }
    let count = positions.len() as f32;
    out.iter_mut().for_each(|x| *x /= count);
}

fn add<E: KvElement>(isa: Isa, store: &KvStore, (layer, page): (usize, PageId), slots: Range<usize>, out: &mut [f32]) {
    isa.run(AddKeys::<E> { keys: store.index_keys::<E>(layer, page), slots, out });
}

/// Adds the keys of some tokens of a page to `out`.
struct AddKeys<'a, E: KvElement> {
    /// `[index_dim][token]`
    keys: &'a [[E::Stored; LANES]],
    slots: Range<usize>,
    /// `[index_dim]`
    out: &'a mut [f32],
}

impl<E: KvElement> Kernel for AddKeys<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (out, key) in self.out.iter_mut().zip(self.keys) {
            let elements = simd.to_array(E::widen(simd, key));
            for slot in self.slots.clone() {
                *out += elements[slot];
            }
        }
    }
}
