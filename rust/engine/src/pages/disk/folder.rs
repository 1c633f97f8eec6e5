//! The cache directory: private to the user, and never trusted.
//!
//! It contains users' prompts. It is opened once, checked to be a directory without access for others, and then used
//! through that handle only, so replacing the path later has no effect. Files in it may still be anything or vanish at
//! any time, because several processes share it and processes get killed.

use std::ffi::CStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, mkdirat, openat, renameat, statat, unlinkat};
use rustix::io::Errno;

use super::DiskCacheError;
use crate::pages::digest::Digest;

/// Mode bits that give group and others access.
const OTHERS: u32 = 0o077;

/// Age at which a temporary file is considered abandoned by a killed process.
const ABANDONED: Duration = Duration::from_secs(3600);

const TEMPORARY: &str = "tmp-";

/// The opened cache directory.
#[derive(Debug)]
pub(super) struct Folder {
    root: File,
    /// Distinguishes temporary files of this process from others.
    opened: u128,
    temporaries: AtomicU64,
}

/// A file found by a scan.
#[derive(Debug)]
pub(super) struct Entry {
    /// Path relative to the directory.
    pub path: String,
    pub bytes: u64,
    /// Time of last use, in nanoseconds since 1970.
    pub used: i128,
    pub is_temporary: bool,
}

/// Reason why a record's file was not read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReadError {
    /// The file is missing or unreadable.
    Missing,
    /// The file has the wrong type or size for the record.
    Invalid,
}

impl Folder {
    /// Opens a directory, creating it if needed.
    pub fn open(path: &Path) -> Result<Self, DiskCacheError> {
        // Strip a trailing slash, after which the system would follow a symbolic link.
        let path = path.components().as_path();
        let failed = |action: &'static str| {
            move |error: io::Error| DiskCacheError::Io { path: path.into(), action, reason: error.to_string() }
        };
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            fs::create_dir_all(parent).map_err(failed("create the parent of"))?;
        }
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed("create")(error)),
            _ => {}
        }
        let found = fs::symlink_metadata(path).map_err(failed("inspect"))?.file_type();
        if !found.is_dir() {
            let found = if found.is_symlink() { "a symbolic link" } else { "not a directory" };
            return Err(DiskCacheError::NotDirectory { path: path.into(), found });
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let root = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path);
        let root = root.map_err(failed("open"))?;
        let metadata = root.metadata().map_err(failed("inspect"))?;
        let required = rustix::process::geteuid().as_raw();
        if metadata.uid() != required {
            return Err(DiskCacheError::Owner { path: path.into(), found: metadata.uid(), required });
        }
        let found = metadata.mode() & 0o7777;
        if found & OTHERS != 0 {
            return Err(DiskCacheError::Mode { path: path.into(), found });
        }
        let opened = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        Ok(Self { root, opened, temporaries: AtomicU64::new(0) })
    }

    /// Returns whether a record's file exists, with any contents.
    pub fn contains(&self, digest: &Digest) -> bool {
        let found = statat(&self.root, path_of(digest), AtFlags::SYMLINK_NOFOLLOW);
        found.is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::RegularFile)
    }

    /// Reads a record's file of exactly `len` bytes and updates its time of use.
    pub fn read(&self, digest: &Digest, len: u64) -> Result<Vec<u8>, ReadError> {
        // Non-blocking, so that a pipe without a writer cannot block.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&self.root, path_of(digest), flags, Mode::empty()) {
            Ok(file) => File::from(file),
            // A symbolic link or a socket.
            Err(Errno::LOOP | Errno::NXIO) => return Err(ReadError::Invalid),
            Err(_) => return Err(ReadError::Missing),
        };
        let found = file.metadata().map_err(|_| ReadError::Missing)?;
        if !found.is_file() || found.len() != len {
            return Err(ReadError::Invalid);
        }
        let mut bytes = Vec::with_capacity(usize::try_from(len).map_err(|_| ReadError::Invalid)?);
        (&file).take(len).read_to_end(&mut bytes).map_err(|_| ReadError::Missing)?;
        // On a read-only disk the time of use is not updated, which is harmless.
        let _ = file.set_modified(SystemTime::now());
        Ok(bytes)
    }

    /// Writes a record's file atomically.
    pub fn write(&self, digest: &Digest, bytes: &[u8]) -> io::Result<()> {
        let path = path_of(digest);
        let number = self.temporaries.fetch_add(1, Ordering::Relaxed);
        let temporary = format!("{}{TEMPORARY}{}-{}-{number}", &path[..3], std::process::id(), self.opened);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let create = || openat(&self.root, &temporary, flags, Mode::RUSR | Mode::WUSR);
        let file = match create() {
            Err(Errno::NOENT) => match mkdirat(&self.root, &path[..2], Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => create(),
                Err(error) => Err(error),
            },
            created => created,
        };
        // Not synced: a file torn by a machine crash is detected by its checksum.
        let written = File::from(file?).write_all(bytes);
        let moved = written.and_then(|()| Ok(renameat(&self.root, &temporary, &self.root, &path)?));
        if moved.is_err() {
            let _ = unlinkat(&self.root, &temporary, AtFlags::empty());
        }
        moved
    }

    /// Removes whatever has a record's name, except a non-empty directory.
    pub fn remove(&self, digest: &Digest) {
        let path = path_of(digest);
        if self.remove_file(&path).is_err() {
            let _ = unlinkat(&self.root, &path, AtFlags::REMOVEDIR);
        }
    }

    /// Removes a file that a scan found.
    pub fn remove_file(&self, path: &str) -> io::Result<()> {
        Ok(unlinkat(&self.root, path, AtFlags::empty())?)
    }

    /// Returns all records and temporary files, after removing abandoned temporary files.
    pub fn scan(&self) -> Vec<Entry> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as i128);
        let mut entries = Vec::new();
        for first in 0..=u8::MAX {
            self.scan_subdirectory(&format!("{first:02x}"), &mut entries);
        }
        entries.retain(|entry| {
            let abandoned = entry.is_temporary && now - entry.used > ABANDONED.as_nanos() as i128;
            if abandoned {
                let _ = self.remove_file(&entry.path);
            }
            !abandoned
        });
        entries
    }

    fn scan_subdirectory(&self, name: &str, entries: &mut Vec<Entry>) {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(subdirectory) = openat(&self.root, name, flags, Mode::empty()) else { return };
        let Ok(files) = Dir::read_from(&subdirectory) else { return };
        for file in files.flatten() {
            let Some((file_name, is_temporary)) = record_or_temporary(name, file.file_name()) else { continue };
            let Ok(found) = statat(&subdirectory, file_name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if FileType::from_raw_mode(found.st_mode) == FileType::RegularFile {
                let used = i128::from(found.st_mtime) * 1_000_000_000 + i128::from(found.st_mtime_nsec);
                let bytes = u64::try_from(found.st_size).unwrap_or(0);
                entries.push(Entry { path: format!("{name}/{file_name}"), bytes, used, is_temporary });
            }
        }
    }
}

/// Returns the relative path of a record: one of 256 subdirectories, since some file systems are slow with many files
/// in one directory.
fn path_of(digest: &Digest) -> String {
    let name = digest.to_string();
    format!("{}/{name}", &name[..2])
}

/// Returns a file's name and whether it is temporary, if it is a name that the cache uses.
fn record_or_temporary<'a>(subdirectory: &str, name: &'a CStr) -> Option<(&'a str, bool)> {
    let name = name.to_str().ok()?;
    let is_temporary = name.starts_with(TEMPORARY);
    let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_record = name.len() == 64 && name.starts_with(subdirectory) && name.bytes().all(is_digit);
    (is_temporary || is_record).then_some((name, is_temporary))
}
