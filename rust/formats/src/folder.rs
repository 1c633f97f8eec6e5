//! [`Folder`]: which files of a model's folder may be opened.
//!
//! A downloaded repository can hold links, and an index with arbitrary file names. A file is opened only if its real
//! path lies inside the folder, or if both lie in one repository of the Hugging Face cache, whose snapshots consist of
//! links: `models--org--name/snapshots/<revision>/x -> ../../blobs/y`.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use crate::file::FileError;

/// Folder of a model, by its real path.
pub(crate) struct Folder {
    real: PathBuf,
}

impl Folder {
    pub fn open(path: &Path) -> Result<Self, FileError> {
        Ok(Self { real: fs::canonicalize(path)? })
    }

    pub fn path(&self) -> &Path {
        &self.real
    }

    /// Returns whether `name` is one path component other than `.` and `..`. Backslashes are refused because they
    /// separate components on other systems.
    pub fn is_plain_name(name: &str) -> bool {
        let mut components = Path::new(name).components();
        let single = matches!(components.next(), Some(Component::Normal(only)) if only == OsStr::new(name));
        single && components.next().is_none() && !name.contains(['\\', '\0', ':'])
    }

    /// Returns the real path of a file in this folder, or `None` if it does not exist.
    ///
    /// # Errors
    /// [`FileError::OutsideFolder`] if it is a link to elsewhere.
    pub fn locate(&self, name: &str) -> Result<Option<PathBuf>, FileError> {
        let real = match fs::canonicalize(self.real.join(name)) {
            Ok(real) => real,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if !self.holds(&real) {
            return Err(FileError::OutsideFolder { target: real });
        }
        Ok(Some(real))
    }

    fn holds(&self, real: &Path) -> bool {
        real.starts_with(&self.real) || self.cache_blobs().is_some_and(|blobs| real.starts_with(blobs))
    }

    /// Returns the blobs folder of the cached repository that this folder is a snapshot of.
    fn cache_blobs(&self) -> Option<PathBuf> {
        let snapshots = self.real.ancestors().find(|path| path.file_name() == Some(OsStr::new("snapshots")))?;
        let repository = snapshots.parent()?;
        let name = repository.file_name()?.to_str()?;
        name.starts_with("models--").then(|| repository.join("blobs"))
    }

    /// Returns the names of the files in this folder, sorted.
    pub fn file_names(&self) -> Result<Vec<String>, FileError> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.real)? {
            names.extend(entry?.file_name().into_string());
        }
        names.sort_unstable();
        Ok(names)
    }
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
