//! Beams in the queues: all beams of a request advance together.

use super::Scheduler;
use crate::beams::Child;
use crate::sequence::Sequence;
use crate::{RequestError, RequestId};

impl Scheduler {
    /// Checks that the beams of a prompt fit side by side. (They would also progress in a smaller pool, but each step
    /// would recompute every beam.)
    pub fn check_beams(&self, beam_width: usize, tokens: usize) -> Result<(), RequestError> {
        let limit = self.limits.max_num_seqs;
        if beam_width > limit {
            return Err(RequestError::TooManyBeams { beam_width, limit });
        }
        match self.kv_cache.missing_pages(beam_width, tokens) {
            Some((needed, pages)) => Err(RequestError::BeamsExceedKv { beam_width, tokens, needed, pages }),
            None => Ok(()),
        }
    }

    /// Removes the beams of a request from the queues, best first, if all of them are expanded; `None` otherwise. They
    /// keep their pages: [`Scheduler::queue_beams`] or [`Scheduler::drop_beams`] must follow.
    pub fn take_expanded_beams(&mut self, id: RequestId) -> Option<Vec<Sequence>> {
        if !self.sequences().filter(|sequence| sequence.id == id).all(Sequence::is_expanded) {
            return None;
        }
        let mut beams = self.take(id);
        beams.sort_by_key(Sequence::rank);
        Some(beams)
    }

    /// Replaces the parents by their children. A parent with several children shares its pages; a parent without
    /// children releases them. Children with pages run, as far as there are free slots.
    pub fn queue_beams(&mut self, parents: Vec<Sequence>, children: &[Child]) {
        let mut children_left: Vec<usize> =
            (0..parents.len()).map(|parent| children.iter().filter(|child| child.parent == parent).count()).collect();
        let timing = parents[0].timing;
        let mut parents: Vec<Option<Sequence>> = parents.into_iter().map(Some).collect();
        for (parent, _) in parents.iter_mut().zip(&children_left).filter(|(_, count)| **count == 0) {
            if let Some(mut parent) = parent.take() {
                self.kv_cache.release(&mut parent.tables);
            }
        }
        for (index, child) in children.iter().enumerate() {
            children_left[child.parent] -= 1;
            let slot = &mut parents[child.parent];
            let beam = if children_left[child.parent] == 0 {
                slot.take()
            } else {
                slot.as_ref().map(|parent| parent.fork(self.kv_cache.share(&parent.tables)))
            };
            let mut beam = beam.expect("a parent exists until its last child replaces it");
            beam.extend_beam(index, child);
            // The children together count the preemptions of their parents.
            beam.timing =
                crate::RequestTiming { preemptions: if index == 0 { timing.preemptions } else { 0 }, ..timing };
            self.queue_beam(beam);
        }
    }

    fn queue_beam(&mut self, mut beam: Sequence) {
        if beam.computed > 0 && self.free_slots() > 0 {
            let index = self.running.partition_point(|other| other.rank() < beam.rank());
            self.running.insert(index, beam);
        } else {
            self.kv_cache.release(&mut beam.tables);
            beam.reset();
            self.add(beam);
        }
    }

    /// Releases the pages of beams that are in no queue; with `invalidate`, their cached pages are dropped too.
    pub fn drop_beams(&mut self, beams: Vec<Sequence>, invalidate: bool) {
        for mut beam in beams {
            if invalidate {
                self.kv_cache.invalidate(&mut beam.tables);
            }
            self.kv_cache.release(&mut beam.tables);
        }
    }
}
