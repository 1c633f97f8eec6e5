//! Malformed tensors of quantized weights: a tensor that is missing or has an invalid type, shape or value is an error
//! that names the tensor, what was found and what is allowed.

use crate::support::{Packed, open};
use ferrule_formats::{CheckpointError, StoredAs};
use serde_json::{Value, json};

/// A tensor: name, type, shape, and the value of all of its bytes.
type Entry = (&'static str, &'static str, Vec<usize>, u8);

/// Checks that looking up and reading `weight` fails, with an error that contains all of `fragments`.
#[track_caller]
fn refused(description: &Value, weight: &str, entries: &[Entry], fragments: &[&str]) {
    let mut packed = Packed::default();
    for (name, dtype, shape, fill) in entries {
        let bits = ferrule_formats::Dtype::named(dtype).unwrap().bits() as usize;
        packed.push(name, dtype, shape, vec![*fill; shape.iter().product::<usize>() * bits / 8]);
    }
    refused_file(description, weight, &packed, fragments);
}

#[track_caller]
fn refused_file(description: &Value, weight: &str, packed: &Packed, fragments: &[&str]) {
    let stored_as: StoredAs = serde_json::from_value(description.clone()).expect("a description");
    let checkpoint = open(&packed.file()).expect("a valid file").stored_as(Some(stored_as));
    let asked = || -> Result<(), CheckpointError> {
        let weight = checkpoint.weight(weight)?;
        weight.check(0..weight.elements())
    };
    let message = asked().expect_err("this must be refused").to_string();
    for fragment in ["model.safetensors: "].iter().chain(fragments) {
        assert!(message.contains(fragment), "{fragment:?} is not in {message:?}");
    }
}

/// Returns the entries with one of them replaced, or removed if `other` is `None`.
fn with(entries: &[Entry], name: &str, other: Option<Entry>) -> Vec<Entry> {
    assert!(entries.iter().any(|entry| entry.0 == name));
    entries.iter().filter(|entry| entry.0 != name).cloned().chain(other).collect()
}

/// Byte of which f16 values are NaN.
const NAN: u8 = 0xff;

fn gptq_entries() -> Vec<Entry> {
    vec![
        ("m.qweight", "I32", vec![8, 16], 0x12),
        ("m.qzeros", "I32", vec![2, 2], 0x12),
        ("m.scales", "F16", vec![2, 16], 0x12),
        ("m.g_idx", "I32", vec![64], 0),
    ]
}

#[test]
fn malformed_gptq_tensors_are_refused() {
    let description = json!({"method": "gptq", "bits": 4, "group_size": 32, "desc_act": true, "zeros_less_one": true});
    let entries = gptq_entries();
    let faults: Vec<(&str, Option<Entry>, &[&str])> = vec![
        ("m.qweight", None, &["has no tensor \"m.qweight\"", "GPTQ weight \"m.weight\""]),
        ("m.qzeros", None, &["has no tensor \"m.qzeros\""]),
        ("m.scales", None, &["has no tensor \"m.scales\""]),
        ("m.g_idx", None, &["has no tensor \"m.g_idx\""]),
        ("m.qweight", Some(("m.qweight", "F32", vec![8, 16], 0)), &["\"m.qweight\" must have dtype I32, got F32"]),
        ("m.qweight", Some(("m.qweight", "I32", vec![128], 0)), &["\"m.qweight\" must be a matrix, got [128]"]),
        ("m.qweight", Some(("m.qweight", "I32", vec![0, 16], 0)), &["[0, 16]", "[inputs * 4 / 32, outputs]"]),
        ("m.qzeros", Some(("m.qzeros", "I64", vec![2, 2], 0)), &["tensor \"m.qzeros\" must have dtype", "got I64"]),
        ("m.qzeros", Some(("m.qzeros", "I32", vec![2, 3], 0)), &["\"m.qzeros\"", "must be [2, 2], got [2, 3]"]),
        ("m.scales", Some(("m.scales", "F16", vec![3, 16], 0)), &["\"m.scales\"", "must be [2, 16], got [3, 16]"]),
        (
            "m.scales",
            Some(("m.scales", "I32", vec![2, 16], 0)),
            &["\"m.scales\" must have dtype F16 or BF16", "got I32"],
        ),
        (
            "m.scales",
            Some(("m.scales", "F16", vec![2, 16], NAN)),
            &["element 0 of tensor \"m.scales\" must be finite, got NaN"],
        ),
        ("m.g_idx", Some(("m.g_idx", "I32", vec![63], 0)), &["\"m.g_idx\"", "must be [64], got [63]"]),
        ("m.g_idx", Some(("m.g_idx", "I64", vec![64], 0)), &["tensor \"m.g_idx\" must have dtype", "got I64"]),
        (
            "m.g_idx",
            Some(("m.g_idx", "I32", vec![64], 0xff)),
            &["element 0 of tensor \"m.g_idx\" must be a group from 0 to 1, got -1"],
        ),
        ("m.g_idx", Some(("m.g_idx", "I32", vec![64], 2)), &["\"m.g_idx\" must be a group from 0 to 1, got 33686018"]),
    ];
    for (name, other, fragments) in faults {
        refused(&description, "m.weight", &with(&entries, name, other), fragments);
    }
    let three = json!({"method": "gptq", "bits": 3, "group_size": 32, "desc_act": true, "zeros_less_one": true});
    refused(&three, "m.weight", &entries, &["\"m.qweight\"", "without a remainder, got [8, 16]"]);
}

#[test]
fn malformed_awq_tensors_are_refused() {
    let description = json!({"method": "awq", "group_size": 32});
    let entries: Vec<Entry> = vec![
        ("m.qweight", "I32", vec![64, 2], 0x12),
        ("m.qzeros", "I32", vec![2, 2], 0x12),
        ("m.scales", "F16", vec![2, 16], 0x12),
    ];
    let faults: Vec<(&str, Option<Entry>, &[&str])> = vec![
        ("m.qweight", None, &["has no tensor \"m.qweight\"", "AWQ weight \"m.weight\""]),
        ("m.qzeros", None, &["has no tensor \"m.qzeros\""]),
        ("m.qweight", Some(("m.qweight", "I16", vec![64, 2], 0)), &["tensor \"m.qweight\" must have dtype", "got I16"]),
        ("m.qweight", Some(("m.qweight", "I32", vec![64, 0], 0)), &["[64, 0]", "both > 0"]),
        ("m.qzeros", Some(("m.qzeros", "I32", vec![2, 1], 0)), &["\"m.qzeros\"", "must be [2, 2], got [2, 1]"]),
        ("m.scales", Some(("m.scales", "F16", vec![1, 16], 0)), &["\"m.scales\"", "must be [2, 16], got [1, 16]"]),
        ("m.scales", Some(("m.scales", "F16", vec![2, 16], NAN)), &["\"m.scales\" must be finite, got NaN"]),
    ];
    for (name, other, fragments) in faults {
        refused(&description, "m.weight", &with(&entries, name, other), fragments);
    }
}

/// Returns a sparse matrix `[3, 12]` with two values in each row, one tensor of which is replaced or, without a type, removed.
fn sparse(name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>) -> Packed {
    let integers = |numbers: &[i64]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>();
    let usual = [
        ("m.compressed", "F32", vec![6], vec![0; 24]),
        ("m.bitmask", "U8", vec![3, 2], [3, 0, 1, 8, 0, 3].to_vec()),
        ("m.shape", "I64", vec![2], integers(&[3, 12])),
        ("m.row_offsets", "I64", vec![3], integers(&[0, 2, 4])),
    ];
    let mut packed = Packed::default();
    for (usual, dtype, shape, bytes) in usual.into_iter().filter(|each| each.0 != name) {
        packed.push(usual, dtype, &shape, bytes);
    }
    if !dtype.is_empty() {
        packed.push(name, dtype, shape, bytes);
    }
    packed
}

#[test]
fn malformed_sparse_tensors_are_refused() {
    let description = json!({"method": "compressed-tensors", "weights": []});
    let refused_with = |packed: &Packed, fragments: &[&str]| refused_file(&description, "m.weight", packed, fragments);
    for name in ["m.bitmask", "m.shape", "m.row_offsets"] {
        refused_with(&sparse(name, "", &[], vec![]), &[&format!("has no tensor \"{name}\"")]);
    }
    let integers = |numbers: &[i64]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>();
    let offsets = |numbers: &[i64]| sparse("m.row_offsets", "I64", &[3], integers(numbers));
    let offset = |row: usize| format!("element {row} of tensor \"m.row_offsets\" must be");
    refused_with(&offsets(&[1, 3, 5]), &[&offset(0), "must be 0, got 1"]);
    refused_with(&offsets(&[0, 3, 4]), &[&offset(1), "must be 2, after 2 values of row 0, got 3"]);
    refused_with(&offsets(&[0, 2, 1]), &[&offset(2), "must be 4, after 2 values of row 1, got 1"]);
    refused_with(&offsets(&[0, i64::MIN, 4]), &[&offset(1), "got -9223372036854775808"]);
    refused_with(&offsets(&[-1, 2, 4]), &[&offset(0), "must be from 0 to 6, the number of values, got -1"]);
    refused_with(&offsets(&[i64::MAX, 2, 4]), &[&offset(0), "must be from 0 to 6", "got 9223372036854775807"]);
    refused_with(&sparse("m.row_offsets", "I32", &[3], vec![0; 12]), &["must have dtype I64, got I32"]);
    refused_with(&sparse("m.row_offsets", "I64", &[2], vec![0; 16]), &["\"m.row_offsets\"", "must be [3], got [2]"]);
    let bits = |bytes: [u8; 6]| sparse("m.bitmask", "U8", &[3, 2], bytes.to_vec());
    refused_with(
        &bits([3, 0, 1, 8, 0, 7]),
        &["\"m.compressed\" must be [7], as the last bits of m.bitmask say, got [6]"],
    );
    refused_with(
        &bits([3, 0, 1, 8, 0, 16]),
        &["element 5 of tensor \"m.bitmask\" must be less than 16, for 12 inputs, got 16"],
    );
    refused_with(&sparse("m.bitmask", "U8", &[3, 1], vec![0; 3]), &["\"m.bitmask\"", "must be [3, 2], got [3, 1]"]);
    refused_with(&sparse("m.bitmask", "I8", &[3, 2], vec![0; 6]), &["must have dtype U8, got I8"]);
    let sizes = |numbers: &[i64]| sparse("m.shape", "I64", &[2], integers(numbers));
    refused_with(&sizes(&[0, 12]), &["element 0 of tensor \"m.shape\" must be from 1 to 4294967295, got 0"]);
    refused_with(
        &sizes(&[3, i64::MAX]),
        &["element 1 of tensor \"m.shape\" must be from 1 to", "got 9223372036854775807"],
    );
    refused_with(&sizes(&[3, 20]), &["\"m.bitmask\" must be [3, 3], got [3, 2]"]);
    let values = |dtype, shape: &[usize], bytes| sparse("m.compressed", dtype, shape, vec![0; bytes]);
    refused_with(&values("F32", &[5], 20), &["\"m.compressed\" must be [6]", "got [5]"]);
    refused_with(&values("F32", &[3, 2], 24), &["\"m.compressed\" must be [values], or [3, 12 / 2]", "got [3, 2]"]);
    refused_with(&values("I8", &[6], 6), &["\"m.compressed\" has dtype I8", "describes no weights"]);
    refused_with(&values("I16", &[6], 12), &["\"m.compressed\" has dtype I16", "describes no weights"]);
    // Two of four.
    let two = |bytes: [u8; 6]| {
        let mut packed = Packed::default();
        packed.push("m.compressed", "F32", &[3, 6], vec![0; 72]);
        packed.push("m.bitmask", "U8", &[3, 2], bytes.to_vec());
        packed.push("m.shape", "I64", &[2, 1], integers(&[3, 12]));
        packed
    };
    let limit = "must be a byte with two bits set for each four inputs, got";
    refused_with(&two([0x33, 5, 0x73, 5, 0x33, 5]), &["element 2 of tensor \"m.bitmask\"", limit, "115"]);
    refused_with(&two([0x33, 5, 0x33, 5, 0x33, 7]), &["element 5 of tensor \"m.bitmask\"", limit, "7"]);

    let description = json!({"method": "compressed-tensors", "weights": [
        {"kind": "int", "bits": 8, "symmetric": true, "group_size": null, "block": null},
    ]});
    let int8 = values("I8", &[6], 6);
    refused_file(&description, "m.weight", &int8, &["has no tensor \"m.weight_scale\""]);
    let mut with_scales = values("I8", &[6], 6);
    with_scales.push("m.weight_scale", "F32", &[2], vec![0; 8]);
    refused_file(&description, "m.weight", &with_scales, &["\"m.weight_scale\"", "got [2]"]);
    let mut with_scales = values("I8", &[6], 6);
    with_scales.push("m.weight_scale", "F16", &[3, 1], vec![NAN; 6]);
    refused_file(&description, "m.weight", &with_scales, &["\"m.weight_scale\" must be finite, got NaN"]);
    let mut with_zeros = values("I8", &[6], 6);
    with_zeros.push("m.weight_scale", "F16", &[3, 1], vec![0; 6]);
    with_zeros.push("m.weight_zero_point", "I8", &[3, 1], vec![0, 0xff, 0]);
    let limit = "element 1 of tensor \"m.weight_zero_point\" must be 0, because";
    refused_file(&description, "m.weight", &with_zeros, &[limit, "got -1"]);
    let asymmetric = json!({"method": "compressed-tensors", "weights": [
        {"kind": "int", "bits": 8, "symmetric": false, "group_size": null, "block": null},
    ]});
    let limit = "\"m.compressed\" is sparse, so quantization_config must have a symmetric scheme";
    refused_file(&asymmetric, "m.weight", &int8, &[limit, "got asymmetric ones"]);
}

/// Elements of some rows are checked without the rows after them.
#[test]
fn values_of_each_sparse_row_must_be_stored() {
    let integers = |numbers: &[i64]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>();
    let stored_as: StoredAs = serde_json::from_value(json!({"method": "compressed-tensors", "weights": []})).unwrap();
    for (offsets, found) in [([0, 5, 7], 5), ([0, 6, 8], 6)] {
        let packed = sparse("m.row_offsets", "I64", &[3], integers(&offsets));
        let checkpoint = open(&packed.file()).unwrap().stored_as(Some(stored_as.clone()));
        let weight = checkpoint.weight("m.weight").unwrap();
        let message = weight.check(12..24).unwrap_err().to_string();
        let limit = "element 1 of tensor \"m.row_offsets\" must be at most 4, so that the 2 values of row 1 are stored";
        assert!(message.contains(limit) && message.ends_with(&format!("got {found}")), "{message}");
    }
    let checkpoint = open(&sparse("m.row_offsets", "I64", &[3], integers(&[0, 2, 4])).file()).unwrap();
    let checkpoint = checkpoint.stored_as(Some(stored_as));
    assert!(checkpoint.weight("m.weight").unwrap().check(12..24).is_ok());
}

#[test]
fn malformed_compressed_tensors_are_refused() {
    let kind = json!({"kind": "int", "bits": 4, "symmetric": false, "group_size": 32, "block": null});
    let description = json!({"method": "compressed-tensors", "weights": [kind]});
    let entries = || {
        let mut packed = Packed::default();
        packed.push("m.weight_packed", "I32", &[16, 8], vec![0x12; 512]);
        packed.push("m.weight_scale", "F16", &[16, 2], vec![0x12; 64]);
        packed.push("m.weight_zero_point", "I32", &[2, 2], vec![0x12; 16]);
        packed
    };
    let shaped = |sizes: [i64; 2]| {
        let mut packed = entries();
        packed.push("m.weight_shape", "I64", &[2], sizes.iter().flat_map(|size| size.to_le_bytes()).collect());
        packed
    };
    let refused_with = |packed: &Packed, fragments: &[&str]| refused_file(&description, "m.weight", packed, fragments);
    refused_with(&entries(), &["has no tensor \"m.weight_shape\"", "compressed-tensors weight"]);
    let mut lacking = Packed::default();
    lacking.push("m.weight_packed", "I32", &[16, 8], vec![0x12; 512]);
    lacking.push("m.weight_shape", "I32", &[2], [16, 0, 0, 0, 64, 0, 0, 0].to_vec());
    refused_with(&lacking, &["has no tensor \"m.weight_scale\""]);
    lacking.push("m.weight_scale", "F16", &[16, 2], vec![0x12; 64]);
    refused_with(&lacking, &["has no tensor \"m.weight_zero_point\""]);
    refused_with(&shaped([17, 64]), &["element 0 of tensor \"m.weight_shape\" must be 16, got 17"]);
    refused_with(&shaped([16, -1]), &["element 1 of tensor \"m.weight_shape\" must be the number of inputs, got -1"]);
    refused_with(&shaped([16, i64::MAX]), &["\"m.weight_packed\"", "got [16, 8]", "9223372036854775807"]);
    refused_with(&shaped([16, 72]), &["must be [16, 72 * 4 / 32], as in m.weight_shape, got [16, 8]"]);
    let with = |name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>| {
        let mut packed = shaped([16, 64]);
        packed.push(name, dtype, shape, bytes);
        packed
    };
    // Replaces the contents of one tensor.
    let again = |name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>| {
        let mut packed = Packed::default();
        packed.push("m.weight_packed", "I32", &[16, 8], vec![0x12; 512]);
        packed.push("m.weight_shape", "I64", &[2], [16i64, 64].iter().flat_map(|size| size.to_le_bytes()).collect());
        for (usual, dtype, shape, bytes) in
            [("m.weight_scale", "F16", [16, 2], 64), ("m.weight_zero_point", "I32", [2, 2], 16)]
        {
            if usual != name {
                packed.push(usual, dtype, &shape, vec![0x12; bytes]);
            }
        }
        packed.push(name, dtype, shape, bytes);
        packed
    };
    refused_with(&again("m.weight_scale", "F16", &[16, 1], vec![0; 32]), &["must be [16, 2], got [16, 1]"]);
    refused_with(
        &again("m.weight_scale", "F16", &[16, 2], vec![NAN; 64]),
        &["\"m.weight_scale\" must be finite, got NaN"],
    );
    refused_with(&again("m.weight_zero_point", "I32", &[2, 3], vec![0; 24]), &["must be [2, 2], got [2, 3]"]);
    refused_with(&again("m.weight_zero_point", "I8", &[2, 2], vec![0; 4]), &["must be [16, 2], got [2, 2]"]);
    refused_with(&again("m.weight_zero_point", "F16", &[16, 2], vec![0; 64]), &["got F16", "I8"]);
    refused_with(
        &with("m.weight_g_idx", "I32", &[64], vec![1; 256]),
        &["\"m.weight_g_idx\" must be a group from 0 to 1, got 16843009"],
    );
    refused_with(&with("m.weight_g_idx", "I32", &[1], vec![1; 4]), &["\"m.weight_g_idx\"", "must be [64], got [1]"]);

    let eight: Vec<Entry> = vec![("m.weight", "F8_E4M3", vec![4, 4], 0), ("m.weight_scale", "F32", vec![4, 1], 0)];
    refused(&description, "m.weight", &eight, &["\"m.weight\" has dtype F8_E4M3", "describes no weights"]);
    let bytes: Vec<Entry> = vec![("m.weight", "I8", vec![4, 4], 0)];
    refused(&description, "m.weight", &bytes, &["has no tensor \"m.weight_scale\""]);
}

#[test]
fn malformed_fp8_tensors_are_refused() {
    let entries: Vec<Entry> =
        vec![("m.weight", "F8_E4M3", vec![40, 48], 0), ("m.weight_scale_inv", "F32", vec![2, 2], 0)];
    let block = json!({"method": "fp8", "block": [32, 32]});
    let faults: Vec<(&str, Option<Entry>, &[&str])> = vec![
        ("m.weight_scale_inv", None, &["has no tensor \"m.weight_scale_inv\"", "FP8 weight \"m.weight\""]),
        ("m.weight_scale_inv", Some(("m.weight_scale_inv", "F32", vec![40, 1], 0)), &["must be [2, 2], got [40, 1]"]),
        ("m.weight_scale_inv", Some(("m.weight_scale_inv", "F64", vec![2, 2], 0)), &["got F64"]),
        ("m.weight_scale_inv", Some(("m.weight_scale_inv", "F32", vec![2, 2], NAN)), &["must be finite, got NaN"]),
        ("m.weight_scale_inv", Some(("m.weight_scale_inv", "F8_E8M0", vec![2, 2], NAN)), &["must be finite, got NaN"]),
        ("m.weight", Some(("m.weight", "F8_E4M3", vec![40], 0)), &["\"m.weight\" must be a matrix, got [40]"]),
        ("m.weight", Some(("m.weight", "F8_E4M3", vec![0, 48], 0)), &["[0, 48]", "both > 0"]),
        ("m.weight", Some(("m.weight", "F8_E4M3FNUZ", vec![40, 48], 0)), &["got F8_E4M3FNUZ"]),
    ];
    for (name, other, fragments) in faults {
        refused(&block, "m.weight", &with(&entries, name, other), fragments);
    }
    let four: Vec<Entry> = vec![("m.weight", "I8", vec![4, 32], 0), ("m.scale", "F8_E8M0", vec![4, 2], 0)];
    let faults: Vec<(&str, Entry, &[&str])> = vec![
        (
            "m.weight",
            ("m.weight", "I8", vec![4, 24], 0),
            &["\"m.weight\" must be [outputs, a multiple of 16], both > 0"],
        ),
        ("m.weight", ("m.weight", "I8", vec![4, 4, 16], 0), &["\"m.weight\" must be a matrix, got [4, 4, 16]"]),
        ("m.scale", ("m.scale", "F8_E8M0", vec![4, 4], 0), &["must be [4, 2], got [4, 4]"]),
        ("m.scale", ("m.scale", "BF16", vec![4, 2], 0), &["got BF16"]),
        ("m.scale", ("m.scale", "F8_E8M0", vec![4, 2], NAN), &["must be at most 252, got 255"]),
    ];
    for (name, other, fragments) in faults {
        refused(&block, "m.weight", &with(&four, name, Some(other)), fragments);
    }
    let plain = json!({"method": "fp8", "block": null});
    refused(&plain, "m.weight", &entries, &["must be [40, 1] or [40] or [1]", "got [2, 2]"]);
}

#[test]
fn malformed_bitsandbytes_tensors_are_refused() {
    let four = json!({"method": "bitsandbytes", "codes": "nf4"});
    let state = "m.weight.quant_state.bitsandbytes__nf4";
    let entries: Vec<Entry> = vec![
        ("m.weight", "U8", vec![128, 1], 0),
        ("m.weight.absmax", "F32", vec![4], 0),
        ("m.weight.quant_map", "F32", vec![16], 0),
    ];
    refused(&four, "m.weight", &entries, &["has no tensor \"m.weight.quant_state.bitsandbytes__nf4\""]);
    let refused_with = |entries: &[Entry], text: &str, fragments: &[&str]| {
        let mut packed = Packed::default();
        for (name, dtype, shape, fill) in entries {
            let bits = ferrule_formats::Dtype::named(dtype).unwrap().bits() as usize;
            packed.push(name, dtype, shape, vec![*fill; shape.iter().product::<usize>() * bits / 8]);
        }
        packed.push(state, "U8", &[text.len()], text.as_bytes().to_vec());
        refused_file(&four, "m.weight", &packed, fragments);
    };
    let valid = r#"{"blocksize": 64, "shape": [16, 16]}"#;
    refused_with(&entries, "{", &[state, "is not a valid quantization state"]);
    refused_with(&entries, &format!("{valid}{}", " ".repeat(1 << 16)), &["the limit is 65536"]);
    refused_with(&entries, r#"{"shape": [16, 16]}"#, &[state, "blocksize"]);
    refused_with(&entries, r#"{"blocksize": 0, "shape": [16, 16]}"#, &[state, "nonzero"]);
    refused_with(&entries, r#"{"blocksize": 64, "shape": [16, 16, 1]}"#, &[state, "is not a valid quantization state"]);
    refused_with(&entries, r#"{"blocksize": 64, "shape": [16, 17]}"#, &["\"m.weight\"", "[128, 1]", "[16, 17]"]);
    refused_with(
        &entries,
        r#"{"blocksize": 64, "shape": [4294967296, 4294967296]}"#,
        &["\"m.weight\"", "half a byte for each element of [4294967296, 4294967296]"],
    );
    let faults: Vec<(&str, Option<Entry>, &[&str])> = vec![
        ("m.weight.absmax", None, &["has no tensor \"m.weight.absmax\""]),
        ("m.weight.absmax", Some(("m.weight.absmax", "F32", vec![5], 0)), &["must be [4], got [5]"]),
        (
            "m.weight.absmax",
            Some(("m.weight.absmax", "U8", vec![4], 0)),
            &["tensor \"m.weight.absmax\" must have dtype", "got U8"],
        ),
        (
            "m.weight.absmax",
            Some(("m.weight.absmax", "F32", vec![4], NAN)),
            &["\"m.weight.absmax\" must be finite, got NaN"],
        ),
        ("m.weight.quant_map", Some(("m.weight.quant_map", "F32", vec![15], 0)), &["must be [16], got [15]"]),
        (
            "m.weight.quant_map",
            Some(("m.weight.quant_map", "F32", vec![16], NAN)),
            &["\"m.weight.quant_map\" must be finite, got NaN"],
        ),
    ];
    for (name, other, fragments) in faults {
        refused_with(&with(&entries, name, other), valid, fragments);
    }
    let mut nested = with(&entries, "m.weight.absmax", Some(("m.weight.absmax", "U8", vec![4], 0)));
    nested.push(("m.weight.nested_absmax", "F32", vec![2], 0));
    refused_with(&nested, valid, &[state, "nested_blocksize and nested_offset are required with"]);
    let state_of_both = r#"{"blocksize": 64, "shape": [16, 16], "nested_blocksize": 2, "nested_offset": 0.5}"#;
    refused_with(&nested, state_of_both, &["has no tensor \"m.weight.nested_quant_map\""]);
    let three = r#"{"blocksize": 64, "shape": [16, 16], "nested_blocksize": 1, "nested_offset": 0.5}"#;
    refused_with(&nested, three, &["\"m.weight.nested_absmax\" must be [4], got [2]"]);

    let eight = json!({"method": "bitsandbytes", "codes": "int8"});
    let entries: Vec<Entry> = vec![("m.weight", "I8", vec![16, 4], 0), ("m.SCB", "F32", vec![16], 0)];
    refused(&eight, "m.weight", &with(&entries, "m.SCB", None), &["has no tensor \"m.SCB\""]);
    let others: [(Entry, &[&str]); 2] = [
        (("m.SCB", "F32", vec![4], 0), &["\"m.SCB\" must be [16] or [16, 1], got [4]"]),
        (("m.SCB", "F32", vec![16], NAN), &["\"m.SCB\" must be finite, got NaN"]),
    ];
    for (other, fragments) in others {
        refused(&eight, "m.weight", &with(&entries, "m.SCB", Some(other)), fragments);
    }
    let transposed = [entries, vec![("m.weight_format", "U8", vec![1], 2)]].concat();
    refused(
        &eight,
        "m.weight",
        &transposed,
        &["element 0 of tensor \"m.weight_format\" must be 0, a layout in rows, got 2"],
    );
}

#[test]
fn malformed_mxfp4_tensors_are_refused() {
    let description = json!({"method": "mxfp4"});
    let entries: Vec<Entry> = vec![("e_blocks", "U8", vec![2, 8, 3, 16], 0), ("e_scales", "U8", vec![2, 8, 3], 127)];
    let faults: Vec<(&str, Option<Entry>, &[&str])> = vec![
        ("e_blocks", None, &["has no tensor \"e_blocks\"", "MXFP4 weight \"e\""]),
        ("e_scales", None, &["has no tensor \"e_scales\""]),
        (
            "e_blocks",
            Some(("e_blocks", "I8", vec![2, 8, 3, 16], 0)),
            &["tensor \"e_blocks\" must have dtype", "got I8"],
        ),
        ("e_blocks", Some(("e_blocks", "U8", vec![2, 8, 3, 15], 0)), &["[2, 8, 3, 15]", "inputs / 32, 16]"]),
        ("e_blocks", Some(("e_blocks", "U8", vec![3, 16], 0)), &["[3, 16]", "inputs / 32, 16]"]),
        ("e_blocks", Some(("e_blocks", "U8", vec![0, 1, 1 << 60, 16], 0)), &["got [0, 1, 1152921504606846976, 16]"]),
        ("e_scales", Some(("e_scales", "U8", vec![2, 8, 4], 0)), &["must be [2, 8, 3], got [2, 8, 4]"]),
        ("e_scales", Some(("e_scales", "U8", vec![2, 8, 3], 253)), &["\"e_scales\" must be at most 252, got 253"]),
    ];
    for (name, other, fragments) in faults {
        refused(&description, "e", &with(&entries, name, other), fragments);
    }
}

#[test]
fn only_experts_that_are_read_are_checked() {
    let stored_as: StoredAs = serde_json::from_value(json!({"method": "mxfp4"})).unwrap();
    let mut packed = Packed::default();
    packed.push("e_blocks", "U8", &[2, 4, 1, 16], vec![0; 128]);
    packed.push("e_scales", "U8", &[2, 4, 1], vec![1, 2, 3, 4, 5, 255, 7, 8]);
    let checkpoint = open(&packed.file()).unwrap().stored_as(Some(stored_as));
    let weight = checkpoint.weight("e").unwrap();
    assert!(weight.check(0..128).is_ok());
    let message = weight.check(128..256).expect_err("an invalid scale").to_string();
    assert!(message.contains("element 5 of tensor \"e_scales\" must be at most 252, got 255"), "{message}");
}

#[test]
fn an_invalid_description_is_refused() {
    let gptq = json!({"method": "gptq", "bits": 4, "group_size": 32, "desc_act": true, "zeros_less_one": true});
    let faults = [
        ("bits", json!(5), "bits must be 2, 3, 4 or 8, got 5"),
        ("group_size", json!(0), "nonzero"),
        ("method", json!("exl2"), "exl2"),
        ("other", json!(1), "unknown field `other`"),
    ];
    for (field, value, fragment) in faults {
        let mut description = gptq.clone();
        description[field] = value;
        let message = serde_json::from_value::<StoredAs>(description).expect_err("it is invalid").to_string();
        assert!(message.contains(fragment), "{fragment:?} is not in {message:?}");
    }
}
