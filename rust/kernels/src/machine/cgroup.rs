//! The control groups that this process is in, version 1 and 2 (`cgroups(7)`).

use std::fs;
use std::path::{Component, Path, PathBuf};

/// What a group controls.
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

/// A group as a directory.
pub struct Cgroup {
    /// Whether it is of version 2, with its names of files.
    pub unified: bool,
    directory: PathBuf,
}

impl Cgroup {
    /// The text of a file; None where there is none.
    pub fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.directory.join(name)).ok()
    }

    /// The number in a file; None where there is none, or it says `max` or -1.
    pub fn read_number(&self, name: &str) -> Option<usize> {
        self.read(name)?.trim().parse().ok()
    }
}

/// The groups whose `controller` bounds this process: its own and all those around it, as far up as is mounted here.
pub fn ancestry(root: &Path, controller: Controller) -> Vec<Cgroup> {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let (groups, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let mut found = Vec::new();
    for (unified, path) in groups.lines().filter_map(|line| membership(line, controller)) {
        let Some(mount) = mounts.lines().filter_map(Mount::parse).find(|mount| mount.holds(unified, controller)) else {
            continue;
        };
        // What is mounted may be the container's own part of the tree; paths outside it are not to be seen.
        let inside = Path::new(path).strip_prefix(&mount.group).unwrap_or(Path::new(""));
        let inside =
            if inside.components().all(|part| matches!(part, Component::Normal(_))) { inside } else { Path::new("") };
        let top = root.join(mount.directory.trim_start_matches('/'));
        let directories = inside.ancestors().map(|part| top.join(part));
        found.extend(directories.map(|directory| Cgroup { unified, directory }));
    }
    found
}

/// The group of a line of `/proc/self/cgroup` (`number:controllers:path`) if it is one for `controller`.
fn membership(line: &str, controller: Controller) -> Option<(bool, &str)> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    let unified = controllers.is_empty();
    (unified || controllers.split(',').any(|name| name == controller.name())).then_some((unified, path))
}

/// A line of `/proc/self/mountinfo`.
struct Mount<'a> {
    /// Which group is at the top of the mounted tree.
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

/// The kernel writes blanks and backslashes as three octal digits.
fn unescape(field: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(field.to_owned(), |text, (code, character)| text.replace(code, character))
}
