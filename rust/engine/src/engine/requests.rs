//! Requests that enter and leave the engine: add, fork, abort.

use ferrule_model::LanguageModel;

use super::Engine;
use crate::pages::Namespace;
use crate::request::check_prompt;
use crate::sequence::Sequence;
use crate::{Request, RequestError, RequestId};

impl<M: LanguageModel> Engine<M> {
    /// Queues a request.
    ///
    /// # Errors
    /// [`RequestError`] if it can never be served, or too many wait; nothing is queued then.
    pub fn add_request(&mut self, request: Request) -> Result<RequestId, RequestError> {
        self.add(request, None)
    }

    /// Queues a request with the prompt of an earlier one. It waits until that prompt is computed, and shares its
    /// pages: so a prompt with many continuations is computed once. If the other one ends before, or its prompt turns
    /// out to be different, this is a request like any other.
    ///
    /// # Errors
    /// As [`Engine::add_request`].
    pub fn fork_request(&mut self, request: Request, of: RequestId) -> Result<RequestId, RequestError> {
        self.add(request, Some(of))
    }

    fn add(&mut self, mut request: Request, fork_parent: Option<RequestId>) -> Result<RequestId, RequestError> {
        let checked = self.check_request(&request);
        self.metrics.requests_refused += u64::from(checked.is_err());
        if checked.is_ok() {
            self.next_id += 1;
            let same = |other: &&Sequence| {
                Some(other.id) == fork_parent
                    && other.tokens[..other.prompt_len] == request.prompt
                    && other.params.cache_salt == request.params.cache_salt
                    && other.adapter == request.adapter
            };
            let fork_parent = self.scheduler.sequences().find(same).map(|fork_parent| fork_parent.id);
            let shareable = self.model.shareable_tokens(request.prompt.len());
            let namespace = Namespace::new(request.params.cache_salt.clone(), request.adapter.as_deref());
            let tables = self.scheduler.pages.tables(namespace, shareable);
            let id = RequestId(self.next_id - 1);
            let prediction = std::mem::take(&mut request.params.prediction);
            let drafts = self.speculator.sources(&request, prediction);
            let max_total_tokens = request.params.max_tokens.min(self.limits.tokens() - request.prompt.len());
            self.searches.begin(id, &request.params, max_total_tokens);
            self.scheduler.add(Sequence::new(id, request, fork_parent, tables, drafts));
        }
        self.publish();
        checked.map(|()| RequestId(self.next_id - 1))
    }

    fn check_request(&self, request: &Request) -> Result<(), RequestError> {
        if let Some(reason) = &self.dead {
            return Err(RequestError::Dead { reason: reason.clone() });
        }
        self.check_generates()?;
        let vocab_size = self.model.vocab_size();
        request.params.validate(vocab_size)?;
        check_prompt(&request.prompt, vocab_size)?;
        self.limits.check(request.prompt.len(), 1)?;
        if let Some(search) = &request.params.beam_search {
            self.scheduler.check_beams(search.beam_width, request.prompt.len())?;
        }
        let (_, waiting) = self.scheduler.requests();
        match self.config.max_queued_requests {
            // Those for whom there is a place wait for no more than the next step.
            Some(limit) if waiting >= limit + self.scheduler.free_places() => {
                Err(RequestError::QueueFull { waiting, limit })
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn check_generates(&self) -> Result<(), RequestError> {
        if self.model.abilities().logits { Ok(()) } else { Err(RequestError::NoLogits) }
    }

    /// Ends a request in whatever state it is; its pages are free at once, and no step says anything of it any more.
    /// False if there is no such request, or it has ended before.
    pub fn abort(&mut self, id: RequestId) -> bool {
        let aborted = self.scheduler.remove(id);
        self.searches.end(id);
        self.speculator.forget(|gone| gone == id);
        self.metrics.requests_finished.abort += u64::from(aborted);
        self.publish();
        aborted
    }

    /// Whether a step would do something.
    pub fn has_unfinished_requests(&self) -> bool {
        self.scheduler.sequences().next().is_some() || !self.final_outputs.is_empty()
    }
}
