//! Quantized weights are read with the values that were packed: whole, in any range, in strides, and as blocks. The
//! packers here place each code bit by bit, as the specifications of the formats say.

use crate::support;
use crate::support::{Packed, Random};
use ferrule_formats::{BlockLayout, Checkpoint, StoredAs, WeightTensor};
use half::{bf16, f16};
use proptest::prelude::*;
use serde_json::{Value, json};

fn open(packed: &Packed, stored_as: Value) -> Checkpoint {
    let stored_as: StoredAs = serde_json::from_value(stored_as).expect("a description");
    support::open(&packed.file()).expect("a valid file").stored_as(Some(stored_as))
}

/// Checks that every way to read the weights returns these values.
fn holds(checkpoint: &Checkpoint, name: &str, shape: &[usize], expected: &[f32], random: &mut Random) {
    assert!(checkpoint.has(name));
    let weight = checkpoint.weight(name).expect("a valid weight");
    weight.check(0..expected.len()).expect("valid numbers");
    assert_eq!((weight.shape(), weight.name()), (shape, name));
    assert!(weight.is_outputs_first() && weight.float_dtype().is_none());
    let read = |first: usize, count: usize| {
        let mut out = vec![f32::NAN; count];
        weight.read_f32(first, &mut out);
        out
    };
    same(&read(0, expected.len()), expected);
    for _ in 0..8 {
        let first = random.below(expected.len());
        let count = random.below(expected.len() - first + 1);
        same(&read(first, count), &expected[first..first + count]);
        let stride = 1 + random.below(expected.len() - first);
        let strided: Vec<_> = expected[first..].iter().copied().step_by(stride).collect();
        let mut out = vec![f32::NAN; strided.len()];
        weight.read_f32_strided(first, stride, &mut out);
        same(&out, &strided);
    }
    if let Some(layout) = weight.blocks() {
        let all: Vec<_> = blocks_as_floats(&weight, layout, 0, expected.len() / layout.inputs());
        same(&all, expected);
        let first = random.below(expected.len() / layout.inputs());
        let count = 1 + random.below(expected.len() / layout.inputs() - first);
        let some = blocks_as_floats(&weight, layout, first, count);
        same(&some, &expected[first * layout.inputs()..][..count * layout.inputs()]);
    }
}

/// Checks that values are equal bit by bit, except for the sign of zero, which codes do not have.
fn same(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(found == expected, "{found} at {index} is not {expected}");
    }
}

fn blocks_as_floats(weight: &WeightTensor<'_>, layout: BlockLayout, first: usize, count: usize) -> Vec<f32> {
    let mut bytes = vec![0xa5; count * layout.bytes()];
    weight.read_blocks(first * layout.inputs(), &mut bytes);
    let half = |codes: &[u8], i: usize| if i < 16 { codes[i] & 15 } else { codes[i - 16] >> 4 };
    let blocks = bytes.chunks_exact(layout.bytes());
    let one = |block: &[u8], i: usize| {
        let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
        match layout {
            BlockLayout::U4 => scale * (f32::from(half(&block[3..], i)) - f32::from(block[2])),
            BlockLayout::U8 => scale * (f32::from(block[4 + i]) - f32::from(u16::from_le_bytes([block[2], block[3]]))),
            BlockLayout::Mxfp4 => MXFP4[usize::from(half(&block[1..], i))] * (f32::from(block[0]) - 127.0).exp2(),
            other => panic!("{} is none of theirs", other.name()),
        }
    };
    blocks.flat_map(|block| (0..layout.inputs()).map(move |i| one(block, i))).collect()
}

/// Packs codes of `bits` bits into words, lowest bits first.
fn stream(codes: impl Iterator<Item = u32>, bits: u32) -> Vec<u32> {
    let mut words = Vec::new();
    for (index, code) in codes.enumerate() {
        for bit in 0..bits as usize {
            let at = index * bits as usize + bit;
            words.resize(words.len().max(at / 32 + 1), 0);
            words[at / 32] |= (code >> bit & 1) << (at % 32);
        }
    }
    words
}

/// Transposes `[rows][columns]`.
fn transposed(rows: &[Vec<u32>]) -> Vec<u32> {
    (0..rows[0].len()).flat_map(|column| rows.iter().map(move |row| row[column])).collect()
}

fn sizes() -> impl Strategy<Value = (usize, usize, u64)> {
    (1usize..40, 1usize..7, any::<u64>())
}

/// A matrix of codes with scales and zero points by output and group.
struct Codes {
    outputs: usize,
    inputs: usize,
    groups: usize,
    codes: Vec<u32>,
    zeros: Vec<u32>,
    scales: Vec<f16>,
    group_of: Vec<usize>,
}

impl Codes {
    fn new(random: &mut Random, outputs: usize, inputs: usize, size: usize, bits: u32) -> Self {
        let groups = inputs.div_ceil(size);
        let mut code = || random.below(1 << bits) as u32;
        let codes = (0..outputs * inputs).map(|_| code()).collect();
        let zeros = (0..outputs * groups).map(|_| code()).collect();
        let scales = (0..outputs * groups).map(|_| f16::from_f32(random.float())).collect();
        Self { outputs, inputs, groups, codes, zeros, scales, group_of: (0..inputs).map(|i| i / size).collect() }
    }

    fn expected(&self) -> Vec<f32> {
        let element = |(o, i): (usize, usize)| {
            let at = o * self.groups + self.group_of[i];
            self.scales[at].to_f32() * (self.codes[o * self.inputs + i] as f32 - self.zeros[at] as f32)
        };
        (0..self.outputs).flat_map(|o| (0..self.inputs).map(move |i| element((o, i)))).collect()
    }

    /// Transposes `[outputs, groups]`.
    fn by_group<T: Copy>(&self, values: &[T]) -> Vec<T> {
        (0..self.groups).flat_map(|g| (0..self.outputs).map(move |o| values[o * self.groups + g])).collect()
    }

    fn rows(&self) -> impl Iterator<Item = &[u32]> {
        self.codes.chunks_exact(self.inputs)
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn halves(values: &[f16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

const MXFP4: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn gptq_weights_equal_the_oracle(
        (outputs, blocks, seed) in sizes(),
        bits in prop::sample::select(vec![2u32, 3, 4, 8]),
        size in prop::sample::select(vec![None, Some(32), Some(64), Some(24)]),
        order in any::<bool>(),
        first_version in any::<bool>(),
    ) {
        let mut random = Random(seed);
        let (outputs, inputs) = (8 * outputs, 32 * blocks);
        let mut all = Codes::new(&mut random, outputs, inputs, size.unwrap_or(inputs), bits);
        if order {
            all.group_of = (0..inputs).map(|_| random.below(all.groups)).collect();
        }
        let columns: Vec<_> = all.rows().map(|row| stream(row.iter().copied(), bits)).collect();
        let zeros: Vec<_> = all.by_group(&all.zeros).chunks_exact(outputs).map(|zeros| {
            let less = u32::from(first_version);
            if bits == 3 {
                return stream(zeros.iter().map(|zero| zero.wrapping_sub(less) & 7), bits);
            }
            // Subtracts from whole words, with a borrow from the neighbour if a code is 0.
            let ones = less * (u32::MAX / ((1 << bits) - 1));
            stream(zeros.iter().copied(), bits).into_iter().map(|word| word.wrapping_sub(ones)).collect()
        }).collect();
        let mut packed = Packed::default();
        packed.push("m.qweight", "I32", &[columns[0].len(), outputs], words(&transposed(&columns)));
        packed.push("m.qzeros", "I32", &[all.groups, zeros[0].len()], words(&zeros.concat()));
        packed.push("m.scales", "F16", &[all.groups, outputs], halves(&all.by_group(&all.scales)));
        let listed: Vec<_> = all.group_of.iter().map(|group| *group as u32).collect();
        packed.push("m.g_idx", "I32", &[inputs], words(&listed));
        let description = json!({
            "method": "gptq", "bits": bits, "group_size": size, "desc_act": order, "zeros_less_one": first_version,
        });
        let checkpoint = open(&packed, description);
        let blocks = checkpoint.weight("m.weight").unwrap().blocks();
        let size = size.unwrap_or(inputs);
        if size % 32 == 0 && all.group_of.iter().enumerate().all(|(i, group)| i / size == *group) {
            prop_assert_eq!(blocks, Some(if bits == 8 { BlockLayout::U8 } else { BlockLayout::U4 }));
        } else {
            prop_assert_eq!(blocks, None);
        }
        holds(&checkpoint, "m.weight", &[outputs, inputs], &all.expected(), &mut random);
    }

    #[test]
    fn awq_weights_equal_the_oracle(
        (outputs, blocks, seed) in sizes(),
        size in prop::sample::select(vec![None, Some(32), Some(10)]),
    ) {
        let mut random = Random(seed);
        let (outputs, inputs) = (8 * outputs, 16 * blocks);
        let all = Codes::new(&mut random, outputs, inputs, size.unwrap_or(inputs), 4);
        // Nibble i of a word holds output ORDER[i] of its eight.
        const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
        let interleaved = |rows: usize, at: &dyn Fn(usize, usize) -> u32| -> Vec<u32> {
            let word = |row: usize, word: usize| (0..8).map(|i| at(row, 8 * word + ORDER[i]) << (4 * i)).sum();
            (0..rows).flat_map(|row| (0..outputs / 8).map(move |column| word(row, column))).collect()
        };
        let codes = interleaved(inputs, &|input, output| all.codes[output * inputs + input]);
        let zeros = interleaved(all.groups, &|group, output| all.zeros[output * all.groups + group]);
        let mut packed = Packed::default();
        packed.push("m.qweight", "I32", &[inputs, outputs / 8], words(&codes));
        packed.push("m.qzeros", "I32", &[all.groups, outputs / 8], words(&zeros));
        packed.push("m.scales", "F16", &[all.groups, outputs], halves(&all.by_group(&all.scales)));
        let checkpoint = open(&packed, json!({"method": "awq", "group_size": size}));
        let has_blocks = inputs % 32 == 0 && size != Some(10);
        prop_assert_eq!(checkpoint.weight("m.weight").unwrap().blocks(), has_blocks.then_some(BlockLayout::U4));
        holds(&checkpoint, "m.weight", &[outputs, inputs], &all.expected(), &mut random);
    }

    #[test]
    fn compressed_tensors_words_equal_the_oracle(
        (outputs, blocks, seed) in sizes(),
        bits in prop::sample::select(vec![2u32, 4, 8]),
        size in prop::sample::select(vec![None, Some(32), Some(20)]),
        zero_points in 0..3,
        wide in any::<bool>(),
        order in any::<bool>(),
    ) {
        let mut random = Random(seed);
        let inputs = 20 * blocks;
        let mut all = Codes::new(&mut random, outputs, inputs, size.unwrap_or(inputs), bits);
        if zero_points == 0 {
            all.zeros.fill(1 << (bits - 1));
        }
        if order {
            all.group_of = (0..inputs).map(|_| random.below(all.groups)).collect();
        }
        let rows: Vec<_> = all.rows().map(|row| stream(row.iter().copied(), bits)).collect();
        let shape = [outputs as i64, inputs as i64].iter().flat_map(|size| size.to_le_bytes()).collect();
        let mut packed = Packed::default();
        packed.push("m.weight_packed", "I32", &[outputs, rows[0].len()], words(&rows.concat()));
        packed.push("m.weight_shape", "I64", &[2], shape);
        let scales: Vec<_> = all.scales.iter().map(|scale| scale.to_f32()).collect();
        match wide {
            true => packed.push("m.weight_scale", "F32", &[outputs, all.groups], floats(&scales)),
            false => packed.push("m.weight_scale", "F16", &[outputs, all.groups], halves(&all.scales)),
        }
        match zero_points {
            0 => {}
            1 => {
                let groups = all.by_group(&all.zeros);
                let columns: Vec<_> = groups.chunks_exact(outputs).map(|z| stream(z.iter().copied(), bits)).collect();
                packed.push("m.weight_zero_point", "I32", &[columns[0].len(), all.groups], words(&transposed(&columns)));
            }
            _ => {
                let signed = all.zeros.iter().map(|zero| (*zero as i32 - (1 << (bits - 1))) as u8).collect();
                packed.push("m.weight_zero_point", "I8", &[outputs, all.groups], signed);
            }
        }
        if order {
            let listed: Vec<_> = all.group_of.iter().map(|group| *group as u32).collect();
            packed.push("m.weight_g_idx", "I32", &[inputs], words(&listed));
        } else {
            packed.push("m.weight_g_idx", "I32", &[inputs], vec![0xff; 4 * inputs]);
        }
        // The tensors fit one of several schemes.
        let of = |bits: u32, group_size: Option<usize>| json!({
            "kind": "int", "bits": bits, "symmetric": zero_points == 0, "group_size": group_size, "block": null,
        });
        let other = if bits == 4 { 8 } else { 4 };
        let description = json!({"method": "compressed-tensors", "weights": [of(other, Some(32)), of(bits, size)]});
        holds(&open(&packed, description), "m.weight", &[outputs, inputs], &all.expected(), &mut random);
    }

    #[test]
    fn compressed_tensors_bytes_equal_the_oracle(
        (outputs, inputs, seed) in (1usize..40, 1usize..80, any::<u64>()),
        shared in 0..3,
        symmetric in any::<bool>(),
    ) {
        let mut random = Random(seed);
        let mut all = Codes::new(&mut random, outputs, inputs, if shared == 2 { 7 } else { inputs }, 8);
        if symmetric {
            all.zeros.fill(128);
        }
        if shared == 0 {
            let (scale, zero) = (all.scales[0], all.zeros[0]);
            all.scales.fill(scale);
            all.zeros.fill(zero);
        }
        let table = if shared == 0 { vec![1] } else { vec![outputs, all.groups] };
        let count = table.iter().product::<usize>();
        let mut packed = Packed::default();
        packed.push("m.weight", "I8", &[outputs, inputs], all.codes.iter().map(|code| (code ^ 128) as u8).collect());
        packed.push("m.weight_scale", "F16", &table, halves(&all.scales[..count]));
        if !symmetric {
            let zeros = all.zeros[..count].iter().map(|zero| (zero ^ 128) as u8).collect();
            packed.push("m.weight_zero_point", "I8", &table, zeros);
        }
        let group_size = (shared == 2).then_some(7);
        let kind = json!({"kind": "int", "bits": 8, "symmetric": symmetric, "group_size": group_size, "block": null});
        let checkpoint = open(&packed, json!({"method": "compressed-tensors", "weights": [kind]}));
        holds(&checkpoint, "m.weight", &[outputs, inputs], &all.expected(), &mut random);
    }

    #[test]
    fn sparse_weights_equal_the_oracle(
        (outputs, inputs, seed) in (1usize..20, 1usize..80, any::<u64>()),
        two_of_four in any::<bool>(),
        kind in prop::sample::select(vec!["F32", "BF16", "I8", "F8_E4M3"]),
        old in any::<bool>(),
    ) {
        let mut random = Random(seed);
        let inputs = if two_of_four { inputs.next_multiple_of(4) } else { inputs };
        let mut mask = vec![false; outputs * inputs];
        if two_of_four {
            for four in mask.chunks_exact_mut(4) {
                let first = random.below(4);
                let second = (first + 1 + random.below(3)) % 4;
                (four[first], four[second]) = (true, true);
            }
        } else {
            mask.iter_mut().for_each(|stored| *stored = random.below(3) == 0);
        }
        let mut bits = vec![0u8; outputs * inputs.div_ceil(8)];
        for (row, stored) in mask.chunks_exact(inputs).enumerate() {
            for (column, _) in stored.iter().enumerate().filter(|(_, stored)| **stored) {
                bits[row * inputs.div_ceil(8) + column / 8] |= 1 << (column % 8);
            }
        }
        // E4M3 codes without NaN, whose values up to 8 codes are multiples of 2^-9.
        let codes: Vec<u8> = mask.iter().map(|_| if kind == "I8" { random.below(256) } else { random.below(8) } as u8).collect();
        let numbers: Vec<f32> = match kind {
            "F32" => codes.iter().map(|_| random.float()).collect(),
            "BF16" => codes.iter().map(|_| bf16::from_f32(random.float()).to_f32()).collect(),
            "I8" => codes.iter().map(|code| f32::from(code.cast_signed())).collect(),
            _ => codes.iter().map(|code| f32::from(*code) * 2f32.powi(-9)).collect(),
        };
        let scales: Vec<f32> = (0..outputs).map(|_| random.float()).collect();
        let is_scaled = kind.contains('8');
        let scale = |at: usize| if is_scaled { scales[at / inputs] } else { 1.0 };
        let expected: Vec<_> =
            (0..mask.len()).map(|at| if mask[at] { numbers[at] * scale(at) } else { 0.0 }).collect();
        let stored: Vec<_> = (0..mask.len()).filter(|at| mask[*at]).collect();
        let bytes = stored.iter().flat_map(|at| match kind {
            "F32" => numbers[*at].to_le_bytes().to_vec(),
            "BF16" => bf16::from_f32(numbers[*at]).to_le_bytes().to_vec(),
            _ => vec![codes[*at]],
        });
        let prefix = if old { "m.weight." } else { "m." };
        let integers = |numbers: &[usize]| numbers.iter().flat_map(|number| (*number as i64).to_le_bytes()).collect();
        let mut packed = Packed::default();
        let shape: &[usize] = if two_of_four { &[outputs, inputs / 2] } else { &[stored.len()] };
        packed.push(&format!("{prefix}compressed"), kind, shape, bytes.collect());
        packed.push(&format!("{prefix}bitmask"), "U8", &[outputs, inputs.div_ceil(8)], bits);
        packed.push(&format!("{prefix}shape"), "I64", if two_of_four { &[2, 1] } else { &[2] }, integers(&[outputs, inputs]));
        if !two_of_four {
            let before = |row: usize| stored.iter().filter(|at| **at < row * inputs).count();
            packed.push(&format!("{prefix}row_offsets"), "I64", &[outputs], integers(&(0..outputs).map(before).collect::<Vec<_>>()));
        }
        if is_scaled {
            packed.push("m.weight_scale", "F32", &[outputs, 1], floats(&scales));
        }
        let of = |kind: &str| json!({"kind": kind, "bits": 8, "symmetric": true, "group_size": null, "block": null});
        let weights = if is_scaled { vec![of("float"), of("int")] } else { vec![] };
        let checkpoint = open(&packed, json!({"method": "compressed-tensors", "weights": weights}));
        holds(&checkpoint, "m.weight", &[outputs, inputs], &expected, &mut random);
    }

    #[test]
    fn fp8_weights_equal_the_oracle(
        (outputs, inputs, seed) in (1usize..40, 1usize..80, any::<u64>()),
        shared in 0..3,
        scale in prop::sample::select(vec!["m.weight_scale_inv", "m.weight_scale", "m.scale"]),
        five_bits in any::<bool>(),
    ) {
        let mut random = Random(seed);
        let (block, table) = match shared {
            0 => ([outputs, inputs], vec![1]),
            1 => ([1, inputs], vec![outputs, 1]),
            _ => ([16, 24], vec![outputs.div_ceil(16), inputs.div_ceil(24)]),
        };
        let scales: Vec<_> = (0..table.iter().product()).map(|_| bf16::from_f32(random.float())).collect();
        // Codes without infinities and NaN.
        let codes: Vec<_> = (0..outputs * inputs).map(|_| (random.below(0x78) + 128 * random.below(2)) as u8).collect();
        let number = |code: u8| {
            let (bits, bias) = if five_bits { (2, 15) } else { (3, 7) };
            let (exponent, mantissa) = (i32::from(code & 127) >> bits, f32::from(code & ((1 << bits) - 1)));
            let one = if exponent == 0 { 0.0 } else { f32::from(1u8 << bits) };
            let magnitude = (one + mantissa) * 2f32.powi(exponent.max(1) - bias - bits);
            if code < 128 { magnitude } else { -magnitude }
        };
        let width = inputs.div_ceil(block[1]);
        let expected: Vec<_> = codes.iter().enumerate().map(|(at, code)| {
            let scale = scales[at / inputs / block[0] * width + at % inputs / block[1]];
            number(*code) * scale.to_f32()
        }).collect();
        let mut packed = Packed::default();
        packed.push("m.weight", if five_bits { "F8_E5M2" } else { "F8_E4M3" }, &[outputs, inputs], codes);
        let stored = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        packed.push(scale, "BF16", &table, stored);
        let checkpoint = open(&packed, json!({"method": "fp8", "block": (shared == 2).then_some(block)}));
        holds(&checkpoint, "m.weight", &[outputs, inputs], &expected, &mut random);
    }

    #[test]
    fn bitsandbytes_4_bit_weights_equal_the_oracle(
        (outputs, inputs, seed) in (1usize..20, 1usize..60, any::<u64>()),
        nested in any::<bool>(),
        name in prop::sample::select(vec!["nf4", "fp4"]),
    ) {
        let mut random = Random(seed);
        let (elements, block, nested_block) = (outputs * inputs, 64, 3);
        let blocks = elements.div_ceil(block);
        let codes: Vec<_> = (0..elements).map(|_| random.below(16) as u8).collect();
        let map: Vec<_> = (0..16).map(|_| random.float()).collect();
        let mut packed = Packed::default();
        let bytes = codes.chunks(2).map(|two| two[0] << 4 | two.get(1).unwrap_or(&0)).collect::<Vec<_>>();
        packed.push("m.weight", "U8", &[bytes.len(), 1], bytes);
        packed.push("m.weight.quant_map", "F32", &[16], floats(&map));
        let mut state = json!({"quant_type": name, "blocksize": block, "dtype": "bfloat16", "shape": [outputs, inputs]});
        let scales: Vec<f32> = if nested {
            let outer: Vec<_> = (0..blocks.div_ceil(nested_block)).map(|_| random.float()).collect();
            let inner: Vec<_> = (0..blocks).map(|_| random.below(256)).collect();
            let nested_map: Vec<_> = (0..256).map(|_| random.float()).collect();
            packed.push("m.weight.absmax", "U8", &[blocks], inner.iter().map(|code| *code as u8).collect());
            packed.push("m.weight.nested_absmax", "F32", &[outer.len()], floats(&outer));
            packed.push("m.weight.nested_quant_map", "F32", &[256], floats(&nested_map));
            state["nested_blocksize"] = json!(nested_block);
            state["nested_offset"] = json!(0.25);
            inner.iter().enumerate().map(|(i, code)| nested_map[*code] * outer[i / nested_block] + 0.25).collect()
        } else {
            let scales: Vec<_> = (0..blocks).map(|_| random.float()).collect();
            packed.push("m.weight.absmax", "F32", &[blocks], floats(&scales));
            scales
        };
        let state = state.to_string().into_bytes();
        packed.push(&format!("m.weight.quant_state.bitsandbytes__{name}"), "U8", &[state.len()], state);
        let expected: Vec<_> = (0..elements).map(|i| map[usize::from(codes[i])] * scales[i / block]).collect();
        let checkpoint = open(&packed, json!({"method": "bitsandbytes", "codes": name}));
        holds(&checkpoint, "m.weight", &[outputs, inputs], &expected, &mut random);
    }

    #[test]
    fn bitsandbytes_8_bit_weights_equal_the_oracle((outputs, inputs, seed) in (1usize..40, 1usize..80, any::<u64>())) {
        let mut random = Random(seed);
        let codes: Vec<_> = (0..outputs * inputs).map(|_| random.below(256) as u8).collect();
        let scales: Vec<_> = (0..outputs).map(|_| random.float()).collect();
        let mut packed = Packed::default();
        packed.push("m.weight", "I8", &[outputs, inputs], codes.clone());
        packed.push("m.SCB", "F32", &[outputs], floats(&scales));
        packed.push("m.weight_format", "U8", &[], vec![0]);
        let expected: Vec<_> = codes.iter().enumerate()
            .map(|(at, code)| f32::from(code.cast_signed()) * (scales[at / inputs] * (1.0 / 127.0))).collect();
        let checkpoint = open(&packed, json!({"method": "bitsandbytes", "codes": "int8"}));
        holds(&checkpoint, "m.weight", &[outputs, inputs], &expected, &mut random);
    }

    #[test]
    fn mxfp4_weights_equal_the_oracle(
        (experts, outputs, blocks, seed) in (1usize..4, 1usize..9, 1usize..4, any::<u64>()),
    ) {
        let mut random = Random(seed);
        let count = experts * outputs * blocks;
        let codes: Vec<_> = (0..count * 32).map(|_| random.below(16) as u8).collect();
        let scales: Vec<_> = (0..count).map(|_| random.below(253) as u8).collect();
        let expected: Vec<_> = codes.iter().enumerate().map(|(i, code)| {
            MXFP4[usize::from(*code)] * (f32::from(scales[i / 32]) - 127.0).exp2()
        }).collect();
        let mut packed = Packed::default();
        let bytes: Vec<u8> = codes.chunks(2).map(|two| two[0] | two[1] << 4).collect();
        packed.push("experts_blocks", "U8", &[experts, outputs, blocks, 16], bytes.clone());
        packed.push("experts_scales", "U8", &[experts, outputs, blocks], scales.clone());
        let checkpoint = open(&packed, json!({"method": "mxfp4"}));
        prop_assert_eq!(checkpoint.weight("experts").unwrap().blocks(), Some(BlockLayout::Mxfp4));
        holds(&checkpoint, "experts", &[experts, outputs, 32 * blocks], &expected, &mut random);

        let mut packed = Packed::default();
        packed.push("expert.weight", "I8", &[experts * outputs, 16 * blocks], bytes);
        packed.push("expert.scale", "F8_E8M0", &[experts * outputs, blocks], scales);
        let checkpoint = open(&packed, json!({"method": "fp8", "block": [128, 128]}));
        prop_assert_eq!(checkpoint.weight("expert.weight").unwrap().blocks(), Some(BlockLayout::Mxfp4));
        holds(&checkpoint, "expert.weight", &[experts * outputs, 32 * blocks], &expected, &mut random);
    }
}

#[test]
fn scales_not_exact_in_f16_have_no_blocks() {
    for (scale, exact) in [(0.5, true), (0.1, false), (1e-9, false), (1e9, false)] {
        let mut packed = Packed::default();
        packed.push("m.weight", "I8", &[2, 32], vec![3; 64]);
        packed.push("m.weight_scale", "F32", &[2, 1], floats(&[0.25, scale]));
        let kind = json!({"kind": "int", "bits": 8, "symmetric": true, "group_size": null, "block": null});
        let checkpoint = open(&packed, json!({"method": "compressed-tensors", "weights": [kind]}));
        let blocks = checkpoint.weight("m.weight").unwrap().blocks();
        assert_eq!(blocks, exact.then_some(BlockLayout::U8), "{scale}");
    }
}

#[test]
fn modules_that_are_not_quantized_are_plain() {
    let methods = [
        json!({"method": "gptq", "bits": 4, "group_size": 32, "desc_act": true, "zeros_less_one": true}),
        json!({"method": "awq", "group_size": 32}),
        json!({"method": "compressed-tensors", "weights": []}),
        json!({"method": "fp8", "block": [128, 128]}),
        json!({"method": "bitsandbytes", "codes": "nf4"}),
        json!({"method": "bitsandbytes", "codes": "int8"}),
        json!({"method": "mxfp4"}),
    ];
    let mut packed = Packed::default();
    packed.push("m.weight", "F32", &[1, 2], floats(&[0.5, -2.0]));
    packed.push("m.bias", "F32", &[2], floats(&[0.5, -2.0]));
    for method in methods {
        let checkpoint = open(&packed, method);
        for name in ["m.weight", "m.bias"] {
            let weight = checkpoint.weight(name).unwrap();
            assert!(weight.float_dtype().is_some() && !weight.is_outputs_first());
        }
        assert!(!checkpoint.has("n.weight"));
    }
}
