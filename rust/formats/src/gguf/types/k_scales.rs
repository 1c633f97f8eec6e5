//! The scales and minima of Q4_K and Q5_K: eight of each, 6 bits apiece, in 12 bytes.

/// The scale and the minimum of 32 inputs.
///
/// The first four of each are the low 6 bits of bytes 0 to 3 and 4 to 7. Of the others the low 4 bits are in the halves
/// of bytes 8 to 11, and the high 2 above those of the first four.
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
