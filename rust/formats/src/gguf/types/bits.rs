//! Reading numbers and codes of a few bits from the bytes of a block.

use half::f16;

/// Returns the f16 at byte `at`, as f32.
#[inline(always)]
pub(super) fn half(block: &[u8], at: usize) -> f32 {
    f16::from_bits(u16_at(block, at)).to_f32()
}

/// Returns the u16 at byte `at`.
#[inline(always)]
pub(super) fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// Returns the u32 at byte `at`.
#[inline(always)]
pub(super) fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Returns 4-bit code `index`; the first code of a byte is in its low half.
#[inline(always)]
pub(super) fn nibble(bytes: &[u8], index: usize) -> u8 {
    bytes[index / 2] >> (4 * (index % 2)) & 15
}
