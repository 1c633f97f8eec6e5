//! Computes slow grammar masks on another thread while the model computes the logits.
//!
//! One thread computes all masks of a step and ends with it, so nothing remains when a step is cancelled or the process
//! forks. Starting it takes tens of microseconds.

use std::thread;

use super::Constraint;
use super::limits::STACK_BYTES;

/// Runs `work` on this thread while another one prepares the masks.
pub(crate) fn prepare_masks_during<'a, T>(
    constraints: impl ExactSizeIterator<Item = &'a mut Constraint> + Send,
    work: impl FnOnce() -> T,
) -> T {
    if constraints.len() == 0 {
        return work();
    }
    thread::scope(|scope| {
        let prepare = move || constraints.for_each(Constraint::prepare);
        let thread = thread::Builder::new().name("ferrule-masks".into()).stack_size(STACK_BYTES);
        // If no thread can be started, each mask is computed at sampling time.
        _ = thread.spawn_scoped(scope, prepare);
        work()
    })
}
