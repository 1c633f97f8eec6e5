//! The loss of rows of outputs.

use ferrule_kernels::disjoint::Tiles;
use ferrule_kernels::{Exec, PoolError};

/// Returns the KL divergence of the probabilities of two rows of logits.
pub(super) fn divergence(exact: &[f32], found: &[f32]) -> f64 {
    let (of_exact, of_found) = (log_sum(exact), log_sum(found));
    let of_logits = |(exact, found): (&f32, &f32)| {
        let log_probability = f64::from(*exact) - of_exact;
        let probability = f64::from((log_probability as f32).exp());
        // A token that the model excludes has no weight, also where both logits are minus infinity.
        if probability == 0.0 { 0.0 } else { probability * (log_probability - (f64::from(*found) - of_found)) }
    };
    exact.iter().zip(found).map(of_logits).sum()
}

/// Returns the squared error of a row, relative to its squares.
pub(super) fn relative_error(exact: &[f32], found: &[f32]) -> f64 {
    let squares = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let error = squares(&mut exact.iter().zip(found).map(|(exact, found)| exact - found));
    if error > 0.0 { error / squares(&mut exact.iter().copied()) } else { 0.0 }
}

/// Computes a number for each of `count` rows, in parallel.
pub(super) fn map_rows(
    exec: &Exec<'_>,
    count: usize,
    of_row: impl Fn(usize) -> f64 + Sync,
) -> Result<Vec<f64>, PoolError> {
    let mut numbers = vec![0.0; count];
    let tiles = Tiles::row_blocks(&mut numbers, 1, 1);
    exec.run(count, |row| tiles.take(row).contiguous()[0] = of_row(row))?;
    drop(tiles);
    Ok(numbers)
}

/// Returns the logarithm of the sum of the exponentials of logits.
pub(super) fn log_sum(logits: &[f32]) -> f64 {
    let peak = logits.iter().fold(f32::NEG_INFINITY, |peak, logit| peak.max(*logit));
    f64::from(peak) + logits.iter().map(|logit| f64::from((logit - peak).exp())).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_that_of_softmax() {
        let (exact, found) = ([0.0, 1.0, -2.0, 3.0], [0.5, 1.0, -1.0, 2.0f32]);
        let softmax = |logits: &[f32]| {
            let sum = logits.iter().map(|logit| f64::from(*logit).exp()).sum::<f64>();
            logits.iter().map(|logit| f64::from(*logit).exp() / sum).collect::<Vec<_>>()
        };
        let (p, q) = (softmax(&exact), softmax(&found));
        let expected = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum::<f64>();
        assert!((divergence(&exact, &found) - expected).abs() < 1e-6);
        assert!(divergence(&exact, &exact.map(|x| x + 7.0)).abs() < 1e-6);
        let excluded = [0.0, 1.0, f32::NEG_INFINITY];
        assert!(divergence(&excluded, &excluded).abs() < 1e-6);
    }

    #[test]
    fn relative_errors_are_squared() {
        assert_eq!(relative_error(&[3.0, 4.0], &[3.0, 3.0]), 1.0 / 25.0);
        assert_eq!(relative_error(&[0.0], &[0.0]), 0.0);
    }
}
