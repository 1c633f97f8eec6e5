//! Time of a step as a function of its number of rows.
//!
//! It depends on the machine, the model, the context length and other load, so it is measured in the steps themselves.
//! Row counts without recent measurements use their neighbours and a default shape.

/// Default cost of an additional row relative to the first row, before any measurement: on two cores llama-1b in int4
/// takes 1.5 times as long with eight rows
/// (`benches/record/2026-11-21-intel-avx512vnni/shape-llama-1b-int4-batch.txt`).
const DEFAULT_SLOPE: f64 = 0.08;
/// Up to this many rows each count has a bucket, since the matmul kernels have tiles of 1, 2, 4, 6, 8, 12 and 16 rows;
/// above, each bucket covers `STRIDE` counts.
const EXACT_ROWS: usize = 16;
const STRIDE: usize = 8;
/// Number of buckets; they cover up to 272 rows.
const BUCKETS: usize = 48;
/// Weight of a new measurement in its own bucket and in all others.
const SMOOTHING: f64 = 0.2;
const NEIGHBOUR_SMOOTHING: f64 = 0.01;
/// A step slower than this multiple of the expected time is an outlier and counts as this multiple.
const OUTLIER_RATIO: f64 = 2.0;

/// Measured step times by number of rows.
#[derive(Debug)]
pub(super) struct StepCosts {
    /// Seconds per bucket, relative to the default shape.
    seconds: [Option<f64>; BUCKETS],
}

/// Returns the bucket of a step.
fn bucket(rows: usize) -> usize {
    let bucket =
        if rows <= EXACT_ROWS { rows.saturating_sub(1) } else { EXACT_ROWS - 1 + (rows - EXACT_ROWS).div_ceil(STRIDE) };
    bucket.min(BUCKETS - 1)
}

/// Returns the time of a step in the default shape, relative to one row.
fn default_shape(rows: usize) -> f64 {
    1.0 + DEFAULT_SLOPE * (rows as f64 - 1.0)
}

impl StepCosts {
    pub fn new() -> Self {
        Self { seconds: [None; BUCKETS] }
    }

    /// Returns the seconds of a step, in arbitrary units before any measurement.
    pub fn of(&self, rows: usize) -> f64 {
        self.scale(bucket(rows)).unwrap_or(1.0) * default_shape(rows)
    }

    /// Returns the measured time of a bucket relative to the default shape, interpolated between its nearest
    /// neighbours.
    fn scale(&self, bucket: usize) -> Option<f64> {
        let near = |mut buckets: Box<dyn Iterator<Item = usize>>| {
            buckets.find_map(|other| self.seconds[other].map(|scale| (other.abs_diff(bucket) as f64, scale)))
        };
        match (near(Box::new((0..=bucket).rev())), near(Box::new(bucket..BUCKETS))) {
            (Some((0.0, scale)), _) | (Some((_, scale)), None) | (None, Some((_, scale))) => Some(scale),
            (Some((before, low)), Some((after, high))) => Some((low * after + high * before) / (before + after)),
            (None, None) => None,
        }
    }

    /// Records the duration of a step.
    pub fn record(&mut self, rows: usize, seconds: f64) {
        let bucket = bucket(rows);
        let measured = match self.scale(bucket) {
            None => seconds / default_shape(rows),
            Some(expected) => (seconds / default_shape(rows)).min(OUTLIER_RATIO * expected),
        };
        for (other, scale) in self.seconds.iter_mut().enumerate() {
            // All buckets drift towards new measurements, because contexts and load change.
            let weight = if other == bucket { SMOOTHING } else { NEIGHBOUR_SMOOTHING };
            if let Some(scale) = scale {
                *scale += weight * (measured - *scale);
            } else if other == bucket {
                *scale = Some(measured);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(costs: &StepCosts, rows: usize, seconds: f64) {
        assert!((costs.of(rows) / seconds - 1.0).abs() < 0.05, "{rows} rows: {} instead of {seconds}", costs.of(rows));
    }

    #[test]
    fn unmeasured_row_counts_are_interpolated() {
        let mut costs = StepCosts::new();
        costs.record(1, 0.025);
        close(&costs, 1, 0.025);
        close(&costs, 16, 0.025 * default_shape(16));
        for _ in 0..100 {
            costs.record(8, 0.030);
            costs.record(1, 0.025);
        }
        close(&costs, 1, 0.025);
        close(&costs, 8, 0.030);
        assert!((0.025..0.030).contains(&costs.of(4)), "{}", costs.of(4));
        costs.record(100_000, 1.0);
    }

    #[test]
    fn outliers_and_old_measurements_are_forgotten() {
        let mut costs = StepCosts::new();
        (0..20).for_each(|_| costs.record(1, 0.010));
        costs.record(8, 10.0);
        let disturbed = costs.of(8);
        assert!(disturbed < 0.040, "{disturbed}");
        (0..500).for_each(|_| costs.record(1, 0.010));
        close(&costs, 8, 0.010 * default_shape(8));
    }
}
