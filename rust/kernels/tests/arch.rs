//! SIMD operations on every instruction set of this machine.

use ferrule_kernels::arch::{Isa, Kernel, LANES, Simd};

struct Widen(fn(u16) -> f32, bool);

impl Kernel for Widen {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for first in (0..=u16::MAX).step_by(LANES) {
            let bits: [u16; LANES] = std::array::from_fn(|i| first + i as u16);
            let widened = if self.1 { simd.load_bf16(&bits) } else { simd.load_f16(&bits) };
            for (bits, value) in bits.iter().zip(simd.to_array(widened)) {
                let expected = self.0(*bits);
                let same = value.to_bits() == expected.to_bits() || (value.is_nan() && expected.is_nan());
                assert!(same, "{bits:#06x} is {expected}, not {value}");
            }
        }
    }
}

#[test]
fn every_half_float_widens_exactly() {
    for isa in Isa::available() {
        isa.run(Widen(|bits| half::f16::from_bits(bits).to_f32(), false));
        isa.run(Widen(|bits| half::bf16::from_bits(bits).to_f32(), true));
    }
}
