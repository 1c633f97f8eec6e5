//! The rotation of integer formats, by its definition.

/// Inputs that integer formats rotate together.
pub const BLOCK: usize = 128;

/// The sign that the rotation gives an input of a block: the fraction of pi, bit by bit.
fn sign(input: usize) -> f32 {
    if 0x243f_6a88_85a3_08d3_1319_8a2e_0370_7344_u128 >> input & 1 == 1 { -1.0 } else { 1.0 }
}

/// Blocks times the Hadamard matrix, in the order of additions that the kernels have.
fn mixed(mut values: Vec<f32>) -> Vec<f32> {
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

/// Whole blocks, rotated.
pub fn rotated(values: &[f32]) -> Vec<f32> {
    mixed(values.iter().enumerate().map(|(i, value)| value * sign(i % BLOCK)).collect())
}

/// Whole blocks, rotated back.
pub fn restored(values: &[f32]) -> Vec<f32> {
    mixed(values.to_vec()).iter().enumerate().map(|(i, value)| value * sign(i % BLOCK) / BLOCK as f32).collect()
}
