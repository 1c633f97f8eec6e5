//! Scales and minima of Q4_K and Q5_K: eight of each, with 6 bits, in 12 bytes.

/// Returns the scale and the minimum of 32 inputs.
///
/// The first four scales are the low 6 bits of bytes 0 to 3, the first four minima those of bytes 4 to 7. The low 4
/// bits of the others are in the halves of bytes 8 to 11, and the high 2 bits above the first four.
#[inline(always)]
pub(super) fn scale_and_minimum(bytes: &[u8], group: usize) -> (f32, f32) {
    let (scale, minimum) = match group {
        0..4 => (bytes[group] & 63, bytes[4 + group] & 63),
        _ => {
            let (first, low) = (group - 4, bytes[4 + group]);
            (low & 15 | bytes[first] >> 6 << 4, low >> 4 | bytes[4 + first] >> 6 << 4)
        }
    };
    (f32::from(scale), f32::from(minimum))
}
