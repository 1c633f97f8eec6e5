//! Packing: what comes out is what was put in, rounded to the format.

use std::num::NonZeroUsize;

use ferrule_kernels::arch::Isa;
use ferrule_kernels::{Cancel, Exec, Format, PackError, PackedMatrix, Pool, PoolError, RowSource};
use proptest::prelude::*;

struct Rows<F>(F);

impl<F: Fn(usize, &mut [f32]) + Sync> RowSource for Rows<F> {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        (self.0)(row, out);
    }
}

fn pack(
    cancel: &Cancel,
    format: Format,
    rows: usize,
    cols: usize,
    source: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<PackedMatrix, PackError> {
    let pool = Pool::new(NonZeroUsize::new(2).unwrap());
    PackedMatrix::pack(&Exec { isa: Isa::best(), pool: &pool, cancel }, format, rows, cols, &Rows(source))
}

fn rounded(format: Format, value: f32) -> f32 {
    match format {
        Format::F32 => value,
        Format::Bf16 => half::bf16::from_f32(value).to_f32(),
        Format::F16 => half::f16::from_f32(value).to_f32(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn rows_come_back_rounded(rows in 0usize..40, cols in 0usize..70, values in prop::collection::vec(any::<f32>(), 97)) {
        let value = |row: usize, column: usize| values[(row * 71 + column) % values.len()];
        for format in Format::ALL {
            let fill = |row, out: &mut [f32]| out.iter_mut().enumerate().for_each(|(i, out)| *out = value(row, i));
            let matrix = pack(&Cancel::new(), *format, rows, cols, fill).unwrap();
            prop_assert_eq!((matrix.rows(), matrix.cols(), matrix.format()), (rows, cols, *format));
            prop_assert_eq!(Some(matrix.bytes() as u64), PackedMatrix::bytes_for(*format, rows, cols));
            let mut out = vec![0.0; cols];
            for row in 0..rows {
                matrix.read_row(row, &mut out);
                for (column, out) in out.iter().enumerate() {
                    let expected = rounded(*format, value(row, column));
                    prop_assert!(out.to_bits() == expected.to_bits() || (out.is_nan() && expected.is_nan()));
                }
            }
        }
    }
}

#[test]
fn formats_have_names() {
    for format in Format::ALL {
        assert_eq!(Format::named(format.name()), Some(*format));
    }
    assert_eq!(Format::named("f64"), None);
}

#[test]
fn sizes_are_checked() {
    assert_eq!(PackedMatrix::bytes_for(Format::Bf16, 17, 10), Some(2 * 10 * 32));
    assert_eq!(PackedMatrix::bytes_for(Format::F32, usize::MAX, usize::MAX), None);
    let never = |_, _: &mut [f32]| panic!("nothing to read");
    for rows in [1 << 40, usize::MAX] {
        assert!(matches!(pack(&Cancel::new(), Format::F32, rows, 1 << 20, never), Err(PackError::Memory(_))));
    }
}

#[test]
fn a_source_that_panics_and_a_raised_flag_are_errors() {
    let panics = |_, _: &mut [f32]| panic!("bad row");
    let error = pack(&Cancel::new(), Format::F16, 40, 3, panics).unwrap_err();
    assert_eq!(error, PackError::Pool(PoolError::Panicked("bad row".to_owned())));
    let cancel = Cancel::new();
    cancel.cancel();
    assert_eq!(pack(&cancel, Format::F16, 40, 3, |_, _| ()).unwrap_err(), PackError::Pool(PoolError::Cancelled));
}
