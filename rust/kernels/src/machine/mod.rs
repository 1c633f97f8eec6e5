//! Processors and memory that this process may use, including container limits.

mod cache;
mod cgroup;
mod nodes;
mod streams;

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use crate::pool::affinity;
use cgroup::{Cgroup, Controller};
pub use streams::reads_one_stream;

/// Returns the number of processors that this process may use: the minimum of its affinity mask and its cgroup CPU
/// quota. A quota is rounded down, as in [`std::thread::available_parallelism`]: with 1.5 processors, a second thread
/// would be throttled for half of every period, and the first would wait for it.
#[must_use]
pub fn cpu_count() -> NonZeroUsize {
    cpu_count_in(Path::new("/"), affinity_count())
}

/// Returns the total bytes of the last-level caches of the processors that this process may use, or 0 if unknown.
#[must_use]
pub fn last_cache_bytes() -> usize {
    cache::last_level_bytes(Path::new("/"), &affinity::processors())
}

/// Returns the processors that this process may use, by NUMA node: one list for each node, and
/// none if the processors are unknown.
#[must_use]
pub fn numa_nodes() -> Vec<Vec<usize>> {
    nodes::by_node(Path::new("/"), &affinity::processors())
}

/// Returns the bytes of memory that this process can still allocate: the minimum of the available memory of the system,
/// the remaining memory of each of its cgroups, and the remaining address space under `RLIMIT_AS`. `u64::MAX` if
/// unknown.
#[must_use]
pub fn available_memory() -> u64 {
    available_memory_in(Path::new("/"), address_space_limit(), &["inactive_file "])
}

/// Returns the bytes of memory that mapped files may take. Unlike [`available_memory`], the recently used page cache of
/// the cgroup counts as free, because mapped files are part of it.
#[must_use]
pub fn memory_for_files() -> u64 {
    available_memory_in(Path::new("/"), address_space_limit(), &["inactive_file ", "active_file "])
}

fn cpu_count_in(root: &Path, affinity: NonZeroUsize) -> NonZeroUsize {
    let quota = |group: &Cgroup| {
        let (quota, period) = if group.unified {
            let text = group.read("cpu.max")?;
            let (quota, period) = text.split_once(' ')?;
            (quota.parse::<usize>().ok()?, period.trim().parse().ok()?)
        } else {
            (group.read_number("cpu.cfs_quota_us")?, group.read_number("cpu.cfs_period_us")?)
        };
        Some(NonZeroUsize::new(quota.checked_div(period)?).unwrap_or(NonZeroUsize::MIN))
    };
    cgroup::ancestors(root, Controller::Cpu).iter().filter_map(quota).fold(affinity, NonZeroUsize::min)
}

/// Computes the available memory. `cached` lists the fields of `memory.stat` that count as usage but can be reclaimed.
fn available_memory_in(root: &Path, address_space_limit: u64, cached: &[&str]) -> u64 {
    let free = |group: &Cgroup| {
        let (limits, usage, prefix) = if group.unified {
            (["memory.max", "memory.high"].as_slice(), "memory.current", "")
        } else {
            (["memory.limit_in_bytes"].as_slice(), "memory.usage_in_bytes", "total_")
        };
        let limit = limits.iter().filter_map(|name| group.read_number(name)).min()?;
        let usage = group.read_number(usage)? as u64;
        let text = group.read("memory.stat").unwrap_or_default();
        let reclaimable: u64 = cached.iter().filter_map(|name| field(&text, &format!("{prefix}{name}"))).sum();
        Some((limit as u64).saturating_sub(usage.saturating_sub(reclaimable)))
    };
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok();
    let system =
        meminfo.and_then(|text| field(&text, "MemAvailable:")).map_or(u64::MAX, |kib| kib.saturating_mul(1024));
    let in_groups = cgroup::ancestors(root, Controller::Memory).iter().filter_map(free).min().unwrap_or(u64::MAX);
    system.min(in_groups).min(address_space_limit.saturating_sub(address_space(root)))
}

/// Returns the number that follows `name` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Returns the bytes of address space that this process has mapped.
fn address_space(root: &Path) -> u64 {
    // SAFETY: reads a system constant.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    let statm = fs::read_to_string(root.join("proc/self/statm")).ok();
    let pages = statm.and_then(|text| text.split(' ').next()?.parse::<u64>().ok()).unwrap_or(0);
    pages.saturating_mul(page)
}

fn address_space_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call fills the structure that it is passed.
    let found = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) } == 0;
    if found && limit.rlim_cur != libc::RLIM_INFINITY { limit.rlim_cur } else { u64::MAX }
}

fn affinity_count() -> NonZeroUsize {
    // SAFETY: reads a system value.
    let online = || unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    // The mask does not cover machines with more than 1024 processors; fall back to the number of processors online.
    NonZeroUsize::new(affinity::processors().len())
        .or_else(|| usize::try_from(online()).ok().and_then(NonZeroUsize::new))
        .unwrap_or(NonZeroUsize::MIN)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Directory with the system files of a fake machine.
    pub(super) struct Fake(PathBuf);

    impl Fake {
        pub fn new(files: &[(&str, &str)]) -> Self {
            static COUNT: AtomicUsize = AtomicUsize::new(0);
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let root = std::env::temp_dir().join(format!("ferrule-machine-{}-{number}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Self(root)
        }

        pub fn root(&self) -> &Path {
            &self.0
        }

        fn cpus(&self, affinity: usize) -> usize {
            cpu_count_in(&self.0, NonZeroUsize::new(affinity).unwrap()).get()
        }

        fn memory(&self) -> u64 {
            available_memory_in(&self.0, u64::MAX, &["inactive_file "])
        }

        fn memory_for_files(&self) -> u64 {
            available_memory_in(&self.0, u64::MAX, &["inactive_file ", "active_file "])
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const V2_MOUNT: (&str, &str) =
        ("proc/self/mountinfo", "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
    const V1_MOUNTS: (&str, &str) = (
        "proc/self/mountinfo",
        "30 24 0:26 /docker/a\\040b /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n\
         31 24 0:27 /docker/a\\040b /sys/fs/cgroup/memory ro master:9 - cgroup cgroup rw,memory\n",
    );
    const V1_GROUPS: (&str, &str) =
        ("proc/self/cgroup", "4:cpu,cpuacct:/docker/a b/inner\n3:memory:/docker/a b\n0::/docker/a b\n");
    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable:    500 kB\n");

    #[test]
    fn this_machine_has_processors_and_memory() {
        assert!(cpu_count() <= affinity_count());
        assert!(available_memory() > 1 << 20);
        assert!(last_cache_bytes() < 1 << 40);
    }

    #[test]
    fn a_quota_of_two_of_sixteen_processors_is_two() {
        let machine =
            Fake::new(&[V2_MOUNT, ("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", "200000 100000\n")]);
        assert_eq!(machine.cpus(16), 2);
        assert_eq!(machine.cpus(1), 1);
    }

    #[test]
    fn quotas_round_down_to_at_least_one() {
        for (quota, cpus) in [("150000 100000", 1), ("399999 100000", 3), ("10000 100000", 1), ("max 100000", 16)] {
            let machine = Fake::new(&[V2_MOUNT, ("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", quota)]);
            assert_eq!(machine.cpus(16), cpus, "{quota}");
        }
    }

    #[test]
    fn the_tightest_ancestor_limits() {
        let machine = Fake::new(&[
            V2_MOUNT,
            MEMINFO,
            ("proc/self/cgroup", "0::/pods/one/box\n"),
            ("sys/fs/cgroup/pods/cpu.max", "800000 100000"),
            ("sys/fs/cgroup/pods/one/cpu.max", "300000 100000"),
            ("sys/fs/cgroup/pods/one/box/cpu.max", "max 100000"),
            ("sys/fs/cgroup/pods/one/memory.max", "max"),
            ("sys/fs/cgroup/pods/one/memory.high", "100000"),
            ("sys/fs/cgroup/pods/one/memory.current", "70000"),
            ("sys/fs/cgroup/pods/one/memory.stat", "active_file 5\ninactive_file 20000\n"),
            ("sys/fs/cgroup/pods/one/box/memory.max", "90000"),
            ("sys/fs/cgroup/pods/one/box/memory.current", "30000"),
        ]);
        assert_eq!(machine.cpus(16), 3);
        assert_eq!(machine.memory(), 50_000);
        assert_eq!(machine.memory_for_files(), 50_005);
    }

    #[test]
    fn version_one_groups_are_found_through_their_mounts() {
        let machine = Fake::new(&[
            V1_MOUNTS,
            V1_GROUPS,
            MEMINFO,
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "600000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/inner/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu,cpuacct/inner/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "300000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "200000\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 50000\n"),
        ]);
        assert_eq!(machine.cpus(16), 6);
        assert_eq!(machine.memory(), 150_000);
    }

    #[test]
    fn a_group_outside_the_mount_maps_to_the_mount_root() {
        let machine = Fake::new(&[
            ("proc/self/mountinfo", "30 24 0:26 /docker/x /sys/fs/cgroup ro - cgroup2 cgroup rw\n"),
            ("proc/self/cgroup", "0::/../elsewhere\n"),
            ("sys/fs/cgroup/cpu.max", "500000 100000\n"),
        ]);
        assert_eq!(machine.cpus(16), 5);
    }

    #[test]
    fn missing_information_does_not_limit() {
        let machine = Fake::new(&[]);
        assert_eq!(machine.cpus(16), 16);
        assert_eq!(machine.memory(), u64::MAX);
        let machine =
            Fake::new(&[MEMINFO, V2_MOUNT, ("proc/self/cgroup", "nonsense"), ("sys/fs/cgroup/cpu.max", "1 0")]);
        assert_eq!(machine.cpus(16), 16);
        assert_eq!(machine.memory(), 500 << 10);
    }

    #[test]
    fn the_address_space_is_a_limit() {
        let machine = Fake::new(&[MEMINFO, ("proc/self/statm", "10 5 3 1 0 2 0\n")]);
        assert_eq!(available_memory_in(&machine.0, 100 << 10, &[]), (100 << 10) - address_space(&machine.0));
        assert_eq!(available_memory_in(&machine.0, 1, &[]), 0);
    }
}
