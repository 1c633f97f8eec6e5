//! Products with a matrix unit, which must have the bits of those without it. All machines with VNNI test the software model
//! of a unit, those with AMX their own unit too.

#![cfg(all(debug_assertions, target_arch = "x86_64", feature = "avx512vnni"))]

#[allow(dead_code, reason = "of the module that tests share")]
mod dense;

use dense::{packed_bands, whole, with_exec};
use ferrule_kernels::arch::{Isa, Model};
use ferrule_kernels::{Exec, Format, PackedMatrix, Product, matmul, matmul_each};

/// Numbers of rows: those without the unit, less and more than a tile and a pair of tiles, and more than a task.
const ROWS: [usize; 9] = [1, 15, 16, 17, 32, 33, 48, 520, 530];

/// Returns activations of different sizes.
fn activations(m: usize, k: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 7919 % 2003) as f32 - 1001.0) / (1 + i % 17) as f32;
    (0..m * k).map(value).collect()
}

fn product(exec: &Exec<'_>, x: &[f32], w: &PackedMatrix) -> Vec<u32> {
    let mut out = vec![f32::NAN; x.len() / w.cols() * w.rows()];
    matmul(exec, x, w, &mut out).unwrap();
    out.into_iter().map(f32::to_bits).collect()
}

/// Returns whether the unit multiplies weights in a format: not if their groups have factors.
fn is_on_unit(format: Format) -> bool {
    format.is_integer() && (format.stored_block().is_none() || format == Format::Int8Sparse)
}

/// Compares products of the first activations with those of all of them without the unit.
fn check(bands: &[(Format, usize)], k: usize, x: &[f32]) {
    let Some([vnni, model]) = Isa::vnni_and_model() else { return };
    let units = [model].into_iter().chain(Isa::named("amx"));
    let w = packed_bands(bands, k, 5);
    let expected = with_exec(vnni, 2, |exec| product(exec, x, &w));
    for (isa, m) in units.flat_map(|isa| ROWS.map(|m| (isa, m))).filter(|(_, m)| m * k <= x.len()) {
        with_exec(isa, 1, |exec| {
            let same = product(exec, &x[..m * k], &w) == expected[..m * w.rows()];
            assert!(same, "{m} rows of {k}, {bands:?}, {}", isa.name());
        });
        let is_on_model = isa.name() == model.name() && m > 16 && bands.iter().all(|(format, _)| is_on_unit(*format));
        assert_eq!(Model::take_products() > 0, is_on_model, "the unit multiplies {m} rows");
        assert!(!Model::is_configured(), "tiles are released");
    }
}

#[test]
fn a_matrix_unit_changes_no_bits() {
    for format in Format::ALL.iter().filter(|format| is_on_unit(**format) || **format == Format::Q4K) {
        // Half a block, a half block at the end, and more blocks than are unpacked at once.
        for k in [40, 328, 1033] {
            let k = whole(&[(*format, 83)], k);
            check(&[(*format, 83)], k, &activations(48, k));
        }
    }
}

#[test]
fn a_matrix_unit_changes_no_bits_of_several_formats() {
    for other in [Format::Q4K, Format::Trellis3] {
        let bands = [(Format::Int8, 48), (other, 16), (Format::Int4, 16), (Format::Int6, 35)];
        let k = whole(&bands, 600);
        check(&bands, k, &activations(33, k));
    }
}

#[test]
fn a_matrix_unit_changes_no_bits_of_products_that_share_activations() {
    let Some([vnni, model]) = Isa::vnni_and_model() else { return };
    // The unit multiplies the first matrix alone, whose tiles of activations are others.
    let (x, bands) = (activations(48, 256), [vec![(Format::Int8, 48)], vec![(Format::Int8, 16), (Format::Q4K, 32)]]);
    for order in [[0, 1], [1, 0]] {
        let weights = order.map(|index: usize| packed_bands(&bands[index], 256, 5));
        let mut outputs = [(); 2].map(|()| vec![f32::NAN; 48 * 48]);
        let mut products: Vec<_> = weights.iter().zip(&mut outputs).map(|(w, out)| Product { x: &x, w, out }).collect();
        with_exec(model, 1, |exec| matmul_each(exec, &mut products)).unwrap();
        for (w, out) in weights.iter().zip(outputs) {
            let out: Vec<_> = out.into_iter().map(f32::to_bits).collect();
            assert!(out == with_exec(vnni, 1, |exec| product(exec, &x, w)), "{order:?}");
        }
    }
}

#[test]
fn a_matrix_unit_changes_no_bits_of_several_tasks_of_rows() {
    for format in [Format::Int4, Format::Trellis3] {
        check(&[(format, 70)], 128, &activations(530, 128));
    }
}

/// Numbers that are not finite make the sums of their rows NaN, and change nothing else.
#[test]
fn a_matrix_unit_changes_no_bits_beside_numbers_that_are_not_finite() {
    for format in [Format::Int8, Format::Int4, Format::Trellis2] {
        let mut x = activations(33, 256);
        (x[3 * 256 + 9], x[20 * 256 + 255], x[32 * 256]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
        check(&[(format, 40)], 256, &x);
    }
}
