//! Random GGUF files.

use super::inputs::{assert_found, run};
use super::random::Random;
use crate::gguf::{GgufError, Header, TensorType, Value};

/// Errors that a few thousand inputs produce. Only larger files reach the limits on counts and lengths.
const FAULTS: [&str; 23] = [
    "Magic",
    "Version",
    "BigEndian",
    "Truncated",
    "CountPastEnd",
    "NameTooLong",
    "NotUtf8",
    "DuplicateKey",
    "UnknownValueType",
    "NotABool",
    "TooDeep",
    "WrongType",
    "Alignment",
    "DuplicateTensor",
    "Dimensions",
    "ZeroDimension",
    "SizeOverflow",
    "UnknownType",
    "RefusedType",
    "PartialBlock",
    "Misaligned",
    "PastEnd",
    "Overlap",
];

/// Bytes of each numeric type; 0 for bools, strings and arrays.
const NUMBER_BYTES: [u8; 13] = [1, 1, 2, 2, 4, 4, 4, 0, 0, 0, 8, 8, 8];
const BOOL: u64 = 7;
const STRING: u64 = 8;
const ARRAY: u64 = 9;

fn put_u32(out: &mut Vec<u8>, random: &mut Random, usual: u64) {
    out.extend((random.number(usual) as u32).to_le_bytes());
}

fn put_u64(out: &mut Vec<u8>, random: &mut Random, usual: u64) {
    out.extend(random.number(usual).to_le_bytes());
}

fn put_string(out: &mut Vec<u8>, random: &mut Random, text: &[u8]) {
    put_u64(out, random, text.len() as u64);
    out.extend(text);
    if random.once_in(100) && !text.is_empty() {
        let at = out.len() - 1;
        out[at] = 0xc3;
    }
}

fn put_name(out: &mut Vec<u8>, random: &mut Random, first: u8) {
    let name = match random.below(200) {
        0 => vec![first; 300],
        1 => Vec::new(),
        _ => vec![first, b'a' + random.below(26) as u8, b'a' + random.below(26) as u8],
    };
    put_string(out, random, &name);
}

fn put_value(out: &mut Vec<u8>, random: &mut Random, ty: u64, depth: u64) {
    match ty {
        BOOL => out.push(random.number(1) as u8),
        STRING => put_string(out, random, b"text"),
        ARRAY => {
            // Sometimes deeper than the reader allows.
            let of = if depth < 6 { some_type(random) } else { 0 };
            let length = random.below(5);
            put_u32(out, random, of);
            put_u64(out, random, length);
            (0..length).for_each(|_| put_value(out, random, of, depth + 1));
        }
        _ => out.extend(&random.next().to_le_bytes()[..usize::from(NUMBER_BYTES[ty as usize])]),
    }
}

/// Returns a random type; one in three is an array, where most can go wrong.
fn some_type(random: &mut Random) -> u64 {
    if random.once_in(3) { ARRAY } else { random.below(13) }
}

/// Writes the keys and returns the alignment that they declare.
fn put_keys(out: &mut Vec<u8>, random: &mut Random, count: u64) -> u64 {
    let mut alignment = 32;
    let special = random.below(8);
    for index in 0..count {
        if index == special {
            alignment = *random.pick(&[1, 8, 32, 64, 256]);
            put_string(out, random, b"general.alignment");
            put_u32(out, random, 4);
            put_u32(out, random, alignment);
        } else {
            put_name(out, random, b'k');
            let ty = some_type(random);
            put_u32(out, random, ty);
            put_value(out, random, ty, 1);
        }
    }
    alignment
}

fn make(random: &mut Random) -> Vec<u8> {
    let mut out = if random.once_in(200) { b"GGML".to_vec() } else { b"GGUF".to_vec() };
    let version = *random.pick(&[2, 3]);
    let version = if random.once_in(200) { u64::from((version as u32).swap_bytes()) } else { version };
    let (tensors, keys) = (random.below(5), random.below(6));
    put_u32(&mut out, random, version);
    put_u64(&mut out, random, tensors);
    put_u64(&mut out, random, keys);
    let alignment = put_keys(&mut out, random, keys);
    let mut end: u64 = 0;
    for _ in 0..tensors {
        put_name(&mut out, random, b't');
        let mut id = random.below(42);
        // Mostly avoid unsupported types, so that what follows is tested.
        while TensorType::of_id(id as u32).is_err() && !random.once_in(20) {
            id = random.below(42);
        }
        let (block, bytes) = TensorType::of_id(id as u32).map_or((32, 32), TensorType::block);
        let dimensions: Vec<_> = (0..1 + random.below(4)).map(|_| 1 + random.below(3)).collect();
        put_u32(&mut out, random, dimensions.len() as u64);
        for (index, size) in dimensions.iter().enumerate() {
            put_u64(&mut out, random, if index == 0 { size * block as u64 } else { *size });
        }
        put_u32(&mut out, random, id);
        put_u64(&mut out, random, end);
        end = (end + dimensions.iter().product::<u64>() * bytes as u64).next_multiple_of(alignment);
    }
    let data = out.len().next_multiple_of(alignment as usize) + end as usize;
    out.resize(data, random.next() as u8);
    out
}

/// Reads a file and, if it is accepted, everything in it.
fn read(file: &[u8], random: &mut Random) -> Result<(), GgufError> {
    let header = Header::read(file)?;
    for key in header.keys.keys() {
        let value = header.value(file, key)?.expect("a value for every key");
        count(value);
    }
    let mut spans = Vec::new();
    for tensor in header.tensors.values() {
        let (block, bytes) = tensor.ty.block();
        let elements: usize = tensor.shape.iter().product();
        assert_eq!(elements / block * bytes, tensor.bytes.len());
        assert!(tensor.shape.last().is_none_or(|row| row % block == 0));
        spans.push((tensor.bytes.start, tensor.bytes.end));
        let stored = &file[tensor.bytes.clone()];
        if let TensorType::Blocks(ty) = tensor.ty {
            let first = random.below(elements as u64) as usize;
            let mut out = [0.0; 300];
            ty.dequantize(stored, first, &mut out[..(elements - first).min(300)]);
        }
    }
    spans.sort_unstable();
    assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0), "tensors share bytes: {spans:?}");
    Ok(())
}

/// Counts the numbers, bools and strings in a value, and checks that an array has the elements that it declares.
fn count(value: Value<'_>) -> usize {
    match value {
        Value::Array(array) => {
            assert_eq!(array.iter().count(), array.len());
            array.iter().map(|element| count(element.expect("what was checked"))).sum()
        }
        _ => 1,
    }
}

#[test]
fn fuzz_gguf() {
    assert_found(&run("GGUF", make, read), &FAULTS);
}
