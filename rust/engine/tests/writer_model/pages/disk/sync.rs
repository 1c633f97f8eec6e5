//! Loom's atomics, locks and threads in place of `src/pages/disk/sync.rs`.
//!
//! Loom's condition variable never times out, so a notification that only the timeout replaces is a deadlock in the model.

pub use loom::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};

pub mod thread {
    use std::io;

    pub use loom::thread::spawn;

    /// Loom's builder of threads, whose handles cannot be asked whether the thread has ended.
    pub struct Builder(loom::thread::Builder);

    impl Builder {
        pub fn new() -> Self {
            Self(loom::thread::Builder::new())
        }

        pub fn name(self, name: String) -> Self {
            Self(self.0.name(name))
        }

        pub fn spawn<T: Send + 'static>(self, run: impl FnOnce() -> T + Send + 'static) -> io::Result<JoinHandle<T>> {
            self.0.spawn(run).map(JoinHandle)
        }
    }

    #[derive(Debug)]
    pub struct JoinHandle<T>(loom::thread::JoinHandle<T>);

    impl<T> JoinHandle<T> {
        /// Returns false: a writer that ends early is a deadlock in the model.
        pub fn is_finished(&self) -> bool {
            false
        }

        pub fn join(self) -> std::thread::Result<T> {
            self.0.join()
        }
    }
}
