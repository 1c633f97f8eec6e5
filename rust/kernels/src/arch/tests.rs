//! Tests the integer operations of every instruction set against the scalar ones.

use proptest::prelude::*;

use super::*;

/// Kernel that returns the results of all integer operations on some bytes.
struct Everything<'a> {
    a: &'a [u8; LINE],
    b: &'a [u8; LINE],
    numbers: &'a [f32; LANES],
}

impl DotKernel for Everything<'_> {
    type Output = Vec<u8>;

    #[inline(always)]
    fn run<S: Dot>(self, simd: S) -> Vec<u8> {
        let mut seen = Vec::new();
        let (a, b) = (simd.load_bytes(self.a), simd.load_bytes(self.b));
        let quad = [self.a[0] as i8, self.a[1] as i8, self.a[2] as i8, self.a[3] as i8];
        let sixteen: &[u8; LANES] = self.b.first_chunk().expect("sixteen");
        let table: &[[i8; 4]; LANES] = bytemuck::cast_ref(self.b);
        let pairs = simd.gather_pairs(&table[..8], simd.and(a, simd.splat_quad([-1, 0x7f, 0, 0])));
        for bytes in [
            simd.and(a, b),
            simd.or(a, b),
            simd.xor(a, b),
            simd.sub_bytes(a, b),
            simd.shift_right::<4>(a),
            simd.shift_left::<2>(b),
            simd.mul_pairs(a, b),
            simd.spread(sixteen),
            simd.lookup(sixteen, simd.and(a, simd.splat_byte(0x7f))),
            simd.shuffle(b, simd.and(a, simd.splat_byte(0x0f))),
            simd.gather(&table[..8], a),
            pairs[0],
            pairs[1],
            simd.negate(b, simd.and(a, simd.splat_byte(0x0f))),
            simd.splat_byte(self.a[7]),
            simd.expand(bytemuck::cast::<_, [u64; 8]>(*self.a)[0], self.b),
            simd.splat_quad(quad),
        ] {
            let mut line = [0; LINE];
            simd.store_bytes(bytes, &mut line);
            seen.extend(line);
        }

        let [low, middle, high] = [(0, 4, 0), (5, 2, 4), (7, 1, 6)].map(|(from, width, to)| {
            Some(Plane {
                bytes: if width == 2 { self.a.last_chunk().expect("sixteen") } else { sixteen },
                from,
                width,
                to,
            })
        });
        for integers in [
            simd.load_i8(&sixteen.map(|byte| byte as i8)),
            simd.load_planes([low], 0),
            simd.load_planes([low, middle], 32),
            simd.load_planes([None, middle, high], 3),
        ] {
            let mut lanes = [0; LANES];
            simd.store_i32(integers, &mut lanes);
            seen.extend(lanes.into_iter().flat_map(i32::to_ne_bytes));
        }

        let integers = simd.to_i32(simd.load(self.numbers));
        let mut narrow = [0; LANES];
        simd.store_i8(integers, &mut narrow);
        seen.extend(narrow.map(|byte| byte as u8));

        // The first factor, as its value and `WEIGHT_BIAS` above it; the second is never -128.
        let x = self.b.map(|byte| (byte as i8).max(-127) as u8);
        let w = simd.xor(a, simd.splat_byte(S::WEIGHT_BIAS));
        let mut sums = [0; LANES];
        let start = simd.load_i32(&std::array::from_fn(|i| i as i32 * -1_000_003));
        simd.store_i32(simd.dot(start, w, simd.load_bytes(&x)), &mut sums);
        for (lane, sum) in sums.iter_mut().enumerate() {
            let total: i32 = x[4 * lane..][..4].iter().map(|byte| i32::from(*byte as i8)).sum();
            *sum -= i32::from(S::WEIGHT_BIAS) * total;
        }
        let total = simd.add_i32(simd.load_i32(&sums), simd.splat_i32(i32::MAX));
        simd.store_i32(total, &mut sums);
        seen.extend(sums.into_iter().flat_map(i32::to_ne_bytes));
        let floats = simd.to_array(simd.to_f32(simd.load_i32(&sums.map(|sum| sum >> 8))));
        seen.extend(floats.into_iter().flat_map(f32::to_ne_bytes));
        let (x, y) = (simd.load(self.numbers), simd.load(&floats));
        let selected = simd.to_array(simd.select_greater(x, simd.splat(0.5), x, y));
        seen.extend(selected.into_iter().flat_map(f32::to_ne_bytes));
        for lanes in [0, 1, 0x8000, 0x5aa5, 0xff00, u16::MAX] {
            let selected = simd.to_array(simd.select_lanes(lanes, x, y));
            for (lane, selected) in selected.iter().enumerate() {
                let wanted = if lanes >> lane & 1 == 1 { self.numbers[lane] } else { floats[lane] };
                assert_eq!(selected.to_bits(), wanted.to_bits(), "lane {lane} of {lanes:#x}");
            }
        }
        for swapped in
            [simd.swap_lanes::<1>(x), simd.swap_lanes::<2>(x), simd.swap_lanes::<4>(x), simd.swap_lanes::<8>(x)]
        {
            seen.extend(simd.to_array(swapped).into_iter().flat_map(f32::to_ne_bytes));
        }
        seen
    }
}

/// Kernel that runs another one with an instruction that expands bytes, if the machine has one.
struct Expanding<K>(K);

impl<K: DotKernel> DotKernel for Expanding<K> {
    type Output = K::Output;

    #[inline(always)]
    fn run<S: Dot>(self, simd: S) -> K::Output {
        simd.vectorize_expand(self.0)
    }
}

/// Kernel that returns a group's products by codes of `bits` bits, on instruction sets that multiply codes.
struct ByCodes<'a> {
    bytes: Everything<'a>,
    bits: u32,
}

impl DotKernel for ByCodes<'_> {
    type Output = Option<[i32; LANES]>;

    #[inline(always)]
    fn run<S: Dot>(self, simd: S) -> Self::Output {
        if !S::BY_CODES && S::CODE_ROWS == 0 {
            return None;
        }
        let Everything { a, b, .. } = self.bytes;
        let x = b.map(|byte| (byte as i8).max(-127) as u8);
        let codes = simd.and(simd.load_bytes(a), simd.splat_byte((1 << self.bits) - 1));
        let scale = simd.and(simd.spread(b.first_chunk().expect("sixteen")), simd.splat_quad([0x0f, 0, 0x0f, 0]));
        let (offset, x) = (simd.splat_byte(1 << (self.bits - 1)), simd.load_bytes(&x));
        // Sixteen inputs: four quads that are all the same, first with the negated offset of the codes.
        let mut partial = simd.splat_i32(0);
        for _ in 0..4 {
            partial = simd.dot_codes(partial, offset, simd.sub_bytes(simd.splat_byte(0), x));
        }
        for _ in 0..4 {
            partial = simd.dot_codes(partial, codes, x);
        }
        let mut sums = [0; LANES];
        simd.store_i32(simd.add_scaled(simd.splat_i32(-1_000_003), partial, scale, self.bits <= 4), &mut sums);
        Some(sums)
    }
}

/// Returns the expected result of [`ByCodes`].
fn by_codes(a: &[u8; LINE], b: &[u8; LINE], bits: u32) -> [i32; LANES] {
    std::array::from_fn(|lane| {
        let weight = |i: usize| i32::from(a[i] & ((1 << bits) - 1)) - (1 << (bits - 1));
        let products = (4 * lane..4 * lane + 4).map(|i| weight(i) * i32::from((b[i] as i8).max(-127)));
        4 * products.sum::<i32>() * i32::from(b[lane] & 0x0f) - 1_000_003
    })
}

/// Compares the operations of every instruction set with the scalar ones.
fn check(a: &[u8; LINE], b: &[u8; LINE], numbers: &[f32; LANES]) {
    let kernel = || Everything { a, b, numbers };
    let expected = Isa::named("scalar").expect("every build has it").run_dot(kernel());
    for isa in Isa::available() {
        assert_eq!(isa.run_dot(kernel()), expected, "{}", isa.name());
        assert_eq!(isa.run_dot(Expanding(kernel())), expected, "{} with its instruction that expands", isa.name());
        for bits in [4, 6] {
            if let Some(sums) = isa.run_dot(ByCodes { bytes: kernel(), bits }) {
                assert_eq!(sums, by_codes(a, b, bits), "{}", isa.name());
            }
        }
    }
    #[cfg(all(target_arch = "x86_64", feature = "avxvnni"))]
    if let Some(token) = AvxVnniEvex::detect() {
        assert_eq!(token.vectorize_dot(kernel()), expected, "AVX-VNNI in the encoding of AVX-512");
    }
}

proptest! {
    #[test]
    fn integer_operations_agree_on_every_instruction_set(
        a in prop::array::uniform32(any::<[u8; 2]>()),
        b in prop::array::uniform32(any::<[u8; 2]>()),
        numbers in prop::array::uniform16(-127.0f32..127.0),
    ) {
        let flat = |pairs: [[u8; 2]; 32]| std::array::from_fn(|i| pairs[i / 2][i % 2]);
        check(&flat(a), &flat(b), &numbers);
    }
}

/// The largest products: pairs of them must not overflow 16 bits.
#[test]
fn extreme_products_are_exact() {
    for (w, x) in [(0x80, 127), (0x80, 0x81), (127, 127), (0x81, 0x81)] {
        check(&[w; LINE], &[x; LINE], &[0.5; LANES]);
    }
}

#[test]
fn the_error_of_an_unknown_name_lists_all_names() {
    let error = Isa::named("sse9").unwrap_err().to_string();
    assert_eq!(
        error,
        "FERRULE_ISA=\"sse9\" is not the name of an instruction set; choose one of: scalar, avx2, avxvnni, avx512, avx512vnni, amx"
    );
}

/// Kernel that stores the same numbers at both places.
struct StoreNontemporal<'a>([&'a mut [f32; LANES]; 2], [f32; LANES]);

impl Kernel for StoreNontemporal<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self(places, numbers) = self;
        for to in places {
            simd.store_nontemporal(simd.load(&numbers), to);
        }
        simd.fence();
    }
}

#[test]
fn nontemporal_stores_write_sixteen_numbers_at_any_alignment() {
    let numbers = std::array::from_fn(|lane| lane as f32);
    for isa in Isa::available() {
        for first in 0..2 * LANES {
            let mut memory = [-1.0; 6 * LANES];
            let (before, rest) = memory.split_at_mut(first);
            let (one, rest) = rest.split_first_chunk_mut().expect("sixteen");
            let (two, after) = rest.split_first_chunk_mut().expect("sixteen");
            isa.run(StoreNontemporal([one, two], numbers));
            assert_eq!((*one, *two), (numbers, numbers), "{}", isa.name());
            assert!(before.iter().chain(&*after).all(|x| *x == -1.0), "{}", isa.name());
        }
    }
}
