//! Random weights, to measure model shapes without a checkpoint.
//!
//! The bytes vary as those of a trained model do, so that speed is realistic. A row of K weights has the variance 1 /
//! K, so that hidden states stay of order one.

/// A matrix of random numbers; the same name gives the same numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RandomMatrix {
    pub seed: u64,
    pub rows: usize,
}

impl RandomMatrix {
    pub fn new(name: &str, rows: usize) -> Self {
        // FNV-1a; any hash would do that is the same on every machine.
        let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        Self { seed: name.bytes().fold(0xcbf2_9ce4_8422_2325, hash), rows }
    }

    /// Fills `out` with row `row`: uniform numbers of variance 1 / `out.len()`.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        let step = (3.0 / out.len() as f32).sqrt() / (1 << 23) as f32;
        let mut state = mix(self.seed ^ mix(row as u64));
        for value in out {
            // Knuth's linear congruential generator; its upper bits are random enough for this purpose.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *value = ((state as i64) >> 40) as f32 * step;
        }
    }
}

/// Finalizer of SplitMix64 (Steele, Lea and Flood 2014): neighbouring rows get unrelated states.
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_repeatable_and_have_variance_one_over_k() {
        let matrix = RandomMatrix::new("layers.0.ffn.up.weight", 2);
        let (mut a, mut b, mut again) = ([0.0; 4096], [0.0; 4096], [0.0; 4096]);
        matrix.read_row(0, &mut a);
        matrix.read_row(1, &mut b);
        matrix.read_row(0, &mut again);
        assert_eq!(a, again);
        assert!(a.iter().zip(&b).filter(|(a, b)| a == b).count() < 10);
        let sum = |f: fn(f32) -> f32| a.iter().map(|&x| f(x)).sum::<f32>();
        assert!((sum(|x| x * x) - 1.0).abs() < 0.1, "{}", sum(|x| x * x));
        assert!(sum(|x| x).abs() < 4.0);
    }
}
