//! Reading valid GGUF files.
//!
//! tests/test_gguf_types.py compares dequantized blocks with the `gguf` package; these tests check that any part of a
//! tensor equals that part of the whole.

use std::fs;

use crate::support::gguf::{Gguf, Tensor, array, split, string, value};
use crate::support::{self, folder};
use ferrule_formats::gguf::{BlockType, TensorType, Value};
use ferrule_formats::{BlockLayout, Checkpoint, Dtype, FloatDtype, GgufFile};
use proptest::prelude::*;
use tempfile::TempDir;

const NAME: &str = "model.gguf";

fn written(file: &Gguf) -> TempDir {
    folder(&[(NAME, &file.bytes())])
}

fn open(dir: &TempDir) -> GgufFile {
    GgufFile::open(&dir.path().join(NAME)).expect("a valid file")
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

#[test]
fn metadata_of_every_type() {
    let keys = [
        ("u8", value(0, [200])),
        ("i8", value(1, [200])),
        ("u16", value(2, 60_000u16.to_le_bytes())),
        ("i16", value(3, (-2i16).to_le_bytes())),
        ("u32", value(4, 4_000_000_000u32.to_le_bytes())),
        ("i32", value(5, (-3i32).to_le_bytes())),
        ("f32", value(6, 0.1f32.to_le_bytes())),
        ("bool", value(7, [1])),
        ("string", value(8, string("\u{e9}\u{1f600}"))),
        ("u64", value(10, u64::MAX.to_le_bytes())),
        ("i64", value(11, i64::MIN.to_le_bytes())),
        ("f64", value(12, 0.1f64.to_le_bytes())),
        ("strings", array(8, 3, &[string(""), string("a"), string("bc")].concat())),
        ("nested", array(9, 2, &[&array(0, 2, &[1, 2])[4..], &array(7, 1, &[0])[4..]].concat())),
    ];
    let dir = written(&Gguf::new(&keys, &[]));
    let file = open(&dir);
    let shown = |key: &str| format!("{:?}", file.value(key).unwrap().expect("a key"));
    for (key, expected) in [
        ("u8", "U8(200)"),
        ("i8", "I8(-56)"),
        ("u16", "U16(60000)"),
        ("i16", "I16(-2)"),
        ("u32", "U32(4000000000)"),
        ("i32", "I32(-3)"),
        ("f32", "F32(0.1)"),
        ("bool", "Bool(true)"),
        ("string", "String(\"\u{e9}\u{1f600}\")"),
        ("u64", "U64(18446744073709551615)"),
        ("i64", "I64(-9223372036854775808)"),
        ("f64", "F64(0.1)"),
    ] {
        assert_eq!(shown(key), expected);
    }
    let elements = |key: &str| match file.value(key).unwrap() {
        Some(Value::Array(array)) => array.iter().map(|element| element.unwrap()).collect::<Vec<_>>(),
        other => panic!("{key} is {other:?}"),
    };
    assert_eq!(format!("{:?}", elements("strings")), r#"[String(""), String("a"), String("bc")]"#);
    let [Value::Array(first), Value::Array(second)] = elements("nested")[..] else { panic!("two arrays") };
    assert_eq!((first.len(), first.of().name(), second.of().name()), (2, "UINT8", "BOOL"));
    assert_eq!(format!("{:?}", first.iter().map(Result::unwrap).collect::<Vec<_>>()), "[U8(1), U8(2)]");
    assert!(file.value("none").unwrap().is_none());
    assert_eq!(file.keys().count(), keys.len());
}

#[test]
fn elements_are_floats_or_bytes_in_row_major_order() {
    let half: Vec<u8> = [1.0f32, -2.5].iter().flat_map(|value| half::f16::from_f32(*value).to_le_bytes()).collect();
    let tensors = [
        Tensor::new("f32", 0, &[2, 3], (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect()),
        Tensor::new("f16", 1, &[2], half),
        Tensor::new("bf16", 30, &[1], vec![0x80, 0x3f]),
        Tensor::new("i32", 26, &[2], vec![1, 0, 0, 0, 2, 0, 0, 0]),
        Tensor::new("scalar", 0, &[], 4f32.to_le_bytes().to_vec()),
    ];
    let dir = written(&Gguf::new(&[], &tensors));
    let checkpoint = open(&dir).into_checkpoint();
    assert_eq!(checkpoint.listing(), dir.path().join(NAME));
    let read = |name: &str| {
        let weight = checkpoint.weight(name).unwrap();
        let mut out = vec![0.0; weight.elements()];
        weight.read_f32(0, &mut out);
        (weight.shape().to_vec(), weight.float_dtype(), out)
    };
    assert_eq!(read("f32"), (vec![3, 2], Some(FloatDtype::F32), vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]));
    assert_eq!(read("f16"), (vec![2], Some(FloatDtype::F16), vec![1.0, -2.5]));
    assert_eq!(read("bf16"), (vec![1], Some(FloatDtype::Bf16), vec![1.0]));
    assert_eq!(read("scalar"), (vec![], Some(FloatDtype::F32), vec![4.0]));
    assert_eq!(checkpoint.tensor("i32").unwrap().dtype(), Dtype::I32);
    let message = checkpoint.weight("i32").unwrap_err().to_string();
    assert!(message.contains("\"i32\"") && message.contains("got I32"), "{message}");
    assert!(checkpoint.weight("f33").unwrap_err().to_string().contains("\"f32\""));
}

#[test]
fn block_types_are_listed_and_read() {
    for &ty in BlockType::ALL {
        let tensor = Tensor::in_blocks(ty, 3, 2);
        let dir = written(&Gguf::new(&[], std::slice::from_ref(&tensor)));
        let checkpoint = open(&dir).into_checkpoint();
        let shape = [3, 2 * ty.inputs()];
        assert_eq!(checkpoint.types().collect::<Vec<_>>(), [("w", TensorType::Blocks(ty), &shape[..])]);
        let stored = checkpoint.tensor("w").unwrap();
        assert_eq!((stored.dtype(), stored.shape()), (Dtype::U8, &[3, 2 * ty.bytes()][..]));
        assert_eq!(stored.bytes(), tensor.data);
        assert_eq!(checkpoint.total_bytes(), tensor.data.len() as u64);

        let weight = checkpoint.weight("w").unwrap();
        assert_eq!((weight.shape(), weight.elements(), weight.float_dtype()), (&shape[..], 6 * ty.inputs(), None));
        assert_eq!(
            weight.blocks(),
            BlockLayout::ALL.iter().copied().find(|layout| { layout.name().eq_ignore_ascii_case(ty.name()) }),
            "{}",
            ty.name()
        );
        // Starts at the second row.
        let mut row = vec![0; 2 * ty.bytes()];
        weight.read_blocks(2 * ty.inputs(), &mut row);
        assert_eq!(row, tensor.data[row.len()..2 * row.len()]);
        checkpoint.release(&weight);
    }
}

#[test]
#[should_panic(expected = "whole blocks of Q8_0")]
fn reading_part_of_a_block_panics() {
    let dir = written(&Gguf::new(&[], &[Tensor::in_blocks(BlockType::Q8_0, 1, 2)]));
    open(&dir).checkpoint().weight("w").unwrap().read_blocks(16, &mut [0; 34]);
}

#[test]
#[should_panic(expected = "out of range")]
fn reading_past_the_end_panics() {
    let dir = written(&Gguf::new(&[], &[Tensor::in_blocks(BlockType::Q8_0, 1, 2)]));
    open(&dir).checkpoint().weight("w").unwrap().read_f32(60, &mut [0.0; 5]);
}

proptest! {
    #[test]
    fn any_range_of_a_tensor_equals_that_of_the_whole(
        ty in prop::sample::select(BlockType::ALL),
        first in any::<prop::sample::Index>(),
        length in any::<prop::sample::Index>(),
        stride in 1usize..70,
    ) {
        let dir = written(&Gguf::new(&[], &[Tensor::in_blocks(ty, 2, 2)]));
        let checkpoint = open(&dir).into_checkpoint();
        let weight = checkpoint.weight("w").unwrap();
        let mut whole = vec![0.0; weight.elements()];
        weight.read_f32(0, &mut whole);

        let first = first.index(whole.len());
        let mut part = vec![0.0; length.index(whole.len() - first + 1)];
        weight.read_f32(first, &mut part);
        prop_assert_eq!(bits(&part), bits(&whole[first..first + part.len()]));

        let strided: Vec<f32> = whole[first..].iter().copied().step_by(stride).collect();
        let mut part = vec![0.0; strided.len()];
        weight.read_f32_strided(first, stride, &mut part);
        prop_assert_eq!(bits(&part), bits(&strided));
    }
}

#[test]
fn parts_form_one_checkpoint_with_the_metadata_of_the_first() {
    let part = |number: u16, keys: &[(&str, Vec<u8>)], tensors: &[Tensor]| {
        Gguf::new(&[&split(number, 2, 3), keys].concat(), tensors).bytes()
    };
    let first = part(
        0,
        &[("k", value(8, string("v")))],
        &[Tensor::floats("b", &[1.0]), Tensor::in_blocks(BlockType::Q4_0, 1, 1)],
    );
    // gguf-split aligns every part on its own.
    let second = {
        let keys = [&split(1, 2, 3)[..], &[("general.alignment", value(4, 64u32.to_le_bytes()))]].concat();
        Gguf { alignment: 64, ..Gguf::new(&keys, &[Tensor::floats("a", &[2.0, 3.0])]) }.bytes()
    };
    let names = ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"];
    let dir = folder(&[(names[0], &first), (names[1], &second)]);
    for named in names {
        let file = GgufFile::open(&dir.path().join(named)).unwrap();
        assert!(file.paths().iter().map(|path| path.file_name().unwrap()).eq(names));
        assert!(matches!(file.value("k").unwrap(), Some(Value::String("v"))));
        let checkpoint = file.into_checkpoint();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b", "w"]);
        let mut value = [0.0; 1];
        checkpoint.weight("a").unwrap().read_f32(1, &mut value);
        assert_eq!(value, [3.0]);
        assert!(checkpoint.listing().ends_with(names[0]));
    }
}

#[test]
fn a_split_count_of_one_is_not_split() {
    for count in [0u16, 1] {
        let keys = [("split.count", value(2, count.to_le_bytes()))];
        let dir = written(&Gguf::new(&keys, &[Tensor::floats("w", &[1.0])]));
        assert_eq!(open(&dir).paths(), [dir.path().join(NAME)]);
    }
}

#[test]
fn a_value_changed_after_opening_is_an_error() {
    let dir = written(&Gguf::new(&[("k", value(8, string("text")))], &[]));
    let file = open(&dir);
    let mut bytes = fs::read(dir.path().join(NAME)).unwrap();
    let text = bytes.windows(4).position(|four| four == b"text").unwrap();
    bytes[text] = 0xff;
    fs::write(dir.path().join(NAME), &bytes).unwrap();
    let message = file.value("k").unwrap_err().to_string();
    assert!(message.contains(NAME) && message.contains("\"k\"") && message.contains("UTF-8"), "{message}");
}

#[test]
fn a_checkpoint_opens_folders_and_files() {
    let dir = folder(&[(NAME, &Gguf::new(&[], &[Tensor::floats("g", &[1.0])]).bytes())]);
    support::write(dir.path(), "model.safetensors", &support::valid(&["s"]));
    assert!(Checkpoint::open(dir.path()).unwrap().has("s"));
    assert!(Checkpoint::open(&dir.path().join(NAME)).unwrap().has("g"));
}
