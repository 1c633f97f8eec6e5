//! Pseudorandom small integers, whose products and sums are exact in every format.

/// Returns an endless sequence of integers from -2 to 2.
pub fn integers(seed: u32) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        ((state >> 16) as i32 % 5 - 2) as f32
    })
}
