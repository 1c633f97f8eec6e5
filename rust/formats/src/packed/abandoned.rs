//! Incomplete packed files and lock files that killed processes left.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

/// Age above which an unlocked temporary file belongs to a killed process. The process of a younger file may not have
/// locked it yet.
const ABANDONED: Duration = Duration::from_secs(10);

/// Removes incomplete packed files and lock files that killed processes left in a folder.
pub(super) fn remove_abandoned(folder: &Path) {
    let Ok(siblings) = fs::read_dir(folder) else { return };
    for sibling in siblings.flatten() {
        let name = sibling.file_name();
        let name = name.to_string_lossy();
        if !(name.starts_with('.') && name.contains(".safetensors.") && name.ends_with(".tmp")) {
            continue;
        }
        if let Ok(file) = File::open(sibling.path()) {
            remove_if_abandoned(&sibling.path(), &file);
        }
    }
}

/// Removes the file at `path`, which was opened as `file`, if it is old and no process holds its lock.
fn remove_if_abandoned(path: &Path, file: &File) {
    let age = || file.metadata()?.modified()?.elapsed().map_err(std::io::Error::other);
    // A process that has ended since then may have removed the file, and another one may have created the next at its path.
    if age().is_ok_and(|age| age > ABANDONED) && file.try_lock().is_ok() && is_at(file, path) {
        let _ = fs::remove_file(path);
    }
}

/// Returns whether an open file is still the one at `path`.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;

    let id = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    matches!((file.metadata().map(id), fs::metadata(path).map(id)), (Ok(open), Ok(found)) if open == found)
}

#[cfg(not(unix))]
fn is_at(_: &File, path: &Path) -> bool {
    path.exists()
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn a_lock_file_that_replaced_an_abandoned_one_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".x.safetensors.lock.tmp");
        let create = || {
            let file = File::create_new(&path).unwrap();
            file.set_modified(SystemTime::now() - 2 * ABANDONED).unwrap();
            file
        };
        drop(create());
        let opened = File::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let next = create();
        next.lock().unwrap();
        remove_if_abandoned(&path, &opened);
        assert!(path.exists());
        drop(next);
        remove_if_abandoned(&path, &File::open(&path).unwrap());
        assert!(!path.exists());
    }
}
