//! NUMA nodes from Linux sysfs. A processor reads the memory of its own node fastest.

use std::fs;
use std::path::Path;

/// Returns these processors by node, in the order of the nodes' numbers; nodes without any of them are left out. All of
/// them are one node where the system does not list its nodes.
pub(super) fn by_node(root: &Path, processors: &[usize]) -> Vec<Vec<usize>> {
    let entries = fs::read_dir(root.join("sys/devices/system/node")).into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix("node")?.parse::<usize>().ok();
    let mut nodes: Vec<_> = entries
        .filter_map(|entry| {
            let list = fs::read_to_string(entry.path().join("cpulist")).ok()?;
            Some((number(entry.file_name().to_str()?)?, list))
        })
        .map(|(number, list)| {
            let ranges = ranges(&list);
            let on_node = |processor: &usize| ranges.iter().any(|(first, last)| (first..=last).contains(&processor));
            (number, processors.iter().copied().filter(on_node).collect::<Vec<_>>())
        })
        .filter(|(_, of_node)| !of_node.is_empty())
        .collect();
    nodes.sort_unstable();
    // A processor that no node lists would never be used.
    let is_whole = nodes.iter().map(|(_, of_node)| of_node.len()).sum::<usize>() == processors.len();
    if is_whole { nodes.into_iter().map(|(_, of_node)| of_node).collect() } else { vec![processors.to_vec()] }
}

/// Returns the first and the last number of each range of a list like `0-3,8,10-11`.
fn ranges(list: &str) -> Vec<(usize, usize)> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some((first.parse().ok()?, last.parse().ok()?))
    };
    list.trim().split(',').filter_map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::Fake;
    use super::*;

    /// Fakes a machine with two sockets of four processors each, and a node that has memory only.
    fn two_sockets() -> Fake {
        Fake::new(&[
            ("sys/devices/system/node/node0/cpulist", "0-1,8-9\n"),
            ("sys/devices/system/node/node1/cpulist", "2-3,10,11\n"),
            ("sys/devices/system/node/node2/cpulist", "\n"),
            ("sys/devices/system/node/online", "0-2\n"),
        ])
    }

    #[test]
    fn processors_are_sorted_by_node() {
        let machine = two_sockets();
        let all = [0, 1, 2, 3, 8, 9, 10, 11];
        assert_eq!(by_node(machine.root(), &all), [vec![0, 1, 8, 9], vec![2, 3, 10, 11]]);
        assert_eq!(by_node(machine.root(), &[3, 9]), [vec![9], vec![3]]);
        assert_eq!(by_node(machine.root(), &[2, 10]), [vec![2, 10]]);
    }

    #[test]
    fn processors_of_an_unlisted_node_are_one_node() {
        assert_eq!(by_node(two_sockets().root(), &[0, 2, 99]), [vec![0, 2, 99]]);
        assert_eq!(by_node(Fake::new(&[]).root(), &[0, 1]), [vec![0, 1]]);
    }

    #[test]
    fn a_damaged_list_has_no_ranges() {
        for list in ["", "x", "1-", "-1", "0-99999999999999999999999"] {
            assert_eq!(ranges(list), [], "{list}");
        }
        assert_eq!(ranges("0-3,x,8\n"), [(0, 3), (8, 8)]);
    }
}
