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

/// Tests go through `Isa::available`: an instruction set that the machine has and the build lacks would go untested.
#[test]
#[cfg(target_arch = "x86_64")]
fn the_build_includes_every_instruction_set_of_this_machine() {
    let flags = std::fs::read_to_string("/proc/cpuinfo").expect("/proc/cpuinfo");
    let flags: Vec<_> = flags.lines().find(|line| line.starts_with("flags")).expect("flags").split(' ').collect();
    let has = |names: &[&str]| names.iter().all(|name| flags.contains(name));
    let avx2 = has(&["avx2", "fma", "f16c", "popcnt"]);
    let avx512 = avx2 && has(&["avx512f", "avx512bw", "avx512vl", "avx512dq"]);
    let mut expected = vec!["scalar"];
    for (name, has) in [
        ("avx2", avx2),
        ("avxvnni", avx2 && has(&["avx_vnni"])),
        ("avx512", avx512),
        ("avx512vnni", avx512 && has(&["avx512_vnni"])),
        ("amx", avx512 && has(&["avx512_vnni", "amx_tile", "amx_int8"])),
    ] {
        if has {
            expected.push(name);
        }
    }
    let available: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
    assert_eq!(available, expected);
}
