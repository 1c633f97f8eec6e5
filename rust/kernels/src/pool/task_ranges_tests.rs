//! Tests of work stealing. They are not in `task_ranges.rs`, which `tests/pool_model` compiles with other atomics.

use super::task_ranges::TaskRanges;

#[test]
fn workers_take_their_own_range_first_and_then_steal_from_the_end_of_others() {
    let ranges = TaskRanges::new([0; 3].into_iter());
    ranges.partition(8, 2);
    let all: Vec<_> = std::iter::from_fn(|| ranges.take(0)).collect();
    assert_eq!(all, [0, 1, 2, 3, 6, 7, 5, 4]);
    assert_eq!((ranges.take(1), ranges.take(2)), (None, None));
    ranges.partition(1, 3);
    assert_eq!((ranges.take(0), ranges.take(1)), (Some(0), None));
    ranges.partition(0, 3);
    assert_eq!(ranges.take(2), None);
}

#[test]
fn workers_steal_from_their_own_node_first() {
    let ranges = TaskRanges::new([0, 0, 1, 1].into_iter());
    ranges.partition(16, 4);
    let own: Vec<_> = std::iter::from_fn(|| ranges.take(3)).take(4).collect();
    assert_eq!(own, [12, 13, 14, 15]);
    // The last tasks of node 1 go to its own worker, although the workers of node 0 have as many.
    let stolen: Vec<_> = std::iter::from_fn(|| ranges.take(3)).take(4).collect();
    assert_eq!(stolen, [10, 11, 9, 8]);
    assert!(ranges.take(3).is_some_and(|task| task < 8), "then from other nodes");
}

#[test]
fn every_task_is_taken_once() {
    // Miri is too slow for more.
    const MANY: usize = if cfg!(miri) { 200 } else { 20_000 };
    for threads in 1..=8 {
        let ranges = TaskRanges::new((0..threads).map(|thread| thread / 2));
        for tasks in [1, 2, 7, MANY / 20, MANY] {
            ranges.partition(tasks, threads);
            let mut taken: Vec<usize> = std::thread::scope(|scope| {
                let take = |thread| std::iter::from_fn(|| ranges.take(thread)).collect::<Vec<_>>();
                let workers: Vec<_> = (0..threads).map(|thread| scope.spawn(move || take(thread))).collect();
                workers.into_iter().flat_map(|worker| worker.join().expect("no panic")).collect()
            });
            taken.sort_unstable();
            assert_eq!(taken, (0..tasks).collect::<Vec<_>>(), "{threads} threads");
        }
    }
}
