//! Malformed model folders, and the links of the Hugging Face cache.

#![cfg(unix)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::support::{folder, refused, valid, write};
use ferrule_formats::{Checkpoint, CheckpointErrorKind};

const INDEX: &str = "model.safetensors.index.json";

fn index(entries: &[(&str, &str)]) -> Vec<u8> {
    let entries: Vec<_> = entries.iter().map(|(tensor, shard)| format!("{tensor:?}:{shard:?}")).collect();
    format!(r#"{{"metadata":{{"total_size":8}},"weight_map":{{{}}}}}"#, entries.join(",")).into_bytes()
}

#[test]
fn shards_are_one_checkpoint() {
    let index = index(&[("a", "1.safetensors"), ("b", "2.safetensors")]);
    let dir = folder(&[(INDEX, &index), ("1.safetensors", &valid(&["a"])), ("2.safetensors", &valid(&["x", "b"]))]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"], "the index lists the tensors");
    assert_eq!(checkpoint.total_bytes(), 8);
    let mut value = [9.0];
    checkpoint.weight("b").unwrap().read_f32(0, &mut value);
    assert_eq!(value, [1.0]);
}

#[test]
fn a_weight_map_outside_the_folder_is_refused() {
    let outside = folder(&[("w.safetensors", &valid(&["a"]))]);
    let absolute = outside.path().join("w.safetensors");
    let dir = folder(&[("model/sub/w.safetensors", &valid(&["a"])), ("w.safetensors", &valid(&["a"]))]);
    let model = dir.path().join("model");
    for shard in ["../w.safetensors", "sub/w.safetensors", "..", ".", "", "./w", absolute.to_str().unwrap(), "a\\b"] {
        write(&model, INDEX, &index(&[("a", shard)]));
        refused(Checkpoint::open(&model), &[INDEX, "\"a\"", &format!("{shard:?}"), "refused"]);
    }
}

#[test]
fn a_link_outside_the_folder_is_refused_before_any_file_is_opened() {
    let outside = folder(&[("w.safetensors", &valid(&["a"]))]);
    // The first shard is malformed: if it were opened, its own error would come first.
    let dir =
        folder(&[(INDEX, &index(&[("a", "1.safetensors"), ("b", "2.safetensors")])), ("1.safetensors", b"broken")]);
    symlink(outside.path().join("w.safetensors"), dir.path().join("2.safetensors")).unwrap();
    refused(Checkpoint::open(dir.path()), &["2.safetensors", "outside of the model's folder", "refused"]);

    for name in ["model.safetensors", INDEX] {
        let dir = folder(&[]);
        symlink(outside.path().join("w.safetensors"), dir.path().join(name)).unwrap();
        refused(Checkpoint::open(dir.path()), &[name, "outside", "refused"]);
    }
}

#[test]
fn a_link_inside_the_folder_and_a_linked_folder_are_followed() {
    let dir = folder(&[("model/weights", &valid(&["a"]))]);
    symlink("weights", dir.path().join("model/model.safetensors")).unwrap();
    symlink("model", dir.path().join("alias")).unwrap();
    for name in ["model", "alias"] {
        assert_eq!(Checkpoint::open(&dir.path().join(name)).unwrap().names().count(), 1);
    }
}

/// Creates a repository as huggingface_hub caches it, and returns the folder of the snapshot.
fn cached(root: &Path, repository: &str, target: &str) -> std::path::PathBuf {
    write(root, &format!("{repository}/blobs/0123abcd"), &valid(&["a"]));
    let snapshot = root.join(repository).join("snapshots/main0");
    fs::create_dir_all(&snapshot).unwrap();
    symlink(target, snapshot.join("model.safetensors")).unwrap();
    snapshot
}

#[test]
fn links_of_the_hugging_face_cache_are_followed() {
    let root = folder(&[]);
    let snapshot = cached(root.path(), "models--org--name", "../../blobs/0123abcd");
    assert_eq!(Checkpoint::open(&snapshot).unwrap().names().collect::<Vec<_>>(), ["a"]);
}

#[test]
fn links_of_the_cache_to_another_repository_are_refused() {
    let root = folder(&[]);
    cached(root.path(), "models--org--other", "../../blobs/0123abcd");
    let snapshot = cached(root.path(), "models--org--name", "../../../models--org--other/blobs/0123abcd");
    refused(Checkpoint::open(&snapshot), &["models--org--other", "refused"]);
    let snapshot = cached(root.path(), "not-a-cache", "../../blobs/0123abcd");
    refused(Checkpoint::open(&snapshot), &["not-a-cache", "refused"]);
}

#[test]
fn a_missing_shard_or_tensor_is_named_with_its_file() {
    let index = index(&[("a", "1.safetensors"), ("b", "2.safetensors")]);
    let dir = folder(&[(INDEX, &index), ("1.safetensors", &valid(&["a"]))]);
    refused(Checkpoint::open(dir.path()), &[INDEX, "\"b\"", "2.safetensors", "does not exist"]);
    write(dir.path(), "2.safetensors", &valid(&["c"]));
    refused(Checkpoint::open(dir.path()), &["2.safetensors", "has no tensor \"b\"", INDEX]);
}

#[test]
fn a_truncated_shard_is_named() {
    let shard = valid(&["a"]);
    let dir = folder(&[(INDEX, &index(&[("a", "1.safetensors")])), ("1.safetensors", &shard[..shard.len() - 1])]);
    refused(Checkpoint::open(dir.path()), &["1.safetensors", "1 bytes are missing"]);
}

#[test]
fn pickle_files_are_refused() {
    let dir = folder(&[("pytorch_model.bin", b"\x80\x02"), ("config.json", b"{}")]);
    refused(Checkpoint::open(dir.path()), &["pytorch_model.bin", "pickle", "arbitrary code", "safetensors"]);
}

#[test]
fn git_lfs_pointers_of_index_and_shards_are_refused() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n";
    let dir = folder(&[(INDEX, pointer)]);
    refused(Checkpoint::open(dir.path()), &[INDEX, "git lfs pull"]);
    let dir = folder(&[(INDEX, &index(&[("a", "1.safetensors")])), ("1.safetensors", pointer)]);
    refused(Checkpoint::open(dir.path()), &["1.safetensors", "git lfs pull"]);
}

#[test]
fn malformed_indexes_are_refused() {
    for (text, fragment) in [
        (&b""[..], "empty"),
        (b"[]", "not a valid index"),
        (b"{}", "weight_map"),
        (br#"{"weight_map":{}}"#, "weight_map is empty"),
        (br#"{"weight_map":{"a":1}}"#, "not a valid index"),
        (br#"{"weight_map":{"a":"x","a":"y"}}"#, "duplicate key \"a\""),
        (br#"{"weight_map":{},"weight_map":{}}"#, "duplicate"),
        (b"{\"weight_map\":{\"\xff\":\"x\"}}", "not a valid index"),
    ] {
        refused(Checkpoint::open(folder(&[(INDEX, text)]).path()), &[INDEX, fragment]);
    }
    let deep = format!(r#"{{"metadata":{},"weight_map":"#, "[".repeat(100_000));
    refused(Checkpoint::open(folder(&[(INDEX, deep.as_bytes())]).path()), &["not a valid index"]);
}

#[test]
fn missing_folders_and_files_are_refused() {
    let dir = folder(&[("other.safetensors", &valid(&["a"]))]);
    refused(Checkpoint::open(&dir.path().join("nowhere")), &["nowhere", "cannot be read"]);
    refused(Checkpoint::open(dir.path()), &["neither model.safetensors nor", "other.safetensors"]);
    refused(Checkpoint::open(folder(&[]).path()), &["neither model.safetensors nor"]);
    fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    refused(Checkpoint::open(dir.path()), &["model.safetensors", "not a regular file"]);
}

#[test]
fn a_pipe_is_refused_at_once() {
    let dir = folder(&[]);
    let made = std::process::Command::new("mkfifo").arg(dir.path().join("model.safetensors")).status().unwrap();
    assert!(made.success());
    refused(Checkpoint::open(dir.path()), &["not a regular file"]);
}

#[test]
fn a_missing_tensor_suggests_the_nearest_name() {
    let dir = folder(&[("model.safetensors", &valid(&["model.norm.weight", "lm_head.weight"]))]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let error = checkpoint.tensor("model.nrm.weight").unwrap_err();
    assert!(matches!(*error.kind, CheckpointErrorKind::NoTensor { .. }));
    let message = error.to_string();
    assert!(message.contains("model.safetensors") && message.contains("\"model.norm.weight\""), "{message}");
}

#[test]
fn open_single_ignores_other_files() {
    const NAME: &str = "adapter_model.safetensors";
    let dir = folder(&[(NAME, &valid(&["a"])), ("model.safetensors", &valid(&["b"]))]);
    let checkpoint = Checkpoint::open_single(dir.path(), NAME).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a"]);
    assert!(checkpoint.listing().ends_with(NAME));

    let dir = folder(&[("model.safetensors", &valid(&["b"])), ("adapter_model.bin", b"PK")]);
    refused(Checkpoint::open_single(dir.path(), NAME), &[NAME, "model.safetensors"]);
    let dir = folder(&[("adapter_model.bin", b"PK")]);
    refused(Checkpoint::open_single(dir.path(), NAME), &["pickle", "adapter_model.bin"]);
    let dir = folder(&[(NAME, b"broken")]);
    refused(Checkpoint::open_single(dir.path(), NAME), &[NAME, "6 bytes"]);
}

#[test]
fn add_folder_prefixes_tensor_names() {
    let dir =
        folder(&[("model.safetensors", &valid(&["a"])), ("2_Dense/model.safetensors", &valid(&["x", "linear.w"]))]);
    let mut checkpoint = Checkpoint::open(dir.path()).unwrap();
    checkpoint.add_folder("2_Dense").unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["2_Dense/linear.w", "2_Dense/x", "a"]);
    let mut value = [9.0];
    checkpoint.weight("2_Dense/linear.w").unwrap().read_f32(0, &mut value);
    assert_eq!(value, [1.0]);
}

#[test]
fn an_added_folder_outside_the_model_is_refused() {
    let outside = folder(&[("model.safetensors", &valid(&["b"]))]);
    let dir = folder(&[("model/model.safetensors", &valid(&["a"])), ("model.safetensors", &valid(&["b"]))]);
    let model = dir.path().join("model");
    symlink(outside.path(), model.join("linked")).unwrap();
    let add = |name: &str| {
        let mut checkpoint = Checkpoint::open(&model).unwrap();
        checkpoint.add_folder(name).map(|()| checkpoint)
    };
    for name in ["..", ".", "", "../model", outside.path().to_str().unwrap(), "missing", "model.safetensors"] {
        refused(add(name), &["is not a subfolder of the model"]);
    }
    refused(add("linked"), &["linked", "outside of the model's folder", "refused"]);
}
