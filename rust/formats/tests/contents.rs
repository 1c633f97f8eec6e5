//! Reading valid safetensors files, checked against the `safetensors` crate, which also wrote them.

use crate::support::{file, folder, open, valid};
use ferrule_formats::{Checkpoint, Dtype, FloatDtype};
use half::{bf16, f16};
use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

const DTYPES: [(Dtype, safetensors::Dtype); 5] = [
    (Dtype::F32, safetensors::Dtype::F32),
    (Dtype::F16, safetensors::Dtype::F16),
    (Dtype::Bf16, safetensors::Dtype::BF16),
    (Dtype::I64, safetensors::Dtype::I64),
    (Dtype::U8, safetensors::Dtype::U8),
];

/// Generates tensors of any name, dtype, shape and bytes, serialized by the oracle.
fn serialized() -> impl Strategy<Value = Vec<u8>> {
    let tensor = ("[a-z.\"\u{e9}]{1,6}", 0..DTYPES.len(), prop::collection::vec(0usize..5, 0..4), any::<u8>());
    prop::collection::vec(tensor, 0..6).prop_map(|tensors| {
        let data: std::collections::BTreeMap<_, _> = tensors
            .into_iter()
            .map(|(name, dtype, shape, seed)| {
                let dtype = DTYPES[dtype].1;
                let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
                let bytes: Vec<u8> = (0..bytes).map(|i| (i as u8).wrapping_mul(37).wrapping_add(seed)).collect();
                (name, (dtype, shape, bytes))
            })
            .collect();
        let views = data.iter().map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).expect("a consistent tensor"))
        });
        safetensors::serialize(views, None).expect("a serialized file")
    })
}

/// Checks that this crate and the oracle find the same tensors in these bytes.
fn agrees_with_the_oracle(checkpoint: &Checkpoint, bytes: &[u8]) {
    let oracle = SafeTensors::deserialize(bytes).expect("what we take, the oracle takes");
    assert_eq!(checkpoint.names().count(), oracle.len());
    for (name, expected) in oracle.iter() {
        let tensor = checkpoint.tensor(name).expect("a tensor that the oracle has");
        assert_eq!(tensor.name(), name);
        assert_eq!(tensor.dtype().name(), expected.dtype().to_string());
        assert_eq!(tensor.shape(), expected.shape());
        assert_eq!(tensor.bytes(), expected.data());
        assert_eq!(tensor.elements() as u64 * tensor.dtype().bits(), 8 * tensor.bytes().len() as u64);
    }
}

proptest! {
    #[test]
    fn every_serialized_file_reads_back(bytes in serialized()) {
        agrees_with_the_oracle(&open(&bytes).expect("a valid file"), &bytes);
    }

    /// A changed file is either refused or read as the oracle reads it. Refusing more than the oracle does is fine.
    #[test]
    fn mutated_files_are_refused_or_agree_with_the_oracle(
        mut bytes in serialized(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), 0..4, any::<u8>()), 1..6),
    ) {
        for (place, kind, value) in edits {
            // Most edits hit the header, where they test more.
            let limit = if kind < 3 { bytes.len().min(400) } else { bytes.len() };
            let at = place.index(limit.max(1)).min(bytes.len());
            match kind {
                0 if at < bytes.len() => bytes[at] = value,
                1 => bytes.insert(at, b"0123456789[]{},:\"eE-."[usize::from(value) % 21]),
                2 if at < bytes.len() => drop(bytes.remove(at)),
                _ => bytes.truncate(at),
            }
        }
        // An edit that changes the length of the header fails early because the length field no longer fits: repair the
        // field half of the time.
        if bytes.len() > 8 && bytes.len() % 2 == 0
            && let Some(end) = bytes.windows(3).rposition(|three| three == b"]}}") {
            let length = (end + 3 - 8) as u64;
            bytes[..8].copy_from_slice(&length.to_le_bytes());
        }
        if let Ok(checkpoint) = open(&bytes) {
            agrees_with_the_oracle(&checkpoint, &bytes);
        }
    }
}

#[test]
fn dtype_names_and_widths_match_the_oracle() {
    for dtype in Dtype::ALL {
        let oracle: safetensors::Dtype = serde_json::from_value(dtype.name().into()).expect("a dtype of the oracle");
        assert_eq!(oracle.bitsize() as u64, dtype.bits(), "{dtype}");
        assert_eq!(Dtype::named(dtype.name()), Some(*dtype));
    }
}

/// Returns a file with one tensor, whose offset modulo 8 is set by padding the header.
fn one(dtype: &str, elements: usize, data: &[u8], padding: usize) -> Vec<u8> {
    let end = data.len();
    let header = format!(r#"{{"w":{{"dtype":"{dtype}","shape":[{elements}],"data_offsets":[0,{end}]}}}}"#);
    file(header + &" ".repeat(padding), data)
}

/// Reads all 65536 values of a 16-bit type, at every alignment and from an odd element on.
fn read_all_16_bit(dtype: &str, widen: impl Fn(u16) -> f32) {
    let data: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for padding in 0..4 {
        let checkpoint = open(&one(dtype, 65536, &data, padding)).unwrap();
        let tensor = checkpoint.weight("w").unwrap();
        for first in [0, 1, 65535, 65536] {
            let mut out = vec![0.0; 65536 - first];
            tensor.read_f32(first, &mut out);
            for (i, value) in out.iter().enumerate() {
                let expected = widen((first + i) as u16);
                let same = value.to_bits() == expected.to_bits() || (value.is_nan() && expected.is_nan());
                assert!(same, "{dtype} {:#06x}: {value} is not {expected}", first + i);
            }
        }
    }
}

#[test]
fn f16_and_bf16_widen_exactly() {
    read_all_16_bit("F16", |bits| f16::from_bits(bits).to_f32());
    read_all_16_bit("BF16", |bits| bf16::from_bits(bits).to_f32());
}

#[test]
fn f32_is_copied_bit_by_bit() {
    let values = [0.0, -0.0, 1.5, f32::MIN_POSITIVE / 2.0, f32::INFINITY, f32::from_bits(0x7f80_0001)];
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    for padding in 0..4 {
        let checkpoint = open(&one("F32", values.len(), &data, padding)).unwrap();
        let tensor = checkpoint.weight("w").unwrap();
        assert_eq!(tensor.float_dtype(), Some(FloatDtype::F32));
        let mut out = [0.0; 5];
        tensor.read_f32(1, &mut out);
        assert_eq!(out.map(f32::to_bits)[..], values.map(f32::to_bits)[1..]);
    }
}

#[test]
#[should_panic(expected = "out of range")]
fn reading_past_the_end_panics() {
    let checkpoint = open(&valid(&["a"])).unwrap();
    checkpoint.weight("a").unwrap().read_f32(1, &mut [0.0]);
}

#[test]
fn other_types_are_refused_as_weights() {
    for (dtype, size) in [("F64", 8), ("I32", 4), ("F8_E4M3", 1)] {
        let checkpoint = open(&one(dtype, 1, &vec![0; size], 0)).unwrap();
        let message = checkpoint.weight("w").unwrap_err().to_string();
        assert!(message.contains("\"w\"") && message.contains(dtype) && message.contains("BF16"), "{message}");
    }
}

/// Returns the kilobytes of the mapped file that are resident in this process.
#[cfg(target_os = "linux")]
fn resident_kb(path: &std::path::Path) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines().skip_while(|line| !line.contains(path.to_str().unwrap()));
    let rss = lines.find_map(|line| line.strip_prefix("Rss:")).expect("a mapping of the file");
    rss.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn released_pages_leave_memory_and_come_back_unchanged() {
    let elements = 1 << 20;
    let data: Vec<u8> = (0..elements).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let dir = folder(&[("model.safetensors", &one("F32", elements, &data, 0))]);
    let path = dir.path().canonicalize().unwrap().join("model.safetensors");
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(resident_kb(&path) < 1024, "opening reads no data");
    let tensor = checkpoint.weight("w").unwrap();
    let mut before = vec![0.0; elements];
    tensor.read_f32(0, &mut before);
    assert!(resident_kb(&path) >= 4096);
    checkpoint.release(&tensor);
    assert!(resident_kb(&path) <= 128, "{} kB are still resident", resident_kb(&path));
    let mut after = vec![0.0; elements];
    tensor.read_f32(0, &mut after);
    assert_eq!(before, after);
    // A tensor smaller than a page has no whole page to release.
    let small = open(&valid(&["a"])).unwrap();
    small.release(&small.weight("a").unwrap());
}
