//! PEFT's tensor names, and the module of the model that each tensor belongs to.

use super::error::TensorError;
use crate::spec::ModelSpec;

/// Prefix that PEFT adds to the names of the base model.
const BASE: &str = "base_model.model.";

/// One of the two matrices of a LoRA module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    A,
    B,
}

impl Half {
    /// Returns the tensor name of a module's matrix.
    pub fn tensor_of(self, module: &str) -> String {
        format!("{BASE}{module}{}", self.ending())
    }

    fn ending(self) -> &'static str {
        match self {
            Self::A => ".lora_A.weight",
            Self::B => ".lora_B.weight",
        }
    }
}

/// Returns the module that a tensor belongs to, and which of its matrices it is.
pub(super) fn module_of(tensor: &str) -> Result<(&str, Half), TensorError> {
    for half in [Half::A, Half::B] {
        let module = tensor.strip_prefix(BASE).and_then(|name| name.strip_suffix(half.ending()));
        if let Some(module) = module {
            return Ok((module, half));
        }
    }
    let whole = |part: &str| tensor.contains(part);
    Err(if whole(".lora_magnitude_vector") {
        TensorError::Unsupported { what: "weights by direction and magnitude (DoRA)" }
    } else if whole(".lora_embedding_") {
        TensorError::Unsupported { what: "an embedding" }
    } else if tensor.starts_with(BASE) && !whole(".lora_") {
        TensorError::Unsupported { what: "weights of the base model (modules_to_save, or a trained embedding)" }
    } else if whole(".lora_B.bias") {
        TensorError::Unsupported { what: "a bias (lora_bias)" }
    } else {
        TensorError::Name
    })
}

/// Returns what a role is, if adapters cannot change it; `None` if they can.
pub(super) fn unsupported(role: &str) -> Option<&'static str> {
    if role.contains(".experts.") {
        return Some("an expert of a mixture of experts");
    }
    if role.ends_with(".router") {
        return Some("the router of a mixture of experts");
    }
    match role {
        "embedding" => Some("an embedding"),
        "lm_head" | "lm_head_projection" | "embedding_projection" => None,
        _ if role.starts_with("layers.") || role.starts_with("streams.") => None,
        _ => Some("a classifier or text projection"),
    }
}

/// Returns the layer of a role.
pub(super) fn layer_of(role: &str) -> Option<usize> {
    role.strip_prefix("layers.")?.split('.').next()?.parse().ok()
}

/// Returns the module of a stored tensor, and its other names by [`ModelSpec::prefixes`]. Returns nothing for a tensor
/// that is not the weight of a module.
pub(super) fn modules(spec: &ModelSpec, tensor: &str) -> Vec<String> {
    let Some(module) = tensor.strip_suffix(".weight") else { return Vec::new() };
    let others = spec.prefixes.iter().filter_map(|(usual, other)| {
        let rest = module.strip_prefix(usual.as_str())?;
        Some(format!("{other}{rest}"))
    });
    std::iter::once(module.to_owned()).chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_names_round_trip() {
        for half in [Half::A, Half::B] {
            let tensor = half.tensor_of("model.layers.0.q_proj");
            assert_eq!(module_of(&tensor), Ok(("model.layers.0.q_proj", half)));
        }
    }

    #[test]
    fn tensors_that_adapters_do_not_have_are_refused_by_name() {
        for (tensor, says) in [
            ("base_model.model.model.layers.0.q_proj.lora_magnitude_vector", "DoRA"),
            ("base_model.model.model.embed_tokens.lora_embedding_A", "changes an embedding"),
            ("base_model.model.lm_head.weight", "modules_to_save"),
            ("base_model.model.model.layers.0.q_proj.lora_B.bias", "lora_bias"),
            ("model.layers.0.q_proj.lora_A.weight", "is not a matrix"),
            ("base_model.model.q_proj.lora_C.weight", "is not a matrix"),
        ] {
            let error = module_of(tensor).unwrap_err().to_string();
            assert!(error.contains(says), "{tensor}: {error}");
        }
    }

    #[test]
    fn roles_have_layers_and_support() {
        assert_eq!(layer_of("layers.12.ffn.router"), Some(12));
        assert_eq!(layer_of("lm_head"), None);
        for role in [
            "embedding",
            "layers.0.ffn.experts.3.up",
            "layers.0.ffn.router",
            "classifier",
            "classifier.dense",
            "text_projections.0",
        ] {
            assert!(unsupported(role).is_some(), "{role}");
        }
        for role in ["lm_head", "embedding_projection", "layers.0.ffn.shared.up", "layers.0.attention.q"] {
            assert_eq!(unsupported(role), None, "{role}");
        }
    }
}
