//! Packed files: what is written is read back, whole or not at all; malformed files are refused.

#![cfg(unix)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::support::{file, folder};
use ferrule_formats::{Dtype, PackedError, PackedFile, PackedTensor, PackedWriter};
use proptest::prelude::*;

const VERSION: u32 = 7;

fn tensor(name: &str, bytes: usize) -> PackedTensor {
    PackedTensor { name: name.to_owned(), dtype: Dtype::U8, bytes: bytes as u64 }
}

fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("model".to_owned(), "a \"model\"".to_owned())])
}

fn write(path: &Path, tensors: &[(&str, Vec<u8>)]) -> Result<(), PackedError> {
    let announced = tensors.iter().map(|(name, bytes)| tensor(name, bytes.len())).collect();
    let mut writer = PackedWriter::create(path, VERSION, &metadata(), announced)?;
    tensors.iter().try_for_each(|(name, bytes)| writer.write(name, bytes))?;
    writer.finish()
}

#[track_caller]
fn refused<T>(result: Result<T, PackedError>, fragments: &[&str]) {
    let message = result.err().expect("this must be refused").to_string();
    for fragment in fragments {
        assert!(message.contains(fragment), "{fragment:?} is not in {message:?}");
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn written_tensors_are_read_back(sizes in prop::collection::vec(1usize..300, 0..6), mapped in any::<bool>()) {
        let folder = folder(&[]);
        let path = folder.path().join("x.safetensors");
        let names: Vec<_> = (0..sizes.len()).rev().map(|i| format!("tensor \"{i}\"")).collect();
        let contents: Vec<_> = sizes.iter().enumerate().map(|(i, &size)| vec![i as u8 + 1; size]).collect();
        let tensors: Vec<_> = names.iter().map(String::as_str).zip(contents).collect();
        write(&path, &tensors).unwrap();

        let packed = PackedFile::open(&path, VERSION, mapped).unwrap();
        prop_assert_eq!(packed.metadata("model"), Some("a \"model\""));
        prop_assert_eq!((packed.is_mapped(), packed.map().is_some()), (mapped, mapped));
        for (name, bytes) in &tensors {
            let range = packed.range(name, bytes.len()).unwrap();
            prop_assert_eq!(range.start % 64, 0);
            let mut out = vec![0; bytes.len()];
            packed.read(range.clone(), &mut out).unwrap();
            prop_assert_eq!(&out, bytes);
            if let Some(map) = packed.map() {
                prop_assert_eq!(&(*map).as_ref()[range], bytes.as_slice());
            }
        }
        // Other readers see a plain safetensors file.
        let raw = fs::read(&path).unwrap();
        let plain = safetensors::SafeTensors::deserialize(&raw).unwrap();
        prop_assert_eq!(plain.len(), tensors.len() + 1);
        for (name, bytes) in &tensors {
            let data = plain.tensor(name).unwrap().data().to_vec();
            prop_assert_eq!(data.len() % 64, 0);
            prop_assert!(data.starts_with(bytes) && data[bytes.len()..].iter().all(|byte| *byte == 0));
        }
        let data_start = 8 + u64::from_le_bytes(raw[..8].try_into().unwrap());
        prop_assert_eq!(data_start % 4096, 0);
    }
}

#[test]
fn an_unfinished_file_never_appears() {
    let folder = folder(&[("x.safetensors", b"old")]);
    let path = folder.path().join("x.safetensors");
    let mut writer = PackedWriter::create(&path, VERSION, &metadata(), vec![tensor("a", 64), tensor("b", 64)]).unwrap();
    writer.write("a", &[1; 64]).unwrap();
    assert_eq!(names(folder.path()).len(), 2);
    drop(writer);
    assert_eq!((names(folder.path()), fs::read(&path).unwrap()), (vec!["x.safetensors".to_owned()], b"old".to_vec()));
    write(&path, &[("a", vec![1; 10])]).unwrap();
    assert_eq!(PackedFile::open(&path, VERSION, true).unwrap().total_bytes(), 128);
}

#[test]
fn two_writers_of_one_file_both_succeed() {
    let folder = folder(&[]);
    let path = folder.path().join("x.safetensors");
    let mut first = PackedWriter::create(&path, VERSION, &metadata(), vec![tensor("a", 3)]).unwrap();
    write(&path, &[("a", vec![2; 3])]).unwrap();
    let before = PackedFile::open(&path, VERSION, true).unwrap();
    first.write("a", &[1; 3]).unwrap();
    first.finish().unwrap();
    let value = |packed: &PackedFile| {
        let mut out = [0; 3];
        packed.read(packed.range("a", 3).unwrap(), &mut out).unwrap();
        out
    };
    assert_eq!(value(&before), [2; 3], "a mapped file stays what it was");
    assert_eq!(value(&PackedFile::open(&path, VERSION, true).unwrap()), [1; 3]);
    assert_eq!(names(folder.path()), ["x.safetensors"]);
}

#[test]
fn abandoned_files_are_removed_and_locked_ones_kept() {
    let old = SystemTime::now() - Duration::from_secs(60);
    let folder = folder(&[]);
    let path = folder.path().join("x.safetensors");
    let leave = |name: &str, time| {
        let file = File::create(folder.path().join(name)).unwrap();
        file.set_modified(time).unwrap();
        file
    };
    drop(leave(".y.safetensors.1-2.tmp", old));
    drop(leave(".z.safetensors.1-2.tmp", SystemTime::now()));
    drop(leave("mine.safetensors.tmp", old));
    drop(leave(".mine.tmp", old));
    let locked = leave(".w.safetensors.1-2.tmp", old);
    locked.lock().unwrap();
    write(&path, &[]).unwrap();
    let expected =
        [".mine.tmp", ".w.safetensors.1-2.tmp", ".z.safetensors.1-2.tmp", "mine.safetensors.tmp", "x.safetensors"];
    assert_eq!(names(folder.path()), expected);
}

#[test]
fn a_missing_folder_is_refused() {
    let folder = folder(&[]);
    let path = folder.path().join("none/x.safetensors");
    refused(write(&path, &[]), &["none/x.safetensors", "cannot be written", "No such file"]);
    refused(PackedFile::open(&path, VERSION, true), &["none", "No such file"]);
    refused(PackedFile::open(&folder.path().join("x.safetensors"), VERSION, true), &["x.safetensors"]);
}

/// Returns a file with this metadata and the tensor `a`, with its header padded so that the data begins at `start`.
fn with_header(metadata: &str, tensor_bytes: usize, start: usize) -> Vec<u8> {
    let mut header = format!(
        r#"{{"__metadata__":{metadata},"a":{{"dtype":"U8","shape":[{tensor_bytes}],"data_offsets":[0,{tensor_bytes}]}}}}"#
    );
    header.push_str(&" ".repeat(start - 8 - header.len()));
    file(header, &vec![0; tensor_bytes])
}

#[test]
fn malformed_files_are_refused() {
    let good = r#"{"layout":"ferrule-2","version":"7"}"#;
    let cases: [(&[u8], &[&str]); 8] = [
        (
            &with_header(r#"{"layout":"ferrule-2","version":"8"}"#, 64, 4096),
            &["layout \"ferrule-2 8\"", "\"ferrule-2 7\""],
        ),
        (&with_header(r#"{"layout":"other","version":"7"}"#, 64, 4096), &["layout \"other 7\"", "\"ferrule-2 7\""]),
        (&with_header("{}", 64, 4096), &["layout \"none none\"", "pack the model again"]),
        (&with_header("null", 64, 4096), &["layout \"none none\""]),
        (&with_header(good, 64, 4095), &["got 4095", "4096"]),
        (&with_header(good, 63, 4096), &["\"a\"", "got 63", "multiple of 64"]),
        (&with_header(good, 64, 4096)[..4096 + 63], &["\"a\"", "1 bytes are missing"]),
        (&with_header(good, 64, 4096), &["no tensor \"checksums\""]),
    ];
    for (bytes, fragments) in cases {
        let folder = folder(&[("x.safetensors", bytes)]);
        for mapped in [false, true] {
            let opened = PackedFile::open(&folder.path().join("x.safetensors"), VERSION, mapped);
            refused(opened, &[&["x.safetensors"], fragments].concat());
        }
    }
    let folder = folder(&[]);
    let path = folder.path().join("x.safetensors");
    write(&path, &[("a", vec![1; 128])]).unwrap();
    let packed = PackedFile::open(&path, VERSION, true).unwrap();
    for bytes in [0, 1, 64, 129, usize::MAX] {
        refused(packed.range("a", bytes), &["\"a\"", "128 bytes", &bytes.to_string()]);
    }
    assert_eq!((packed.range("a", 65).unwrap(), packed.range("a", 128).unwrap()), (4096..4161, 4096..4224));
    refused(packed.range("b", 64), &["no tensor \"b\""]);
}

/// Verifies all checksums of a file.
fn verify(path: &Path, mapped: bool) -> Result<(), PackedError> {
    let packed = PackedFile::open(path, VERSION, mapped)?;
    (0..packed.names().len()).try_for_each(|index| packed.verify(index))
}

#[test]
fn every_flipped_bit_is_detected() {
    let folder = folder(&[]);
    let path = folder.path().join("x.safetensors");
    let size = 3 << 20;
    write(&path, &[("b", vec![3; size]), ("empty", vec![]), ("a", (0..100).collect())]).unwrap();
    let whole = fs::read(&path).unwrap();
    assert_eq!(PackedFile::open(&path, VERSION, true).unwrap().names(), ["b", "empty", "a"]);
    for mapped in [false, true] {
        verify(&path, mapped).unwrap();
    }
    let data_start = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    // Bytes of the header and its padding, of the tensors and their padding, and of the checksums. The padding of the
    // checksums is never read.
    let header = [0, 7, 8, 20, 90, data_start - 1];
    let data = [0, size - 1, size, size + 99, size + 127, size + 128, size + 128 + 15];
    for at in header.into_iter().chain(data.map(|at| data_start + at)) {
        for bit in 0..8 {
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << bit;
            fs::write(&path, &damaged).unwrap();
            for mapped in [false, true] {
                assert!(verify(&path, mapped).is_err(), "bit {bit} of byte {at} was flipped");
            }
        }
    }
    let mut damaged = whole;
    damaged[data_start + size] ^= 1;
    fs::write(&path, &damaged).unwrap();
    refused(verify(&path, true), &["x.safetensors", "is damaged: the checksum of tensor \"a\" must be "]);
}

#[test]
fn a_file_truncated_while_open_is_an_error() {
    let folder = folder(&[]);
    let path = folder.path().join("x.safetensors");
    write(&path, &[("a", vec![1; 8192])]).unwrap();
    let packed = PackedFile::open(&path, VERSION, false).unwrap();
    let range = packed.range("a", 8192).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(5000).unwrap();
    refused(packed.read(range, &mut [0; 8192]), &["x.safetensors", "cannot be read"]);
}

#[test]
fn a_link_outside_the_folder_is_refused() {
    let outside = folder(&[]);
    write(&outside.path().join("x.safetensors"), &[]).unwrap();
    let folder = folder(&[]);
    let link = folder.path().join("model.safetensors");
    std::os::unix::fs::symlink(outside.path().join("x.safetensors"), &link).unwrap();
    refused(PackedFile::open(&link, VERSION, true), &["model.safetensors", "outside of the model's folder"]);
}
