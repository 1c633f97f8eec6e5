//! Opening a checkpoint: a folder of safetensors files, or a GGUF file.

use std::collections::BTreeMap;
use std::path::Path;

use memmap2::Mmap;

use crate::checkpoint::{Checkpoint, Place};
use crate::error::{CheckpointError, CheckpointErrorKind, InFile};
use crate::file::{map_file, open_file};
use crate::folder::Folder;
use crate::gguf_file::GgufFile;
use crate::index::{INDEX_NAME, read_index};
use crate::safetensors::{Entry, Header, SafetensorsError, read_header};

const SINGLE_NAME: &str = "model.safetensors";

/// File extensions of PyTorch's pickles.
const PICKLE_EXTENSIONS: [&str; 5] = ["bin", "pt", "pth", "ckpt", "pkl"];

impl Checkpoint {
    /// Opens a checkpoint: `path` is a GGUF file, or a folder with `model.safetensors` or with
    /// `model.safetensors.index.json` and its shards.
    ///
    /// Reads and checks only the headers; allocates a table of the tensors.
    ///
    /// # Errors
    /// [`CheckpointError`] if a file is missing, malformed, or outside of the folder.
    ///
    /// # Examples
    /// ```
    /// use ferrule_formats::Checkpoint;
    ///
    /// let folder = tempfile::tempdir()?;
    /// let header = r#"{"bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}"#;
    /// let mut file = (header.len() as u64).to_le_bytes().to_vec();
    /// file.extend(header.as_bytes());
    /// file.extend([1.0f32, -2.5].iter().flat_map(|value| value.to_le_bytes()));
    /// std::fs::write(folder.path().join("model.safetensors"), file)?;
    ///
    /// let checkpoint = Checkpoint::open(folder.path())?;
    /// assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["bias"]);
    /// let bias = checkpoint.weight("bias")?;
    /// let mut values = vec![0.0; bias.elements()];
    /// bias.read_f32(0, &mut values);
    /// assert_eq!(values, [1.0, -2.5]);
    ///
    /// let error = checkpoint.weight("bais").unwrap_err();
    /// assert!(error.to_string().ends_with(r#"has no tensor "bais"; the nearest name is "bias""#));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        if path.is_file() {
            return GgufFile::open(path).map(GgufFile::into_checkpoint);
        }
        let folder = Folder::open(path).in_file(path)?;
        if let Some(single) = open_in(&folder, SINGLE_NAME)? {
            return Ok(single);
        }
        match folder.locate(INDEX_NAME).in_file(&folder.path().join(INDEX_NAME))? {
            Some(index) => open_sharded(&folder, &index),
            None => Err(without_safetensors(&folder, |others| CheckpointErrorKind::NoWeights { others })),
        }
    }

    /// Opens only the safetensors file `name` in `dir`.
    ///
    /// # Errors
    /// Same as [`open`](Self::open).
    pub fn open_single(dir: &Path, name: &str) -> Result<Self, CheckpointError> {
        let folder = Folder::open(dir).in_file(dir)?;
        match open_in(&folder, name)? {
            Some(single) => Ok(single),
            None => Err(without_safetensors(&folder, |others| CheckpointErrorKind::NoFile {
                name: name.to_owned(),
                others,
            })),
        }
    }

    /// Adds the tensors of the subfolder `name`, with `name/` before their names: `2_Dense/linear.weight`.
    ///
    /// # Errors
    /// Same as [`open`](Self::open), and [`CheckpointErrorKind::NotAFolder`] if there is no such folder.
    pub fn add_folder(&mut self, name: &str) -> Result<(), CheckpointError> {
        let named = self.folder().join(name);
        let located = if Folder::is_plain_name(name) {
            Folder::open(self.folder()).in_file(self.folder())?.locate(name).in_file(&named)?
        } else {
            None
        };
        let Some(path) = located.filter(|path| path.is_dir()) else {
            return Err(CheckpointErrorKind::NotAFolder).in_file(&named);
        };
        self.merge(name, Self::open(&path)?);
        Ok(())
    }
}

fn open_in(folder: &Folder, name: &str) -> Result<Option<Checkpoint>, CheckpointError> {
    let named = folder.path().join(name);
    let Some(path) = folder.locate(name).in_file(&named)? else { return Ok(None) };
    let (map, entries) = open_shard(&path).in_file(&named)?;
    let tensors = entries.into_iter().map(|(name, entry)| (name, Place { shard: 0, entry, blocks: None })).collect();
    Ok(Some(Checkpoint::new(folder.path().to_owned(), named, vec![map], tensors)))
}

fn open_sharded(folder: &Folder, index: &Path) -> Result<Checkpoint, CheckpointError> {
    let listing = folder.path().join(INDEX_NAME);
    // All shards are located, and thereby checked, before the first one is opened.
    let mut located = Vec::new();
    for (shard, tensors) in read_index(index).in_file(index)? {
        let named = folder.path().join(&shard);
        match folder.locate(&shard).in_file(&named)? {
            Some(path) => located.push((path, named, tensors)),
            None => {
                let tensor = tensors.into_iter().next().unwrap_or_default();
                return Err(CheckpointErrorKind::ShardMissing { tensor, shard }).in_file(&listing);
            }
        }
    }
    let mut shards = Vec::with_capacity(located.len());
    let mut all = BTreeMap::new();
    for (shard, (path, named, tensors)) in located.into_iter().enumerate() {
        let (map, mut entries) = open_shard(&path).in_file(&named)?;
        for tensor in tensors {
            match entries.remove(&tensor) {
                Some(entry) => all.insert(tensor, Place { shard, entry, blocks: None }),
                None => {
                    let index = INDEX_NAME.to_owned();
                    return Err(CheckpointErrorKind::ShardLacks { tensor, index }).in_file(&named);
                }
            };
        }
        shards.push(map);
    }
    Ok(Checkpoint::new(folder.path().to_owned(), listing, shards, all))
}

/// Maps one safetensors file and reads its header.
fn open_shard(path: &Path) -> Result<(Mmap, BTreeMap<String, Entry>), SafetensorsError> {
    let (mut file, bytes) = open_file(path)?;
    let Header { tensors, .. } = read_header(&mut file, bytes)?;
    let map = map_file(&file, bytes)?;
    Ok((map, tensors))
}

/// Returns the error for a folder without the requested safetensors file: `error` with the names of the other
/// ones, or [`CheckpointErrorKind::PickleOnly`] if there are only pickles.
fn without_safetensors(folder: &Folder, error: impl FnOnce(Vec<String>) -> CheckpointErrorKind) -> CheckpointError {
    let names = match folder.file_names() {
        Ok(names) => names,
        Err(error) => return CheckpointError { file: folder.path().to_owned(), kind: Box::new(error.into()) },
    };
    let with = |extensions: &[&str]| -> Vec<String> {
        let has = |name: &&String| Path::new(name).extension().is_some_and(|e| extensions.iter().any(|x| e == *x));
        names.iter().filter(has).cloned().collect()
    };
    let others = with(&["safetensors"]);
    let files = with(&PICKLE_EXTENSIONS);
    let only_pickles = others.is_empty() && !files.is_empty();
    let kind = if only_pickles { CheckpointErrorKind::PickleOnly { files } } else { error(others) };
    CheckpointError { file: folder.path().to_owned(), kind: Box::new(kind) }
}
