//! Opening and mapping files, and the errors that any file can have whatever its format.

use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

/// The start of a Git LFS pointer (<https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md>).
pub(crate) const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// The largest file that Git LFS itself reads as a pointer, in bytes.
pub(crate) const MAX_LFS_POINTER: u64 = 1024;

/// A file cannot be opened or read, or is obviously not a model file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum FileError {
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("is not a regular file")]
    NotAFile,
    #[error("is empty (0 bytes): the download was interrupted or never started")]
    Empty,
    #[error("was truncated while it was opened: it had {expected} bytes and now has {found}")]
    Truncated { expected: u64, found: u64 },
    #[error(
        "is a Git LFS pointer of {bytes} bytes, not the weights. Download the weights: run `git lfs pull` in its folder"
    )]
    LfsPointer { bytes: u64 },
    #[error("is a link to {}, which is outside of the model's folder: refused", target.display())]
    OutsideFolder { target: PathBuf },
}

/// Returns whether the bytes of a whole file are a Git LFS pointer.
pub(crate) fn is_lfs_pointer(file: &[u8]) -> bool {
    file.len() as u64 <= MAX_LFS_POINTER && file.starts_with(LFS_POINTER)
}

/// Opens a regular file and returns it with its length in bytes.
///
/// Pipes and devices are refused because opening them could block forever.
pub(crate) fn open_file(path: &Path) -> Result<(File, u64), FileError> {
    if !fs::metadata(path)?.is_file() {
        return Err(FileError::NotAFile);
    }
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    Ok((file, bytes))
}

/// Releases the memory of a mapped file's whole pages in a range; they are read from the file again when needed.
#[cfg(unix)]
pub(crate) fn release_pages(map: &Mmap, range: Range<usize>) {
    let page = page_bytes();
    let (begin, end) = (range.start.next_multiple_of(page), range.end.min(map.len()) / page * page);
    if begin < end {
        // SAFETY: the range lies inside the mapping, which is read-only and backed by a file, so a dropped page holds
        // the same bytes when it is read again.
        let advised = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, begin, end - begin) };
        // This is advice: if the system does not take it, more memory stays resident.
        drop(advised);
    }
}

#[cfg(not(unix))]
pub(crate) fn release_pages(_: &Mmap, _: Range<usize>) {}

#[cfg(unix)]
fn page_bytes() -> usize {
    // SAFETY: reads a constant of the system; touches no memory of ours.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(page).ok().filter(|page| page.is_power_of_two()).unwrap_or(1 << 16)
}

/// Maps a file whose header was checked against a length of `bytes`.
pub(crate) fn map_file(file: &File, bytes: u64) -> Result<Mmap, FileError> {
    // SAFETY: the mapping is read-only and exposed only as bytes, for which any value is valid. The remaining risk is
    // another program that truncates the file meanwhile: see the crate's documentation.
    let map = unsafe { Mmap::map(file) }?;
    // A file that has shrunk since the header was checked is not the file that was checked.
    if (map.len() as u64) < bytes {
        return Err(FileError::Truncated { expected: bytes, found: map.len() as u64 });
    }
    Ok(map)
}
