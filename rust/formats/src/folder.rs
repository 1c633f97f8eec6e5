//! Which files of a folder may be opened.
//!
//! A downloaded repository can hold links and an index with any text for file names. A file is opened only where its
//! real path lies inside the folder, or where both lie in one repository of the Hugging Face cache, whose snapshots
//! are made of links: `models--org--name/snapshots/<revision>/x -> ../../blobs/y`.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};

use memmap2::Mmap;

use crate::error::{CheckpointError, Fault};

/// A model's folder, by its real path.
pub(crate) struct Folder {
    real: PathBuf,
}

impl Folder {
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let real = fs::canonicalize(path).map_err(|error| Fault::Io(error).of(path))?;
        Ok(Self { real })
    }

    pub fn path(&self) -> &Path {
        &self.real
    }

    /// Is `name` one path component, and not `.` or `..`? A backslash separates on other systems.
    pub fn is_plain_name(name: &str) -> bool {
        let mut components = Path::new(name).components();
        let single = matches!(components.next(), Some(Component::Normal(only)) if only == OsStr::new(name));
        single && components.next().is_none() && !name.contains(['\\', '\0', ':'])
    }

    /// The real path of a file of this folder: None where there is none, an error where it is somewhere else.
    pub fn locate(&self, name: &str) -> Result<Option<PathBuf>, CheckpointError> {
        let path = self.real.join(name);
        let real = match fs::canonicalize(&path) {
            Ok(real) => real,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Fault::Io(error).of(&path)),
        };
        if !self.holds(&real) {
            return Err(Fault::LeavesFolder { target: real }.of(&path));
        }
        Ok(Some(real))
    }

    fn holds(&self, real: &Path) -> bool {
        real.starts_with(&self.real) || self.cache_blobs().is_some_and(|blobs| real.starts_with(blobs))
    }

    /// The blobs of the cached repository that this folder is a snapshot of.
    fn cache_blobs(&self) -> Option<PathBuf> {
        let snapshots = self.real.ancestors().find(|path| path.file_name() == Some(OsStr::new("snapshots")))?;
        let repository = snapshots.parent()?;
        let name = repository.file_name()?.to_str()?;
        name.starts_with("models--").then(|| repository.join("blobs"))
    }

    /// Names of the files in this folder, sorted.
    pub fn file_names(&self) -> Result<Vec<String>, CheckpointError> {
        let names = || -> io::Result<Vec<String>> {
            let mut names = Vec::new();
            for entry in fs::read_dir(&self.real)? {
                names.extend(entry?.file_name().into_string());
            }
            names.sort_unstable();
            Ok(names)
        };
        names().map_err(|error| Fault::Io(error).of(&self.real))
    }
}

/// Opens a regular file and tells its length; a pipe or a device could block for ever.
pub(crate) fn open_file(path: &Path) -> Result<(File, u64), Fault> {
    if !fs::metadata(path)?.is_file() {
        return Err(Fault::NotAFile);
    }
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    Ok((file, bytes))
}

/// Maps a file of so many bytes.
pub(crate) fn map_file(file: &File, bytes: u64) -> Result<Mmap, Fault> {
    // SAFETY: the mapping is read-only, and handed out as bytes only, for which any value is valid. What remains is a
    // program that truncates the file meanwhile: see the crate's documentation.
    let map = unsafe { Mmap::map(file) }?;
    // Headers are checked against `bytes`; a file that has shrunk since then is not what was checked.
    if (map.len() as u64) < bytes {
        return Err(Fault::TooShort { bytes: map.len() as u64 });
    }
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_single_component_is_a_plain_name() {
        for name in ["model.safetensors", "model-00001-of-00002.safetensors", "...", "a b"] {
            assert!(Folder::is_plain_name(name), "{name:?}");
        }
        for name in ["", ".", "..", "../x", "/etc/passwd", "a/b", "a/", "./a", "a\\b", "C:x", "a\0b"] {
            assert!(!Folder::is_plain_name(name), "{name:?}");
        }
    }
}
