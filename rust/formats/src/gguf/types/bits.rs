//! Numbers and codes of few bits within a block's bytes.

use half::f16;

/// The half-precision number at byte `at`.
#[inline(always)]
pub(super) fn half(block: &[u8], at: usize) -> f32 {
    f16::from_bits(u16_at(block, at)).to_f32()
}

/// The u16 at byte `at`.
#[inline(always)]
pub(super) fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// The u32 at byte `at`.
#[inline(always)]
pub(super) fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Half a byte: those of one byte follow each other, the low one first.
#[inline(always)]
pub(super) fn nibble(bytes: &[u8], index: usize) -> u8 {
    bytes[index / 2] >> (4 * (index % 2)) & 15
}
