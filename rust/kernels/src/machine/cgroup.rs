//! Control groups of this process, versions 1 and 2 (`cgroups(7)`).

use std::fs;
use std::path::{Component, Path, PathBuf};

/// Resource that a cgroup controls.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Controller {
    Cpu,
    Memory,
}

impl Controller {
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
        }
    }
}

/// Directory of a cgroup.
pub struct Cgroup {
    /// Whether the cgroup is version 2 (unified hierarchy), which has other file names.
    pub unified: bool,
    directory: PathBuf,
}

impl Cgroup {
    /// Reads a file. Returns `None` if it does not exist.
    pub fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.directory.join(name)).ok()
    }

    /// Reads a number from a file. Returns `None` if the file does not exist or contains `max` or -1.
    pub fn read_number(&self, name: &str) -> Option<usize> {
        self.read(name)?.trim().parse().ok()
    }
}

/// Returns the cgroups of `controller` that limit this process: its own and all visible ancestors.
pub fn ancestors(root: &Path, controller: Controller) -> Vec<Cgroup> {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let (groups, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let mut found = Vec::new();
    for (unified, path) in groups.lines().filter_map(|line| membership(line, controller)) {
        let Some(mount) = mounts.lines().filter_map(Mount::parse).find(|mount| mount.holds(unified, controller)) else {
            continue;
        };
        // A container may see only its own subtree as the mount; paths outside it do not exist here.
        let inside = Path::new(path).strip_prefix(&mount.group).unwrap_or(Path::new(""));
        let inside =
            if inside.components().all(|part| matches!(part, Component::Normal(_))) { inside } else { Path::new("") };
        let top = root.join(mount.directory.trim_start_matches('/'));
        let directories = inside.ancestors().map(|part| top.join(part));
        found.extend(directories.map(|directory| Cgroup { unified, directory }));
    }
    found
}

/// Parses a line of `/proc/self/cgroup` (`number:controllers:path`). Returns whether it is version 2, and its path, if
/// it applies to `controller`.
fn membership(line: &str, controller: Controller) -> Option<(bool, &str)> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    let unified = controllers.is_empty();
    (unified || controllers.split(',').any(|name| name == controller.name())).then_some((unified, path))
}

/// Fields of a line of `/proc/self/mountinfo`.
struct Mount<'a> {
    /// Cgroup at the root of the mounted tree.
    group: String,
    directory: String,
    filesystem: &'a str,
    options: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (place, source) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3).map(unescape);
        let mut source = source.split(' ');
        Some(Self {
            group: place.next()?,
            directory: place.next()?,
            filesystem: source.next()?,
            options: source.nth(1)?,
        })
    }

    fn holds(&self, unified: bool, controller: Controller) -> bool {
        if unified {
            self.filesystem == "cgroup2"
        } else {
            self.filesystem == "cgroup" && self.options.split(',').any(|name| name == controller.name())
        }
    }
}

/// Decodes octal escapes: the kernel writes whitespace and backslashes as three octal digits.
fn unescape(field: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(field.to_owned(), |text, (code, character)| text.replace(code, character))
}
