//! Round trips of packed matrices: rows read back are the original ones, rounded to the format.

#[allow(dead_code, reason = "of the module that tests share")]
mod dense;
mod rotation;

use std::num::NonZeroUsize;
use std::sync::Arc;

use dense::{Noise, packed_bands, whole, with_exec};
use ferrule_kernels::arch::{ByteLine, Isa};
use ferrule_kernels::{
    AllocError, BufferError, BytesOwner, Cancel, Exec, Format, LAYOUT_VERSION, PackError, PackedMatrix, Pool,
    PoolError, RowSource, SharedBytes, matmul,
};
use proptest::prelude::*;
use rotation::{HALF, restored, rotated};

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
    PackedMatrix::pack(&Exec { isa: Isa::best(), pool: &pool, cancel }, &[(format, rows)], cols, &Rows(source))
}

fn rounded(format: Format, value: f32) -> f32 {
    match format {
        Format::F32 => value,
        Format::Bf16 => half::bf16::from_f32(value).to_f32(),
        Format::F16 => half::f16::from_f32(value).to_f32(),
        _ => unreachable!("quantized formats round whole rows"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn rows_come_back_rounded(rows in 0usize..40, cols in 0usize..70, values in prop::collection::vec(any::<f32>(), 97)) {
        let value = |row: usize, column: usize| values[(row * 71 + column) % values.len()];
        for format in Format::ALL.iter().filter(|format| !format.is_integer()) {
            let fill = |row, out: &mut [f32]| out.iter_mut().enumerate().for_each(|(i, out)| *out = value(row, i));
            let matrix = pack(&Cancel::new(), *format, rows, cols, fill).unwrap();
            prop_assert_eq!((matrix.rows(), matrix.cols()), (rows, cols));
            prop_assert_eq!(matrix.formats().collect::<Vec<_>>(), [(*format, rows.div_ceil(16))]);
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

/// Returns the largest error of a weight relative to the largest weight of its super-block: half a code, plus the
/// rounding error of the sub-scale for all but int8.
fn worst_error(format: Format) -> f32 {
    match format {
        Format::Int8 => 0.6 / 127.0,
        Format::Int6 => 0.125,
        Format::Int5 => 0.1,
        Format::Int3 => 0.4,
        Format::Int2 => 0.8,
        _ => 0.2,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Codes of every position in a panel are read back: a wrong nibble would be far off.
    #[test]
    fn rows_come_back_quantized(rows in 1usize..40, halves in 1usize..9, values in prop::collection::vec(-1.0f32..1.0, 997)) {
        let cols = halves * HALF;
        let value = |row: usize, column: usize| values[(row * 631 + column) % values.len()];
        for format in [Format::Int8, Format::Int6, Format::Int5, Format::Int4, Format::Int3, Format::Int2] {
            // Stored blocks are rotated.
            let fill = |row, out: &mut [f32]| {
                out.copy_from_slice(&restored(&(0..cols).map(|i| value(row, i)).collect::<Vec<_>>()));
            };
            let matrix = pack(&Cancel::new(), format, rows, cols, fill).unwrap();
            prop_assert_eq!(Some(matrix.bytes() as u64), PackedMatrix::bytes_for(format, rows, cols));
            let mut out = vec![0.0; cols];
            for row in 0..rows {
                matrix.read_row(row, &mut out);
                for (index, out) in rotated(&out).chunks(256).enumerate() {
                    let exact: Vec<f32> = (0..out.len()).map(|i| value(row, index * 256 + i)).collect();
                    let largest = exact.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                    for (column, (out, exact)) in out.iter().zip(&exact).enumerate() {
                        let error = (out - exact).abs();
                        prop_assert!(error <= worst_error(format) * largest, "{format:?} row {row} column {column}: {exact} became {out}");
                    }
                }
            }
        }
    }
}

/// Rows may end within a block.
#[test]
fn short_blocks_come_back_quantized() {
    for (format, bound) in [
        (Format::Int8, 0.02),
        (Format::Int6, 0.06),
        (Format::Int5, 0.1),
        (Format::Int4, 0.2),
        (Format::Int3, 0.4),
        (Format::Int2, 0.6),
        (Format::Trellis5, 0.1),
        (Format::Trellis4, 0.15),
        (Format::Trellis3, 0.25),
        (Format::Trellis2, 0.45),
    ] {
        for cols in [1, 2, 31, 64, 127, 129, 192, 300, 576] {
            let values: Vec<f32> = (0..cols).map(|i| (i * 104_729 % 1009) as f32 / 504.0 - 1.0).collect();
            let matrix = pack(&Cancel::new(), format, 1, cols, |_, out| out.copy_from_slice(&values)).unwrap();
            let mut out = vec![0.0; cols];
            matrix.read_row(0, &mut out);
            let length = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
            let error = length(&mut out.iter().zip(&values).map(|(out, value)| out - value));
            let whole = length(&mut values.iter().copied());
            assert!(error < bound * whole, "{format:?} {cols}: {error} of {whole}");
        }
    }
}

#[test]
fn all_instruction_sets_quantize_to_the_same_bits() {
    let fill = |row: usize, out: &mut [f32]| {
        out.iter_mut().enumerate().for_each(|(i, out)| *out = ((row * 7919 + i * 104_729) % 1009) as f32 / 504.0 - 1.0);
    };
    for format in Format::ALL.iter().filter(|format| format.stored_block().is_none()) {
        let read = |isa| {
            let pool = Pool::new(NonZeroUsize::new(2).unwrap());
            let exec = Exec { isa, pool: &pool, cancel: &Cancel::new() };
            let matrix = PackedMatrix::pack(&exec, &[(*format, 40)], 700, &Rows(fill)).unwrap();
            let mut out = vec![0.0; 40 * 700];
            out.chunks_mut(700).enumerate().for_each(|(row, out)| matrix.read_row(row, out));
            out
        };
        let scalar = read(Isa::named("scalar").unwrap());
        for isa in Isa::available() {
            assert!(read(isa) == scalar, "{format:?} {}", isa.name());
        }
    }
}

#[test]
fn random_weights_differ_and_keep_the_variance() {
    let pool = Pool::new(NonZeroUsize::new(2).unwrap());
    let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &Cancel::new() };
    for format in Format::ALL.iter().filter(|format| format.is_integer()) {
        let matrix = PackedMatrix::random(&exec, &[(*format, 64)], 1024, 5).unwrap();
        let mut rows = vec![vec![0.0; 1024]; 64];
        rows.iter_mut().enumerate().for_each(|(row, out)| matrix.read_row(row, out));
        let variance = rows.iter().flatten().map(|w| w * w).sum::<f32>() / 64.0;
        // Scales of mxfp4 are powers of two, the nearest of which may be off by a factor of 1.42.
        let slack = if *format == Format::Mxfp4 { 1.0 } else { 0.1 };
        assert!((variance - 1.0).abs() < slack, "{format:?}: {variance}");
        assert!((1..64).all(|row| rows[row] != rows[0]), "{format:?}");
    }
}

#[test]
fn sizes_are_checked() {
    assert_eq!(PackedMatrix::bytes_for(Format::Bf16, 17, 10), Some(2 * 10 * 32));
    assert_eq!(PackedMatrix::bytes_for(Format::F32, usize::MAX, usize::MAX), None);
    // Rows of 4.5 blocks: lines of a panel, and three rows of block scales.
    for (format, lines) in [
        (Format::Int8, 144),
        (Format::Int6, 111),
        (Format::Int5, 93),
        (Format::Int4, 77),
        (Format::Int3, 57),
        (Format::Int2, 39),
        (Format::Trellis5, 90),
        (Format::Trellis4, 72),
        (Format::Trellis3, 54),
        (Format::Trellis2, 36),
    ] {
        for cols in [520, 576] {
            assert_eq!(PackedMatrix::bytes_for(format, 16, cols), Some(lines * 64 + 3 * 32), "{format:?}");
        }
    }
    let never = |_, _: &mut [f32]| panic!("nothing to read");
    for rows in [1 << 40, usize::MAX] {
        assert!(matches!(pack(&Cancel::new(), Format::F32, rows, 1 << 20, never), Err(PackError::Memory(_))));
    }
}

#[test]
fn panics_of_the_source_and_cancellation_are_errors() {
    let panics = |_, _: &mut [f32]| panic!("bad row");
    let error = pack(&Cancel::new(), Format::F16, 40, 3, panics).unwrap_err();
    assert_eq!(error, PackError::Pool(PoolError::Panicked("bad row".to_owned())));
    let cancel = Cancel::new();
    cancel.cancel();
    assert_eq!(pack(&cancel, Format::F16, 40, 3, |_, _| ()).unwrap_err(), PackError::Pool(PoolError::Cancelled));
}

/// Owner of shared memory that is aligned to a cache line.
struct Owner(Vec<ByteLine>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// Copies the buffers of a matrix into shared memory, each aligned to a cache line.
fn shared_buffers(matrix: &PackedMatrix) -> Vec<SharedBytes> {
    let mut bytes = Vec::new();
    let mut ranges = Vec::new();
    for buffer in matrix.buffers() {
        bytes.resize(bytes.len().next_multiple_of(64), 0u8);
        ranges.push(bytes.len()..bytes.len() + buffer.len());
        bytes.extend_from_slice(buffer);
    }
    let mut lines = vec![ByteLine([0; 64]); bytes.len().div_ceil(64)];
    bytemuck::cast_slice_mut(&mut lines)[..bytes.len()].copy_from_slice(&bytes);
    let owner: BytesOwner = Arc::new(Owner(lines));
    ranges.into_iter().map(|range| SharedBytes::new(Arc::clone(&owner), range).unwrap()).collect()
}

fn rows_of(matrix: &PackedMatrix) -> Vec<f32> {
    let mut values = vec![0.0; matrix.rows() * matrix.cols()];
    values.chunks_mut(matrix.cols()).enumerate().for_each(|(row, out)| matrix.read_row(row, out));
    values
}

#[test]
fn matrices_are_restored_from_shared_memory_and_from_copies() {
    let all = Format::ALL.iter().map(|format| vec![(*format, 37)]);
    for formats in all.chain([vec![(Format::Int4, 32), (Format::Int6, 21)]]) {
        let cols = whole(&formats, 301);
        let packed = packed_bands(&formats, cols, 3);
        let buffers: Vec<_> = packed.buffers().collect();
        let sizes = formats.iter().flat_map(|&(format, rows)| PackedMatrix::buffer_bytes(format, rows, cols).unwrap());
        assert_eq!(sizes.collect::<Vec<_>>(), buffers.iter().map(|buffer| buffer.len()).collect::<Vec<_>>());

        let shared = PackedMatrix::shared(&formats, cols, shared_buffers(&packed)).unwrap();
        let mut next = buffers.iter();
        let fill = |bytes: &mut [u8]| -> Result<(), AllocError> {
            bytes.copy_from_slice(next.next().unwrap());
            Ok(())
        };
        let filled = PackedMatrix::filled(&formats, cols, fill).unwrap();
        assert_eq!((shared.shared_bytes(), filled.shared_bytes()), (packed.bytes(), 0));
        for copy in [shared, filled] {
            assert!(copy.buffers().eq(packed.buffers()), "{formats:?}");
            assert!(copy.formats().eq(packed.formats()) && copy.bytes() == packed.bytes());
            assert!(rows_of(&copy) == rows_of(&packed), "{formats:?}");
        }
    }
}

#[test]
fn panels_are_the_rows_of_the_whole() {
    let all = Format::ALL.iter().map(|format| vec![(*format, 53)]);
    for formats in all.chain([vec![(Format::Int4, 32), (Format::Int6, 21)]]) {
        let cols = whole(&formats, 301);
        let packed = packed_bands(&formats, cols, 3);
        let shared = PackedMatrix::shared(&formats, cols, shared_buffers(&packed)).unwrap();
        let rows = rows_of(&packed);
        for panels in [0..4, 0..1, 1..3, 3..4, 2..2] {
            for matrix in [&packed, &shared] {
                let part = matrix.panels(panels.clone()).unwrap();
                let expected = 53.min(panels.end * 16) - 53.min(panels.start * 16);
                assert_eq!((part.rows(), part.cols()), (expected, cols));
                assert!(
                    rows_of(&part) == rows[panels.start * 16 * cols..][..expected * cols],
                    "{formats:?} {panels:?}"
                );
                assert_eq!(part.shared_bytes(), if matrix.shared_bytes() > 0 { part.bytes() } else { 0 });
                // The outputs are those of the whole, bit by bit.
                let x: Vec<f32> = (0..2 * cols).map(|i| (i % 17) as f32 - 8.0).collect();
                let outputs = |matrix: &PackedMatrix| {
                    let mut out = vec![0.0; 2 * matrix.rows()];
                    with_exec(Isa::best(), 1, |exec| matmul(exec, &x, matrix, &mut out).unwrap());
                    out
                };
                let (all, found) = (outputs(matrix), outputs(&part));
                for row in 0..2 {
                    let expected = &all[row * 53 + panels.start * 16..][..expected];
                    assert!(found[row * part.rows()..][..part.rows()] == *expected, "{formats:?} {panels:?}");
                }
            }
        }
    }
}

#[test]
fn shared_buffers_of_the_wrong_size_or_alignment_are_refused() {
    let packed = pack(&Cancel::new(), Format::Int8, 32, 256, |row, out| out.fill(row as f32)).unwrap();
    let [data, scales] = PackedMatrix::buffer_bytes(Format::Int8, 32, 256).unwrap();
    let shared = |buffers: Vec<SharedBytes>| PackedMatrix::shared(&[(Format::Int8, 32)], 256, buffers).unwrap_err();
    let owner: BytesOwner = Arc::new(Owner(vec![ByteLine([0; 64]); (data + scales) / 64 + 2]));
    let bytes = |first: usize, len: usize| SharedBytes::new(Arc::clone(&owner), first..first + len).unwrap();
    let buffers = shared_buffers(&packed);
    assert_eq!(
        shared(vec![bytes(0, data - 64), buffers[1].clone()]),
        BufferError::Length { expected: data, found: data - 64 }
    );
    assert_eq!(
        shared(vec![buffers[0].clone(), bytes(0, scales + 64)]),
        BufferError::Length { expected: scales, found: scales + 64 }
    );
    assert_eq!(shared(vec![bytes(32, data), buffers[1].clone()]), BufferError::Alignment { past: 32 });
    assert!(SharedBytes::new(Arc::clone(&owner), 0..data + scales + 200).is_none());
}

/// Computes the FNV-1a hash (<http://www.isthe.com/chongo/tech/comp/fnv/>).
fn hash<'a>(bytes: impl Iterator<Item = &'a u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Packed files outlive a build, so every change of the layout must change its version.
#[test]
fn the_layout_matches_its_version() {
    let pinned = [
        ("f32", 0x6fe0_af31_30f5_dcd4),
        ("bf16", 0xa282_e61b_2986_3316),
        ("f16", 0xb255_07fe_c6dc_fad6),
        ("u8", 0xc8b6_5246_1063_8adf),
        ("q8_0", 0x1fc5_33bc_8c55_f7aa),
        ("int8", 0xe073_b1e0_ad13_fe3e),
        ("q6_k", 0x2620_7fa7_c52b_d47f),
        ("int6", 0x4fcf_d172_4c77_bbf0),
        ("q5_1", 0x45f5_e2f6_d185_52c6),
        ("q5_0", 0x0b77_68ce_8728_0d85),
        ("q5_k", 0x3cd4_fc71_3dc4_2ae4),
        ("int5", 0xbbc2_ba8e_a9f4_16f9),
        ("trellis5", 0x5c78_1038_d4e6_7b3c),
        ("int8_2of4", 0xb5a9_3300_699f_0338),
        ("int8_sparse", 0x3ec1_6d20_e60d_7e52),
        ("q4_1", 0xc1f3_c562_7521_d25b),
        ("u4", 0x6cfa_4801_ebe3_6f72),
        ("q4_0", 0xbb71_9d95_e752_2c12),
        ("q4_k", 0xb88c_a6cb_f4d5_f046),
        ("iq4_nl", 0xbb71_9d95_e752_2c12),
        ("int4", 0x746e_6a80_2394_9f75),
        ("iq4_xs", 0xdd8c_3273_d878_da3d),
        ("mxfp4", 0x5604_54ee_4e59_478b),
        ("trellis4", 0xbb01_330b_9362_9708),
        ("q3_k", 0xdaa8_a0b1_e3e6_cfdb),
        ("iq3_s", 0x9f1f_36e4_fcb8_6900),
        ("int4_2of4", 0x995c_14cb_fe24_1240),
        ("int3", 0x9cb9_841d_1da7_75cf),
        ("trellis3", 0x460a_594e_d481_daea),
        ("iq3_xxs", 0xef7d_23ac_7119_336a),
        ("q2_k", 0x85dd_9873_091a_4fd1),
        ("iq2_s", 0xd468_8768_5f92_bc92),
        ("iq2_xs", 0x2274_8faa_0ab5_7be7),
        ("int2", 0x5fae_ebf5_8ed4_ab4e),
        ("trellis2", 0xb5ac_9bdf_9067_edda),
        ("iq2_xxs", 0x9d17_1684_df83_dde8),
    ];
    // Rows that end with a half block.
    let pinned_halves = [
        ("int8", 0x1219_947e_8b07_3dbd),
        ("int6", 0x0017_eddb_cffc_09c6),
        ("int5", 0x4afd_94ab_a298_ccc7),
        ("trellis5", 0xd08f_a113_bcf2_f571),
        ("int4", 0x471e_3b2e_6770_5aa6),
        ("int3", 0xb32d_f46f_543b_b511),
        ("int2", 0x3a78_9ef9_1608_dbf1),
        ("trellis4", 0x624c_9c76_256d_0b5b),
        ("trellis3", 0x3d9a_9aa1_f2a1_738d),
        ("trellis2", 0xbf9e_ca24_4ad0_ece4),
    ];
    for isa in Isa::available() {
        let hashes = |cols: usize, formats: &[Format]| {
            let hash_of = |format: &Format| {
                let source = Noise { formats: &[(*format, 37)], seed: 11, first: 0 };
                let matrix = with_exec(isa, 2, |exec| PackedMatrix::pack(exec, source.formats, cols, &source)).unwrap();
                (format.name(), hash(matrix.buffers().flatten()))
            };
            formats.iter().map(hash_of).collect::<Vec<_>>()
        };
        let halves: Vec<Format> = pinned_halves.iter().map(|(name, _)| Format::named(name).unwrap()).collect();
        assert_eq!(LAYOUT_VERSION, 4, "update the hashes for the new version");
        let message = format!("{}: the layout has changed; increment LAYOUT_VERSION", isa.name());
        assert_eq!(hashes(768, Format::ALL), pinned, "{message}");
        assert_eq!(hashes(576, &halves), pinned_halves, "{message}");
    }
}
