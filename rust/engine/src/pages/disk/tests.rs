//! Tests of the disk cache: whatever is in the directory, a load returns the stored bytes or nothing, and never blocks.

use std::fs::{self, File, FileTimes};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::time::SystemTime;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::pages::Namespace;

const PAYLOAD_BYTES: usize = 1000;

/// A limit that no test of other behaviour reaches.
const PLENTY: u64 = 1 << 30;

fn record_bytes() -> u64 {
    record_len(PAYLOAD_BYTES)
}

/// Returns the first page of a sequence, distinguished by a number.
struct Page {
    digest: Digest,
    parent: Digest,
    tokens: [u32; PAGE_TOKENS],
    payload: Vec<u8>,
}

fn page(number: u32) -> Page {
    let parent = Digest::root(&[1; 32], &Namespace::default());
    let tokens = [number; PAGE_TOKENS];
    Page { digest: parent.child(&tokens), parent, tokens, payload: vec![number as u8; PAYLOAD_BYTES] }
}

/// Returns a private directory inside a temporary one.
fn directory() -> (TempDir, PathBuf) {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("cache");
    (directory, path)
}

fn store(cache: &mut DiskCache, page: &Page) -> bool {
    cache.store(&page.digest, &page.parent, &page.tokens, page.payload.clone())
}

fn load(cache: &mut DiskCache, page: &Page) -> Option<Vec<u8>> {
    cache.load(&page.digest, &page.parent, &page.tokens, PAYLOAD_BYTES)
}

fn file_of(directory: &Path, page: &Page) -> PathBuf {
    let name = page.digest.to_string();
    directory.join(&name[..2]).join(name)
}

/// Returns a cache after writing the given pages.
fn filled(directory: &Path, limit: u64, numbers: impl IntoIterator<Item = u32>) -> DiskCache {
    let mut cache = DiskCache::open(directory, limit).unwrap();
    for number in numbers {
        assert!(store(&mut cache, &page(number)));
    }
    cache.flush();
    cache
}

fn set_age(file: &Path, seconds: u64) {
    let time = SystemTime::now() - Duration::from_secs(seconds);
    File::options().write(true).open(file).unwrap().set_times(FileTimes::new().set_modified(time)).unwrap();
}

fn all_files(directory: &Path) -> Vec<PathBuf> {
    let subdirectories = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let files = subdirectories.flat_map(|path| fs::read_dir(path).unwrap());
    files.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn stored_records_outlive_the_cache() {
    let (_guard, path) = directory();
    let mut cache = DiskCache::open(&path, PLENTY).unwrap();
    assert_eq!(load(&mut cache, &page(1)), None);
    assert!(!cache.contains(&page(1).digest));
    assert!(store(&mut cache, &page(1)) && store(&mut cache, &page(2)));
    cache.flush();
    assert!(cache.contains(&page(1).digest));
    assert_eq!(load(&mut cache, &page(1)), Some(page(1).payload));
    let expected = DiskStatistics { hits: 1, misses: 1, stored: 2, bytes: 2 * record_bytes(), ..Default::default() };
    assert_eq!(cache.statistics(), expected);
    assert!(store(&mut cache, &page(3)));
    // Dropping the cache writes the queue.
    drop(cache);

    let mut cache = DiskCache::open(&path, PLENTY).unwrap();
    assert_eq!(cache.statistics().bytes, 3 * record_bytes());
    for number in 1..=3 {
        assert_eq!(load(&mut cache, &page(number)), Some(page(number).payload));
    }
    // Existing records are not written again.
    let before = fs::metadata(file_of(&path, &page(1))).unwrap().ino();
    assert!(store(&mut cache, &page(1)));
    cache.flush();
    assert_eq!(fs::metadata(file_of(&path, &page(1))).unwrap().ino(), before);
    assert_eq!(cache.statistics().stored, 0);
}

#[test]
fn files_are_private_and_no_temporary_files_remain() {
    let (_guard, path) = directory();
    let cache = filled(&path, PLENTY, 0..20);
    drop(cache);
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&path), 0o700);
    let files = all_files(&path);
    assert_eq!(files.len(), 20);
    for file in files {
        assert_eq!((mode(&file), mode(file.parent().unwrap())), (0o600, 0o700), "{}", file.display());
    }
}

#[test]
fn two_caches_share_a_directory() {
    let (_guard, path) = directory();
    let mut first = DiskCache::open(&path, PLENTY).unwrap();
    let mut second = DiskCache::open(&path, PLENTY).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| (0..200).for_each(|number| assert!(store(&mut first, &page(number)))));
        scope.spawn(|| (100..300).for_each(|number| assert!(store(&mut second, &page(number)))));
    });
    first.flush();
    second.flush();
    for number in 0..300 {
        assert_eq!(load(&mut first, &page(number)), Some(page(number).payload));
        assert_eq!(load(&mut second, &page(number)), Some(page(number).payload));
    }
    assert_eq!(all_files(&path).len(), 300);
    // A record that one cache removes is a miss for the other.
    first.shared.folder.remove(&page(7).digest);
    assert_eq!(load(&mut second, &page(7)), None);
    assert_eq!(second.statistics().damaged, 0);
}

#[test]
fn the_least_recently_used_record_is_evicted_first() {
    let (_guard, path) = directory();
    drop(filled(&path, PLENTY, 0..10));
    for number in 0..10 {
        set_age(&file_of(&path, &page(number)), 1000 - u64::from(number));
    }
    let mut cache = DiskCache::open(&path, 10 * record_bytes()).unwrap();
    assert!(load(&mut cache, &page(0)).is_some(), "a hit makes the oldest the newest");
    assert!(store(&mut cache, &page(10)));
    cache.flush();
    let kept: Vec<u32> = (0..=10).filter(|&number| cache.contains(&page(number).digest)).collect();
    assert_eq!(kept, [0, 3, 4, 5, 6, 7, 8, 9, 10]);
    assert_eq!(cache.statistics().bytes, 9 * record_bytes());
}

#[test]
fn the_directory_stays_within_its_limit() {
    let (_guard, path) = directory();
    let limit = 20 * record_bytes();
    // Two caches that only see each other's files.
    let mut caches = [filled(&path, limit, []), filled(&path, limit, [])];
    for number in 0..100 {
        let cache = &mut caches[number as usize % 2];
        store(cache, &page(number));
        cache.flush();
        let bytes: u64 = all_files(&path).iter().map(|file| fs::metadata(file).unwrap().len()).sum();
        assert!(bytes <= limit + 2 * limit / 10, "{bytes} bytes after {number} records");
    }
    // A cache opened with a smaller limit evicts at once.
    let cache = DiskCache::open(&path, 5 * record_bytes()).unwrap();
    assert!(all_files(&path).len() <= 5 && cache.statistics().bytes <= 5 * record_bytes());
}

#[test]
fn a_record_larger_than_the_limit_is_dropped() {
    let (_guard, path) = directory();
    let mut cache = DiskCache::open(&path, record_bytes() - 1).unwrap();
    assert!(!store(&mut cache, &page(0)));
    assert_eq!(cache.statistics().dropped, 1);
}

#[test]
fn abandoned_temporary_files_are_removed_after_an_hour() {
    let (_guard, path) = directory();
    drop(filled(&path, PLENTY, [0]));
    let beside = |name: &str| {
        let file = file_of(&path, &page(0)).with_file_name(name);
        fs::write(&file, b"half a record").unwrap();
        file
    };
    let (old, new, foreign) = (beside("tmp-1-2-3"), beside("tmp-1-2-4"), beside("notes.txt"));
    set_age(&old, 3700);
    set_age(&foreign, 3700);
    fs::write(path.join("README"), b"not ours").unwrap();
    // Far over the limit, except for files that must not be touched.
    let cache = DiskCache::open(&path, 1).unwrap();
    assert!(!old.exists() && new.exists() && foreign.exists() && path.join("README").exists());
    assert!(!cache.contains(&page(0).digest));
}

#[test]
fn non_files_in_place_of_a_record_are_removed_without_blocking() {
    let (guard, path) = directory();
    let outside = guard.path().join("outside");
    let mut cache = filled(&path, PLENTY, [0]);
    let file = file_of(&path, &page(0));
    let whole = fs::read(&file).unwrap();
    fs::write(&outside, &whole).unwrap();
    let kinds: [(&str, &dyn Fn()); 6] = [
        ("symbolic link", &|| symlink(&outside, &file).unwrap()),
        ("dangling link", &|| symlink("nowhere", &file).unwrap()),
        ("pipe", &|| {
            let mode = rustix::fs::Mode::RWXU;
            rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        }),
        ("directory", &|| fs::create_dir(&file).unwrap()),
        ("socket", &|| drop(UnixListener::bind(&file).unwrap())),
        ("larger file", &|| fs::write(&file, [&whole[..], b"more"].concat()).unwrap()),
    ];
    for (count, (kind, make)) in (1..).zip(kinds) {
        cache.shared.folder.remove(&page(0).digest);
        make();
        assert_eq!(cache.contains(&page(0).digest), kind == "larger file", "{kind}");
        assert_eq!(load(&mut cache, &page(0)), None, "{kind}");
        assert!(fs::symlink_metadata(&file).is_err(), "the {kind} is still there");
        assert_eq!(cache.statistics().damaged, count);
    }
    assert_eq!(fs::read(&outside).unwrap(), whole);
    assert!(store(&mut cache, &page(0)));
    cache.flush();
    assert_eq!(load(&mut cache, &page(0)), Some(page(0).payload));
}

#[test]
fn a_non_empty_directory_in_place_of_a_record_affects_only_that_record() {
    let (_guard, path) = directory();
    let mut cache = DiskCache::open(&path, PLENTY).unwrap();
    fs::create_dir_all(file_of(&path, &page(0)).join("inner")).unwrap();
    assert_eq!(load(&mut cache, &page(0)), None);
    assert!(store(&mut cache, &page(0)));
    cache.flush();
    assert_eq!(load(&mut cache, &page(0)), None);
    assert!(store(&mut cache, &page(1)), "writing goes on");
    cache.flush();
    assert_eq!(load(&mut cache, &page(1)), Some(page(1).payload));
    let statistics = cache.statistics();
    assert_eq!((statistics.stored, statistics.dropped), (1, 1));
    let temporary = |file: &PathBuf| file.file_name().unwrap().to_string_lossy().starts_with("tmp-");
    assert!(!all_files(&path).iter().any(temporary));
}

#[test]
fn a_record_of_another_sequence_is_rejected() {
    let (_guard, path) = directory();
    let mut cache = filled(&path, PLENTY, [0, 1]);
    fs::copy(file_of(&path, &page(0)), file_of(&path, &page(1))).unwrap();
    assert_eq!(load(&mut cache, &page(1)), None);
    assert_eq!(load(&mut cache, &page(0)), Some(page(0).payload));
    assert_eq!(cache.statistics().damaged, 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn damaged_files_are_rejected_and_removed(
        place in any::<prop::sample::Index>(),
        flip in 1_u8..,
        is_truncated: bool,
    ) {
        let (_guard, path) = directory();
        let mut cache = filled(&path, PLENTY, [0]);
        let file = file_of(&path, &page(0));
        let mut bytes = fs::read(&file).unwrap();
        let place = place.index(bytes.len());
        bytes[place] ^= flip;
        fs::write(&file, &bytes[..if is_truncated { place } else { bytes.len() }]).unwrap();
        prop_assert_eq!(load(&mut cache, &page(0)), None);
        prop_assert!(!file.exists());
        prop_assert!(store(&mut cache, &page(0)));
        cache.flush();
        prop_assert_eq!(load(&mut cache, &page(0)), Some(page(0).payload));
        let statistics = cache.statistics();
        prop_assert_eq!((statistics.hits, statistics.misses, statistics.damaged), (1, 1, 1));
    }
}

#[test]
fn a_failing_disk_pauses_writes_but_not_reads() {
    let (_guard, path) = directory();
    let mut cache = filled(&path, PLENTY, [0]);
    // Nothing can be created below a regular file, even by root (whom modes do not restrict).
    let odd =
        (1..).find(|&number| file_of(&path, &page(number)).parent() != file_of(&path, &page(0)).parent()).unwrap();
    fs::write(file_of(&path, &page(odd)).parent().unwrap(), b"").unwrap();
    assert!(store(&mut cache, &page(odd)));
    cache.flush();
    assert!(!store(&mut cache, &page(odd)), "writing has paused");
    let statistics = cache.statistics();
    assert_eq!((statistics.stored, statistics.dropped), (1, 2));
    assert_eq!(load(&mut cache, &page(0)), Some(page(0).payload));
    assert_eq!(load(&mut cache, &page(odd)), None);
}

#[test]
fn a_removed_directory_behaves_as_empty() {
    let (_guard, path) = directory();
    let mut cache = filled(&path, PLENTY, [0]);
    fs::remove_dir_all(&path).unwrap();
    // A directory put in its place is not written to.
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(load(&mut cache, &page(0)), None);
    store(&mut cache, &page(0));
    cache.flush();
    assert_eq!(cache.statistics().dropped, 1);
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
}

#[test]
fn a_directory_with_access_for_others_is_rejected() {
    let (guard, path) = directory();
    let refused = |path: &Path| DiskCache::open(path, PLENTY).map(|_| ()).unwrap_err();
    // Parent directories are created too.
    DiskCache::open(&path.join("deep/er"), PLENTY).unwrap();
    for mode in [0o701, 0o710, 0o720, 0o740, 0o755, 0o777] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let error = refused(&path);
        assert_eq!(error, DiskCacheError::Mode { path: path.clone(), found: mode });
        assert!(error.to_string().contains(&format!("mode {mode:o}")), "{error}");
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    DiskCache::open(&path, PLENTY).unwrap();

    let file = guard.path().join("file");
    fs::write(&file, b"").unwrap();
    let link = guard.path().join("link");
    symlink(&path, &link).unwrap();
    let not_directory = |path: &Path, found| DiskCacheError::NotDirectory { path: path.into(), found };
    assert_eq!(refused(&file), not_directory(&file, "not a directory"));
    assert_eq!(refused(&link), not_directory(&link, "a symbolic link"));
    assert_eq!(refused(&link.join("")), not_directory(&link, "a symbolic link"));
    assert!(matches!(refused(&file.join("below")), DiskCacheError::Io { .. }));
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
        assert_eq!(refused(&path), DiskCacheError::Owner { path, found: 12345, required: 0 });
    }
}

/// Environment variable that passes the directory to the process to be killed.
const DIRECTORY_OF_CHILD: &str = "FERRULE_TEST_DISK_CACHE";

#[test]
fn a_process_killed_while_writing_leaves_only_complete_records() {
    // Large enough that the process is most likely killed in the middle of a record.
    const LARGE: usize = 4 << 20;
    let large = |number| Page { payload: vec![number as u8; LARGE], ..page(number) };
    if let Some(path) = std::env::var_os(DIRECTORY_OF_CHILD) {
        let mut cache = DiskCache::open(Path::new(&path), PLENTY).unwrap();
        for number in 0..200 {
            store(&mut cache, &large(number));
            cache.flush();
        }
        return;
    }
    let (_guard, path) = directory();
    for round in 1..=3 {
        let (_, module) = module_path!().split_once("::").unwrap();
        let name = format!("{module}::a_process_killed_while_writing_leaves_only_complete_records");
        let mut child = process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name])
            .env(DIRECTORY_OF_CHILD, &path)
            .stdout(process::Stdio::null())
            .spawn()
            .unwrap();
        let is_at_work = || path.exists() && all_files(&path).len() >= 2 * round;
        while !is_at_work() {
            assert!(child.try_wait().unwrap().is_none(), "the child ended before it wrote anything");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let mut cache = DiskCache::open(&path, PLENTY).unwrap();
        let written = (0..200).filter(|&number| cache.contains(&page(number).digest)).collect::<Vec<_>>();
        assert!(!written.is_empty());
        for number in written {
            let Page { digest, parent, tokens, payload } = large(number);
            assert_eq!(cache.load(&digest, &parent, &tokens, LARGE), Some(payload));
        }
    }
}

#[test]
fn a_forked_process_starts_its_own_writer() {
    let (_guard, path) = directory();
    let mut cache = filled(&path, PLENTY, [0]);
    // The state in a forked child: a writer of another process without its thread, with the lock held.
    let owned = cache.writer.as_mut().unwrap();
    owned.process = 0;
    let held = owned.writer.hold_lock();
    cache.flush();
    assert!(cache.writer.is_none());
    assert!(store(&mut cache, &page(1)));
    cache.flush();
    assert_eq!(load(&mut cache, &page(1)), Some(page(1).payload));
    drop(cache);
    drop(held);
}

#[test]
fn dropping_does_not_wait_for_the_writer_of_another_process() {
    let (_guard, path) = directory();
    let mut cache = filled(&path, PLENTY, [0]);
    let owned = cache.writer.as_mut().unwrap();
    owned.process = 0;
    let held = owned.writer.hold_lock();
    drop(cache);
    drop(held);
}
