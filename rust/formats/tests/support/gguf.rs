//! GGUF files for tests, written byte by byte.

use ferrule_formats::gguf::BlockType;

/// Returns a string: its length and its text.
pub fn string(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}

/// Returns a metadata value: the id of its type, and its bytes.
pub fn value(ty: u32, bytes: impl AsRef<[u8]>) -> Vec<u8> {
    [&ty.to_le_bytes()[..], bytes.as_ref()].concat()
}

/// Returns an array of elements of a type, with a declared length.
pub fn array(of: u32, length: u64, elements: &[u8]) -> Vec<u8> {
    value(9, [&of.to_le_bytes()[..], &length.to_le_bytes(), elements].concat())
}

/// A tensor as a header declares it, and its data.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    /// Fastest first.
    pub dimensions: Vec<u64>,
    pub dimension_count: u32,
    pub ty: u32,
    pub data: Vec<u8>,
    /// Offset in the data; `None` for the next aligned one.
    pub offset: Option<u64>,
}

impl Tensor {
    pub fn new(name: &str, ty: u32, dimensions: &[u64], data: Vec<u8>) -> Self {
        let dimension_count = dimensions.len() as u32;
        Self { name: name.to_owned(), dimensions: dimensions.to_vec(), dimension_count, ty, data, offset: None }
    }

    /// Returns a matrix `w` of `rows` rows with `row_blocks` random blocks each.
    pub fn in_blocks(ty: BlockType, rows: usize, row_blocks: usize) -> Self {
        let data = (0..rows * row_blocks * ty.bytes()).map(|i| (i * 37 + i / 251 * 13) as u8).collect();
        Self::new("w", ty.id(), &[(row_blocks * ty.inputs()) as u64, rows as u64], data)
    }

    /// Returns a vector of f32.
    pub fn floats(name: &str, values: &[f32]) -> Self {
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::new(name, 0, &[values.len() as u64], data)
    }
}

/// Contents of a file to be written.
#[derive(Clone)]
pub struct Gguf {
    pub magic: Vec<u8>,
    pub version: u32,
    pub tensor_count: Option<u64>,
    pub key_count: Option<u64>,
    pub keys: Vec<(String, Vec<u8>)>,
    pub tensors: Vec<Tensor>,
    pub alignment: usize,
}

impl Gguf {
    pub fn new(keys: &[(&str, Vec<u8>)], tensors: &[Tensor]) -> Self {
        Self {
            magic: b"GGUF".to_vec(),
            version: 3,
            tensor_count: None,
            key_count: None,
            keys: keys.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect(),
            tensors: tensors.to_vec(),
            alignment: 32,
        }
    }

    /// Returns everything before the data, and the offset of each tensor in the data.
    pub fn header(&self) -> (Vec<u8>, Vec<u64>) {
        let mut out = self.magic.clone();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            out.extend([string(key), value.clone()].concat());
        }
        let (mut end, mut offsets) = (0, Vec::new());
        for Tensor { name, dimensions, dimension_count, ty, data, offset } in &self.tensors {
            out.extend(string(name));
            out.extend(dimension_count.to_le_bytes());
            out.extend(dimensions.iter().flat_map(|size| size.to_le_bytes()));
            out.extend(ty.to_le_bytes());
            out.extend(offset.unwrap_or(end).to_le_bytes());
            offsets.push(end);
            end = (end + data.len() as u64).next_multiple_of(self.alignment as u64);
        }
        (out, offsets)
    }

    /// Returns the whole file; nothing follows the last tensor.
    pub fn bytes(&self) -> Vec<u8> {
        let (mut out, offsets) = self.header();
        let start = out.len().next_multiple_of(self.alignment);
        for (tensor, offset) in self.tensors.iter().zip(offsets) {
            out.resize(start + offset as usize, 0);
            out.extend(&tensor.data);
        }
        out
    }
}

/// Returns the keys of a part: its number, the count of parts, and the number of tensors in all parts.
pub fn split(number: u16, count: u16, tensors: i32) -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("split.no", value(2, number.to_le_bytes())),
        ("split.count", value(2, count.to_le_bytes())),
        ("split.tensors.count", value(5, tensors.to_le_bytes())),
    ]
}
