//! Packed matrices whose buffers end at guard pages.

use std::sync::Arc;

use ferrule_kernels::arch::ByteLine;
use ferrule_kernels::{BytesOwner, Format, PackedMatrix, SharedBytes};

use super::guard::Guarded;

/// Bytes that end at a guard page.
struct Owner(Guarded<ByteLine>);

// SAFETY: the memory is only read, and is unmapped when the last owner is dropped.
unsafe impl Send for Owner {}
// SAFETY: same.
unsafe impl Sync for Owner {}

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// Returns a matrix over copies of its buffers that end at guard pages. Buffers begin at a cache line, so block scales
/// may end half a line before the page.
pub fn guarded<'a>(formats: &[(Format, usize)], cols: usize, buffers: impl Iterator<Item = &'a [u8]>) -> PackedMatrix {
    let shared = buffers.map(|bytes| {
        let mut lines = vec![ByteLine([0; 64]); bytes.len().div_ceil(64)];
        bytemuck::cast_slice_mut(&mut lines)[..bytes.len()].copy_from_slice(bytes);
        let owner: BytesOwner = Arc::new(Owner(Guarded::new(&lines)));
        SharedBytes::new(owner, 0..bytes.len()).unwrap()
    });
    PackedMatrix::shared(formats, cols, shared).unwrap()
}
