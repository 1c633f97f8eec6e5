//! Tables that stay in their file: every row, and every part of one, equals what reading the whole tensor gives.

use std::collections::BTreeMap;

use crate::support::gguf::{Gguf, Tensor};
use crate::support::{Packed, folder};
use ferrule_formats::gguf::BlockType;
use ferrule_formats::{Checkpoint, Dtype, GgufFile, PackedFile, PackedTensor, PackedWriter, StoredTable};

const VERSION: u32 = 7;

/// Checks a table of `rows` rows against the weight of that name.
fn check(checkpoint: &Checkpoint, name: &str, table: &StoredTable, [rows, columns]: [usize; 2]) {
    let mut whole = vec![0.0; rows * columns];
    checkpoint.weight(name).unwrap().read_f32(0, &mut whole);
    for row in (0..rows).rev() {
        for (first, count) in [(0, columns), (1, columns - 1), (columns / 2, 3), (columns - 1, 1)] {
            let mut out = vec![0.0; count];
            table.read(row, first, &mut out);
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&out), bits(&whole[row * columns + first..][..count]), "{name}, row {row}, from {first}");
        }
        table.release(row);
    }
}

/// Writes a table to a packed file and reads it from there, mapped or not.
fn packed(table: &StoredTable, [rows, columns]: [usize; 2], check: impl Fn(&StoredTable)) {
    let directory = folder(&[]);
    let path = directory.path().join("x.safetensors");
    let name = format!("tables.0.{}", table.format().name());
    let bytes = table.bytes().len() as u64;
    let announced = vec![PackedTensor { name: name.clone(), dtype: Dtype::U8, bytes }];
    let mut writer = PackedWriter::create(&path, VERSION, &BTreeMap::new(), announced).unwrap();
    writer.write_table(&name, table).unwrap();
    writer.finish().unwrap();
    for mapped in [false, true] {
        let file = PackedFile::open(&path, VERSION, mapped).unwrap();
        let read = file.table("tables.0", rows, columns).unwrap();
        assert_eq!(read.format(), table.format());
        check(&read);
        let error = file.table("tables.1", rows, columns).unwrap_err().to_string();
        assert!(error.contains("has no tensor \"tables.1\""), "{error}");
        let error = file.table("tables.0", rows + 64, columns).unwrap_err().to_string();
        assert!(error.contains(&name) && error.contains("bytes"), "{error}");
    }
}

#[test]
fn floats_of_every_type() {
    let shape @ [rows, columns] = [70, 96];
    for (dtype, bytes) in [("F32", 4), ("F16", 2), ("BF16", 2)] {
        // No byte is the upper one of a NaN, whose bits need not survive.
        let data = (0..rows * columns * bytes).map(|i| (i * 31 % 113) as u8).collect();
        let mut file = Packed::default();
        file.push("before", "U8", &[5], vec![0; 5]);
        file.push("table", dtype, &shape, data);
        let directory = folder(&[("model.safetensors", &file.file())]);
        let checkpoint = Checkpoint::open(directory.path()).unwrap();
        let table = checkpoint.table(&checkpoint.weight("table").unwrap(), columns).unwrap();
        assert_eq!(table.format().name(), dtype);
        check(&checkpoint, "table", &table, shape);
        packed(&table, shape, |read| check(&checkpoint, "table", read, shape));
        table.release_all();
        check(&checkpoint, "table", &table, shape);
    }
}

#[test]
fn blocks_of_gguf() {
    for ty in [BlockType::Q8_0, BlockType::Q5_0, BlockType::Q4K, BlockType::Q6K] {
        let shape @ [_, columns] = [9, 2 * ty.inputs()];
        let directory = folder(&[("model.gguf", &Gguf::new(&[], &[Tensor::in_blocks(ty, 9, 2)]).bytes())]);
        let checkpoint = GgufFile::open(&directory.path().join("model.gguf")).unwrap().into_checkpoint();
        let weight = checkpoint.weight("w").unwrap();
        let table = checkpoint.table(&weight, columns).unwrap();
        assert_eq!(table.format().name(), ty.name());
        check(&checkpoint, "w", &table, shape);
        packed(&table, shape, |read| check(&checkpoint, "w", read, shape));
        assert!(checkpoint.table(&weight, columns / 2 + 1).is_none(), "rows that end within a block");
    }
}
