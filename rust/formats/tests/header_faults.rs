//! Malformed safetensors files are refused with errors that name the value.

use crate::support::{file, open, refused, valid};

const A: &str = r#""a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;

#[test]
fn headers_longer_than_the_limit_or_the_file_are_refused() {
    let with_length = |length: u64| [&length.to_le_bytes()[..], b"{}"].concat();
    for length in [100_000_001, 1 << 63, u64::MAX] {
        refused(open(&with_length(length)), &["model.safetensors", &length.to_string(), "100000000"]);
    }
    refused(open(&with_length(3)), &["3 bytes", "only 2 bytes follow"]);
    refused(open(&with_length(100_000_000)), &["100000000 bytes", "only 2 bytes follow"]);
}

#[test]
fn files_too_short_for_a_header_are_refused() {
    refused(open(b""), &["empty", "0 bytes"]);
    for bytes in 1..8 {
        refused(open(&vec![0; bytes]), &[&format!("{bytes} bytes long")]);
    }
    refused(open(&[0; 8]), &["invalid"]);
}

#[test]
fn headers_that_are_not_utf8_are_refused() {
    refused(open(&file(b"{\"a\xff\":1}", b"")), &["not valid UTF-8", "3"]);
    refused(open(&file(b"\xff", b"")), &["not valid UTF-8"]);
}

#[test]
fn headers_that_are_not_an_object_are_refused() {
    refused(open(&file("[]", b"")), &["got '['"]);
    refused(open(&file(" {}", b"")), &["got ' '"]);
    refused(open(&file(r#"{"a":"#, b"")), &["invalid"]);
    refused(open(&file("{}{}", b"")), &["invalid"]);
}

#[test]
fn duplicate_keys_are_refused() {
    refused(open(&file(format!("{{{A},{A}}}"), &[0; 4])), &["duplicate key \"a\""]);
    // The same name with an escape.
    refused(open(&file(format!("{{{A},{}}}", A.replace("\"a\"", "\"\\u0061\"")), &[0; 4])), &["duplicate key \"a\""]);
    refused(open(&file(r#"{"__metadata__":{"x":"1","x":"2"}}"#, b"")), &["duplicate key \"x\""]);
    refused(open(&file(r#"{"__metadata__":{},"__metadata__":{}}"#, b"")), &["__metadata__", "duplicate key"]);
    let twice = A.replace("\"F32\"", "\"F32\",\"dtype\":\"I32\"");
    refused(open(&file(format!("{{{twice}}}"), &[0; 4])), &["dtype"]);
}

#[test]
fn deeply_nested_headers_are_refused() {
    let deep = "[".repeat(100_000);
    for header in [
        format!("{{\"a\":{deep}"),
        format!("{{\"a\":{{\"shape\":{deep}"),
        format!("{{\"a\":{{\"other\":{deep}"),
        format!("{{\"__metadata__\":{{\"a\":{deep}"),
        "{\"a\":".repeat(100_000),
    ] {
        refused(open(&file(header, b"")), &["invalid"]);
    }
}

#[test]
fn values_of_the_wrong_type_are_refused() {
    for wrong in [
        r#"{"a":null}"#,
        r#"{"a":1}"#,
        r#"{"a":{}}"#,
        r#"{"a":{"dtype":"F32","shape":[1]}}"#,
        r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1e3],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}"#,
        r#"{"a":{"dtype":1,"shape":[1],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"stride":[2]}}"#,
        r#"{"__metadata__":{"a":1}}"#,
    ] {
        refused(open(&file(wrong, &[0; 4])), &["invalid"]);
    }
    let many = format!(r#"{{"a":{{"dtype":"F32","shape":[{}1],"data_offsets":[0,4]}}}}"#, "1,".repeat(1_000_000));
    refused(open(&file(many, &[0; 4])), &["at most 8 dimensions"]);
}

fn two(first: (u64, u64), second: (u64, u64)) -> String {
    let entry = |name, (begin, end): (u64, u64)| {
        format!(r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{end}]}}"#, end - begin)
    };
    format!("{{{},{}}}", entry("a", first), entry("b", second))
}

#[test]
fn holes_overlaps_and_trailing_bytes_are_refused() {
    refused(open(&file(two((0, 4), (6, 8)), &[0; 8])), &["bytes 4 to 6", "\"b\"", "not part of any tensor"]);
    refused(open(&file(two((2, 4), (4, 8)), &[0; 8])), &["bytes 0 to 2", "\"a\""]);
    refused(open(&file(two((0, 5), (4, 8)), &[0; 8])), &["\"b\"", "byte 4", "ends at 5"]);
    refused(open(&file(two((0, 8), (2, 4)), &[0; 8])), &["\"b\"", "byte 2", "ends at 8"]);
    refused(open(&file(two((0, 8), (0, 8)), &[0; 8])), &["byte 0", "ends at 8"]);
    refused(open(&file(two((0, 4), (4, 8)), &[0; 11])), &["3 bytes after the last tensor", "8"]);
    refused(open(&file("{}", &[0; 1])), &["1 bytes after the last tensor"]);
}

#[test]
fn spans_that_contradict_shape_or_dtype_are_refused() {
    let one = |dtype: &str, shape: &str, begin: u64, end: u64| {
        file(format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}}}"#), &[0; 8])
    };
    refused(open(&one("F32", "[3]", 0, 8)), &["\"w\"", "[3]", "F32", "12 bytes", "span 8"]);
    refused(open(&one("F32", "[0]", 0, 8)), &["0 bytes", "span 8"]);
    refused(open(&one("F64", "[]", 0, 4)), &["8 bytes", "span 4"]);
    refused(open(&one("F32", "[2]", 8, 0)), &["[8, 0]", "reversed"]);
    let huge = i64::MAX;
    refused(open(&one("F32", &format!("[{huge},{huge}]"), 0, 8)), &["\"w\"", "exceeds 64 bits"]);
    refused(open(&one("F32", &format!("[{huge}]"), 0, 8)), &["exceeds 64 bits"]);
    refused(open(&one("F32", &format!("[{huge},{huge},0]"), 0, 8)), &["exceeds 64 bits"]);
    refused(open(&one("F33", "[2]", 0, 8)), &["\"w\"", "unknown dtype \"F33\"", "BF16"]);
    refused(open(&one("f32", "[2]", 0, 8)), &["unknown dtype \"f32\""]);
    refused(open(&one("F4", "[3]", 0, 8)), &["F4", "whole number of bytes"]);
    refused(open(&one("U8", "[18446744073709551615]", 0, u64::MAX)), &["exceeds 64 bits"]);
    refused(open(&one("U8", "[1152921504606846976]", 0, 1 << 60)), &["8 bytes", "missing", "truncated"]);
}

#[test]
fn every_truncation_is_detected() {
    let whole = valid(&["a", "b"]);
    assert!(open(&whole).is_ok());
    for bytes in 0..whole.len() {
        assert!(open(&whole[..bytes]).is_err(), "{bytes} of {} bytes", whole.len());
    }
    let message =
        refused(open(&whole[..whole.len() - 1]), &["\"b\"", "ends at byte 8", "has only 7", "1 bytes are missing"]);
    assert!(message.contains("truncated"));
}

#[test]
fn a_git_lfs_pointer_is_refused() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 12345\n";
    refused(open(pointer), &["Git LFS pointer", "Download the weights", "git lfs pull"]);
}

#[test]
fn too_many_tensors_are_refused() {
    let mut header = String::from("{");
    for i in 0..300_000 {
        header.push_str(&format!(r#""{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}},"#));
    }
    header.pop();
    header.push('}');
    refused(open(&file(header, b"")), &["more than 262144"]);
}
