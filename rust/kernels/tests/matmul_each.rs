//! Batched products against each product alone.

mod dense;
mod guard;

use std::thread::sleep;
use std::time::Duration;

use dense::{noise, packed, packed_bands, pool, whole, with_exec};
use ferrule_kernels::arch::Isa;
use ferrule_kernels::{Cancel, Exec, Format, PoolError, Product, matmul, matmul_each};
use guard::Guarded;
use proptest::prelude::*;

/// Shape of a product: rows, outputs, inputs, and the index of its activations.
type Shape = (usize, usize, usize, usize);

/// Generates products with few different shapes and activations, so that some share their activations.
fn shapes() -> impl Strategy<Value = Vec<Shape>> {
    let rows = prop_oneof![Just(0), Just(1), Just(1), 2usize..=40];
    prop::collection::vec((rows, 1usize..=150, prop_oneof![Just(77), Just(128), 1usize..=300], 0usize..2), 0..7)
}

/// Returns formats of matrices with `n` rows: each format alone, and combinations of quantized formats if there are
/// enough rows.
fn formats(n: usize) -> Vec<Vec<(Format, usize)>> {
    let mut formats: Vec<_> = Format::ALL.iter().map(|format| vec![(*format, n)]).collect();
    for [most, some, few] in [[Format::Int4, Format::Int6, Format::Int8], [Format::Q4K, Format::Int4, Format::Q6K]] {
        formats.push(if n > 48 { vec![(most, 32), (some, 16), (few, n - 48)] } else { vec![(some, n)] });
    }
    formats
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Checks that the products in `formats(n)[index]` have the same bits when batched and alone, on every instruction set.
fn check(threads: usize, shapes: &[Shape], index: usize) {
    let shapes = shapes.iter().map(|&(m, n, k, x)| (m, n, whole(&formats(n)[index], k), x)).collect::<Vec<_>>();
    let packed = |&(_, n, k, _): &Shape| packed_bands(&formats(n)[index], k, n as u64);
    let weights: Vec<_> = shapes.iter().map(packed).collect();
    // All slices of one activation vector start at the same address, so the length must distinguish them as well.
    let activations = [noise(60 * 512, 1), noise(60 * 512, 2)].map(|values| Guarded::new(&values));
    let inputs: Vec<&[f32]> = shapes.iter().map(|(m, _, k, x)| &activations[*x][..m * k]).collect();
    for isa in Isa::available() {
        let alone = inputs.iter().zip(&weights).zip(&shapes).map(|((x, w), (m, n, ..))| {
            let mut out = vec![f32::NAN; m * n];
            with_exec(isa, 1, |exec| matmul(exec, x, w, &mut out)).unwrap();
            out
        });
        let mut together: Vec<_> = shapes.iter().map(|(m, n, ..)| Guarded::new(&vec![f32::NAN; m * n])).collect();
        let products = inputs.iter().zip(&weights).zip(&mut together).map(|((x, w), out)| Product { x, w, out });
        let mut products: Vec<_> = products.collect();
        with_exec(isa, threads, |exec| matmul_each(exec, &mut products)).unwrap();
        for (together, alone) in together.iter().zip(alone) {
            assert_eq!(bits(together), bits(&alone), "{shapes:?} in {:?}, {isa:?}", formats(0)[index]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn batched_products_have_the_bits_of_single_products(shapes in shapes(), threads in 1usize..=4) {
        for index in 0..formats(0).len() {
            check(threads, &shapes, index);
        }
    }
}

/// Uses enough activations for parallel quantization, and enough weights for several tasks per product.
#[test]
fn large_batched_products_have_the_bits_of_single_products() {
    let mut shapes = vec![(1, 700, 300, 0), (30, 700, 300, 1), (30, 90, 300, 1), (0, 90, 300, 1), (40, 40, 256, 0)];
    // The same slice as above with another number of rows.
    shapes.push((60, 40, 150, 1));
    for index in 0..formats(0).len() {
        check(3, &shapes, index);
    }
}

/// Computes two products in `format`.
fn two(exec: &Exec<'_>, format: Format) -> Result<(), PoolError> {
    let w = packed(format, 100, 10, 1);
    let (mut first, mut second) = ([0.0; 100], [0.0; 200]);
    let first = Product { x: &[1.0; 10], w: &w, out: &mut first };
    matmul_each(exec, &mut [first, Product { x: &[1.0; 20], w: &w, out: &mut second }])
}

#[test]
fn cancelling_is_an_error() {
    for format in [Format::Bf16, Format::Int4] {
        for threads in [1, 2] {
            with_exec(Isa::best(), threads, |exec| {
                exec.cancel.cancel();
                assert_eq!(two(exec, format), Err(PoolError::Cancelled));
                exec.cancel.reset();
                assert_eq!(two(exec, format), Ok(()));
            });
        }
    }
}

#[test]
fn a_panic_is_an_error() {
    for format in [Format::Bf16, Format::Int4] {
        let (pool, cancel) = (pool(2), Cancel::with_poll(|| panic!("the hook")));
        // Longer than the minimum interval between calls of the hook.
        sleep(Duration::from_millis(50));
        let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
        assert_eq!(two(&exec, format), Err(PoolError::Panicked("the hook".to_owned())));
        assert_eq!(two(&Exec { cancel: &Cancel::new(), ..exec }, format), Ok(()));
    }
}

#[test]
fn empty_products_are_supported() {
    let (w, no_inputs) = (packed(Format::Int8, 17, 5, 1), packed(Format::F32, 3, 0, 1));
    with_exec(Isa::best(), 2, |exec| {
        matmul_each(exec, &mut []).unwrap();
        let (mut out, mut zeros) = ([f32::NAN; 17], [f32::NAN; 6]);
        let products = &mut [
            Product { x: &[], w: &no_inputs, out: &mut zeros },
            Product { x: &[], w: &w, out: &mut [] },
            Product { x: &[1.0; 5], w: &w, out: &mut out },
        ];
        matmul_each(exec, products).unwrap();
        assert!(out.iter().all(|out| out.is_finite()) && zeros == [0.0; 6]);
    });
}

#[test]
#[should_panic(expected = "x must have 10 elements (2 rows of 5), got 9")]
fn activations_of_the_wrong_length_are_refused() {
    with_exec(Isa::best(), 1, |exec| {
        let w = packed(Format::F32, 3, 5, 1);
        let first = Product { x: &[0.0; 5], w: &w, out: &mut [0.0; 3] };
        let _ = matmul_each(exec, &mut [first, Product { x: &[0.0; 9], w: &w, out: &mut [0.0; 6] }]);
    });
}

#[test]
fn products_of_different_families_have_the_bits_of_separate_calls() {
    let x = noise(2 * 256, 3);
    with_exec(Isa::best(), 2, |exec| {
        let formats = [Format::F16, Format::Int4, Format::F32, Format::Q4K, Format::F16];
        let weights = formats.map(|format| packed(format, 20, 256, 4));
        let mut out = [[f32::NAN; 40]; 5];
        let mut products: Vec<_> = weights.iter().zip(&mut out).map(|(w, out)| Product { x: &x, w, out }).collect();
        matmul_each(exec, &mut products).unwrap();
        for (w, out) in weights.iter().zip(out) {
            let mut alone = [f32::NAN; 40];
            matmul(exec, &x, w, &mut alone).unwrap();
            assert_eq!(out, alone);
        }
    });
}
