//! Random safetensors files.

use std::fmt::Write;

use super::inputs::{assert_found, run};
use super::random::Random;
use crate::dtype::Dtype;
use crate::safetensors::{SafetensorsError, read_header};

const FAULTS: [&str; 14] = [
    "HeaderTooLong",
    "HeaderPastEnd",
    "HeaderNotUtf8",
    "HeaderNotObject",
    "HeaderMalformed",
    "UnknownDtype",
    "OffsetsReversed",
    "PastEnd",
    "SizeOverflow",
    "PartialByte",
    "SizeMismatch",
    "Overlap",
    "Hole",
    "TrailingBytes",
];

fn entry(text: &mut String, random: &mut Random, end: &mut u64) {
    let dtype = *random.pick(Dtype::ALL);
    let mut shape: Vec<_> = (0..random.below(4)).map(|_| random.below(4)).collect();
    if dtype.bits() < 8 && !random.once_in(20) {
        shape.push(4);
    }
    // One byte too high or too low.
    let begin = if random.once_in(30) { (*end + random.below(3)).saturating_sub(1) } else { *end };
    *end = begin;
    *end += shape.iter().product::<u64>() * dtype.bits() / 8;
    let shape: Vec<_> = shape.into_iter().map(|size| random.number(size).to_string()).collect();
    let dtype = if random.once_in(100) { "F17" } else { dtype.name() };
    let (begin, end) = (random.number(begin), random.number(*end));
    let name = random.below(300);
    let written = write!(text, r#""t{name}":{{"dtype":"{dtype}","shape":[{}],"#, shape.join(","))
        .and_then(|()| write!(text, r#""data_offsets":[{begin},{end}]}},"#));
    written.expect("room for text");
}

fn make(random: &mut Random) -> Vec<u8> {
    let mut text = String::from("{");
    let mut end = 0;
    for _ in 0..random.below(5) {
        entry(&mut text, random, &mut end);
    }
    if random.once_in(3) {
        text.push_str(r#""__metadata__":{"format":"pt"},"#);
    }
    if text.len() > 1 {
        text.pop();
    }
    text.push('}');
    let mut text = text.into_bytes();
    // Damages only the text, so that the length before it stays right.
    if random.once_in(4) {
        random.damage(&mut text);
    }
    let length = random.number(text.len() as u64);
    let mut file = [&length.to_le_bytes()[..], &text].concat();
    file.resize(file.len() + random.number(end).min(4096) as usize, 0);
    file
}

/// Reads a file and, if it is accepted, checks that its tensors cover the data.
fn read(file: &[u8], _: &mut Random) -> Result<(), SafetensorsError> {
    let header = read_header(&mut &*file, file.len() as u64)?;
    let mut spans = Vec::new();
    for entry in header.tensors.values() {
        let elements: u64 = entry.shape.iter().map(|&size| size as u64).product();
        assert_eq!(elements * entry.dtype.bits(), 8 * entry.bytes.len() as u64);
        spans.push((entry.bytes.start, entry.bytes.end));
    }
    spans.sort_unstable();
    assert!(spans.windows(2).all(|pair| pair[0].1 == pair[1].0), "a hole or an overlap: {spans:?}");
    assert!(spans.last().is_none_or(|last| last.1 == file.len()), "bytes after the last tensor");
    Ok(())
}

#[test]
fn fuzz_safetensors() {
    assert_found(&run("safetensors", make, read), &FAULTS);
}
