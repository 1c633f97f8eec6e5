//! The files of a model: one, or the parts that llama.cpp's `gguf-split` writes.
//!
//! Each part is a GGUF file with the keys `split.no` (from 0), `split.count` and `split.tensors.count` (of all parts
//! together), and has a name that ends in its number and their count, from 1: `-00001-of-00003.gguf`. The first one
//! has the model's metadata.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::fault::GgufFault;
use super::header::{Header, TensorInfo};
use super::types::TensorType;
use crate::checkpoint::{Blocks, Checkpoint, Place};
use crate::dtype::Dtype;
use crate::error::{CheckpointError, Fault};
use crate::folder::{Folder, map_file, open_file};
use crate::safetensors::Entry;

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";
/// What five digits can count.
const MAX_PARTS: u64 = 99_999;

/// One file, mapped, and what its header says.
pub(super) struct Part {
    pub path: PathBuf,
    map: Mmap,
    header: Header,
}

impl Part {
    /// Opens the file at `real`, which errors call `path`.
    fn open(real: &Path, path: PathBuf) -> Result<Self, CheckpointError> {
        let opened = || -> Result<_, Fault> {
            let (file, bytes) = open_file(real)?;
            let map = map_file(&file, bytes)?;
            let header = Header::read(&map)?;
            Ok((map, header))
        };
        let (map, header) = opened().map_err(|fault| fault.of(&path))?;
        Ok(Self { path, map, header })
    }

    /// An integer of the metadata, if it is there.
    fn integer(&self, key: &str) -> Result<Option<i128>, GgufFault> {
        let Some(value) = self.header.value(&self.map, key)? else { return Ok(None) };
        let found = value.value_type().name();
        let integer = value.integer();
        integer.map(Some).ok_or_else(|| GgufFault::WrongType { key: key.to_owned(), found, expected: "an integer" })
    }

    /// Its number and the count of all parts, if there are others.
    fn split(&self) -> Result<Option<(u64, u64)>, GgufFault> {
        let Some(count) = self.integer(COUNT)? else { return Ok(None) };
        let count = within(COUNT, count, 0, MAX_PARTS)?;
        // What is not split may say so in either way.
        if count <= 1 {
            return Ok(None);
        }
        let number = within(NUMBER, self.integer(NUMBER)?.unwrap_or(-1), 0, count - 1)?;
        Ok(Some((number, count)))
    }

    fn fault(&self, fault: GgufFault) -> CheckpointError {
        Fault::from(fault).of(&self.path)
    }
}

fn within(key: &'static str, value: i128, least: u64, most: u64) -> Result<u64, GgufFault> {
    let number = u64::try_from(value).ok().filter(|number| (least..=most).contains(number));
    number.ok_or(GgufFault::SplitRange { key, value, least, most })
}

/// How the name of a part ends.
fn ending(number: u64, count: u64) -> String {
    format!("-{:05}-of-{count:05}.gguf", number + 1)
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens a file and, where it is a part, all of them, in their order.
pub(super) fn open(path: &Path) -> Result<Vec<Part>, CheckpointError> {
    // Whoever names a file may name a link to anywhere.
    let named = Part::open(path, path.to_owned())?;
    let Some((number, count)) = named.split().map_err(|fault| named.fault(fault))? else { return Ok(vec![named]) };

    let expected = ending(number, count);
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let Some(stem) = name.strip_suffix(expected.as_str()) else {
        return Err(named.fault(GgufFault::SplitName { number, count, expected }));
    };
    let folder = Folder::open(folder_of(path))?;
    // All parts are located, and with that checked, before the next one is opened.
    let mut located = Vec::new();
    for number in 0..count {
        let name = format!("{stem}{}", ending(number, count));
        match folder.locate(&name)? {
            Some(real) => located.push((real, folder.path().join(name))),
            None => return Err(named.fault(GgufFault::PartMissing { count, missing: name })),
        }
    }
    drop(named);
    let parts = located.into_iter().map(|(real, path)| Part::open(&real, path)).collect::<Result<Vec<_>, _>>()?;
    check_agreement(&parts)?;
    Ok(parts)
}

/// Each part says which one it is and how many there are, and together they have as many tensors as they say.
fn check_agreement(parts: &[Part]) -> Result<(), CheckpointError> {
    let count = parts.len() as u64;
    let [first, ..] = parts else { return Ok(()) };
    let tensors = first.integer(TENSORS).map_err(|fault| first.fault(fault))?;
    for (number, part) in parts.iter().enumerate() {
        let agree = |key: &'static str, expected: u64| {
            let found = part.integer(key).map_err(|fault| part.fault(fault))?;
            if found == Some(expected.into()) {
                return Ok(());
            }
            let found = found.map_or("nothing".to_owned(), |found| found.to_string());
            let first = first.path.display().to_string();
            Err(part.fault(GgufFault::PartDiffers { key, found, first, expected }))
        };
        agree(COUNT, count)?;
        agree(NUMBER, number as u64)?;
    }
    let found = parts.iter().map(|part| part.header.tensors.len() as u64).sum();
    match tensors {
        Some(expected) if expected != i128::from(found) => {
            let expected = within(TENSORS, expected, 0, u64::MAX).map_err(|fault| first.fault(fault))?;
            Err(first.fault(GgufFault::PartsLackTensors { count, expected, found }))
        }
        _ => Ok(()),
    }
}

/// The tensors of all parts as one checkpoint, and the header of the first part.
pub(super) fn join(parts: Vec<Part>) -> Result<(Checkpoint, Header), CheckpointError> {
    let mut tensors = BTreeMap::new();
    let (mut shards, mut headers, mut paths) = (Vec::new(), Vec::new(), Vec::new());
    for (shard, Part { path, map, mut header }) in parts.into_iter().enumerate() {
        for (name, info) in std::mem::take(&mut header.tensors) {
            let place = place(shard, info);
            if let Some(Place { shard: other, .. }) = tensors.insert(name.clone(), place) {
                let other: &PathBuf = &paths[other];
                let fault = GgufFault::TensorInTwoParts { tensor: name, other: other.display().to_string() };
                return Err(Fault::from(fault).of(&path));
            }
        }
        shards.push(map);
        headers.push(header);
        paths.push(path);
    }
    let listing = paths.swap_remove(0);
    Ok((Checkpoint::of_parts(folder_of(&listing).to_owned(), listing, shards, tensors), headers.swap_remove(0)))
}

/// Where a tensor lies. One in blocks is one of bytes, whose rows are as long as their blocks take.
fn place(shard: usize, TensorInfo { ty, shape, bytes }: TensorInfo) -> Place {
    match ty {
        TensorType::Elements(dtype) => Place { shard, entry: Entry { dtype, shape, bytes }, blocks: None },
        TensorType::Blocks(ty) => {
            let mut rows = shape.clone();
            if let Some(row) = rows.last_mut() {
                *row = *row / ty.inputs() * ty.bytes();
            }
            let entry = Entry { dtype: Dtype::U8, shape: rows, bytes };
            Place { shard, entry, blocks: Some(Blocks { ty, shape }) }
        }
    }
}
