//! [`Checkpoint`]: all tensors of a Hugging Face directory or a GGUF file, memory-mapped.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use crate::dtype::FloatDtype;
use crate::error::{CheckpointError, CheckpointErrorKind, InFile};
use crate::file::release_pages;
use crate::gguf::{BlockType, TensorType};
use crate::nearest::nearest;
use crate::quantized::StoredAs;
use crate::safetensors::Entry;
use crate::table::StoredTable;
use crate::tensor::{FindTensor, Tensor};
use crate::weight::{Numbers, WeightTensor};

/// The tensors of one model: in one safetensors file, in several with an index, or in GGUF.
#[derive(Debug)]
pub struct Checkpoint {
    /// Real path of the folder.
    folder: PathBuf,
    /// Path of the file that lists the tensors: the only file, the index, or the first part.
    listing: PathBuf,
    shards: Vec<Arc<Mmap>>,
    tensors: BTreeMap<String, Place>,
    /// Quantization method of weights that are not plain tensors.
    stored_as: Option<StoredAs>,
}

/// Location of a tensor.
#[derive(Debug)]
pub(crate) struct Place {
    pub shard: usize,
    pub entry: Entry,
    /// Blocks that its bytes consist of, if it is quantized in GGUF.
    pub blocks: Option<Blocks>,
}

/// Block type of a tensor of bytes, and the shape of its values.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub ty: BlockType,
    pub shape: Box<[usize]>,
}

impl Checkpoint {
    /// Creates a checkpoint of tensors that are stored in `shards`.
    pub(crate) fn new(folder: PathBuf, listing: PathBuf, shards: Vec<Mmap>, tensors: BTreeMap<String, Place>) -> Self {
        Self { folder, listing, shards: shards.into_iter().map(Arc::new).collect(), tensors, stored_as: None }
    }

    /// Adds the tensors of another checkpoint, with `prefix/` before their names.
    pub(crate) fn merge(&mut self, prefix: &str, other: Self) {
        let first = self.shards.len();
        self.shards.extend(other.shards);
        let renamed = other
            .tensors
            .into_iter()
            .map(|(tensor, place)| (format!("{prefix}/{tensor}"), Place { shard: first + place.shard, ..place }));
        self.tensors.extend(renamed);
    }

    /// Returns the real path of the folder that the files lie in.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Sets the quantization method of the weights that are not plain tensors.
    #[must_use]
    pub fn stored_as(self, stored_as: Option<StoredAs>) -> Self {
        Self { stored_as, ..self }
    }

    /// Returns the bytes of a file.
    pub(crate) fn shard(&self, shard: usize) -> &[u8] {
        &self.shards[shard]
    }

    /// Returns whether some weights are quantized.
    pub fn is_quantized(&self) -> bool {
        self.stored_as.is_some() || self.tensors.values().any(|place| place.blocks.is_some())
    }

    /// Returns the path of the file that lists the tensors: the only file, the index, or the first part.
    pub fn listing(&self) -> &Path {
        &self.listing
    }

    /// Returns whether there is a weight of that name, in one tensor or in several.
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some() || self.stored_as.as_ref().is_some_and(|stored_as| stored_as.has(self, name))
    }

    /// Returns the tensor of that name; a tensor in blocks is returned as its bytes, with the type U8.
    ///
    /// # Errors
    /// [`CheckpointErrorKind::NoTensor`] with the nearest name, if there is no such tensor.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, CheckpointError> {
        self.place(name).map(|(name, place)| self.at(name, place))
    }

    fn place(&self, name: &str) -> Result<(&str, &Place), CheckpointError> {
        let found = self.tensors.get_key_value(name).ok_or_else(|| {
            let nearest = nearest(name, self.names()).map(str::to_owned);
            CheckpointErrorKind::NoTensor { tensor: name.to_owned(), nearest }
        });
        found.map(|(name, place)| (name.as_str(), place)).in_file(&self.listing)
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

    /// Returns the weight of that name: F32, F16 or BF16, in blocks, or quantized by the checkpoint's method.
    ///
    /// # Errors
    /// Same as [`tensor`](Self::tensor); [`CheckpointErrorKind::NotFloat`] or [`CheckpointErrorKind::Quantized`].
    pub fn weight(&self, name: &str) -> Result<WeightTensor<'_>, CheckpointError> {
        let listing = self.listing.as_path();
        let quantized = match &self.stored_as {
            Some(stored_as) => stored_as.weight(self, name).in_file(listing)?,
            None => None,
        };
        let numbers = match quantized {
            Some(quantized) => Numbers::Quantized(quantized),
            None => {
                let (name, place) = self.place(name)?;
                let tensor = self.at(name, place);
                let not_float = || CheckpointErrorKind::NotFloat { tensor: name.to_owned(), dtype: tensor.dtype };
                match &place.blocks {
                    Some(Blocks { ty, shape }) => Numbers::Blocks(*ty, shape, tensor),
                    None => {
                        Numbers::Float(FloatDtype::of(tensor.dtype).ok_or_else(not_float).in_file(listing)?, tensor)
                    }
                }
            }
        };
        Ok(WeightTensor { name: name.to_owned(), numbers, listing })
    }

    /// Returns the name, stored type and shape (slowest dimension first) of each tensor.
    pub fn types(&self) -> impl Iterator<Item = (&str, TensorType, &[usize])> {
        self.tensors.iter().map(|(name, Place { entry, blocks, .. })| match blocks {
            Some(Blocks { ty, shape }) => (name.as_str(), TensorType::Blocks(*ty), &**shape),
            None => (name.as_str(), TensorType::Elements(entry.dtype), &*entry.shape),
        })
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the number of tensors and their bytes for each stored type, by the type's name.
    pub fn stored(&self) -> BTreeMap<&'static str, (usize, u64)> {
        let mut stored = BTreeMap::new();
        for ((_, ty, _), place) in self.types().zip(self.tensors.values()) {
            let (tensors, bytes) = stored.entry(ty.name()).or_insert((0, 0));
            *tensors += 1;
            *bytes += place.entry.bytes.len() as u64;
        }
        stored
    }

    /// Returns the bytes of all tensors together.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|place| place.entry.bytes.len() as u64).sum()
    }

    /// Releases the memory of a weight; its pages are read from the file again when they are next used.
    ///
    /// Releases only whole pages inside its tensors, because neighbours may be in use.
    pub fn release(&self, weight: &WeightTensor<'_>) {
        for tensor in weight.stored() {
            release_pages(&self.shards[tensor.shard], tensor.offset..tensor.offset + tensor.bytes.len());
        }
    }

    /// Returns the matrix in a weight, as a table of rows of `columns` elements that stays in its file; `None` if the
    /// weight is neither plain nor in ggml's blocks, or rows end within a block.
    pub fn table(&self, weight: &WeightTensor<'_>, columns: usize) -> Option<StoredTable> {
        let format = weight.row_format()?;
        let row_bytes = format.row_bytes(columns)?;
        let [tensor] = weight.stored()[..] else { return None };
        let bytes = tensor.offset..tensor.offset + tensor.bytes.len();
        Some(StoredTable::new(Arc::clone(&self.shards[tensor.shard]), bytes, format, row_bytes))
    }
}

impl FindTensor for Checkpoint {
    fn find(&self, name: &str) -> Option<Tensor<'_>> {
        let (name, place) = self.tensors.get_key_value(name)?;
        Some(self.at(name, place))
    }
}
