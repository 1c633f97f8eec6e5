//! Tests of the thread pool: tasks, cancellation, panics, forks and idle processor time.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ferrule_kernels::arch::Isa;
use ferrule_kernels::{Cancel, Exec, Pool, PoolError, machine};

/// Divisor of the number of repetitions.
const FEWER: usize = if cfg!(miri) { 20 } else { 1 };

fn pool(threads: usize) -> Pool {
    Pool::new(NonZeroUsize::new(threads).unwrap())
}

/// Returns whether a run of `tasks` tasks calls each number once.
fn runs_each_task_once(pool: &Pool, tasks: usize) -> bool {
    let calls: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
    let done = pool.run(tasks, &|task| _ = calls[task].fetch_add(1, Ordering::Relaxed), &Cancel::new());
    done.is_ok() && calls.into_iter().all(|count| count.into_inner() == 1)
}

fn sleep(milliseconds: u64) {
    thread::sleep(Duration::from_millis(milliseconds));
}

#[test]
fn each_task_runs_once() {
    for threads in 1..=5 {
        let pool = pool(threads);
        for tasks in [0, 1, 2, 3, 7, 64, 1000 / FEWER] {
            assert!(runs_each_task_once(&pool, tasks), "{tasks} tasks on {threads} threads");
        }
    }
}

#[test]
fn each_task_of_each_run_runs_once() {
    for threads in 1..=3 {
        for counts in [&[][..], &[0], &[0, 0, 5], &[3, 0, 0, 40, 1, 0], &[200, 7]] {
            let calls: Vec<Vec<_>> =
                counts.iter().map(|count| (0..*count).map(|_| AtomicUsize::new(0)).collect()).collect();
            let (pool, cancel) = (pool(threads), Cancel::new());
            let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
            let call = |run: usize, task: usize| _ = calls[run][task].fetch_add(1, Ordering::Relaxed);
            exec.run_each(counts.iter().copied(), call).unwrap();
            let once = calls.into_iter().flatten().all(|count| count.into_inner() == 1);
            assert!(once, "{counts:?} on {threads} threads");
        }
    }
}

/// Returns the processors on which the calling thread may run.
fn processors() -> BTreeSet<usize> {
    machine::numa_nodes().into_iter().flatten().collect()
}

#[test]
#[cfg_attr(miri, ignore = "calls the system")]
fn threads_stay_on_their_nodes() {
    let all = processors();
    // A machine with one processor has it in both nodes.
    let nodes = [*all.first().unwrap(), *all.last().unwrap()];
    let pool = Pool::on_nodes(NonZeroUsize::new(2).unwrap(), &nodes.map(|processor| vec![processor]));
    assert_eq!(pool.nodes(), 2);
    let found = Mutex::new(BTreeMap::new());
    // Each task waits until the other one has started, so that each thread runs one.
    let begun = AtomicUsize::new(0);
    let job = |task| {
        found.lock().unwrap().insert(task, processors());
        begun.fetch_add(1, Ordering::SeqCst);
        while begun.load(Ordering::SeqCst) < 2 {
            thread::yield_now();
        }
    };
    let binding = pool.bind_caller();
    pool.run(2, &job, &Cancel::new()).unwrap();
    drop(binding);
    let expected = nodes.map(|processor| BTreeSet::from([processor]));
    assert_eq!(found.into_inner().unwrap().into_values().collect::<Vec<_>>(), expected);
    assert_eq!(processors(), all, "the caller is free again");
    assert!(runs_each_task_once(&pool, 100));
}

#[test]
fn all_threads_run_tasks_and_have_names() {
    let names = Mutex::new(BTreeSet::new());
    // Each task waits until the other two have started, so three threads are needed.
    let begun = AtomicUsize::new(0);
    let job = |_| {
        names.lock().unwrap().insert(thread::current().name().map(str::to_owned));
        begun.fetch_add(1, Ordering::SeqCst);
        while begun.load(Ordering::SeqCst) < 3 {
            thread::yield_now();
        }
    };
    pool(3).run(3, &job, &Cancel::new()).unwrap();
    let names = names.into_inner().unwrap();
    assert_eq!(names.len(), 3);
    assert!(names.contains(&Some("ferrule-1".to_owned())) && names.contains(&Some("ferrule-2".to_owned())));
}

#[test]
fn a_single_task_or_thread_runs_on_the_caller() {
    let caller = thread::current().id();
    let job = |_| assert_eq!(thread::current().id(), caller);
    pool(4).run(1, &job, &Cancel::new()).unwrap();
    pool(1).run(100, &job, &Cancel::new()).unwrap();
}

#[test]
fn a_hundred_thousand_tiny_runs() {
    const RUNS: usize = 100_000 / (FEWER * FEWER);
    let (pool, cancel) = (pool(2), Cancel::new());
    let count = AtomicUsize::new(0);
    for _ in 0..RUNS {
        pool.run(2, &|_| _ = count.fetch_add(1, Ordering::Relaxed), &cancel).unwrap();
    }
    assert_eq!(count.into_inner(), 2 * RUNS);
}

#[test]
fn sleeping_threads_wake_up() {
    let pool = pool(3);
    for pause in [0, 1, 5, 20] {
        sleep(pause);
        assert!(runs_each_task_once(&pool, 50));
    }
}

#[test]
fn a_set_flag_stops_the_run_before_the_first_task() {
    for threads in [1, 2] {
        let cancel = Cancel::new();
        cancel.cancel();
        let job = |_| panic!("no task may begin");
        assert_eq!(pool(threads).run(8, &job, &cancel), Err(PoolError::Cancelled));
        cancel.reset();
        assert_eq!(pool(threads).run(8, &|_| (), &cancel), Ok(()));
    }
}

#[test]
fn a_flag_set_after_the_last_task_started_has_no_effect() {
    let cancel = Cancel::new();
    assert_eq!(pool(2).run(1, &|_| cancel.cancel(), &cancel), Ok(()));
}

#[test]
fn cancellation_takes_effect_within_one_task() {
    let (pool, cancel) = (pool(2), Arc::new(Cancel::new()));
    let canceller = {
        let cancel = Arc::clone(&cancel);
        thread::spawn(move || {
            sleep(30);
            cancel.cancel();
            Instant::now()
        })
    };
    assert_eq!(pool.run(100_000, &|_| sleep(1), &cancel), Err(PoolError::Cancelled));
    let latency = canceller.join().unwrap().elapsed();
    assert!(latency < Duration::from_millis(500), "{latency:?}");
}

#[test]
fn the_caller_polls_while_it_waits_for_workers() {
    let pool = pool(2);
    let caller = thread::current().id();
    // Whether the worker takes a task, and whether the caller polls between two tasks, depends on time. Try until the
    // worker has a task, which ends only after the hook was called, and the caller has finished the other one.
    loop {
        let (waited, polled) = (AtomicBool::new(false), Arc::new(AtomicBool::new(false)));
        let hook = {
            let polled = Arc::clone(&polled);
            move || {
                assert_eq!(thread::current().id(), caller);
                polled.store(true, Ordering::SeqCst);
                true
            }
        };
        let cancel = Cancel::with_poll(hook);
        let job = |_| {
            if thread::current().id() == caller {
                return sleep(1);
            }
            waited.store(true, Ordering::SeqCst);
            while !polled.load(Ordering::SeqCst) {
                thread::yield_now();
            }
        };
        match pool.run(2, &job, &cancel) {
            Ok(()) if waited.into_inner() => {
                assert!(cancel.is_cancelled());
                break;
            }
            Ok(()) | Err(PoolError::Cancelled) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_panic_is_an_error_and_the_pool_stays_usable() {
    for threads in [1, 3] {
        let pool = pool(threads);
        for _ in 0..20_usize.div_ceil(FEWER) {
            let job = |task| assert_ne!(task, 5, "task five");
            match pool.run(10, &job, &Cancel::new()) {
                Err(PoolError::Panicked(message)) => assert!(message.contains("task five"), "{message}"),
                other => panic!("{other:?}"),
            }
            // The pool never drops such a payload. This one takes no memory, so that Miri finds no leak.
            let not_a_string = |_| std::panic::panic_any(());
            let expected = PoolError::Panicked("panic payload is not a string".to_owned());
            assert_eq!(pool.run(4, &not_a_string, &Cancel::new()), Err(expected));
            assert!(runs_each_task_once(&pool, 100));
        }
    }
}

#[test]
fn a_panicking_hook_is_an_error() {
    let cancel = Cancel::with_poll(|| panic!("the hook"));
    let outcome = pool(2).run(1000 / FEWER, &|_| sleep(1), &cancel);
    assert_eq!(outcome, Err(PoolError::Panicked("the hook".to_owned())));
}

#[test]
fn concurrent_runs_are_serialized() {
    let pool = pool(2);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..200 / FEWER).for_each(|_| assert!(runs_each_task_once(&pool, 17))));
        }
    });
}

#[test]
fn waiting_for_another_run_can_be_cancelled() {
    let (pool, begun, release) = (pool(2), AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let job = |_| {
                begun.store(true, Ordering::SeqCst);
                while !release.load(Ordering::SeqCst) {
                    sleep(1);
                }
            };
            pool.run(2, &job, &Cancel::new()).unwrap();
        });
        while !begun.load(Ordering::SeqCst) {
            sleep(1);
        }
        let outcome = pool.run(2, &|_| (), &Cancel::with_poll(|| true));
        release.store(true, Ordering::SeqCst);
        assert_eq!(outcome, Err(PoolError::Cancelled));
    });
}

#[test]
fn nested_runs_work() {
    let pool = pool(3);
    let count = AtomicUsize::new(0);
    let inner = |_| _ = count.fetch_add(1, Ordering::Relaxed);
    let outer = |_| pool.run(5, &inner, &Cancel::new()).unwrap();
    pool.run(7, &outer, &Cancel::new()).unwrap();
    assert_eq!(count.into_inner(), 35);
}

#[test]
fn dropping_the_pool_joins_its_threads() {
    let alive = Arc::new(());
    for _ in 0..50_usize.div_ceil(FEWER) {
        let (pool, alive) = (pool(3), Arc::clone(&alive));
        pool.run(9, &|_| _ = Arc::strong_count(&alive), &Cancel::new()).unwrap();
    }
    drop(pool(3));
    assert_eq!(Arc::strong_count(&alive), 1);
}

/// Runs `work` in a forked child. It must return true within ten seconds and must not panic: a child of a
/// multi-threaded process should not print.
#[track_caller]
fn assert_in_child(work: impl FnOnce() -> bool) {
    // SAFETY: the only locks that the child takes are those of the allocator, which glibc makes safe after a fork, and
    // the child leaves by `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork failed");
    if child == 0 {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!outcome.unwrap_or(false))) };
    }
    assert_eq!(status_of(child), 0, "exit status of the child (256: returned false; 9: timed out)");
}

/// Waits for a child and returns its status. Kills the child after ten seconds.
fn status_of(child: libc::pid_t) -> i32 {
    let start = Instant::now();
    let mut status = 0;
    // SAFETY: waits for a child of this process.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
        if start.elapsed() > Duration::from_secs(10) {
            // SAFETY: the child belongs to this process and has not been reaped yet.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        sleep(2);
    }
    status
}

#[test]
fn a_forked_child_starts_new_threads() {
    let pool = pool(3);
    assert!(runs_each_task_once(&pool, 100));
    assert_in_child(|| {
        let works = (0..10).all(|_| runs_each_task_once(&pool, 100));
        assert_in_child(|| runs_each_task_once(&pool, 100));
        works
    });
    assert!(runs_each_task_once(&pool, 100));
}

#[test]
fn a_child_forked_during_a_run_works() {
    let (pool, begun, release) = (pool(3), AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let job = |_| {
                begun.store(true, Ordering::SeqCst);
                while !release.load(Ordering::SeqCst) {
                    sleep(1);
                }
            };
            pool.run(3, &job, &Cancel::new()).unwrap();
        });
        while !begun.load(Ordering::SeqCst) {
            sleep(1);
        }
        assert_in_child(|| runs_each_task_once(&pool, 100));
        release.store(true, Ordering::SeqCst);
    });
}

#[test]
fn a_child_can_drop_the_pool_of_its_parent_process() {
    let pool = pool(3);
    assert!(runs_each_task_once(&pool, 100));
    let mut pool = Some(pool);
    assert_in_child(|| {
        drop(pool.take());
        true
    });
}

#[test]
fn a_hook_that_forks_does_not_hang_the_child() {
    let pool = pool(2);
    let caller = thread::current().id();
    assert_in_child(|| {
        let child = Arc::new(AtomicI32::new(-1));
        let hook = {
            let child = Arc::clone(&child);
            move || {
                if child.load(Ordering::SeqCst) == -1 {
                    // SAFETY: as in `assert_in_child`.
                    child.store(unsafe { libc::fork() }, Ordering::SeqCst);
                }
                false
            }
        };
        let cancel = Cancel::with_poll(hook);
        loop {
            let done = AtomicUsize::new(0);
            // The worker's task takes longer than the caller's, so the hook is called while the caller waits.
            let job = |_| {
                sleep(if thread::current().id() == caller { 1 } else { 100 });
                done.fetch_add(1, Ordering::SeqCst);
            };
            let outcome = pool.run(2, &job, &cancel);
            let complete = outcome.is_ok() && done.into_inner() == 2;
            match child.load(Ordering::SeqCst) {
                // The caller ran both tasks before a worker woke up.
                -1 => {}
                // The grandchild: tasks that workers had started are lost, but it can start new workers.
                0 => {
                    let lost = matches!(outcome, Err(PoolError::Panicked(_)));
                    return (lost || complete) && runs_each_task_once(&pool, 100);
                }
                child => return complete && status_of(child) == 0,
            }
        }
    });
}

#[test]
fn idle_threads_use_no_processor_time() {
    fn processor_time() -> Duration {
        // SAFETY: `getrusage` fills the structure; all zero bytes are a valid value of it.
        let usage = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
            usage
        };
        [usage.ru_utime, usage.ru_stime]
            .into_iter()
            .map(|time| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000))
            .sum()
    }
    // Measured in a child process, where no other test runs.
    assert_in_child(|| {
        let pool = pool(4);
        let works = runs_each_task_once(&pool, 100);
        sleep(5);
        let before = processor_time();
        sleep(300);
        works && processor_time() - before < Duration::from_millis(10)
    });
}
