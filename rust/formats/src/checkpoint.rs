//! Every tensor of a Hugging Face directory or a GGUF file, memory-mapped.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::dtype::FloatDtype;
use crate::error::{CheckpointError, Fault};
use crate::folder::{Folder, map_file, open_file};
use crate::gguf::{BlockType, GgufFile, TensorType};
use crate::index::{INDEX_NAME, read_index};
use crate::nearest::nearest;
use crate::quantized::StoredAs;
use crate::safetensors::{Entry, Header, read_header};
use crate::tensor::{Numbers, Tensor, WeightTensor};

const SINGLE_NAME: &str = "model.safetensors";

/// What PyTorch's pickles are called.
const PICKLE_EXTENSIONS: [&str; 5] = ["bin", "pt", "pth", "ckpt", "pkl"];

/// The tensors of one model: in one safetensors file, in several with an index, or in GGUF.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its real path.
    folder: PathBuf,
    /// What lists the tensors: the one file, the index, or the first part.
    listing: PathBuf,
    shards: Vec<Mmap>,
    tensors: BTreeMap<String, Place>,
    /// How weights are stored that are not plain.
    stored_as: Option<StoredAs>,
}

/// Where a tensor lies.
#[derive(Debug)]
pub(crate) struct Place {
    pub shard: usize,
    pub entry: Entry,
    /// What its bytes mean, where they are blocks.
    pub blocks: Option<Blocks>,
}

/// The blocks that a tensor of bytes is made of, and its shape in numbers.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub ty: BlockType,
    pub shape: Box<[usize]>,
}

impl Checkpoint {
    /// Opens `model.safetensors`, or else `model.safetensors.index.json` and its shards, in the folder `path`; or the
    /// GGUF file `path`.
    ///
    /// Reads and checks the headers alone; takes memory for a table of the tensors.
    ///
    /// # Errors
    /// [`CheckpointError`] for whatever is missing, malformed, or outside of the folder.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        if path.is_file() {
            return GgufFile::open(path).map(GgufFile::into_checkpoint);
        }
        let folder = Folder::open(path)?;
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
        let tensors =
            entries.into_iter().map(|(name, entry)| (name, Place { shard: 0, entry, blocks: None })).collect();
        Ok(Some(Self { folder: folder.path().to_owned(), listing: named, shards: vec![map], tensors, stored_as: None }))
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
                    Some(entry) => all.insert(tensor, Place { shard, entry, blocks: None }),
                    None => return Err(Fault::ShardLacks { tensor, index: INDEX_NAME.to_owned() }.of(&named)),
                };
            }
            shards.push(map);
        }
        Ok(Self { folder: folder.path().to_owned(), listing, shards, tensors: all, stored_as: None })
    }

    /// Of tensors that were found elsewhere.
    pub(crate) fn of_parts(
        folder: PathBuf,
        listing: PathBuf,
        shards: Vec<Mmap>,
        tensors: BTreeMap<String, Place>,
    ) -> Self {
        Self { folder, listing, shards, tensors, stored_as: None }
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
        let renamed = tensors
            .into_iter()
            .map(|(tensor, place)| (format!("{name}/{tensor}"), Place { shard: first + place.shard, ..place }));
        self.tensors.extend(renamed);
        Ok(())
    }

    /// The same files, of which weights are stored in this way where they are not plain.
    #[must_use]
    pub fn stored_as(self, stored_as: Option<StoredAs>) -> Self {
        Self { stored_as, ..self }
    }

    /// The bytes of a file.
    pub(crate) fn shard(&self, shard: usize) -> &[u8] {
        &self.shards[shard]
    }

    /// Whether weights are stored in fewer bits than floating-point numbers have.
    pub fn is_quantized(&self) -> bool {
        self.stored_as.is_some() || self.tensors.values().any(|place| place.blocks.is_some())
    }

    /// What lists the tensors: the one file, the index, or the first part.
    pub fn listing(&self) -> &Path {
        &self.listing
    }

    /// Whether there are weights of that name, in whatever tensors.
    pub fn has(&self, name: &str) -> bool {
        self.has_tensor(name) || self.stored_as.as_ref().is_some_and(|stored_as| stored_as.has(self, name))
    }

    /// Whether there is a tensor of that name.
    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor of that name; of one in blocks their bytes, as U8.
    ///
    /// # Errors
    /// [`Fault::NoTensor`] names it, the file that should list it, and the nearest name there.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, CheckpointError> {
        self.find(name).map(|(name, place)| self.at(name, place))
    }

    fn find(&self, name: &str) -> Result<(&str, &Place), CheckpointError> {
        let Some((name, place)) = self.tensors.get_key_value(name) else {
            let nearest = nearest(name, self.names()).map(str::to_owned);
            return Err(Fault::NoTensor { tensor: name.to_owned(), nearest }.of(&self.listing));
        };
        Ok((name, place))
    }

    fn at<'a>(&'a self, name: &'a str, Place { shard, entry, .. }: &'a Place) -> Tensor<'a> {
        Tensor {
            name,
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: &self.shards[*shard][entry.bytes.clone()],
            shard: *shard,
            offset: entry.bytes.start,
        }
    }

    /// The weights of that name: of F32, F16 or BF16, in blocks, or as the checkpoint stores what it has quantized.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor); [`Fault::NotFloat`], and for the tensors of a quantized weight [`Fault::PartMissing`]
    /// and its neighbours.
    pub fn weight(&self, name: &str) -> Result<WeightTensor<'_>, CheckpointError> {
        let listing = self.listing.as_path();
        let quantized = match &self.stored_as {
            Some(stored_as) => stored_as.weight(self, name).map_err(|fault| fault.of(listing))?,
            None => None,
        };
        let numbers = match quantized {
            Some(quantized) => Numbers::Quantized(quantized),
            None => {
                let (name, place) = self.find(name)?;
                let tensor = self.at(name, place);
                let not_float = || Fault::NotFloat { tensor: name.to_owned(), dtype: tensor.dtype }.of(listing);
                match &place.blocks {
                    Some(Blocks { ty, shape }) => Numbers::Blocks(*ty, shape, tensor),
                    None => Numbers::Float(FloatDtype::of(tensor.dtype).ok_or_else(not_float)?, tensor),
                }
            }
        };
        Ok(WeightTensor { name: name.to_owned(), numbers, listing })
    }

    /// How each tensor is stored, by name: its type, and its shape with the slowest dimension first.
    pub fn types(&self) -> impl Iterator<Item = (&str, TensorType, &[usize])> {
        self.tensors.iter().map(|(name, Place { entry, blocks, .. })| match blocks {
            Some(Blocks { ty, shape }) => (name.as_str(), TensorType::Blocks(*ty), &**shape),
            None => (name.as_str(), TensorType::Elements(entry.dtype), &*entry.shape),
        })
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// How many tensors are stored as each type, and their bytes together; by the type's name.
    pub fn stored(&self) -> BTreeMap<&'static str, (usize, u64)> {
        let mut stored = BTreeMap::new();
        for ((_, ty, _), place) in self.types().zip(self.tensors.values()) {
            let (tensors, bytes) = stored.entry(ty.name()).or_insert((0, 0));
            *tensors += 1;
            *bytes += place.entry.bytes.len() as u64;
        }
        stored
    }

    /// Bytes of all tensors together.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|place| place.entry.bytes.len() as u64).sum()
    }

    /// Gives the memory behind a weight back; its pages are read from the file again when they are next touched.
    ///
    /// Whole pages inside its tensors only: their neighbours may be in use.
    pub fn release(&self, weight: &WeightTensor<'_>) {
        weight.stored().iter().for_each(|tensor| self.release_tensor(tensor));
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
    let map = map_file(&file, bytes)?;
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
