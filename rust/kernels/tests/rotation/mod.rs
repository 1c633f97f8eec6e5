//! Reference implementation of the input rotation of integer formats.

/// Number of inputs that integer formats rotate together.
pub const BLOCK: usize = 128;

/// Returns the sign of an input of a block: a bit of the fraction of pi.
fn sign(input: usize) -> f32 {
    if 0x243f_6a88_85a3_08d3_1319_8a2e_0370_7344_u128 >> input & 1 == 1 { -1.0 } else { 1.0 }
}

/// Applies the Hadamard transform to whole blocks, with the order of additions of the kernels.
fn hadamard(mut values: Vec<f32>) -> Vec<f32> {
    for half in [64, 32, 16, 8, 4, 2, 1] {
        for pair in values.chunks_mut(2 * half) {
            let (first, second) = pair.split_at_mut(half);
            for (a, b) in first.iter_mut().zip(second) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
    }
    values
}

/// Rotates whole blocks.
pub fn rotated(values: &[f32]) -> Vec<f32> {
    hadamard(values.iter().enumerate().map(|(i, value)| value * sign(i % BLOCK)).collect())
}

/// Inverts the rotation of whole blocks.
pub fn restored(values: &[f32]) -> Vec<f32> {
    hadamard(values.to_vec()).iter().enumerate().map(|(i, value)| value * sign(i % BLOCK) / BLOCK as f32).collect()
}
