//! Packed files, which store the weights of a model in the layout of the kernels, so that they are used without a copy.
//!
//! A packed file is a safetensors file with alignment: the header is padded with spaces so that the data begins at a
//! multiple of 4096 bytes, and every tensor takes a multiple of 64 bytes, so that each begins on a cache line. Padding
//! is zero. `layout` and `version` in the metadata identify how the tensors store matrices; this module does not depend
//! on it. The last tensor holds the checksum of the header, which is verified when the file is opened, and a checksum of
//! each tensor, which [`PackedFile::verify`] verifies.

mod abandoned;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use memmap2::Mmap;
use serde_json::json;

use self::abandoned::remove_abandoned;
use crate::checksums::{CHECKSUMS, Checksums, file_order};
use crate::dtype::Dtype;
use crate::file::{FileError, map_file, open_file, release_pages};
use crate::folder::Folder;
use crate::nearest::{nearest, suggestion};
use crate::safetensors::{Entry, Header, LENGTH_BYTES, SafetensorsError, read_header};
use crate::table::{RowFormat, StoredTable};

/// Value of `layout` in the metadata.
const LAYOUT: &str = "ferrule-2";

/// Alignment of the data: the smallest page size.
const DATA_ALIGNMENT: u64 = 4096;

/// Alignment of tensors: a cache line.
const LINE: usize = 64;

/// Beginning of the names of tables, which are not kept in memory.
const TABLES: &str = "tables.";

/// Bytes of a table that are copied or verified before their memory is released.
const TABLE_PART_BYTES: usize = 16 << 20;

/// Bytes of a tensor that are read at a time to verify it.
const VERIFY_BYTES: usize = 1 << 20;

/// A packed file cannot be used or written.
#[derive(Debug, thiserror::Error)]
#[error("{}: {kind}", file.display())]
pub struct PackedError {
    /// Path of the file.
    pub file: PathBuf,
    /// Kind of the error.
    pub kind: Box<PackedErrorKind>,
}

/// Kinds of errors in a packed file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum PackedErrorKind {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    #[error("cannot be written: {0}")]
    Write(std::io::Error),
    #[error("has layout {found:?}, but this build of ferrule reads {known:?}: pack the model again")]
    Layout { found: String, known: String },
    #[error("data must begin at a multiple of 4096 bytes, got {begin}")]
    Start { begin: u64 },
    #[error("length of tensor {tensor:?} must be a multiple of 64 bytes, got {bytes}")]
    Line { tensor: String, bytes: usize },
    #[error(
        "tensor {tensor:?} has {bytes} bytes, but the config requires {expected} bytes, padded to a multiple of 64"
    )]
    Length { tensor: String, bytes: usize, expected: usize },
    #[error("tensor {tensor:?} has {rows} rows, but the config allows at most {expected}")]
    Rows { tensor: String, rows: usize, expected: usize },
    #[error("format of tensor {tensor:?} cannot be used in place of {asked}, which the quantization requires")]
    Format { tensor: String, asked: &'static str },
    #[error("tensor {tensor:?} has blocks of {block} inputs, which do not divide the {inputs} inputs of the config")]
    Blocks { tensor: String, block: usize, inputs: usize },
    #[error("is damaged: the checksum of {part} must be {expected:08x}, got {found:08x}")]
    Damaged { part: String, expected: u32, found: u32 },
    #[error("has no tensor {tensor:?}{}", suggestion(nearest.as_deref()))]
    NoTensor { tensor: String, nearest: Option<String> },
}

impl PackedErrorKind {
    fn of(self, file: &Path) -> PackedError {
        PackedError { file: file.to_owned(), kind: Box::new(self) }
    }
}

/// An open packed file.
#[derive(Debug)]
pub struct PackedFile {
    path: PathBuf,
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, Entry>,
    /// Names of the tensors that have checksums, in the order of the file.
    names: Vec<String>,
    checksums: Checksums,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Mapped(Arc<Mmap>),
    /// Tensors are read on demand.
    File(File),
}

impl PackedFile {
    /// Opens a packed file of this layout version, and maps it if `mapped`. Reads and checks only the header.
    ///
    /// # Errors
    /// [`PackedError`] if the file is missing, malformed, a link out of its folder, or has another version, or if its
    /// header is damaged.
    pub fn open(path: &Path, version: u32, mapped: bool) -> Result<Self, PackedError> {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let at = |error: FileError| PackedErrorKind::from(error).of(path);
        let Some(real) = Folder::open(parent).and_then(|folder| folder.locate(name)).map_err(at)? else {
            return Err(at(FileError::Io(std::io::ErrorKind::NotFound.into())));
        };
        Self::open_real(&real, version, mapped).map_err(|kind| kind.of(path))
    }

    fn open_real(path: &Path, version: u32, mapped: bool) -> Result<Self, PackedErrorKind> {
        let (mut file, bytes) = open_file(path)?;
        let Header { metadata, tensors, data_start } = read_header(&mut file, bytes)?;
        let layout = format!("{LAYOUT} {version}");
        let found = |key| metadata.get(key).map_or("none", String::as_str);
        let found = format!("{} {}", found("layout"), found("version"));
        if found != layout {
            return Err(PackedErrorKind::Layout { found, known: layout });
        }
        if data_start % DATA_ALIGNMENT != 0 {
            return Err(PackedErrorKind::Start { begin: data_start });
        }
        if let Some((tensor, entry)) = tensors.iter().find(|(_, entry)| entry.bytes.len() % LINE != 0) {
            return Err(PackedErrorKind::Line { tensor: tensor.clone(), bytes: entry.bytes.len() });
        }
        let checksums = read_checksums(&file, &tensors, data_start)?;
        let bytes = if mapped { Bytes::Mapped(Arc::new(map_file(&file, bytes)?)) } else { Bytes::File(file) };
        let names = file_order(&tensors);
        Ok(Self { path: path.to_owned(), metadata, tensors, names, checksums, bytes })
    }

    /// Returns the real path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the metadata value of `key`.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    /// Returns all metadata.
    pub fn all_metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Returns the bytes of all tensors together.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|entry| entry.bytes.len() as u64).sum()
    }

    /// Returns the names of the tensors in the order of the file.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Reads the tensor at `index` of [`PackedFile::names`] with its padding, and compares its checksum.
    ///
    /// # Errors
    /// [`PackedErrorKind::Damaged`] if the checksum differs; [`PackedErrorKind::File`] if reading the file fails.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn verify(&self, index: usize) -> Result<(), PackedError> {
        let name = &self.names[index];
        let range = self.tensors[name].bytes.clone();
        let found = match &self.bytes {
            Bytes::Mapped(map) => range.clone().step_by(TABLE_PART_BYTES).fold(0, |sum, begin| {
                let part = begin..range.end.min(begin + TABLE_PART_BYTES);
                let sum = crc32c::crc32c_append(sum, &map[part.clone()]);
                if name.starts_with(TABLES) {
                    release_pages(map, part);
                }
                sum
            }),
            Bytes::File(file) => {
                let (mut sum, mut buffer) = (0, vec![0; range.len().min(VERIFY_BYTES)]);
                for start in range.clone().step_by(VERIFY_BYTES) {
                    let part = &mut buffer[..(range.end - start).min(VERIFY_BYTES)];
                    read_at(file, start as u64, part)
                        .map_err(|error| PackedErrorKind::from(FileError::Io(error)).of(&self.path))?;
                    sum = crc32c::crc32c_append(sum, part);
                }
                sum
            }
        };
        let part = format!("tensor {name:?}");
        check(part, self.checksums.tensor(index), found).map_err(|kind| kind.of(&self.path))
    }

    /// Returns the bytes of a tensor including padding, or `None` if there is no such tensor.
    pub fn bytes_of(&self, tensor: &str) -> Option<usize> {
        self.tensors.get(tensor).map(|entry| entry.bytes.len())
    }

    /// Returns the byte range in the file of a tensor that must have `bytes` bytes without padding.
    ///
    /// # Errors
    /// [`PackedErrorKind::NoTensor`], or [`PackedErrorKind::Length`] if the tensor has another length.
    pub fn range(&self, tensor: &str, bytes: usize) -> Result<Range<usize>, PackedError> {
        let Some(entry) = self.tensors.get(tensor) else {
            return Err(self.missing(tensor));
        };
        let found = entry.bytes.len();
        if bytes.checked_next_multiple_of(LINE) != Some(found) {
            return Err(
                PackedErrorKind::Length { tensor: tensor.to_owned(), bytes: found, expected: bytes }.of(&self.path)
            );
        }
        Ok(entry.bytes.start..entry.bytes.start + bytes)
    }

    /// Returns an error about this file.
    pub fn error(&self, kind: PackedErrorKind) -> PackedError {
        kind.of(&self.path)
    }

    /// Returns the error for a tensor that the file does not have.
    pub fn missing(&self, tensor: &str) -> PackedError {
        let nearest = nearest(tensor, self.tensors.keys().map(String::as_str)).map(str::to_owned);
        PackedErrorKind::NoTensor { tensor: tensor.to_owned(), nearest }.of(&self.path)
    }

    /// Returns whether the file is mapped.
    pub fn is_mapped(&self) -> bool {
        matches!(self.bytes, Bytes::Mapped(_))
    }

    /// Returns the mapping, or `None` if the file is not mapped.
    pub fn map(&self) -> Option<Arc<dyn AsRef<[u8]> + Send + Sync>> {
        match &self.bytes {
            Bytes::Mapped(map) => Some(Arc::clone(map) as Arc<_>),
            Bytes::File(_) => None,
        }
    }

    /// Returns the table `<tensor>.<format>` of rows of `columns` elements, which stays in the file. Its name begins with
    /// `tables.`.
    ///
    /// # Errors
    /// [`PackedErrorKind::NoTensor`] if the file has it in no format, [`PackedErrorKind::Length`] if it has another
    /// length, and [`PackedErrorKind::File`] if the file cannot be mapped.
    pub fn table(&self, tensor: &str, rows: usize, columns: usize) -> Result<StoredTable, PackedError> {
        let named = RowFormat::all().map(|format| (format, format!("{tensor}.{}", format.name())));
        let found = named.into_iter().find(|(_, name)| self.tensors.contains_key(name));
        let (format, name) = found.ok_or_else(|| self.missing(tensor))?;
        let row_bytes = format.row_bytes(columns);
        let bytes = row_bytes.and_then(|bytes| bytes.checked_mul(rows)).unwrap_or(usize::MAX);
        let range = self.range(&name, bytes)?;
        let map = match &self.bytes {
            Bytes::Mapped(map) => Arc::clone(map),
            Bytes::File(file) => {
                let map = map_file(file, range.end as u64);
                Arc::new(map.map_err(|error| self.error(error.into()))?)
            }
        };
        Ok(StoredTable::new(map, range, format, row_bytes.unwrap_or(0)))
    }

    /// Copies a range of the file, as [`PackedFile::range`] returns it.
    ///
    /// # Errors
    /// [`PackedErrorKind::File`] if reading the file fails, or if it was truncated.
    ///
    /// # Panics
    /// If `out` has another length than the range, or the range exceeds a mapped file.
    pub fn read(&self, range: Range<usize>, out: &mut [u8]) -> Result<(), PackedError> {
        match &self.bytes {
            Bytes::Mapped(map) => out.copy_from_slice(&map[range]),
            Bytes::File(file) => {
                assert_eq!(range.len(), out.len(), "the length of a range");
                read_at(file, range.start as u64, out)
                    .map_err(|error| PackedErrorKind::from(FileError::Io(error)).of(&self.path))?;
            }
        }
        Ok(())
    }
}

/// Reads the checksums of a file, and verifies the checksum of the header.
fn read_checksums(
    file: &File,
    tensors: &BTreeMap<String, Entry>,
    data_start: u64,
) -> Result<Checksums, PackedErrorKind> {
    let read = |range: Range<usize>| {
        let mut bytes = vec![0; range.len()];
        read_at(file, range.start as u64, &mut bytes).map_err(FileError::Io).map(|()| bytes)
    };
    let Some(entry) = tensors.get(CHECKSUMS) else {
        return Err(PackedErrorKind::NoTensor { tensor: CHECKSUMS.to_owned(), nearest: None });
    };
    let others = tensors.len() - 1;
    let (expected, found) = (Checksums::bytes(others), entry.bytes.len());
    if found != expected.next_multiple_of(LINE) {
        return Err(PackedErrorKind::Length { tensor: CHECKSUMS.to_owned(), bytes: found, expected });
    }
    let checksums = Checksums::read(&read(entry.bytes.clone())?, others);
    check("the header".to_owned(), checksums.header(), crc32c::crc32c(&read(0..data_start as usize)?))?;
    Ok(checksums)
}

/// Compares a checksum with the one in the file.
fn check(part: String, expected: u32, found: u32) -> Result<(), PackedErrorKind> {
    if expected == found { Ok(()) } else { Err(PackedErrorKind::Damaged { part, expected, found }) }
}

/// A tensor to be written.
#[derive(Debug, Clone)]
pub struct PackedTensor {
    /// Name of the tensor.
    pub name: String,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Bytes without padding.
    pub bytes: u64,
}

/// Writes a packed file: it appears at its path when it is complete, or not at all.
///
/// # Examples
/// ```
/// use std::collections::BTreeMap;
///
/// use ferrule_formats::{Dtype, PackedFile, PackedTensor, PackedWriter};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// let tensor = PackedTensor { name: "codes".into(), dtype: Dtype::U8, bytes: 3 };
/// let mut writer = PackedWriter::create(&path, 1, &BTreeMap::new(), vec![tensor])?;
/// writer.write("codes", &[1, 2, 3])?;
/// writer.finish()?;
///
/// let file = PackedFile::open(&path, 1, true)?;
/// let mut codes = [0; 3];
/// file.read(file.range("codes", 3)?, &mut codes)?;
/// assert_eq!(codes, [1, 2, 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PackedWriter {
    path: PathBuf,
    /// Path of the file while it is incomplete.
    temporary: PathBuf,
    file: File,
    /// Tensors that are not written yet, the next one last.
    left: Vec<PackedTensor>,
    checksums: Checksums,
    is_finished: bool,
}

impl PackedWriter {
    /// Creates a file for these tensors, in this order, and reserves disk space for all of it. Removes incomplete files
    /// that killed processes left beside it.
    ///
    /// # Errors
    /// [`PackedErrorKind::Write`] if the disk is full or the folder is not writable.
    pub fn create(
        path: &Path,
        version: u32,
        metadata: &BTreeMap<String, String>,
        mut tensors: Vec<PackedTensor>,
    ) -> Result<Self, PackedError> {
        let left = tensors.iter().rev().cloned().collect();
        let bytes = Checksums::bytes(tensors.len()) as u64;
        tensors.push(PackedTensor { name: CHECKSUMS.to_owned(), dtype: Dtype::U8, bytes });
        let failed = |error| PackedErrorKind::Write(error).of(path);
        remove_abandoned(folder_of(path));
        let header = header_of(version, metadata, &tensors);
        let bytes = tensors.iter().map(padded_bytes).sum::<u64>() + header.len() as u64;
        let temporary = temporary_beside(path);
        let file = File::create_new(&temporary).map_err(failed)?;
        // On a file system without locks, no process removes abandoned files either.
        let _ = file.try_lock();
        let mut checksums = Checksums::default();
        checksums.push(crc32c::crc32c(&header));
        let mut writer = Self { path: path.to_owned(), temporary, file, left, checksums, is_finished: false };
        reserve(&writer.file, bytes).map_err(failed)?;
        writer.file.write_all(&header).map_err(failed)?;
        Ok(writer)
    }

    /// Writes the next tensor.
    ///
    /// # Errors
    /// [`PackedErrorKind::Write`].
    ///
    /// # Panics
    /// If `name` is not the next tensor, or `bytes` has another length than was announced.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), PackedError> {
        let next = self.left.pop().expect("a tensor that was announced");
        assert_eq!((next.name.as_str(), next.bytes), (name, bytes.len() as u64), "the tensors' order");
        self.append(bytes)
    }

    /// Writes the next tensor, which is a table of another file, without holding more than a part of it in memory.
    ///
    /// # Errors
    /// [`PackedErrorKind::Write`].
    ///
    /// # Panics
    /// As [`PackedWriter::write`].
    pub fn write_table(&mut self, name: &str, table: &StoredTable) -> Result<(), PackedError> {
        let next = self.left.pop().expect("a tensor that was announced");
        assert_eq!((next.name.as_str(), next.bytes), (name, table.bytes().len() as u64), "the tensors' order");
        let bytes = table.bytes();
        self.append_parts(bytes.len(), bytes.chunks(TABLE_PART_BYTES), || table.release_all())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), PackedError> {
        self.append_parts(bytes.len(), [bytes].into_iter(), || ())
    }

    /// Appends a tensor of `length` bytes that is given in parts; calls `written` after each of them.
    fn append_parts<'b>(
        &mut self,
        length: usize,
        parts: impl Iterator<Item = &'b [u8]>,
        written: impl Fn(),
    ) -> Result<(), PackedError> {
        let padding = &[0; LINE][..length.next_multiple_of(LINE) - length];
        let mut sum = 0;
        for part in parts.chain([padding]) {
            sum = crc32c::crc32c_append(sum, part);
            self.file.write_all(part).map_err(|error| PackedErrorKind::Write(error).of(&self.path))?;
            written();
        }
        self.checksums.push(sum);
        Ok(())
    }

    /// Moves the complete file to its path, replacing any file there.
    ///
    /// # Errors
    /// [`PackedErrorKind::Write`]; the previous file at the path is then unchanged.
    ///
    /// # Panics
    /// If tensors are missing.
    pub fn finish(mut self) -> Result<(), PackedError> {
        assert!(self.left.is_empty(), "{} tensors have not been written", self.left.len());
        self.append(&self.checksums.to_bytes())?;
        let moved = self.file.sync_all().and_then(|()| fs::rename(&self.temporary, &self.path));
        moved.map_err(|error| PackedErrorKind::Write(error).of(&self.path))?;
        self.is_finished = true;
        // The file is complete and in place. Systems that cannot sync folders offer nothing more.
        let _ = File::open(folder_of(&self.path)).and_then(|folder| folder.sync_all());
        Ok(())
    }
}

impl Drop for PackedWriter {
    fn drop(&mut self) {
        if !self.is_finished {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

fn padded_bytes(tensor: &PackedTensor) -> u64 {
    tensor.bytes.next_multiple_of(LINE as u64)
}

/// Returns the bytes before the data: header length and padded header.
fn header_of(version: u32, metadata: &BTreeMap<String, String>, tensors: &[PackedTensor]) -> Vec<u8> {
    let mut metadata = metadata.clone();
    metadata.insert("layout".to_owned(), LAYOUT.to_owned());
    metadata.insert("version".to_owned(), version.to_string());
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), json!(metadata));
    let mut end = 0;
    for tensor in tensors {
        let (begin, bytes) = (end, padded_bytes(tensor));
        end += bytes;
        let entry = json!({
            "dtype": tensor.dtype.name(),
            "shape": [bytes * 8 / tensor.dtype.bits()],
            "data_offsets": [begin, end],
        });
        header.insert(tensor.name.clone(), entry);
    }
    let mut text = serde_json::Value::Object(header).to_string().into_bytes();
    let with_length = text.len() as u64 + LENGTH_BYTES;
    let padding = with_length.next_multiple_of(DATA_ALIGNMENT) - with_length;
    text.resize(text.len() + padding as usize, b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut text);
    bytes
}

/// Returns a name beside `path` that no other call or process returns.
fn temporary_beside(path: &Path) -> PathBuf {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}-{now}.tmp", std::process::id()))
}

/// Returns the folder of a file.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Reserves disk space, so that a full disk is reported before the work and not after it.
fn reserve(file: &File, bytes: u64) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;

        let Ok(length) = i64::try_from(bytes) else { return Err(std::io::ErrorKind::FileTooLarge.into()) };
        // SAFETY: changes a file that this process owns, and no memory.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length) } != 0 {
            let error = std::io::Error::last_os_error();
            if matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG)) {
                return Err(error);
            }
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, bytes);
    Ok(())
}

#[cfg(unix)]
fn read_at(file: &File, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt;

    file.read_exact_at(out, offset)
}

#[cfg(not(unix))]
fn read_at(mut file: &File, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
    use std::io::{Read, Seek, SeekFrom};

    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_a_folder_is_in_the_working_directory() {
        assert_eq!(["x", "/x", "a/x"].map(|path| folder_of(Path::new(path))), [".", "/", "a"].map(Path::new));
    }
}
