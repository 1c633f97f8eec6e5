//! Round trips of K and V against the rounding of the `half` crate and a reference quantizer. Elements are read from the
//! bytes of a page.

use std::num::NonZeroUsize;

use ferrule_kernels::arch::{Dot, DotKernel, Isa, LINE};
use ferrule_kernels::kv::{KvFormat, KvRow, KvShape, KvStore, PAGE_TOKENS};
use ferrule_kernels::{AllocError, Cancel, Exec, Pool, Rows};
use proptest::prelude::*;

use crate::guard::Guarded;

/// Creates a store in which every bit is set, which is NaN in all formats, to detect reads of unwritten elements.
pub fn poisoned(format: KvFormat, shape: KvShape, pages: usize) -> KvStore {
    let mut store = KvStore::new(format, shape, pages).expect("memory");
    let page = vec![0xff; KvStore::page_bytes(format, shape).expect("a size") as usize];
    (0..pages as u32).for_each(|index| store.set_page(index, &page));
    store
}

/// Quantizes the numbers of one token and head to int8, and dequantizes them.
pub fn dequantized(numbers: &[f32]) -> Vec<f32> {
    let largest = numbers.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let scale = half::bf16::from_f32(largest / 127.0).to_f32();
    if scale < f32::MIN_POSITIVE {
        return vec![0.0; numbers.len()];
    }
    numbers.iter().map(|x| (x * scale.recip()).round_ties_even() * scale).collect()
}

/// Returns K and V of a token and head, rounded to the format and widened.
fn rounded(format: KvFormat, key: &[f32], value: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let each =
        |round: fn(f32) -> f32| (key.iter().map(|x| round(*x)).collect(), value.iter().map(|x| round(*x)).collect());
    match format {
        KvFormat::F32 => each(|x| x),
        KvFormat::F16 => each(|x| half::f16::from_f32(x).to_f32()),
        KvFormat::Bf16 => each(|x| half::bf16::from_f32(x).to_f32()),
        KvFormat::Int8 if key.iter().chain(value).any(|x| !x.is_finite()) => each(|x| x * f32::NAN),
        KvFormat::Int8 => (dequantized(key), dequantized(value)),
    }
}

struct Bias;

impl DotKernel for Bias {
    type Output = u8;

    #[inline(always)]
    fn run<S: Dot>(self, _: S) -> u8 {
        S::WEIGHT_BIAS
    }
}

/// Columns of a vector, to a multiple of which the columns of V are padded.
const VECTOR: usize = 16;

/// Returns K and V of a token in one head of a page of floating-point elements, with the padding of V.
fn read_floats(format: KvFormat, key_dim: usize, head: &[u8], slot: usize) -> (Vec<f32>, Vec<f32>) {
    let numbers: Vec<f32> = match format {
        KvFormat::F32 => head.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect(),
        KvFormat::F16 => head.as_chunks().0.iter().map(|bytes| half::f16::from_ne_bytes(*bytes).to_f32()).collect(),
        KvFormat::Bf16 => head.as_chunks().0.iter().map(|bytes| half::bf16::from_ne_bytes(*bytes).to_f32()).collect(),
        KvFormat::Int8 => unreachable!("codes are integers"),
    };
    // [key_dim][token], [token][columns]
    let (keys, values) = numbers.split_at(key_dim * PAGE_TOKENS);
    let columns = values.len() / PAGE_TOKENS;
    (keys.iter().skip(slot).step_by(PAGE_TOKENS).copied().collect(), values[slot * columns..][..columns].to_vec())
}

/// Returns K and V of a token in one head of a page of codes, with their padding.
fn read_codes(isa: Isa, key_dim: usize, head: &[u8], slot: usize) -> (Vec<f32>, Vec<f32>) {
    let (scales, codes) = head.split_at(LINE);
    let (keys, values) = codes.split_at(key_dim.div_ceil(4) * LINE);
    let scale = |index: usize| half::bf16::from_bits(u16::from_ne_bytes(scales.as_chunks().0[index])).to_f32();
    let number = |byte: u8, scale: f32| f32::from(byte as i8) * scale;
    let (key_scale, bias) = (scale(slot), isa.run_dot(Bias));
    // A NaN scale of K applies to V as well.
    let value_scale = if key_scale.is_nan() { f32::NAN } else { scale(PAGE_TOKENS + slot) };
    // [key_dim / 4][token][4], [token / 4][columns][4]
    let keys = keys.chunks(LINE).flat_map(|line| &line[slot * 4..][..4]);
    let values = values.chunks(values.len() / (PAGE_TOKENS / 4)).nth(slot / 4).expect("four rows of quads");
    let values = values.iter().skip(slot % 4).step_by(4);
    (
        keys.map(|byte| number(byte.wrapping_sub(bias), key_scale)).collect(),
        values.map(|byte| number(*byte, value_scale)).collect(),
    )
}

/// Returns K and V of a token from the bytes of its page, `[kv_head][dim]` each. The shape has no keys of an indexer.
fn read(store: &KvStore, isa: Isa, layer: usize, row: KvRow) -> (Vec<f32>, Vec<f32>) {
    let (format, KvShape { kv_heads, key_dim, value_dim, .. }) = (store.format(), store.shape());
    let columns = key_dim + value_dim.next_multiple_of(VECTOR);
    let head_bytes = match format {
        KvFormat::F32 => columns * PAGE_TOKENS * 4,
        KvFormat::F16 | KvFormat::Bf16 => columns * PAGE_TOKENS * 2,
        KvFormat::Int8 => LINE + (key_dim.next_multiple_of(4) + value_dim.next_multiple_of(VECTOR)) * PAGE_TOKENS,
    };
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for head in store.page(row.page).chunks_exact(head_bytes).skip(layer * kv_heads).take(kv_heads) {
        let (key, value) = match format {
            KvFormat::Int8 => read_codes(isa, key_dim, head, row.slot),
            _ => read_floats(format, key_dim, head, row.slot),
        };
        let is_padding = |pad: &f32| *pad == 0.0 || (format == KvFormat::Int8 && pad.is_nan());
        assert!(key[key_dim..].iter().chain(&value[value_dim..]).all(is_padding), "K and V are zero-padded");
        keys.extend_from_slice(&key[..key_dim]);
        values.extend_from_slice(&value[..value_dim]);
    }
    (keys, values)
}

fn with_exec<T>(isa: Isa, run: impl FnOnce(&Exec<'_>) -> T) -> T {
    let (pool, cancel) = (Pool::new(NonZeroUsize::new(2).expect("two")), Cancel::new());
    run(&Exec { isa, pool: &pool, cancel: &cancel })
}

/// Rounds all heads of a token: `[kv_heads * key_dim]` and `[kv_heads * value_dim]`.
fn rounded_heads(format: KvFormat, shape: KvShape, keys: &[f32], values: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let heads = keys.chunks_exact(shape.key_dim).zip(values.chunks_exact(shape.value_dim));
    let heads: Vec<_> = heads.map(|(key, value)| rounded(format, key, value)).collect();
    (heads.iter().flat_map(|head| head.0.clone()).collect(), heads.iter().flat_map(|head| head.1.clone()).collect())
}

fn same(got: &[f32], wanted: &[f32]) -> bool {
    got.len() == wanted.len() && got.iter().zip(wanted).all(|(a, b)| a == b || (a.is_nan() && b.is_nan()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The error of a code is at most half a scale, and the scale is the smallest that bf16 can represent.
    #[test]
    fn codes_round_to_nearest(
        numbers in prop::collection::vec(-1f32..1.0, 1..70),
        exponent in -100i32..100,
    ) {
        let numbers: Vec<f32> = numbers.iter().map(|x| x * 2f32.powi(exponent)).collect();
        let largest = numbers.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let scale = largest / 127.0 * (1.0 + 1.0 / 256.0);
        for (x, code) in numbers.iter().zip(dequantized(&numbers)) {
            prop_assert!((x - code).abs() <= scale * 0.500_01, "{x} became {code}, largest {largest}");
        }
    }

    #[test]
    fn written_rows_are_read_back(
        kv_heads in 1usize..4,
        key_dim in 1usize..70,
        value_dim in 1usize..70,
        format in prop::sample::select(KvFormat::ALL.to_vec()),
        count in 1usize..40,
        numbers in prop::collection::vec(any::<f32>(), 40 * 6 * 70),
    ) {
        let shape = KvShape { layers: 2, kv_heads, key_dim, value_dim, index_dim: 0 };
        let stride = kv_heads * (key_dim + value_dim) + 3;
        let data = Guarded::new(&numbers[..count * stride]);
        // Visits every slot of five pages, the last page first.
        let rows: Vec<KvRow> =
            (0..count).map(|i| KvRow { page: 4 - (i / PAGE_TOKENS) as u32, slot: (i * 5) % PAGE_TOKENS }).collect();
        for isa in Isa::available() {
            let mut store = KvStore::new(format, shape, 5).expect("memory");
            with_exec(isa, |exec| {
                let (keys, values) = (Rows::new(&data, stride, 3), Rows::new(&data, stride, 3 + kv_heads * key_dim));
                store.write(exec, 1, &rows, keys, values)
            }).expect("runs");
            for (row, at) in data.chunks_exact(stride).zip(&rows) {
                let (keys, values) = row[3..].split_at(kv_heads * key_dim);
                let (wanted_keys, wanted_values) = rounded_heads(format, shape, keys, values);
                let (keys, values) = read(&store, isa, 1, *at);
                prop_assert!(same(&keys, &wanted_keys) && same(&values, &wanted_values), "{}", isa.name());
                let (keys, values) = read(&store, isa, 0, *at);
                prop_assert!(keys.iter().chain(&values).all(|x| *x == 0.0), "the other layer is unchanged");
            }
        }
    }
}

/// Uses enough rows for a parallel write, and pages that are not neighbours.
#[test]
fn parallel_writes_and_page_copies_are_read_back() {
    let shape = KvShape { layers: 3, kv_heads: 2, key_dim: 80, value_dim: 72, index_dim: 0 };
    let stride = 2 * (80 + 72);
    let data: Vec<f32> = (0..100 * stride).map(|i| (i % 1009) as f32 - 500.0).collect();
    for (isa, format) in Isa::available().into_iter().flat_map(|isa| KvFormat::ALL.iter().map(move |f| (isa, *f))) {
        let mut store = KvStore::new(format, shape, 9).expect("memory");
        let rows: Vec<KvRow> = (0..100).map(|i| KvRow { page: [7, 2, 5, 0, 8, 1, 3][i / 16], slot: i % 16 }).collect();
        let (keys, values) = (Rows::new(&data, stride, 0), Rows::new(&data, stride, 160));
        with_exec(isa, |exec| store.write(exec, 2, &rows, keys, values)).expect("runs");
        store.copy_page(5, 6);
        for (index, at) in rows.iter().enumerate() {
            let (keys, values) = data[index * stride..][..stride].split_at(160);
            assert_eq!(read(&store, isa, 2, *at), rounded_heads(format, shape, keys, values));
            if at.page == 5 {
                let copy = KvRow { page: 6, ..*at };
                assert_eq!(read(&store, isa, 2, copy), read(&store, isa, 2, *at));
            }
        }
    }
}

#[test]
fn page_sizes_are_exact_and_overflow_is_an_error() {
    let shape = KvShape { layers: 2, kv_heads: 4, key_dim: 20, value_dim: 20, index_dim: 0 };
    let numbers = 2 * 4 * 16 * (20 + 32);
    assert_eq!(KvStore::page_bytes(KvFormat::F32, shape), Some(numbers * 4));
    assert_eq!(KvStore::page_bytes(KvFormat::F16, shape), Some(numbers * 2));
    // A line of scales, five quads of K with sixteen tokens each, four quads of V's tokens with 32 columns each.
    assert_eq!(KvStore::page_bytes(KvFormat::Int8, shape), Some(2 * 4 * (64 + 5 * 64 + 4 * 128)));
    for format in KvFormat::ALL {
        assert_eq!(KvStore::page_bytes(*format, KvShape { key_dim: usize::MAX / 8, ..shape }), None);
        assert_eq!(KvStore::page_bytes(*format, KvShape { value_dim: usize::MAX / 8, ..shape }), None);
    }
    assert!(matches!(KvStore::new(KvFormat::F16, shape, usize::MAX / 64), Err(AllocError { bytes: u64::MAX })));
    assert!(matches!(KvStore::new(KvFormat::F16, shape, 1 << 40), Err(AllocError { bytes }) if bytes < u64::MAX));
    assert_eq!(KvStore::new(KvFormat::F16, shape, 0).expect("nothing").pages(), 0);
    for format in KvFormat::ALL {
        assert_eq!(KvFormat::named(format.name()), Some(*format));
    }
    assert_eq!(KvFormat::named("f8"), None);
}

#[test]
#[should_panic(expected = "page 2 is out of bounds for 2 pages")]
fn writing_a_page_out_of_bounds_panics() {
    let shape = KvShape { layers: 1, kv_heads: 1, key_dim: 4, value_dim: 4, index_dim: 0 };
    let mut store = KvStore::new(KvFormat::F32, shape, 2).expect("memory");
    let view = Rows::new(&[0.0; 8], 8, 0);
    let _ = with_exec(Isa::best(), |exec| store.write(exec, 0, &[KvRow { page: 2, slot: 0 }], view, view));
}

proptest! {
    /// The bytes of a page restore its contents in another store and at another index.
    #[test]
    fn pages_round_trip_through_bytes(format in prop::sample::select(KvFormat::ALL), layers in 1_usize..3, seed in any::<u8>()) {
        let shape = KvShape { layers, kv_heads: 2, key_dim: 20, value_dim: 36, index_dim: 0 };
        let mut from = KvStore::new(format, shape, 3).unwrap();
        let bytes = KvStore::page_bytes(format, shape).unwrap() as usize;
        let written: Vec<u8> = (0..bytes).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
        from.set_page(2, &written);
        prop_assert_eq!(from.page(2), &written[..]);
        prop_assert!(from.page(1).iter().all(|byte| *byte == 0));
        from.copy_page(2, 0);
        let mut to = KvStore::new(format, shape, 2).unwrap();
        to.set_page(1, from.page(0));
        prop_assert_eq!(to.page(1), &written[..]);
        prop_assert!(to.page(0).iter().all(|byte| *byte == 0));
    }
}

#[test]
#[should_panic(expected = "length must be the size of a page")]
fn setting_a_page_from_the_wrong_number_of_bytes_panics() {
    let shape = KvShape { layers: 1, kv_heads: 1, key_dim: 16, value_dim: 16, index_dim: 0 };
    let mut store = KvStore::new(KvFormat::F32, shape, 1).unwrap();
    store.set_page(0, &[0; 64]);
}

#[test]
#[should_panic(expected = "page 1 is out of bounds for 1 pages")]
fn reading_a_page_out_of_bounds_panics() {
    let shape = KvShape { layers: 1, kv_heads: 1, key_dim: 16, value_dim: 16, index_dim: 0 };
    let _ = KvStore::new(KvFormat::F32, shape, 1).unwrap().page(1);
}
