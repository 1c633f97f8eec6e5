//! Every tensor of a Hugging Face directory, memory-mapped.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::dtype::FloatDtype;
use crate::error::{CheckpointError, Fault};
use crate::folder::{Folder, open_file};
use crate::index::{INDEX_NAME, read_index};
use crate::nearest::nearest;
use crate::safetensors::{Entry, Header, read_header};
use crate::tensor::{Numbers, Tensor, WeightTensor};

const SINGLE_NAME: &str = "model.safetensors";

/// What PyTorch's pickles are called.
const PICKLE_EXTENSIONS: [&str; 5] = ["bin", "pt", "pth", "ckpt", "pkl"];

/// The tensors of one model, in one safetensors file or in several with an index.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its real path.
    folder: PathBuf,
    /// What lists the tensors: the one file, or the index.
    listing: PathBuf,
    shards: Vec<Mmap>,
    tensors: BTreeMap<String, Place>,
}

/// Where a tensor lies.
#[derive(Debug)]
struct Place {
    shard: usize,
    entry: Entry,
}

impl Checkpoint {
    /// Opens `model.safetensors`, or else `model.safetensors.index.json` and its shards, in `dir`.
    ///
    /// Reads and checks the headers alone; takes memory for a table of the tensors.
    ///
    /// # Errors
    /// [`CheckpointError`] for whatever is missing, malformed, or outside of the folder.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let folder = Folder::open(dir)?;
        if let Some(single) = Self::open_in(&folder, SINGLE_NAME)? {
            return Ok(single);
        }
        match folder.locate(INDEX_NAME)? {
            Some(index) => Self::open_sharded(&folder, &index),
            None => {
                let fault = without_safetensors(&folder, |others| Fault::NoWeights { others })?;
                Err(fault.of(folder.path()))
            }
        }
    }

    /// Opens the file `name` in `dir`, and no other; as [`open`](Self::open) otherwise.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_single(dir: &Path, name: &str) -> Result<Self, CheckpointError> {
        let folder = Folder::open(dir)?;
        if let Some(single) = Self::open_in(&folder, name)? {
            return Ok(single);
        }
        let fault = without_safetensors(&folder, |others| Fault::NoFile { name: name.to_owned(), others })?;
        Err(fault.of(folder.path()))
    }

    fn open_in(folder: &Folder, name: &str) -> Result<Option<Self>, CheckpointError> {
        let Some(path) = folder.locate(name)? else { return Ok(None) };
        let named = folder.path().join(name);
        let (map, entries) = open_shard(&path).map_err(|fault| fault.of(&named))?;
        let tensors = entries.into_iter().map(|(name, entry)| (name, Place { shard: 0, entry })).collect();
        Ok(Some(Self { folder: folder.path().to_owned(), listing: named, shards: vec![map], tensors }))
    }

    fn open_sharded(folder: &Folder, index: &Path) -> Result<Self, CheckpointError> {
        let listing = folder.path().join(INDEX_NAME);
        // All shards are located, and with that checked, before the first one is opened.
        let mut located = Vec::new();
        for (shard, tensors) in read_index(index)? {
            match folder.locate(&shard)? {
                Some(path) => located.push((path, folder.path().join(&shard), tensors)),
                None => {
                    let tensor = tensors.into_iter().next().unwrap_or_default();
                    return Err(Fault::ShardMissing { tensor, shard }.of(&listing));
                }
            }
        }
        let mut shards = Vec::with_capacity(located.len());
        let mut all = BTreeMap::new();
        for (shard, (path, named, tensors)) in located.into_iter().enumerate() {
            let (map, mut entries) = open_shard(&path).map_err(|fault| fault.of(&named))?;
            for tensor in tensors {
                match entries.remove(&tensor) {
                    Some(entry) => all.insert(tensor, Place { shard, entry }),
                    None => return Err(Fault::ShardLacks { tensor, index: INDEX_NAME.to_owned() }.of(&named)),
                };
            }
            shards.push(map);
        }
        Ok(Self { folder: folder.path().to_owned(), listing, shards, tensors: all })
    }

    /// Adds the tensors of a folder within this one, under names that begin with its own: `2_Dense/linear.weight`.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`Fault::NotAFolder`] where there is no such folder.
    pub fn add_folder(&mut self, name: &str) -> Result<(), CheckpointError> {
        let located = if Folder::is_plain_name(name) { Folder::open(&self.folder)?.locate(name)? } else { None };
        let Some(path) = located.filter(|path| path.is_dir()) else {
            return Err(Fault::NotAFolder.of(&self.folder.join(name)));
        };
        let Self { shards, tensors, .. } = Self::open(&path)?;
        let first = self.shards.len();
        self.shards.extend(shards);
        let renamed = tensors.into_iter().map(|(tensor, Place { shard, entry })| {
            (format!("{name}/{tensor}"), Place { shard: first + shard, entry })
        });
        self.tensors.extend(renamed);
        Ok(())
    }

    /// What lists the tensors: the one file, or the index.
    pub fn listing(&self) -> &Path {
        &self.listing
    }

    /// Whether there is a tensor of that name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor of that name.
    ///
    /// # Errors
    /// [`Fault::NoTensor`] names it, the file that should list it, and the nearest name there.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, CheckpointError> {
        let Some((name, Place { shard, entry })) = self.tensors.get_key_value(name) else {
            let nearest = nearest(name, self.names()).map(str::to_owned);
            return Err(Fault::NoTensor { tensor: name.to_owned(), nearest }.of(&self.listing));
        };
        Ok(Tensor {
            name,
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: &self.shards[*shard][entry.bytes.clone()],
            shard: *shard,
            offset: entry.bytes.start,
        })
    }

    /// The weights of that name, which must be of F32, F16 or BF16.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor), and [`Fault::NotFloat`].
    pub fn weight(&self, name: &str) -> Result<WeightTensor<'_>, CheckpointError> {
        let tensor = self.tensor(name)?;
        match FloatDtype::of(tensor.dtype) {
            Some(float) => {
                Ok(WeightTensor { name: tensor.name, shape: tensor.shape, numbers: Numbers::Float(float, tensor) })
            }
            None => Err(Fault::NotFloat { tensor: name.to_owned(), dtype: tensor.dtype }.of(&self.listing)),
        }
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Bytes of all tensors together.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|place| place.entry.bytes.len() as u64).sum()
    }

    /// Gives the memory behind a weight back; its pages are read from the file again when they are next touched.
    ///
    /// Whole pages inside its tensors only: their neighbours may be in use.
    pub fn release(&self, weight: &WeightTensor<'_>) {
        weight.stored().for_each(|tensor| self.release_tensor(tensor));
    }

    #[cfg(unix)]
    fn release_tensor(&self, tensor: &Tensor<'_>) {
        let page = page_bytes();
        let begin = tensor.offset.next_multiple_of(page);
        let end = (tensor.offset + tensor.bytes.len()) / page * page;
        if begin < end {
            // SAFETY: the range lies inside the mapping, which is read-only and backed by a file, so that a page dropped
            // here holds the same bytes when it is touched again.
            let advised = unsafe {
                self.shards[tensor.shard].unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, begin, end - begin)
            };
            // Advice: where the system does not take it, more memory stays resident and nothing else happens.
            drop(advised);
        }
    }

    #[cfg(not(unix))]
    fn release_tensor(&self, _: &Tensor<'_>) {}
}

/// Maps one safetensors file and reads its header.
fn open_shard(path: &Path) -> Result<(Mmap, BTreeMap<String, Entry>), Fault> {
    let (mut file, bytes) = open_file(path)?;
    let Header { tensors, .. } = read_header(&mut file, bytes)?;
    // SAFETY: the mapping is read-only, and handed out as bytes only, for which any value is valid. What remains is a
    // program that truncates the file meanwhile: see the crate's documentation.
    let map = unsafe { Mmap::map(&file) }?;
    // The header was checked against `bytes`; a file that has shrunk since then is not what was checked.
    if (map.len() as u64) < bytes {
        return Err(Fault::TooShort { bytes: map.len() as u64 });
    }
    Ok((map, tensors))
}

/// Why a folder cannot be loaded that has no safetensors file of the right name: `fault` of the others, unless there are
/// pickles and nothing else.
fn without_safetensors(folder: &Folder, fault: impl FnOnce(Vec<String>) -> Fault) -> Result<Fault, CheckpointError> {
    let names = folder.file_names()?;
    let with = |extensions: &[&str]| -> Vec<String> {
        let has = |name: &&String| Path::new(name).extension().is_some_and(|e| extensions.iter().any(|x| e == *x));
        names.iter().filter(has).cloned().collect()
    };
    let others = with(&["safetensors"]);
    let files = with(&PICKLE_EXTENSIONS);
    Ok(if others.is_empty() && !files.is_empty() { Fault::PickleOnly { files } } else { fault(others) })
}

#[cfg(unix)]
fn page_bytes() -> usize {
    // SAFETY: asks for a constant of the system; touches no memory of ours.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(page).ok().filter(|page| page.is_power_of_two()).unwrap_or(1 << 16)
}
