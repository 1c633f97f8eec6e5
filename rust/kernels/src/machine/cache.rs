//! Processor cache sizes from Linux sysfs. A memory bandwidth measurement must exceed the last-level cache.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Returns the bytes of the last-level caches of these processors. A shared cache counts once.
pub(super) fn last_level_bytes(root: &Path, processors: &[usize]) -> usize {
    // Keyed by level and by the list of processors that share the cache.
    let mut caches = BTreeMap::new();
    for processor in processors {
        let folder = root.join(format!("sys/devices/system/cpu/cpu{processor}/cache"));
        let indices = fs::read_dir(folder).into_iter().flatten().flatten();
        caches.extend(indices.filter_map(|index| describe(&index.path())));
    }
    let last = caches.keys().map(|(level, _)| *level).max();
    caches.iter().filter(|((level, _), _)| Some(*level) == last).map(|(_, bytes)| bytes).sum()
}

fn describe(index: &Path) -> Option<((u32, String), usize)> {
    let read = |name: &str| fs::read_to_string(index.join(name)).ok();
    let level = read("level")?.trim().parse().ok()?;
    let shared_by = read("shared_cpu_list")?.trim().to_owned();
    let size = read("size")?;
    // The kernel always writes this file in KiB.
    let bytes = size.trim().strip_suffix('K')?.parse::<usize>().ok()?.checked_mul(1024)?;
    Some(((level, shared_by), bytes))
}

#[cfg(test)]
mod tests {
    use super::super::tests::Fake;
    use super::*;

    /// Fakes a machine with two processors per last-level cache (chiplets), and one processor without cache information.
    fn chiplets() -> Fake {
        let mut files = Vec::new();
        for (processor, shared_by) in [(0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")] {
            for (index, level, shared_by, size) in
                [(0, "1", processor.to_string(), "48K"), (3, "3", shared_by.to_owned(), "32768K")]
            {
                let folder = format!("sys/devices/system/cpu/cpu{processor}/cache/index{index}");
                files.push((format!("{folder}/level"), level.to_owned()));
                files.push((format!("{folder}/shared_cpu_list"), format!("{shared_by}\n")));
                files.push((format!("{folder}/size"), format!("{size}\n")));
            }
        }
        files.push(("sys/devices/system/cpu/cpu4/cache/index0/level".to_owned(), "nonsense".to_owned()));
        Fake::new(&files.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect::<Vec<_>>())
    }

    #[test]
    fn a_shared_cache_counts_once() {
        let machine = chiplets();
        for (processors, mib) in
            [(vec![0, 1], 32), (vec![1, 2], 64), (vec![0, 1, 2, 3, 4], 64), (vec![4], 0), (vec![], 0)]
        {
            assert_eq!(last_level_bytes(machine.root(), &processors), mib << 20, "{processors:?}");
        }
    }
}
