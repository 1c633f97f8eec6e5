//! Masks that take long are made while the model computes the logits that they will be laid on.
//!
//! One thread for all of a step's masks, begun with the step and over with it: so nothing of it is left when a step is
//! cancelled, and none is there when the process forks. Starting it takes some tens of microseconds.

use std::thread;

use super::Constraint;
use super::limits::STACK_BYTES;

/// Runs `work` in this thread, and meanwhile prepares the masks in another one.
pub(crate) fn beside<'a, T>(
    constraints: impl ExactSizeIterator<Item = &'a mut Constraint> + Send,
    work: impl FnOnce() -> T,
) -> T {
    if constraints.len() == 0 {
        return work();
    }
    thread::scope(|scope| {
        let prepare = move || constraints.for_each(Constraint::prepare);
        let thread = thread::Builder::new().name("ferrule-masks".into()).stack_size(STACK_BYTES);
        // Where none can be started, each mask is made when its token is sampled.
        _ = thread.spawn_scoped(scope, prepare);
        work()
    })
}
