//! Expansion of bytes by tables, for instruction sets that have no instruction for it.

use std::arch::x86_64::*;

use super::simd::LINE;

/// Shuffles that expand bytes to the ones of a mask of eight bits. The highest bit of an index makes a byte zero.
type Shuffles = [[u8; 8]; 256];

/// Shuffles of the lower and of the upper half of sixteen bytes.
static LOWER: Shuffles = shuffles(0);
static UPPER: Shuffles = shuffles(8);

const fn shuffles(first: u8) -> Shuffles {
    let mut shuffles = [[0x80; 8]; 256];
    let mut mask = 0;
    while mask < shuffles.len() {
        let (mut bit, mut index) = (0, first);
        while bit < 8 {
            if mask >> bit & 1 == 1 {
                shuffles[mask][bit] = index;
                index += 1;
            }
            bit += 1;
        }
        mask += 1;
    }
    shuffles
}

/// Expands the first bytes of `values` to the ones of `mask`, sixteen at a time; the other bytes are zero.
///
/// # Safety
/// The machine must have SSSE3 and POPCNT.
#[inline(always)]
pub(super) unsafe fn expand(mask: u64, values: &[u8; LINE]) -> [__m128i; 4] {
    // A macro rather than closures, which would be compiled without the instructions.
    macro_rules! quarter {
        ($bits:literal) => {{
            let (low, high) = ((mask >> $bits & 0xff) as usize, (mask >> ($bits + 8) & 0xff) as usize);
            let before = _popcnt64((mask & !(u64::MAX << $bits)).cast_signed()) as usize;
            let first = values.as_ptr().add(before);
            let bytes = load_halves(first, first.add(_popcnt64(low as i64) as usize));
            _mm_shuffle_epi8(bytes, load_halves(LOWER[low].as_ptr(), UPPER[high].as_ptr()))
        }};
    }
    // SAFETY: the caller's machine has the instructions. The bits of the mask before those of eight bytes are no more than
    // the bytes before the last eight.
    unsafe { [quarter!(0), quarter!(16), quarter!(32), quarter!(48)] }
}

/// Loads eight bytes to each half.
///
/// # Safety
/// Eight bytes must be readable at both pointers.
#[inline(always)]
unsafe fn load_halves(low: *const u8, high: *const u8) -> __m128i {
    // SAFETY: promised by the caller.
    unsafe { _mm_unpacklo_epi64(_mm_loadl_epi64(low.cast()), _mm_loadl_epi64(high.cast())) }
}
