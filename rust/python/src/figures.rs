//! The figures of a model as JSON: of one that is loaded, and of one that might be.

use ferrule_engine::pages;
use ferrule_kernels::Format;
use ferrule_kernels::arch::Isa;
use ferrule_kernels::kv::PAGE_TOKENS;
use ferrule_kernels::machine;
use ferrule_model::{KvGroup, LoadError, ModelSpec, Needs, Quantization, WeightSizes, buffer_bytes};
use pyo3::prelude::*;
use serde_json::{Map, Value, json};

use crate::engine::DEFAULT_KV_SHARE;
use crate::errors;
use crate::options::Options;
use crate::packing::WeightFiles;

/// What a model is on this machine and under these options, whether it is loaded or not.
pub(crate) fn describe(
    weights: &WeightSizes,
    quantization: Quantization,
    groups: &[KvGroup],
    options: &Options,
    isa: Isa,
) -> Value {
    let by_format = Format::ALL.iter().zip(weights.bytes_by_format).filter(|(_, bytes)| *bytes > 0);
    let by_format: Map<_, _> = by_format.map(|(format, bytes)| (format.name().to_owned(), json!(bytes))).collect();
    let page_bytes: u64 = groups.iter().map(|group| group.page_bytes).sum();
    // What a token looks back upon: in each group no more than its window.
    let windows: Vec<_> = groups
        .iter()
        .map(|group| json!({ "window": group.window, "bytes_per_token": group.page_bytes / PAGE_TOKENS as u64 }))
        .collect();
    json!({
        "isa": isa.name(),
        "threads": options.threads,
        "quantization": quantization.name(),
        "kv_cache_dtype": options.kv_format.name(),
        "parameters": weights.parameters,
        "parameters_per_token": weights.parameters_per_token,
        "layer_parameters": weights.layer_parameters,
        "layer_parameters_per_token": weights.layer_parameters_per_token,
        "weight_bytes": weights.weight_bytes,
        "weight_bytes_by_format": by_format,
        "weight_bytes_per_token": weights.weight_bytes_per_token,
        "vector_bytes": weights.vector_bytes,
        "kv_bytes_per_token": page_bytes / PAGE_TOKENS as u64,
        "kv_windows": windows,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
    })
}

/// What a model would be and take, without loading it.
#[pyfunction]
#[pyo3(signature = (spec, weights, options))]
pub(crate) fn measure(py: Python<'_>, spec: &str, weights: Option<&str>, options: &str) -> PyResult<String> {
    let spec = ModelSpec::from_json(spec).map_err(|error| errors::spec_error(&error))?;
    let options = Options::from_json(options, &spec)?;
    let isa = errors::chosen_isa()?;
    let measured = py.detach(|| {
        let files = WeightFiles::open(weights, &spec, options.mmap)?;
        let source = files.source(options.allow_paging);
        let quantization = options.quantization.unwrap_or_else(|| Quantization::auto(source));
        let needs = ferrule_model::measure(&spec, source, quantization, options.kv_format)?;
        let is_mapped = options.mmap && matches!(files, WeightFiles::Packed(_));
        Ok::<_, LoadError>((needs, quantization, files.stored(), is_mapped))
    });
    let (Needs { weights, kv_groups }, quantization, stored, is_mapped) =
        measured.map_err(|error| errors::load_error(&error))?;
    let Options { max_model_len, max_num_seqs, max_num_batched_tokens: chunk, .. } = options;

    // One sequence, however long. Its prompt comes in chunks, unless it is read both ways; one row at a time has logits.
    let kv_bytes = pages::bytes_of_one(&kv_groups, max_model_len, chunk);
    let rows = if spec.causal { chunk.min(max_model_len) } else { max_model_len };
    let buffers = buffer_bytes(&spec, rows, 1);
    let kept = weights.weight_bytes.saturating_add(weights.vector_bytes);
    let available = if is_mapped { machine::memory_for_files() } else { machine::available_memory() };
    // As an engine divides what the weights leave.
    let budget = options.kv_cache_memory.unwrap_or(available.saturating_sub(kept) / DEFAULT_KV_SHARE);
    let held = pages::divide(&kv_groups, budget, max_model_len, max_num_seqs, chunk)
        .map_or(0, |pages| pages::tokens_of_one(&kv_groups, &pages).min(max_model_len));

    let mut figures = describe(&weights, quantization, &kv_groups, &options, isa);
    figures["mapped_bytes"] = json!(if is_mapped { weights.weight_bytes } else { 0 });
    figures["checkpoint_bytes"] = json!(stored.as_ref().map(|(bytes, _)| bytes));
    figures["stored_types"] = stored.map_or(Value::Null, |(_, types)| {
        let each = |(name, (tensors, bytes))| (name, json!({"tensors": tensors, "bytes": bytes}));
        types.into_iter().map(each).collect()
    });
    figures["max_model_len"] = json!(max_model_len);
    figures["memory"] = json!({
        "weights": weights.weight_bytes,
        "vectors": weights.vector_bytes,
        "kv_cache": kv_bytes,
        "buffers": buffers,
        "needed": kept.saturating_add(kv_bytes).saturating_add(buffers),
        "available": available,
        "holds_tokens": if kept > available { 0 } else { held },
    });
    Ok(figures.to_string())
}
