//! What a step of so many rows takes, beside others.
//!
//! It depends on the machine, the model, the context and who else computes there, so it is measured in the steps
//! themselves. Where a number of rows was not seen, or not for long, its neighbours and the usual shape stand in.

/// What a row adds to the time of the first one, as a share of it, where nothing is known: on two cores llama-1b in
/// int4 takes 1.5 times as long with eight rows
/// (`benches/record/2026-11-21-intel-avx512vnni/shape-llama-1b-int4-batch.txt`).
const DEFAULT_SLOPE: f64 = 0.08;
/// Up to here each number of rows is on its own, since the matmuls have tiles of 1, 2, 4, 6, 8, 12 and 16 rows; above
/// they go by so many.
const SINGLE: usize = 16;
const STRIDE: usize = 8;
/// Kinds of steps that are told apart: up to 272 rows.
const BUCKETS: usize = 48;
/// The share of a new measurement, and of what it tells of steps with other numbers of rows.
const SMOOTHING: f64 = 0.2;
const NEIGHBOUR_SMOOTHING: f64 = 0.01;
/// A step that took longer than this times the expected one was disturbed, and counts as if it had taken so long.
const OUTLIER_RATIO: f64 = 2.0;

/// See the module.
#[derive(Debug)]
pub(super) struct StepCosts {
    /// Seconds of each kind of step, over the usual shape.
    seconds: [Option<f64>; BUCKETS],
}

/// The kind of a step, and how long it takes in the usual shape.
fn kind(rows: usize) -> usize {
    let kind = if rows <= SINGLE { rows.saturating_sub(1) } else { SINGLE - 1 + (rows - SINGLE).div_ceil(STRIDE) };
    kind.min(BUCKETS - 1)
}

fn usual(rows: usize) -> f64 {
    1.0 + DEFAULT_SLOPE * (rows as f64 - 1.0)
}

impl StepCosts {
    pub fn new() -> Self {
        Self { seconds: [None; BUCKETS] }
    }

    /// Seconds that a step takes; in arbitrary units while nothing is known.
    pub fn of(&self, rows: usize) -> f64 {
        self.scale(kind(rows)).unwrap_or(1.0) * usual(rows)
    }

    /// What steps of a kind take over the usual shape: as measured, or between its nearest neighbours.
    fn scale(&self, kind: usize) -> Option<f64> {
        let near = |mut kinds: Box<dyn Iterator<Item = usize>>| {
            kinds.find_map(|other| self.seconds[other].map(|scale| (other.abs_diff(kind) as f64, scale)))
        };
        match (near(Box::new((0..=kind).rev())), near(Box::new(kind..BUCKETS))) {
            (Some((0.0, scale)), _) | (Some((_, scale)), None) | (None, Some((_, scale))) => Some(scale),
            (Some((before, low)), Some((after, high))) => Some((low * after + high * before) / (before + after)),
            (None, None) => None,
        }
    }

    /// Takes note of a step.
    pub fn record(&mut self, rows: usize, seconds: f64) {
        let kind = kind(rows);
        let measured = match self.scale(kind) {
            None => seconds / usual(rows),
            Some(expected) => (seconds / usual(rows)).min(OUTLIER_RATIO * expected),
        };
        for (other, scale) in self.seconds.iter_mut().enumerate() {
            // Contexts grow and machines change: what was seen long ago goes the way of what is seen now.
            let easing = if other == kind { SMOOTHING } else { NEIGHBOUR_SMOOTHING };
            if let Some(scale) = scale {
                *scale += easing * (measured - *scale);
            } else if other == kind {
                *scale = Some(measured);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(costs: &StepCosts, rows: usize, seconds: f64) {
        assert!((costs.of(rows) / seconds - 1.0).abs() < 0.05, "{rows} rows: {} and not {seconds}", costs.of(rows));
    }

    #[test]
    fn what_is_measured_is_known_and_its_neighbours_are_in_between() {
        let mut costs = StepCosts::new();
        costs.record(1, 0.025);
        close(&costs, 1, 0.025);
        close(&costs, 16, 0.025 * usual(16));
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
    fn a_hiccup_is_forgotten_and_so_is_what_was_seen_long_ago() {
        let mut costs = StepCosts::new();
        (0..20).for_each(|_| costs.record(1, 0.010));
        costs.record(8, 10.0);
        let disturbed = costs.of(8);
        assert!(disturbed < 0.040, "{disturbed}");
        (0..500).for_each(|_| costs.record(1, 0.010));
        close(&costs, 8, 0.010 * usual(8));
    }
}
