//! Requests that enter and leave the engine: add, fork, abort.

use ferrule_model::LanguageModel;

use super::Engine;
use crate::pages::Namespace;
use crate::request::{check_features, check_prompt};
use crate::sequence::Sequence;
use crate::{Request, RequestError, RequestId};

impl<M: LanguageModel> Engine<M> {
    /// Adds a request to the waiting queue and returns its id.
    ///
    /// # Errors
    /// Returns [`RequestError`] if the request is invalid, can never be served, or the queue is full. Nothing is queued
    /// then.
    pub fn add_request(&mut self, request: Request) -> Result<RequestId, RequestError> {
        self.add(request, None)
    }

    /// Adds a request that forks from `parent`, an earlier request with the same prompt. It waits until the parent's
    /// prompt is computed, then shares its pages, so a prompt with many continuations is computed once. If the parent
    /// ends first, or its prompt differs, the request is handled like any other.
    ///
    /// # Errors
    /// Returns the errors of [`Engine::add_request`].
    pub fn fork_request(&mut self, request: Request, parent: RequestId) -> Result<RequestId, RequestError> {
        self.add(request, Some(parent))
    }

    /// Queues a request, optionally as a fork of `fork_parent`.
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
                    && *other.features == *request.features
            };
            let fork_parent = self.scheduler.sequences().find(same).map(|parent| parent.id);
            let shareable = self.model.shareable_tokens(request.prompt.len());
            let namespace = Namespace::new(request.params.cache_salt.clone(), request.adapter.as_deref());
            let tables = self.scheduler.kv_cache.tables(namespace, shareable);
            let id = RequestId(self.next_id - 1);
            let prediction = std::mem::take(&mut request.params.prediction);
            let drafts = self.speculator.sources(&request, prediction);
            let max_output_tokens = request.params.max_tokens.min(self.limits.tokens() - request.prompt.len());
            self.searches.start(id, &request.params, max_output_tokens);
            self.scheduler.add(Sequence::new(id, request, fork_parent, tables, drafts));
        }
        self.publish();
        checked.map(|()| RequestId(self.next_id - 1))
    }

    /// Checks everything that can reject a request.
    fn check_request(&self, request: &Request) -> Result<(), RequestError> {
        if let Some(failure) = &self.dead {
            return Err(RequestError::Dead(failure.clone()));
        }
        self.check_generates()?;
        let vocab_size = self.model.vocab_size();
        request.params.validate(vocab_size)?;
        check_prompt(&request.prompt, vocab_size)?;
        check_features(&request.features, request.prompt.len(), &self.model.capabilities())?;
        self.limits.check(request.prompt.len(), 1)?;
        if let Some(search) = &request.params.beam_search {
            self.scheduler.check_beams(search.beam_width, request.prompt.len())?;
        }
        let (_, waiting) = self.scheduler.requests();
        match self.config.max_queued_requests {
            // Requests that fit into free slots start in the next step and do not count as waiting.
            Some(limit) if waiting >= limit + self.scheduler.free_slots() => {
                Err(RequestError::QueueFull { waiting, limit })
            }
            _ => Ok(()),
        }
    }

    /// Checks that the model has an lm_head.
    pub(crate) fn check_generates(&self) -> Result<(), RequestError> {
        if self.model.capabilities().logits { Ok(()) } else { Err(RequestError::NoLogits) }
    }

    /// Aborts a request and frees its pages. Later steps return no output for it. Returns false if the request does not
    /// exist or has finished.
    pub fn abort(&mut self, id: RequestId) -> bool {
        let aborted = self.scheduler.remove(id);
        self.searches.remove(id);
        self.speculator.release(|other| other == id);
        self.ready_outputs.retain(|output| output.request != id);
        self.metrics.requests_finished.abort += u64::from(aborted);
        self.publish();
        aborted
    }

    /// Returns whether any request is unfinished or has outputs, so that a step has work to do.
    pub fn has_unfinished_requests(&self) -> bool {
        let has_outputs = !self.ready_outputs.is_empty() || !self.final_outputs.is_empty();
        has_outputs || self.scheduler.sequences().next().is_some()
    }
}
