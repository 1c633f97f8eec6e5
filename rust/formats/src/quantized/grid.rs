//! [`Grid`]: the scales of a weight, each for some of its elements.

use half::f16;

use super::error::QuantizedError;
use super::parts::{Parts, value_fault};
use crate::dtype::{Dtype, FloatDtype};
use crate::tensor::Tensor;

/// Types of scales.
pub(super) const SCALES: &[Dtype] = &[Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F8E8M0];

/// Storage of a scale.
#[derive(Debug, Clone, Copy)]
enum Element {
    Float(FloatDtype),
    /// Exponent plus 127 (OCP MX 1.0); 255 is NaN.
    PowerOfTwo,
}

/// Scales by (row, column): that at element `row * strides[0] + column * strides[1]`. Entries along a stride of 0 are
/// shared.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid<'a> {
    tensor: Tensor<'a>,
    element: Element,
    strides: [usize; 2],
}

impl<'a> Grid<'a> {
    /// Creates the grid of a tensor whose shape has been checked.
    pub fn new(parts: &Parts<'a>, tensor: Tensor<'a>, strides: [usize; 2]) -> Result<Self, QuantizedError> {
        parts.expect_dtype(&tensor, SCALES)?;
        let element = FloatDtype::of(tensor.dtype).map_or(Element::PowerOfTwo, Element::Float);
        Ok(Self { tensor, element, strides })
    }

    pub fn tensor(&self) -> Tensor<'a> {
        self.tensor
    }

    /// Returns the scale at (row, column).
    pub fn at(&self, row: usize, column: usize) -> f32 {
        self.element(row * self.strides[0] + column * self.strides[1])
    }

    fn element(&self, index: usize) -> f32 {
        match self.element {
            Element::Float(float) => float.read(self.tensor.bytes, index),
            Element::PowerOfTwo => power_of_two(self.tensor.bytes[index]),
        }
    }

    /// Checks that all scales are finite.
    pub fn check(&self) -> Result<(), QuantizedError> {
        let elements = 0..self.tensor.elements();
        match elements.map(|index| (index, self.element(index))).find(|(_, value)| !value.is_finite()) {
            Some((index, value)) => Err(value_fault(&self.tensor, index, value, "finite")),
            None => Ok(()),
        }
    }

    /// Returns whether f16 represents all scales exactly.
    pub fn is_exact_in_f16(&self) -> bool {
        matches!(self.element, Element::Float(FloatDtype::F16))
            || (0..self.tensor.elements())
                .map(|index| self.element(index))
                .all(|value| f16::from_f32(value).to_f32().to_bits() == value.to_bits())
    }
}

/// Returns 2^(exponent - 127); NaN for 255.
pub(super) fn power_of_two(exponent: u8) -> f32 {
    match exponent {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_are_exact() {
        for exponent in 0..255u8 {
            assert_eq!(f64::from(power_of_two(exponent)), 2f64.powi(i32::from(exponent) - 127));
        }
        assert!(power_of_two(255).is_nan());
    }
}
