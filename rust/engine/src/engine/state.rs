//! A sequence's keys and values as bytes, and back: for callers who keep a computed prompt in a file of their own.

use std::sync::Arc;

use ferrule_kernels::Cancel;
use ferrule_kernels::kv::PAGE_TOKENS;
use ferrule_model::{Adapter, LanguageModel, LogitRows};

use super::Engine;
use crate::EngineError;
use crate::pages::{Namespace, PAGE_NONE, decode_state, encode_state, payload, payload_len};
use crate::request::{check_prompt, prompt_from_ids};

impl<M: LanguageModel> Engine<M> {
    /// The state after these tokens: what is not in the prefix cache is computed. Whole pages are saved; the tokens after
    /// the last one cost little to compute again.
    ///
    /// # Errors
    /// [`EngineError::Request`] if the sequence is empty, too long or not of the model's tokens, or the model generates
    /// nothing; [`EngineError::Cancelled`], [`EngineError::Dead`].
    pub fn save_state(
        &mut self,
        token_ids: &[i64],
        cache_salt: Option<Arc<str>>,
        adapter: Option<&Adapter>,
        cancel: &Cancel,
    ) -> Result<Vec<u8>, EngineError> {
        self.check_alive()?;
        self.check_generates()?;
        self.limits.check(token_ids.len(), 0)?;
        let tokens = prompt_from_ids(token_ids, self.model.vocab_size())?;
        let shareable = self.model.shareable_tokens(tokens.len());
        let end = tokens.len().min(shareable) / PAGE_TOKENS * PAGE_TOKENS;
        let namespace = Namespace::new(cache_salt, adapter);
        let tables = self.scheduler.pages.tables(namespace.clone(), shareable);
        self.with_tables(tables, |engine, tables| {
            let mut computed = engine.scheduler.pages.reuse(tables, &tokens, 0, end);
            // Pages that a window has passed are read before they are given back.
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
                let pages = &mut engine.scheduler.pages;
                for fresh in pages.cache_full_pages(tables, &tokens, computed) {
                    pages.write_to_disk(tables, &fresh, &engine.model);
                }
            }
            let fingerprint = engine.model.fingerprint();
            let payload_len = payload_len(&engine.model);
            Ok(encode_state(&fingerprint, &namespace, &tokens, records.iter(), payload_len))
        })
    }

    /// Brings a saved state into the prefix cache, as far as there is room, for sequences with the same adapter, whether
    /// or not that is loaded now; its tokens, and how many of them are there now.
    ///
    /// # Errors
    /// [`EngineError::State`] for bytes that [`Engine::save_state`] did not give for the same model,
    /// [`EngineError::NoPrefixCache`], [`EngineError::Dead`].
    pub fn restore_state(&mut self, state: &[u8]) -> Result<(Vec<u32>, usize), EngineError> {
        self.check_alive()?;
        if !self.config.enable_prefix_caching {
            return Err(EngineError::NoPrefixCache);
        }
        let state = decode_state(state, || self.model.fingerprint(), payload_len(&self.model))?;
        check_prompt(&state.tokens, self.model.vocab_size())?;
        let pages = &mut self.scheduler.pages;
        let mut tables = pages.tables(state.namespace, self.model.shareable_tokens(state.tokens.len()));
        let most = state.pages.len() * PAGE_TOKENS;
        let computed = pages.reuse(&mut tables, &state.tokens, 0, most);
        let records = tables.shareable_pages(&state.tokens, most).zip(&state.pages[computed / PAGE_TOKENS..]);
        let records: Vec<_> = records.map(|(tokens, payload)| (tokens, payload.to_vec())).collect();
        let mut moves = Vec::new();
        pages.insert_loaded(&tables, records.into_iter(), &mut moves);
        moves.iter().for_each(|page_move| page_move.apply(&mut self.model));
        let computed = pages.reuse(&mut tables, &state.tokens, computed, most);
        pages.release(&mut tables);
        self.publish();
        Ok((state.tokens, computed))
    }
}
