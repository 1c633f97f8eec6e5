//! Beams in the queues: all of a request's together, since they go on together.

use super::Scheduler;
use crate::beams::Child;
use crate::sequence::Sequence;
use crate::{RequestError, RequestId};

impl Scheduler {
    /// Checks that beams of a prompt could be computed side by side. (They get there in a small pool too, but each step
    /// would compute the whole of each.)
    pub fn check_beams(&self, beam_width: usize, tokens: usize) -> Result<(), RequestError> {
        let limit = self.limits.max_num_seqs;
        if beam_width > limit {
            return Err(RequestError::TooManyBeams { beam_width, limit });
        }
        match self.pages.missing_pages(beam_width, tokens) {
            Some((needed, pages)) => Err(RequestError::BeamsExceedKv { beam_width, tokens, needed, pages }),
            None => Ok(()),
        }
    }

    /// Takes the beams of a request out of the queues, the best first, if each of them is computed to its end. They keep
    /// their pages: [`Scheduler::queue_beams`] or [`Scheduler::drop_beams`] follows.
    pub fn take_expanded_beams(&mut self, id: RequestId) -> Option<Vec<Sequence>> {
        if !self.sequences().filter(|sequence| sequence.id == id).all(Sequence::is_expanded) {
            return None;
        }
        let mut beams = self.take(id);
        beams.sort_by_key(Sequence::rank);
        Some(beams)
    }

    /// Queues the next beams in the place of those that they go on from. One that goes on in several ways shares its
    /// pages; one that does not go on gives them back. Who has pages runs, as far as there are places.
    pub fn queue_beams(&mut self, parents: Vec<Sequence>, children: &[Child]) {
        let mut left: Vec<usize> =
            (0..parents.len()).map(|parent| children.iter().filter(|child| child.parent == parent).count()).collect();
        let timing = parents[0].timing;
        let mut parents: Vec<Option<Sequence>> = parents.into_iter().map(Some).collect();
        for (parent, _) in parents.iter_mut().zip(&left).filter(|(_, left)| **left == 0) {
            if let Some(mut parent) = parent.take() {
                self.pages.release(&mut parent.tables);
            }
        }
        for (index, child) in children.iter().enumerate() {
            left[child.parent] -= 1;
            let slot = &mut parents[child.parent];
            let beam = if left[child.parent] == 0 {
                slot.take()
            } else {
                slot.as_ref().map(|parent| parent.fork(self.pages.share(&parent.tables)))
            };
            let mut beam = beam.expect("a parent is there until its last child takes its place");
            beam.become_beam(index, child);
            // Together they have been preempted as often as their parents.
            beam.timing =
                crate::RequestTiming { preemptions: if index == 0 { timing.preemptions } else { 0 }, ..timing };
            self.queue_beam(beam);
        }
    }

    fn queue_beam(&mut self, mut beam: Sequence) {
        if beam.computed > 0 && self.free_places() > 0 {
            let place = self.running.partition_point(|other| other.rank() < beam.rank());
            self.running.insert(place, beam);
        } else {
            self.pages.release(&mut beam.tables);
            beam.reset();
            self.add(beam);
        }
    }

    /// Gives back what beams hold that are in no queue any more; with `invalidate` what is kept of them is forgotten.
    pub fn drop_beams(&mut self, beams: Vec<Sequence>, invalidate: bool) {
        for mut beam in beams {
            if invalidate {
                self.pages.invalidate(&mut beam.tables);
            }
            self.pages.release(&mut beam.tables);
        }
    }
}
