//! [`Growth`] of the loss of a model with the error of some of its matrices.

use std::ops::{Add, Mul};

use super::noise::NOISES;

/// The loss of a model as a polynomial of the relative squared error of a class of its matrices.
///
/// For small errors it is linear. Large errors can cost more in proportion: in the embedded model without calibration, 1.2 to
/// 10 times as much with two bits as with four.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Growth {
    pub linear: f64,
    pub quadratic: f64,
}

impl Growth {
    /// Returns the growth through the losses measured with [`NOISES`]. Where the loss grows more slowly than the error,
    /// it is linear, as with the small error.
    pub fn of([small, large]: [f64; NOISES.len()]) -> Self {
        let [of_small, of_large] = [small / NOISES[0], large / NOISES[1]];
        let quadratic = f64::max((of_large - of_small) / (NOISES[1] - NOISES[0]), 0.0);
        Self { linear: f64::max(of_small - quadratic * NOISES[0], 0.0), quadratic }
    }

    /// Returns the loss for a relative squared error.
    pub fn loss(self, error: f64) -> f64 {
        error * (self.linear + error * self.quadratic)
    }
}

impl Add for Growth {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { linear: self.linear + other.linear, quadratic: self.quadratic + other.quadratic }
    }
}

impl Mul<f64> for Growth {
    type Output = Self;

    fn mul(self, factor: f64) -> Self {
        Self { linear: self.linear * factor, quadratic: self.quadratic * factor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_those_measured_where_they_grow_faster_than_errors() {
        for losses in [[0.006, 0.1], [0.006, 0.3], [0.0, 0.2], [0.001, 0.9]] {
            let growth = Growth::of(losses);
            // A large error that costs hundreds of times as much leaves nothing for the linear part.
            assert!((growth.loss(NOISES[1]) / losses[1] - 1.0).abs() < 0.1, "{growth:?}");
            assert!(growth.loss(NOISES[0]) >= losses[0] - 1e-9, "{growth:?}");
        }
        let saturated = Growth::of([0.006, 0.05]);
        assert_eq!(saturated, Growth { linear: 1.0, quadratic: 0.0 });
        assert_eq!(Growth::of([0.0; 2]), Growth::default());
    }

    #[test]
    fn growths_of_shares_add_up() {
        let growth = Growth::of([0.01, 0.4]);
        let sum = growth * 0.25 + growth * 0.75;
        assert!((sum.loss(0.05) - growth.loss(0.05)).abs() < 1e-12);
    }
}
