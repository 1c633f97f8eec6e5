//! [`GgufFile`]: a model in GGUF, in one file or in the parts that llama.cpp's `gguf-split` writes.
//!
//! Each part is a GGUF file with the keys `split.no` (from 0), `split.count` and `split.tensors.count` (of all parts
//! together), and a name that ends in its number, from 1, and their count: `-00001-of-00003.gguf`. The first part has
//! the metadata of the model.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::checkpoint::{Blocks, Checkpoint, Place};
use crate::dtype::Dtype;
use crate::error::{CheckpointError, InFile};
use crate::file::{map_file, open_file};
use crate::folder::Folder;
use crate::gguf::{GgufError, Header, MAGIC, TensorInfo, TensorType, Value};
use crate::safetensors::Entry;

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";
/// The largest number of five digits.
const MAX_PARTS: u64 = 99_999;

/// The GGUF file of a model, with all of its parts: metadata and tensors.
#[derive(Debug)]
pub struct GgufFile {
    checkpoint: Checkpoint,
    paths: Vec<PathBuf>,
    /// Header of the first part, which has the metadata of the model.
    header: Header,
}

impl GgufFile {
    /// Returns whether a file begins as GGUF does.
    pub fn is_gguf(path: &Path) -> bool {
        let mut magic = [0; MAGIC.len()];
        File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == MAGIC
    }

    /// Opens a file, or all parts of a model beside the part `path`.
    ///
    /// Reads and checks only the headers; allocates a table of the keys and the tensors.
    ///
    /// # Errors
    /// [`CheckpointError`] for a file that is missing or malformed, or a part outside of the folder.
    ///
    /// # Examples
    /// ```
    /// use ferrule_formats::GgufFile;
    /// use ferrule_formats::gguf::Value;
    ///
    /// let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    /// let mut file = b"GGUF".to_vec();
    /// file.extend(3u32.to_le_bytes()); // version
    /// file.extend(0u64.to_le_bytes()); // number of tensors
    /// file.extend(1u64.to_le_bytes()); // number of keys
    /// file.extend(string("general.architecture"));
    /// file.extend(8u32.to_le_bytes()); // type of the value: a string
    /// file.extend(string("llama"));
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("model.gguf");
    /// std::fs::write(&path, file)?;
    ///
    /// let opened = GgufFile::open(&path)?;
    /// assert!(matches!(opened.value("general.architecture")?, Some(Value::String("llama"))));
    /// assert_eq!(opened.checkpoint().names().count(), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        join(open_parts(path)?)
    }

    /// Returns the paths of the files, in the order of the parts.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Returns the metadata keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.header.keys.keys().map(String::as_str)
    }

    /// Returns the value of a metadata key, if the file has it.
    ///
    /// # Errors
    /// [`GgufError`] if the file has been changed since it was opened.
    pub fn value(&self, key: &str) -> Result<Option<Value<'_>>, CheckpointError> {
        self.header.value(self.checkpoint.shard(0), key).in_file(self.checkpoint.listing())
    }

    /// Adds the path of the file to the error of a metadata value, such as an array element.
    pub fn error(&self, error: GgufError) -> CheckpointError {
        CheckpointError { file: self.checkpoint.listing().to_owned(), kind: Box::new(error.into()) }
    }

    /// Returns the tensors.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Returns the tensors and drops the metadata.
    pub fn into_checkpoint(self) -> Checkpoint {
        self.checkpoint
    }
}

/// One mapped file and its header.
struct Part {
    path: PathBuf,
    map: Mmap,
    header: Header,
}

impl Part {
    /// Opens the file at `real`; errors name it `path`.
    fn open(real: &Path, path: PathBuf) -> Result<Self, CheckpointError> {
        let read = || -> Result<_, GgufError> {
            let (file, bytes) = open_file(real)?;
            let map = map_file(&file, bytes)?;
            let header = Header::read(&map)?;
            Ok((map, header))
        };
        let (map, header) = read().in_file(&path)?;
        Ok(Self { path, map, header })
    }

    /// Returns a metadata integer, if the file has it.
    fn integer(&self, key: &str) -> Result<Option<i128>, GgufError> {
        let Some(value) = self.header.value(&self.map, key)? else { return Ok(None) };
        let found = value.value_type().name();
        let integer = value.integer();
        integer.map(Some).ok_or_else(|| GgufError::WrongType { key: key.to_owned(), found, expected: "an integer" })
    }

    /// Returns the part's number and the count of parts, if there are several.
    fn split(&self) -> Result<Option<(u64, u64)>, GgufError> {
        let Some(count) = self.integer(COUNT)? else { return Ok(None) };
        let count = within(COUNT, count, 0, MAX_PARTS)?;
        // A file that is not split may have a count of 0 or 1.
        if count <= 1 {
            return Ok(None);
        }
        let number = within(NUMBER, self.integer(NUMBER)?.unwrap_or(-1), 0, count - 1)?;
        Ok(Some((number, count)))
    }

    /// Returns `error` with the path of this part.
    fn refuse<T>(&self, error: GgufError) -> Result<T, CheckpointError> {
        Err(error).in_file(&self.path)
    }
}

fn within(key: &'static str, value: i128, least: u64, most: u64) -> Result<u64, GgufError> {
    let number = u64::try_from(value).ok().filter(|number| (least..=most).contains(number));
    number.ok_or(GgufError::SplitRange { key, value, least, most })
}

/// Returns the end of the name of a part.
fn ending(number: u64, count: u64) -> String {
    format!("-{:05}-of-{count:05}.gguf", number + 1)
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens a file or, if it is a part, all parts in order.
fn open_parts(path: &Path) -> Result<Vec<Part>, CheckpointError> {
    // The user names this file, so it may be a link to anywhere.
    let named = Part::open(path, path.to_owned())?;
    let Some((number, count)) = named.split().in_file(&named.path)? else { return Ok(vec![named]) };

    let expected = ending(number, count);
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let Some(stem) = name.strip_suffix(expected.as_str()) else {
        return named.refuse(GgufError::SplitName { number, count, expected });
    };
    let folder = Folder::open(folder_of(path)).in_file(folder_of(path))?;
    // All parts are located, and thereby checked, before the next one is opened.
    let mut located = Vec::new();
    for number in 0..count {
        let name = format!("{stem}{}", ending(number, count));
        let path = folder.path().join(&name);
        match folder.locate(&name).in_file(&path)? {
            Some(real) => located.push((real, path)),
            None => return named.refuse(GgufError::PartMissing { count, missing: name }),
        }
    }
    drop(named);
    let parts = located.into_iter().map(|(real, path)| Part::open(&real, path)).collect::<Result<Vec<_>, _>>()?;
    check_agreement(&parts)?;
    Ok(parts)
}

/// Checks that each part has its number and the count, and that all parts together have the tensors that they declare.
fn check_agreement(parts: &[Part]) -> Result<(), CheckpointError> {
    let count = parts.len() as u64;
    let [first, ..] = parts else { return Ok(()) };
    let tensors = first.integer(TENSORS).in_file(&first.path)?;
    for (number, part) in parts.iter().enumerate() {
        let agree = |key: &'static str, expected: u64| {
            let found = part.integer(key).in_file(&part.path)?;
            if found == Some(expected.into()) {
                return Ok(());
            }
            let found = found.map_or("nothing".to_owned(), |found| found.to_string());
            let first = first.path.display().to_string();
            part.refuse(GgufError::PartDiffers { key, found, first, expected })
        };
        agree(COUNT, count)?;
        agree(NUMBER, number as u64)?;
    }
    let found = parts.iter().map(|part| part.header.tensors.len() as u64).sum();
    match tensors {
        Some(expected) if expected != i128::from(found) => {
            let expected = within(TENSORS, expected, 0, u64::MAX).in_file(&first.path)?;
            first.refuse(GgufError::PartsLackTensors { count, expected, found })
        }
        _ => Ok(()),
    }
}

/// Joins the tensors of all parts to one checkpoint.
fn join(parts: Vec<Part>) -> Result<GgufFile, CheckpointError> {
    let mut tensors = BTreeMap::new();
    let (mut shards, mut headers, mut paths) = (Vec::new(), Vec::new(), Vec::new());
    for (shard, Part { path, map, mut header }) in parts.into_iter().enumerate() {
        for (name, info) in std::mem::take(&mut header.tensors) {
            let place = place(shard, info);
            if let Some(Place { shard: other, .. }) = tensors.insert(name.clone(), place) {
                let other: &PathBuf = &paths[other];
                let error = GgufError::TensorInTwoParts { tensor: name, other: other.display().to_string() };
                return Err(error).in_file(&path);
            }
        }
        shards.push(map);
        headers.push(header);
        paths.push(path);
    }
    let first = paths[0].clone();
    let checkpoint = Checkpoint::new(folder_of(&first).to_owned(), first, shards, tensors);
    Ok(GgufFile { checkpoint, paths, header: headers.swap_remove(0) })
}

/// Returns where a tensor is stored. A tensor in blocks is stored as bytes, with rows as long as their blocks.
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
