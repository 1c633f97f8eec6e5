//! Tests of the placement of threads. They are not in `placement.rs`, which `tests/pool_model` compiles too.

use super::parts_by_node;
use super::placement::Placement;

/// Nodes with these numbers of processors.
fn nodes(sizes: &[usize]) -> Vec<Vec<usize>> {
    let mut next = 0;
    let mut node = |size: &usize| {
        next += size;
        (next - size..next).collect()
    };
    sizes.iter().map(&mut node).collect()
}

#[test]
fn threads_are_divided_by_processors() {
    for (threads, sizes, expected) in [
        (4, vec![2, 2], vec![0, 0, 1, 1]),
        (6, vec![4, 4], vec![0, 0, 0, 1, 1, 1]),
        (4, vec![4, 4], vec![0, 0, 0, 0]),
        (4, vec![6, 2], vec![0, 0, 0, 0]),
        (8, vec![6, 2], vec![0, 0, 0, 0, 0, 0, 1, 1]),
        (7, vec![4, 4], vec![0, 0, 0, 0, 1, 1, 1]),
        (3, vec![1, 1, 1], vec![0, 1, 2]),
        (3, vec![], vec![0, 0, 0]),
        (3, vec![8], vec![0, 0, 0]),
        (1, vec![4, 4], vec![0]),
    ] {
        let placement = Placement::new(threads, &nodes(&sizes));
        let found: Vec<_> = (0..threads).map(|thread| placement.node_of(thread)).collect();
        assert_eq!(found, expected, "{threads} threads on {sizes:?}");
        assert_eq!(placement.nodes(), expected.last().unwrap() + 1);
    }
}

#[test]
fn the_shares_of_the_nodes_are_all_tasks_in_the_order_of_the_threads() {
    for threads in 1..=9 {
        for sizes in [vec![], vec![3], vec![4, 4], vec![1, 6], vec![2, 2, 2, 2], vec![1, 1, 1, 1, 1, 30]] {
            let placement = Placement::new(threads, &nodes(&sizes));
            for tasks in [0, 1, 2, 7, 64, 100] {
                let shares: Vec<_> = (0..placement.nodes()).map(|node| placement.share(tasks, node)).collect();
                let all: Vec<_> = shares.iter().cloned().flatten().collect();
                assert_eq!(all, (0..tasks).collect::<Vec<_>>(), "{threads} threads on {sizes:?}");
                for thread in 0..threads {
                    // Where the range of a thread begins, if every thread has tasks.
                    let first = tasks * thread / threads;
                    let node = placement.node_of(thread);
                    assert!(tasks < threads || shares[node].contains(&first), "{tasks} tasks, thread {thread}");
                }
            }
        }
    }
}

#[test]
fn each_node_gets_its_share_of_each_run() {
    let two = Placement::new(2, &nodes(&[1, 1]));
    assert_eq!(
        parts_by_node(&[4, 0, 3], &two),
        [(0, 0, 0..2), (2, 1, 0..0), (2, 2, 0..1), (3, 0, 2..4), (5, 1, 0..0), (5, 2, 1..3)]
    );
    let anywhere = Placement::new(2, &[]);
    assert_eq!(parts_by_node(&[4, 0, 3], &anywhere), [(0, 0, 0..4), (4, 1, 0..0), (4, 2, 0..3)]);
}
