//! Saves the KV cache of a sequence as bytes and restores it, so that callers can keep a computed prompt in a file.

use std::sync::Arc;

use ferrule_kernels::Cancel;
use ferrule_kernels::kv::PAGE_TOKENS;
use ferrule_model::{Adapter, LanguageModel, LogitRows};

use super::Engine;
use crate::EngineError;
use crate::pages::{Namespace, PAGE_NONE, decode_state, encode_state, payload, payload_len};
use crate::request::{check_prompt, prompt_from_ids};

impl<M: LanguageModel> Engine<M> {
    /// Returns the KV cache of a sequence as bytes. Tokens that are not in the prefix cache are computed. Only full
    /// pages are saved; the few tokens after the last one are computed again on use.
    ///
    /// # Errors
    /// Returns [`EngineError::Request`] if the sequence is empty, too long, contains an id outside the vocabulary, or
    /// the model does not generate; [`EngineError::NoSavedStates`]; [`EngineError::Cancelled`]; [`EngineError::Dead`].
    pub fn save_state(
        &mut self,
        token_ids: &[i64],
        cache_salt: Option<Arc<str>>,
        adapter: Option<&Adapter>,
        cancel: &Cancel,
    ) -> Result<Vec<u8>, EngineError> {
        self.check_alive()?;
        self.check_generates()?;
        self.check_saved_states()?;
        self.limits.check(token_ids.len(), 0)?;
        let tokens = prompt_from_ids(token_ids, self.model.vocab_size())?;
        let shareable = self.model.shareable_tokens(tokens.len());
        let end = tokens.len().min(shareable) / PAGE_TOKENS * PAGE_TOKENS;
        let namespace = Namespace::new(cache_salt, adapter);
        let tables = self.scheduler.kv_cache.tables(namespace.clone(), shareable);
        self.with_tables(tables, |engine, tables| {
            let mut computed = engine.scheduler.kv_cache.reuse(tables, &tokens, 0, end);
            // Read pages before they leave the attention window and are released.
            let mut records: Vec<Vec<u8>> = Vec::new();
            loop {
                for index in records.len()..computed / PAGE_TOKENS {
                    let pages = tables.tables().iter().map(|table| table.get(index).copied().unwrap_or(PAGE_NONE));
                    records.push(payload(&engine.model, pages));
                }
                if computed == end {
                    break;
                }
                computed += engine.compute_chunk(tables, &tokens, computed..end, LogitRows::None, adapter, cancel)?;
                let pages = &mut engine.scheduler.kv_cache;
                for new_pages in pages.cache_full_pages(tables, &tokens, computed) {
                    pages.write_to_disk(tables, &new_pages, &engine.model);
                }
            }
            let fingerprint = engine.model.fingerprint();
            let payload_len = payload_len(&engine.model);
            Ok(encode_state(&fingerprint, &namespace, &tokens, records.iter(), payload_len))
        })
    }

    /// Checks that saved states can hold the model's sequence memory.
    fn check_saved_states(&self) -> Result<(), EngineError> {
        if self.scheduler.kv_cache.has_states() { Err(EngineError::NoSavedStates) } else { Ok(()) }
    }

    /// Loads a saved state into the prefix cache, as far as free pages allow, for sequences with the same adapter
    /// (which need not be loaded now). Returns the state's tokens and how many of them are cached now.
    ///
    /// # Errors
    /// Returns [`EngineError::State`] if the bytes were not saved by [`Engine::save_state`] with the same model;
    /// [`EngineError::NoPrefixCache`]; [`EngineError::NoSavedStates`]; [`EngineError::Dead`].
    pub fn restore_state(&mut self, state: &[u8]) -> Result<(Vec<u32>, usize), EngineError> {
        self.check_alive()?;
        if !self.config.enable_prefix_caching {
            return Err(EngineError::NoPrefixCache);
        }
        self.check_saved_states()?;
        let state = decode_state(state, || self.model.fingerprint(), payload_len(&self.model))?;
        check_prompt(&state.tokens, self.model.vocab_size())?;
        let pages = &mut self.scheduler.kv_cache;
        let mut tables = pages.tables(state.namespace, self.model.shareable_tokens(state.tokens.len()));
        let limit = state.pages.len() * PAGE_TOKENS;
        let computed = pages.reuse(&mut tables, &state.tokens, 0, limit);
        let records = tables.shareable_pages(&state.tokens, limit).zip(&state.pages[computed / PAGE_TOKENS..]);
        let records: Vec<_> = records.map(|(tokens, payload)| (tokens, payload.to_vec())).collect();
        let mut moves = Vec::new();
        pages.insert_loaded(&tables, records.into_iter(), &mut moves);
        moves.iter().for_each(|page_move| page_move.apply(&mut self.model));
        let computed = pages.reuse(&mut tables, &state.tokens, computed, limit);
        pages.release(&mut tables);
        self.publish();
        Ok((state.tokens, computed))
    }
}
