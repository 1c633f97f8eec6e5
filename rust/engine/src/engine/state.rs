//! Saves the KV cache of a sequence as bytes and restores it, so that callers can keep a computed prompt in a file.

use std::sync::Arc;

use ferrule_kernels::Cancel;
use ferrule_kernels::kv::PAGE_TOKENS;
use ferrule_model::{Adapter, LanguageModel, LogitRows};

use super::Engine;
use crate::EngineError;
use crate::pages::{Content, Namespace, SavedPage, decode_state, encode_state, payload, payload_len};
use crate::request::{check_prompt, prompt_from_ids};

impl<M: LanguageModel> Engine<M> {
    /// Returns the KV cache of a sequence as bytes. Tokens that are not in the prefix cache are computed. Only full
    /// pages are saved; the few tokens after the last one are computed again on use.
    ///
    /// # Errors
    /// Returns [`EngineError::Request`] if the sequence is empty, too long, contains an id outside the vocabulary, or
    /// the model does not generate; [`EngineError::RemotePages`]; [`EngineError::Cancelled`]; [`EngineError::Dead`].
    pub fn save_state(
        &mut self,
        token_ids: &[i64],
        cache_salt: Option<Arc<str>>,
        adapter: Option<&Adapter>,
        cancel: &Cancel,
    ) -> Result<Vec<u8>, EngineError> {
        self.check_alive()?;
        self.check_generates()?;
        self.check_local_pages()?;
        self.limits.check(token_ids.len(), 0)?;
        let tokens = prompt_from_ids(token_ids, self.model.vocab_size())?;
        let shareable = self.model.shareable_tokens(tokens.len());
        let end = tokens.len().min(shareable) / PAGE_TOKENS * PAGE_TOKENS;
        let namespace = Namespace::new(cache_salt, adapter);
        let tables = self.scheduler.kv_cache.tables(namespace.clone(), shareable);
        self.with_tables(tables, cancel, |engine, tables| {
            let mut computed = engine.scheduler.kv_cache.reuse(tables, &tokens, 0, end);
            // Read pages before they leave the attention window and are released.
            let mut records: Vec<Vec<u8>> = Vec::new();
            loop {
                for index in records.len()..computed / PAGE_TOKENS {
                    records.push(payload(&engine.model, Content::Pages, &tables.pages_at(index)));
                }
                if computed == end {
                    break;
                }
                computed += engine.compute_chunk(tables, &tokens, computed..end, LogitRows::None, adapter, cancel)?;
                let pages = &mut engine.scheduler.kv_cache;
                for new_pages in pages.cache_full_pages(tables, &tokens, tokens.len(), computed) {
                    pages.write_to_disk(tables, &new_pages, &engine.model);
                }
            }
            let fingerprint = engine.model.fingerprint();
            let snapshot = match end {
                0 => Vec::new(),
                _ => payload(&engine.model, Content::States, &tables.pages_at(0)),
            };
            let pages_len = payload_len(&engine.model, Content::Pages);
            Ok(encode_state(&fingerprint, &namespace, &tokens, records.iter(), pages_len, &snapshot))
        })
    }

    fn check_local_pages(&self) -> Result<(), EngineError> {
        if self.model.has_local_pages() { Ok(()) } else { Err(EngineError::RemotePages) }
    }

    /// Loads a saved state into the prefix cache, as far as free pages allow, for sequences with the same adapter
    /// (which need not be loaded now). Returns the state's tokens and how many of them are cached now.
    ///
    /// # Errors
    /// Returns [`EngineError::State`] if the bytes were not saved by [`Engine::save_state`] with the same model;
    /// [`EngineError::RemotePages`]; [`EngineError::NoPrefixCache`]; [`EngineError::Dead`].
    pub fn restore_state(&mut self, state: &[u8]) -> Result<(Vec<u32>, usize), EngineError> {
        self.check_alive()?;
        self.check_local_pages()?;
        if !self.config.enable_prefix_caching {
            return Err(EngineError::NoPrefixCache);
        }
        let [pages_len, states_len] = Content::ALL.map(|content| payload_len(&self.model, content));
        let state = decode_state(state, || self.model.fingerprint(), pages_len, states_len)?;
        check_prompt(&state.tokens, self.model.vocab_size())?;
        let pages = &mut self.scheduler.kv_cache;
        let mut tables = pages.tables(state.namespace, self.model.shareable_tokens(state.tokens.len()));
        let limit = state.pages.len() * PAGE_TOKENS;
        let computed = pages.reuse(&mut tables, &state.tokens, 0, limit);
        let rest = tables.shareable_pages(&state.tokens, limit).zip(&state.pages[computed / PAGE_TOKENS..]);
        let saved = rest.map(|(tokens, pages)| SavedPage { tokens, pages: Some(pages.to_vec()), states: None });
        let mut saved: Vec<SavedPage<'_>> = saved.collect();
        if let Some(last) = saved.last_mut().filter(|_| states_len > 0) {
            last.states = Some(state.snapshot.to_vec());
        }
        let mut moves = Vec::new();
        pages.insert_saved(&tables, saved, &mut moves);
        moves.iter().for_each(|page_move| page_move.apply(&mut self.model));
        let computed = pages.reuse(&mut tables, &state.tokens, computed, limit);
        pages.release(&mut tables);
        self.publish();
        Ok((state.tokens, computed))
    }
}
