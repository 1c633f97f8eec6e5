//! Reference implementation of the input rotation of integer formats.

/// Number of inputs that integer formats rotate together.
pub const BLOCK: usize = 128;

/// Number of inputs of a half block, with which a row may end.
pub const HALF: usize = BLOCK / 2;

/// Returns the sign of an input of a block: a bit of the fraction of pi.
fn sign(input: usize) -> f32 {
    if 0x243f_6a88_85a3_08d3_1319_8a2e_0370_7344_u128 >> input & 1 == 1 { -1.0 } else { 1.0 }
}

/// Returns the factor of an input of a row of `inputs`: a half block is scaled like whole blocks.
fn factor(input: usize, inputs: usize) -> f32 {
    if input < inputs - inputs % BLOCK { 1.0 } else { std::f32::consts::SQRT_2 }
}

/// Applies the Hadamard transform to the blocks of a row, with the order of additions of the kernels.
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

/// Rotates a row of blocks, the last of which may be a half block.
pub fn rotated(values: &[f32]) -> Vec<f32> {
    let rotated = hadamard(values.iter().enumerate().map(|(i, value)| value * sign(i % BLOCK)).collect());
    rotated.iter().enumerate().map(|(i, value)| value * factor(i, values.len())).collect()
}

/// Inverts the rotation of a row.
pub fn restored(values: &[f32]) -> Vec<f32> {
    let scale = |i| sign(i % BLOCK) / BLOCK as f32 * factor(i, values.len());
    hadamard(values.to_vec()).iter().enumerate().map(|(i, value)| value * scale(i)).collect()
}
