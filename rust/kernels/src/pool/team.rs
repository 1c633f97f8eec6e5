//! The threads of a pool and how they meet the caller.
//!
//! The meeting point is one word, the *gate*: the number of the current run, whether it takes helpers, and how many are
//! inside. The caller opens the gate, works itself, closes the gate when no task is left, and waits until the
//! helpers that came in have left. A helper that wakes late finds the gate closed and nobody has waited for it: on a
//! busy machine a run does not take longer than its tasks.
//!
//! Between runs a helper spins for [`SPIN`] and then sleeps. Going to sleep and being called must not miss each other:
//! the helper first says that it sleeps and then looks at the gate again; the caller first opens the gate and then looks
//! who sleeps. All four steps are sequentially consistent, so at least one of the two sees the other.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::shares::Shares;
use super::{IN_TASK, PoolError, WAIT_INTERVAL, fork};
use crate::Cancel;

/// How long a thread spins before it sleeps: longer than the gap between two operations of a forward pass (a few
/// microseconds), about as long as falling asleep and waking up again costs.
const SPIN: Duration = Duration::from_micros(50);

/// Work to share, and what came of it.
pub struct Job<'a> {
    tasks: usize,
    task: &'a (dyn Fn(usize) + Sync),
    cancel: &'a Cancel,
    /// A task was left out because of `cancel`.
    cut_short: AtomicBool,
    panicked: AtomicBool,
    /// What the first task to panic said.
    panic: Mutex<Option<String>>,
}

impl<'a> Job<'a> {
    pub fn new(tasks: usize, task: &'a (dyn Fn(usize) + Sync), cancel: &'a Cancel) -> Self {
        Self {
            tasks,
            task,
            cancel,
            cut_short: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
        }
    }

    /// Does all tasks on this thread alone.
    pub fn work_alone(&self) {
        let mut tasks = 0..self.tasks;
        self.work(|| tasks.next(), || self.cancel.poll());
    }

    /// Does tasks until there is no next one, one panics, or `cancelled` says so.
    fn work(&self, mut next: impl FnMut() -> Option<usize>, cancelled: impl Fn() -> bool) {
        self.catch(|| {
            while let Some(task) = next() {
                if self.panicked.load(Ordering::Relaxed) {
                    break;
                }
                if cancelled() {
                    self.cut_short.store(true, Ordering::Relaxed);
                    break;
                }
                (self.task)(task);
            }
        });
    }

    /// Does a piece of work whose panic is the job's.
    fn catch(&self, work: impl FnOnce()) {
        let was_in_task = IN_TASK.replace(true);
        let outcome = catch_unwind(AssertUnwindSafe(work));
        IN_TASK.set(was_in_task);
        if let Err(payload) = outcome {
            self.fail(message(payload));
        }
    }

    fn fail(&self, message: String) {
        self.panicked.store(true, Ordering::Relaxed);
        self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(message);
    }

    /// What came of the job after every thread has left it.
    pub fn result(self) -> Result<(), PoolError> {
        match self.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(message) => Err(PoolError::Panicked(message)),
            None if self.cut_short.into_inner() => Err(PoolError::Cancelled),
            None => Ok(()),
        }
    }
}

/// What a panic said.
fn message(payload: Box<dyn Any + Send>) -> String {
    let payload = match payload.downcast::<String>() {
        Ok(text) => return *text,
        Err(payload) => payload,
    };
    match payload.downcast::<&str>() {
        Ok(text) => (*text).to_owned(),
        Err(payload) => {
            // Dropping it runs code that may panic again, in a place where nobody could catch it.
            std::mem::forget(payload);
            "a value that is not text".to_owned()
        }
    }
}

/// Threads that help the caller.
pub struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

struct Shared {
    gate: Gate,
    /// Who does which tasks of the run.
    shares: Shares,
    /// The job behind the open gate.
    job: AtomicPtr<Job<'static>>,
    leaving: AtomicBool,
    /// Whether the caller sleeps, and who it is.
    caller_sleeps: AtomicBool,
    caller: Mutex<Option<Thread>>,
    /// Whether each helper sleeps.
    asleep: Vec<AtomicBool>,
}

/// The number of the run in the upper half; below it whether it is open, and how many are inside.
#[repr(align(128))]
struct Gate(AtomicU64);

const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;

const fn run_number(gate: u64) -> u64 {
    gate >> 32
}

impl Team {
    /// Starts up to `helpers` threads: fewer where the system refuses.
    pub fn start(helpers: usize) -> Self {
        let shared = Arc::new(Shared {
            gate: Gate(AtomicU64::new(0)),
            shares: Shares::new(helpers + 1),
            job: AtomicPtr::default(),
            leaving: AtomicBool::new(false),
            caller_sleeps: AtomicBool::new(false),
            caller: Mutex::new(None),
            asleep: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
        });
        let start = |index| {
            let shared = Arc::clone(&shared);
            // The caller is number 0.
            let builder = thread::Builder::new().name(format!("ferrule-{}", index + 1));
            builder.spawn(move || shared.help(index)).ok()
        };
        Self { helpers: (0..helpers).map_while(start).collect(), shared }
    }

    /// Does `job` with up to `wanted` helpers. Returns when no thread is inside the job any more. One run at a time.
    pub fn run(&self, job: &Job<'_>, wanted: usize) {
        let shared = &*self.shared;
        let generation = fork::generation();
        *shared.caller.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
        shared.job.store(std::ptr::from_ref(job).cast_mut().cast(), Ordering::Relaxed);
        shared.shares.deal(job.tasks, wanted.min(self.helpers.len()) + 1);
        // Nobody is inside, so nothing but the number is in the gate.
        let number = run_number(shared.gate.0.load(Ordering::Relaxed)).wrapping_add(1) << 32;
        shared.gate.0.store(number | OPEN, Ordering::SeqCst);
        for (helper, asleep) in self.helpers.iter().zip(&shared.asleep).take(wanted) {
            if asleep.load(Ordering::SeqCst) {
                helper.thread().unpark();
            }
        }
        // From here to the end nothing may unwind: helpers hold on to the job, which lives in the caller's frames.
        job.work(|| shared.shares.take(0), || job.cancel.poll());
        shared.gate.0.fetch_and(!OPEN, Ordering::SeqCst);
        shared.wait_until_left(job, generation);
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.leaving.store(true, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // A helper catches every panic of a task; there is no error to hand on.
            let _ = helper.join();
        }
    }
}

impl Shared {
    /// The life of a helper.
    fn help(&self, index: usize) {
        let mut last = 0;
        while let Some(number) = self.wait_for_run(index, last) {
            last = number;
            if self.enter(number) {
                // SAFETY: `enter` counted this thread in while the gate was open. The caller of `Team::run` stored the
                // job before it opened the gate, and does not return, so that the job lives, until all are out.
                let job = unsafe { &*self.job.load(Ordering::Relaxed) };
                job.work(|| self.shares.take(index + 1), || job.cancel.is_cancelled());
                self.leave();
            }
        }
    }

    /// The number of an open run other than `last`; None when the pool is being dropped.
    fn wait_for_run(&self, index: usize, last: u64) -> Option<u64> {
        let open = || {
            let gate = self.gate.0.load(Ordering::SeqCst);
            (gate & OPEN != 0 && run_number(gate) != last).then(|| run_number(gate))
        };
        let leaving = || self.leaving.load(Ordering::SeqCst);
        let mut found = None;
        spin_until(|| {
            found = open();
            found.is_some() || leaving()
        });
        let asleep = &self.asleep[index];
        while found.is_none() && !leaving() {
            asleep.store(true, Ordering::SeqCst);
            found = open();
            if found.is_none() && !leaving() {
                thread::park();
            }
            asleep.store(false, Ordering::SeqCst);
        }
        found
    }

    /// Goes in, unless run `number` takes no helpers any more.
    fn enter(&self, number: u64) -> bool {
        let count_in = |gate: u64| (gate & OPEN != 0 && run_number(gate) == number).then_some(gate + 1);
        self.gate.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, count_in).is_ok()
    }

    fn leave(&self) {
        let gate = self.gate.0.fetch_sub(1, Ordering::SeqCst) - 1;
        if gate & (OPEN | INSIDE) == 0
            && self.caller_sleeps.load(Ordering::SeqCst)
            && let Some(caller) = &*self.caller.lock().unwrap_or_else(PoisonError::into_inner)
        {
            caller.unpark();
        }
    }

    /// Waits until all helpers are out. Polls the job's cancel flag, so that they may come sooner.
    fn wait_until_left(&self, job: &Job<'_>, generation: u32) {
        let left = || self.gate.0.load(Ordering::SeqCst) & INSIDE == 0;
        if spin_until(left) {
            return;
        }
        self.caller_sleeps.store(true, Ordering::SeqCst);
        while !left() {
            job.catch(|| {
                job.cancel.poll();
            });
            if fork::generation() != generation {
                // What is polled forked this very thread: the helpers are in the other process.
                job.fail("the process forked in the middle of a parallel run".to_owned());
                break;
            }
            thread::park_timeout(WAIT_INTERVAL);
        }
        self.caller_sleeps.store(false, Ordering::SeqCst);
    }
}

/// Spins until `done` or for [`SPIN`]; says which.
fn spin_until(mut done: impl FnMut() -> bool) -> bool {
    /// Looks between two looks at the clock, which costs more.
    const LOOKS: u32 = 16;
    let mut start = None;
    loop {
        for _ in 0..LOOKS {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.get_or_insert_with(Instant::now).elapsed() > SPIN {
            return done();
        }
    }
}
