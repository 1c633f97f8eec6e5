//! Memory of the KV cache: its size, and its division between a model and a draft model.

use ferrule_kernels::{Cancel, machine};
use ferrule_model::{LanguageModel, Pipeline};

use super::{BuildError, EngineModel, EngineOptions};
use crate::{ConfigError, DraftModel, pages};

/// Divisor of the free memory for the default size of the KV cache: one half, since the program that uses the engine
/// needs memory too.
pub(super) const DEFAULT_SHARE: u64 = 2;

/// Divisor of the free memory for the minimum size of the KV cache beside mapped weights that may exceed the memory.
/// Such weights are read from their file repeatedly anyway.
const PAGING_SHARE: u64 = 4;

/// Allocates the KV caches and returns the number of pages of each of the model's groups.
pub(super) fn allocate(
    model: &mut EngineModel,
    mut draft: Option<&mut DraftModel<EngineModel>>,
    options: &EngineOptions,
    max_model_len: usize,
    cancel: &Cancel,
) -> Result<Vec<usize>, BuildError> {
    let mapped = model.mapped_bytes() + draft.as_ref().map_or(0, |draft| draft.model.mapped_bytes());
    let available =
        model.pipeline().map_or_else(|| available_beside(mapped, options.allow_paging), Pipeline::kv_budget);
    let budget = options.kv_cache_memory.unwrap_or(available / DEFAULT_SHARE);
    if budget > available {
        return Err(BuildError::KvMemory { requested: budget, available });
    }
    let divide = |model: &mut EngineModel, budget: u64, max_model_len: usize| {
        let EngineOptions { max_num_seqs, max_num_batched_tokens, .. } = *options;
        let pages = pages::divide(model.kv_groups(), budget, max_model_len, max_num_seqs, max_num_batched_tokens)
            .map_err(|error: ConfigError| BuildError::from(error))?;
        model.allocate_kv(&pages, cancel)?;
        Ok::<_, BuildError>(pages)
    };
    // Both caches hold the same number of tokens.
    let for_one = |model: &EngineModel| {
        u128::from(pages::bytes_of_one(model.kv_groups(), max_model_len, options.max_num_batched_tokens))
    };
    let draft_bytes = draft.as_ref().map_or(0, |draft| for_one(&draft.model));
    let total_bytes = for_one(model).max(1) + draft_bytes;
    let draft_budget = (u128::from(budget) * draft_bytes / total_bytes) as u64;
    if let Some(draft) = &mut draft {
        draft.pages = divide(&mut draft.model, draft_budget, draft.max_model_len)?;
    }
    divide(model, budget - draft_budget, max_model_len)
}

/// Returns the free bytes for a KV cache beside mapped weights. The system counts mapped pages as free until they are
/// read, so they are subtracted.
pub(super) fn available_beside(mapped: u64, allow_paging: bool) -> u64 {
    if mapped == 0 {
        return machine::available_memory();
    }
    let free = machine::memory_for_files();
    free.saturating_sub(mapped).max(if allow_paging { free / PAGING_SHARE } else { 0 })
}
