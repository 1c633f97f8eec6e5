//! Malformed GGUF files are refused with errors that name the file and the value.

use std::fs;

use crate::support::gguf::{Gguf, Tensor, array, split, string, value};
use crate::support::{folder, refused};
use ferrule_formats::{Checkpoint, CheckpointError, GgufFile};

const NAME: &str = "model.gguf";

fn open(bytes: &[u8]) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(&folder(&[(NAME, bytes)]).path().join(NAME))
}

fn open_with_keys(keys: &[(&str, Vec<u8>)]) -> Result<Checkpoint, CheckpointError> {
    open(&Gguf::new(keys, &[]).bytes())
}

fn open_with_tensors(tensors: &[Tensor]) -> Result<Checkpoint, CheckpointError> {
    open(&Gguf::new(&[], tensors).bytes())
}

/// Returns a file with keys of every type and tensors of two types.
fn valid() -> Gguf {
    let keys = [
        ("general.architecture", value(8, string("llama"))),
        ("general.alignment", value(4, 64u32.to_le_bytes())),
        ("a.flag", value(7, [1])),
        ("a.float", value(6, 0.5f32.to_le_bytes())),
        ("a.numbers", array(5, 2, &[1i32.to_le_bytes(), (-1i32).to_le_bytes()].concat())),
        ("a.tokens", array(8, 2, &[string("a"), string("\u{e9}")].concat())),
    ];
    let tensors = [Tensor::floats("w", &[1.0, 2.0, 3.0]), Tensor::new("q", 8, &[32, 2], vec![0; 68])];
    Gguf { alignment: 64, ..Gguf::new(&keys, &tensors) }
}

#[test]
fn empty_files_and_wrong_magic_or_version_are_refused() {
    refused(open(b""), &[NAME, "empty", "0 bytes"]);
    for start in [&b"GG"[..], b"GGML", b"ggjt\x03\0\0\0", b"FUGG\x03\0\0\0", &[0; 100]] {
        refused(open(start), &[NAME, "\"GGUF\"", "not a GGUF file"]);
    }
    for version in [0, 1, 4, 99] {
        let file = Gguf { version, ..valid() };
        refused(open(&file.bytes()), &[NAME, &format!("version {version}"), "supported: 2 and 3"]);
    }
    let file = Gguf { version: 3u32.swap_bytes(), ..valid() };
    refused(open(&file.bytes()), &[NAME, "big-endian", "version 3"]);
    let file = Gguf { version: 2, ..valid() };
    assert!(open(&file.bytes()).is_ok());
}

#[test]
fn counts_beyond_the_file_are_refused() {
    for count in [u64::MAX, 1 << 63, 1 << 40, 5] {
        let file = Gguf { tensor_count: Some(count), ..Gguf::new(&[], &[]) };
        refused(open(&file.bytes()), &[NAME, &format!("tensor_count is {count}"), "8 bytes", "at most 0"]);
        let file = Gguf { key_count: Some(count), ..Gguf::new(&[], &[]) };
        refused(open(&file.bytes()), &[NAME, &format!("metadata_kv_count is {count}"), "0 bytes", "at most 0"]);
    }
    let file = Gguf { key_count: Some(500_000_000), ..Gguf::new(&[], &[]) };
    assert_eq!(file.bytes().len(), 24);
    refused(open(&file.bytes()), &["500000000"]);
    // Counts that the file could hold but no model has.
    let mut large = Gguf { tensor_count: Some(16_385), ..Gguf::new(&[], &[]) }.bytes();
    large.resize(2 << 20, 0);
    refused(open(&large), &["tensor_count is 16385", "the limit is 16384"]);
    let mut large = Gguf { key_count: Some(16_385), ..Gguf::new(&[], &[]) }.bytes();
    large.resize(2 << 20, 0);
    refused(open(&large), &["metadata_kv_count is 16385", "the limit is 16384"]);
}

#[test]
fn lengths_of_keys_and_strings_are_checked() {
    for length in [1 << 63, u64::MAX, 1 << 32, 12] {
        let rest = [&length.to_le_bytes()[..], b"key"].concat();
        let key = [Gguf { key_count: Some(1), ..Gguf::new(&[], &[]) }.bytes(), rest.clone(), vec![0; 8]].concat();
        refused(open(&key), &[NAME, "the name of key 0", &format!("{length} bytes are needed")]);
        refused(open_with_keys(&[("k", value(8, rest))]), &[NAME, "\"k\"", &format!("{length} bytes are needed")]);
    }
    let long = "x".repeat(256);
    refused(open_with_keys(&[(&long, value(7, [1]))]), &[NAME, "the name of key 0", "256 bytes", "the limit is 255"]);
    refused(open_with_tensors(&[Tensor::floats(&long, &[1.0])]), &["the name of tensor 0", "256", "255"]);
    refused(open_with_keys(&[("k", value(8, string(b"ab\xff")))]), &[NAME, "\"k\"", "not valid UTF-8", "2"]);
    refused(
        open_with_keys(&[("k", array(8, 2, &[string("a"), string(b"\xc3")].concat()))]),
        &["\"k\"", "not valid UTF-8"],
    );
}

#[test]
fn deeply_nested_arrays_are_refused() {
    let nested = |depth: usize| {
        let level = |of: u32| [&of.to_le_bytes()[..], &1u64.to_le_bytes()].concat();
        value(9, [level(9).repeat(depth - 1), level(0), vec![7]].concat())
    };
    assert!(open_with_keys(&[("k", nested(4))]).is_ok());
    for depth in [5, 100_000] {
        refused(open_with_keys(&[("k", nested(depth))]), &[NAME, "\"k\"", "deeper than 4"]);
    }
    for (of, each) in [(0, 1), (7, 1), (8, 8), (9, 12), (12, 8)] {
        for length in [u64::MAX, 1 << 61, 100] {
            let message = refused(open_with_keys(&[("k", array(of, length, &[0; 24]))]), &["the length of \"k\""]);
            assert!(message.contains(&format!("is {length}")) && message.contains(&format!("at most {}", 24 / each)));
        }
    }
    let many = array(0, (1 << 22) + 1, &vec![0; (1 << 22) + 1]);
    refused(open_with_keys(&[("k", many)]), &["\"k\"", "4194305", "the limit is 4194304"]);
    let half = array(0, 1 << 21, &vec![0; 1 << 21]);
    let keys = [("a", half.clone()), ("b", half.clone()), ("c", array(0, 1, &[0]))];
    refused(open_with_keys(&keys), &["\"c\"", "4194305"]);
    assert!(open_with_keys(&keys[..2]).is_ok());
}

#[test]
fn unknown_value_types_and_duplicate_keys_are_refused() {
    for ty in [13, 255, u32::MAX] {
        refused(open_with_keys(&[("k", value(ty, [0; 8]))]), &[NAME, "\"k\"", &format!("unknown type {ty}")]);
        refused(open_with_keys(&[("k", array(ty, 0, &[]))]), &[NAME, "\"k\"", &format!("unknown type {ty}")]);
    }
    refused(open_with_keys(&[("k", value(7, [2]))]), &[NAME, "\"k\"", "bool", "got 2"]);
    refused(open_with_keys(&[("k", array(7, 3, &[0, 1, 9]))]), &[NAME, "\"k\"", "bool", "got 9"]);
    let twice = [("k", value(7, [1])), ("l", value(7, [1])), ("k", value(0, [1]))];
    refused(open_with_keys(&twice), &[NAME, "duplicate key \"k\""]);
}

#[test]
fn invalid_alignments_are_refused() {
    let with = |value| open_with_keys(&[("general.alignment", value)]);
    for alignment in [0u32, 13, 33, 1 << 31, 1 << 22, u32::MAX] {
        let fragments = [NAME, "general.alignment", &format!("got {alignment}"), "power of two up to 2097152"];
        refused(with(value(4, alignment.to_le_bytes())), &fragments);
    }
    refused(with(value(10, 32u64.to_le_bytes())), &["general.alignment", "UINT64", "must be UINT32"]);
    refused(with(value(8, string("32"))), &["general.alignment", "STRING", "UINT32"]);
    for alignment in [1u32, 8, 32, 4096, 1 << 21] {
        assert!(with(value(4, alignment.to_le_bytes())).is_ok(), "{alignment}");
    }
}

#[test]
fn invalid_dimensions_are_refused() {
    let with = |dimensions: &[u64]| Tensor::new("w", 0, dimensions, vec![0; 64]);
    for dimension_count in [5, u32::MAX] {
        let fragments = [NAME, "\"w\"", &format!("{dimension_count} dimensions"), "the limit is 4"];
        refused(open_with_tensors(&[Tensor { dimension_count, ..with(&[1]) }]), &fragments);
    }
    for dimensions in [&[0][..], &[4, 0], &[0, 4], &[u64::MAX, u64::MAX, 0]] {
        refused(open_with_tensors(&[with(dimensions)]), &[NAME, "\"w\"", &format!("{dimensions:?}"), "must be > 0"]);
    }
    for dimensions in [&[u64::MAX][..], &[1 << 62], &[1 << 32, 1 << 32], &[1 << 31, 1 << 31, 1 << 31, 1 << 31]] {
        let fragments = [NAME, "\"w\"", &format!("{dimensions:?}"), "F32", "exceeds 64 bits"];
        refused(open_with_tensors(&[with(dimensions)]), &fragments);
    }
    // Few bytes and too many elements: a block of TQ1_0 has 256 elements in 54 bytes.
    let tensor = Tensor::new("w", 34, &[1 << 60, 1 << 4], vec![0; 64]);
    refused(open_with_tensors(&[tensor]), &["\"w\"", "exceeds 64 bits"]);
}

#[test]
fn invalid_tensor_types_and_partial_blocks_are_refused() {
    let with = |ty, row| open_with_tensors(&[Tensor::new("w", ty, &[row], vec![0; 2048])]);
    for ty in [42, 100, u32::MAX] {
        refused(with(ty, 256), &[NAME, "\"w\"", &format!("unknown type {ty}")]);
    }
    for (ty, name) in [(4, "Q4_2"), (5, "Q4_3"), (9, "Q8_1"), (15, "Q8_K"), (31, "Q4_0_4_4"), (38, "IQ4_NL_8_8")] {
        refused(with(ty, 256), &[NAME, "\"w\"", name, "unsupported type"]);
    }
    refused(with(2, 48), &[NAME, "\"w\"", "got 48", "multiple of 32", "Q4_0"]);
    refused(with(12, 32), &[NAME, "\"w\"", "got 32", "multiple of 256", "Q4_K"]);
    // The tensor has as many elements as a block, but in two rows.
    refused(open_with_tensors(&[Tensor::new("w", 8, &[16, 2], vec![0; 34])]), &["got 16", "Q8_0"]);
    let scalar = Tensor::new("w", 8, &[], vec![0; 34]);
    refused(open_with_tensors(&[scalar]), &["got 1", "Q8_0"]);
}

#[test]
fn invalid_offsets_are_refused() {
    let at = |offset, name: &str| Tensor { offset: Some(offset), ..Tensor::floats(name, &[0.0; 16]) };
    for offset in [1, 31, 33] {
        let fragments = [NAME, "\"w\"", &format!("got {offset}"), "alignment 32"];
        refused(open_with_tensors(&[at(offset, "w")]), &fragments);
    }
    for offset in [32, 1 << 40, u64::MAX - 31, 1 << 63] {
        let fragments =
            [NAME, "\"w\"", &format!("offset {offset} "), "takes 64 bytes", "has only 64 bytes", "truncated"];
        refused(open_with_tensors(&[at(offset, "w")]), &fragments);
    }
    let fragments = [NAME, "\"b\"", "offset 32 ", "overlaps tensor \"a\"", "ends at 64"];
    refused(open_with_tensors(&[at(0, "a"), at(32, "b"), at(64, "c")]), &fragments);
    refused(open_with_tensors(&[at(64, "b"), at(64, "a")]), &["offset 64 ", "overlaps tensor"]);
    // Tensors may be in another order, and with gaps.
    assert!(open_with_tensors(&[at(128, "a"), at(0, "b"), at(64, "c")]).is_ok());
}

#[test]
fn duplicate_tensors_are_refused() {
    let tensors = [Tensor::floats("w", &[1.0]), Tensor::floats("v", &[1.0]), Tensor::floats("w", &[1.0])];
    refused(open_with_tensors(&tensors), &[NAME, "duplicate tensor \"w\""]);
}

#[test]
fn every_truncation_is_detected() {
    let whole = valid().bytes();
    assert!(open(&whole).is_ok());
    let dir = folder(&[]);
    let path = dir.path().join(NAME);
    for bytes in 0..whole.len() {
        fs::write(&path, &whole[..bytes]).unwrap();
        refused(Checkpoint::open(&path), &[NAME]);
    }
    refused(open(&whole[..whole.len() - 1]), &["\"q\"", "takes 68 bytes", "has only 131 bytes", "truncated"]);
    refused(open(&whole[..142]), &["\"a.float\"", "4 bytes are needed from byte 140", "the file has only 2"]);
}

#[test]
fn a_git_lfs_pointer_and_a_directory_are_refused() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n";
    refused(open(pointer), &[NAME, "Git LFS pointer", "git lfs pull"]);
    let dir = folder(&[("model.gguf/x", b"")]);
    let error = GgufFile::open(&dir.path().join(NAME)).unwrap_err().to_string();
    assert!(error.contains("not a regular file"), "{error}");
}

const PARTS: [&str; 3] = ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"];

/// Creates the files of a model in three parts of one tensor each; `second` returns the bytes of the second part.
fn three(second: impl Fn(u16, &str) -> Vec<u8>) -> tempfile::TempDir {
    let dir = folder(&[]);
    for (number, name) in PARTS.into_iter().enumerate() {
        let tensor = ["a", "b", "c"][number];
        let bytes = if number == 1 { second(1, tensor) } else { part(number as u16, 3, 3, tensor) };
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

fn part(number: u16, count: u16, tensors: i32, name: &str) -> Vec<u8> {
    Gguf::new(&split(number, count, tensors), &[Tensor::floats(name, &[f32::from(number)])]).bytes()
}

#[test]
fn missing_and_inconsistent_parts_are_refused() {
    let whole = three(|number, name| part(number, 3, 3, name));
    for name in PARTS {
        let file = GgufFile::open(&whole.path().join(name)).unwrap();
        assert_eq!(file.checkpoint().names().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(file.paths().len(), 3);
    }
    let open = |dir: &tempfile::TempDir, part: usize| Checkpoint::open(&dir.path().join(PARTS[part]));

    fs::remove_file(whole.path().join(PARTS[1])).unwrap();
    refused(open(&whole, 0), &[PARTS[0], "3 parts", PARTS[1], "is missing", "download"]);
    let dir = three(|_, _| part(1, 4, 3, "b"));
    refused(open(&dir, 0), &[PARTS[1], "split.count = 4", PARTS[0], "says 3"]);
    refused(open(&dir, 1), &[PARTS[1], "part 1 of 4", "-00002-of-00004.gguf"]);
    let dir = three(|_, _| part(2, 3, 3, "b"));
    refused(open(&dir, 0), &[PARTS[1], "split.no = 2", "says 1"]);
    let dir = three(|_, _| Gguf::new(&[], &[Tensor::floats("b", &[1.0])]).bytes());
    refused(open(&dir, 2), &[PARTS[1], "split.count = nothing", "says 3"]);
    let dir = three(|_, _| part(1, 3, 3, "a"));
    refused(open(&dir, 0), &[PARTS[1], "\"a\"", PARTS[0]]);
    let dir = three(|_, _| Gguf::new(&split(1, 3, 3), &[]).bytes());
    refused(open(&dir, 0), &[PARTS[0], "split.tensors.count is 3", "have 2 tensors"]);
    let dir = three(|_, _| b"GGUF".to_vec());
    refused(open(&dir, 0), &[PARTS[1], "the version"]);

    for (keys, fragments) in [
        (split(3, 3, 3), ["split.no must be in 0..=2", "got 3"]),
        (vec![("split.count", value(8, string("3")))], ["split.count", "STRING"]),
        (vec![("split.count", value(5, (-3i32).to_le_bytes()))], ["split.count must be in 0..=99999", "got -3"]),
        (
            vec![("split.count", value(10, u64::MAX.to_le_bytes()))],
            ["split.count must be in 0..=99999", "got 18446744073709551615"],
        ),
        (vec![("split.count", value(2, 3u16.to_le_bytes()))], ["split.no must be in 0..=2", "got -1"]),
    ] {
        let dir = three(|number, name| part(number, 3, 3, name));
        fs::write(dir.path().join(PARTS[0]), Gguf::new(&keys, &[]).bytes()).unwrap();
        refused(open(&dir, 0), &[&[PARTS[0]], &fragments[..]].concat());
    }
    let alone = folder(&[("model.gguf", &part(0, 3, 3, "a"))]);
    refused(Checkpoint::open(&alone.path().join(NAME)), &[NAME, "part 0 of 3", "-00001-of-00003.gguf"]);
}

#[test]
#[cfg(unix)]
fn a_part_that_links_outside_the_folder_is_refused() {
    use std::os::unix::fs::symlink;
    let dir = three(|number, name| part(number, 3, 3, name));
    let outside = folder(&[("outside.gguf", &part(1, 3, 3, "b"))]);
    fs::remove_file(dir.path().join(PARTS[1])).unwrap();
    symlink(outside.path().join("outside.gguf"), dir.path().join(PARTS[1])).unwrap();
    for named in PARTS {
        refused(Checkpoint::open(&dir.path().join(named)), &[PARTS[1], "outside of the model's folder", "refused"]);
    }
    // A user may name a link as the single file.
    fs::write(outside.path().join("whole.gguf"), valid().bytes()).unwrap();
    symlink(outside.path().join("whole.gguf"), dir.path().join(NAME)).unwrap();
    assert!(Checkpoint::open(&dir.path().join(NAME)).is_ok());
}
