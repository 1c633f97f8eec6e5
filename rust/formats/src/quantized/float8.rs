//! Values of the 256 codes of 8-bit types.

use crate::dtype::Dtype;

/// Supported 8-bit floating-point types.
pub(super) const FLOATS: &[Dtype] = &[Dtype::F8E4M3, Dtype::F8E5M2];

/// Returns the values of an 8-bit type; `None` for other types.
pub(super) fn numbers(dtype: Dtype) -> Option<&'static [f32; 256]> {
    match dtype {
        Dtype::F8E4M3 => Some(&E4M3),
        Dtype::F8E5M2 => Some(&E5M2),
        Dtype::I8 => Some(&SIGNED),
        _ => None,
    }
}

/// E4M3 has no infinities; only the codes with all bits set are NaN (<https://arxiv.org/abs/2209.05433>).
static E4M3: [f32; 256] = numbers_of(4, 3);
/// E5M2 is the upper byte of f16.
static E5M2: [f32; 256] = numbers_of(5, 2);
static SIGNED: [f32; 256] = {
    let mut numbers = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        numbers[code] = (code as u8).cast_signed() as f32;
        code += 1;
    }
    numbers
};

/// Returns the values of codes with a sign, an exponent and a mantissa.
const fn numbers_of(exponent_bits: u32, mantissa_bits: u32) -> [f32; 256] {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let mut numbers = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let mantissa = code as u32 & ((1 << mantissa_bits) - 1);
        let exponent = code as u32 >> mantissa_bits & ((1 << exponent_bits) - 1);
        let magnitude = if exponent == 0 {
            // The value is mantissa * 2^(1 - bias - mantissa_bits), a normal number in f32.
            mantissa as f32 * f32::from_bits((127 + 1 - bias - mantissa_bits) << 23)
        } else {
            f32::from_bits((127 + exponent - bias) << 23 | mantissa << (23 - mantissa_bits))
        };
        let last = exponent == (1 << exponent_bits) - 1;
        let magnitude = match (exponent_bits, last, mantissa) {
            (4, true, 7) => f32::NAN,
            (5, true, 0) => f32::INFINITY,
            (5, true, _) => f32::NAN,
            _ => magnitude,
        };
        numbers[code] = if code < 128 { magnitude } else { -magnitude };
        code += 1;
    }
    numbers
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn e5m2_is_the_upper_byte_of_f16() {
        for code in 0..=255u8 {
            let (found, expected) = (E5M2[usize::from(code)], f16::from_bits(u16::from(code) << 8).to_f32());
            assert!(found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()), "{code}");
        }
    }

    #[test]
    fn e4m3_matches_the_paper() {
        let all = [(0x00, 0.0), (0x01, 2f32.powi(-9)), (0x07, 7.0 * 2f32.powi(-9)), (0x08, 2f32.powi(-6)), (0x38, 1.0)];
        for (code, number) in all.into_iter().chain([(0x3c, 1.5), (0x7e, 448.0), (0x78, 256.0)]) {
            assert_eq!((E4M3[code], E4M3[code | 0x80]), (number, -number), "{code:#x}");
        }
        assert!(E4M3[0x7f].is_nan() && E4M3[0xff].is_nan());
        assert_eq!(E4M3.iter().filter(|number| !number.is_finite()).count(), 2);
    }
}
