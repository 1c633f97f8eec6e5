//! How PEFT names an adapter's tensors, and which module of the model each is for.

use super::error::TensorFault;
use crate::spec::ModelSpec;

/// What PEFT puts before the base's names.
const BASE: &str = "base_model.model.";

/// One of the two matrices of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    A,
    B,
}

impl Half {
    /// What a module's matrix is called.
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

/// The module that a tensor is for, and which of its matrices it is.
pub(super) fn module_of(tensor: &str) -> Result<(&str, Half), TensorFault> {
    for half in [Half::A, Half::B] {
        let module = tensor.strip_prefix(BASE).and_then(|name| name.strip_suffix(half.ending()));
        if let Some(module) = module {
            return Ok((module, half));
        }
    }
    let whole = |part: &str| tensor.contains(part);
    Err(if whole(".lora_magnitude_vector") {
        TensorFault::Unsupported { what: "a matrix by directions and magnitudes (DoRA)" }
    } else if whole(".lora_embedding_") {
        TensorFault::Unsupported { what: "an embedding" }
    } else if tensor.starts_with(BASE) && !whole(".lora_") {
        TensorFault::Unsupported { what: "the base's own weights (modules_to_save, or an embedding trained along)" }
    } else if whole(".lora_B.bias") {
        TensorFault::Unsupported { what: "a bias (lora_bias)" }
    } else {
        TensorFault::Name
    })
}

/// What a role is that no adapter can change; none where it can.
pub(super) fn unsupported(role: &str) -> Option<&'static str> {
    if role.contains(".experts.") {
        return Some("an expert of a mixture");
    }
    if role.ends_with(".router") {
        return Some("the router of a mixture");
    }
    match role {
        "embedding" => Some("an embedding"),
        "head" | "head_projection" | "embedding_projection" => None,
        _ if role.starts_with("layers.") => None,
        _ => Some("what runs once for a text"),
    }
}

/// The layer of a role.
pub(super) fn layer_of(role: &str) -> Option<usize> {
    role.strip_prefix("layers.")?.split('.').next()?.parse().ok()
}

/// The module of a stored tensor, and what else it may be called: see [`ModelSpec::prefixes`]. Empty for a tensor that
/// is no module's weight.
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
    fn tensors_are_named_as_they_are_read() {
        for half in [Half::A, Half::B] {
            let tensor = half.tensor_of("model.layers.0.q_proj");
            assert_eq!(module_of(&tensor), Ok(("model.layers.0.q_proj", half)));
        }
    }

    #[test]
    fn what_is_no_matrix_of_an_adapter_is_told_by_its_name() {
        for (tensor, says) in [
            ("base_model.model.model.layers.0.q_proj.lora_magnitude_vector", "DoRA"),
            ("base_model.model.model.embed_tokens.lora_embedding_A", "changes an embedding"),
            ("base_model.model.lm_head.weight", "modules_to_save"),
            ("base_model.model.model.layers.0.q_proj.lora_B.bias", "lora_bias"),
            ("model.layers.0.q_proj.lora_A.weight", "is no matrix"),
            ("base_model.model.q_proj.lora_C.weight", "is no matrix"),
        ] {
            let fault = module_of(tensor).unwrap_err().to_string();
            assert!(fault.contains(says), "{tensor}: {fault}");
        }
    }

    #[test]
    fn roles_say_what_they_are() {
        assert_eq!(layer_of("layers.12.ffn.router"), Some(12));
        assert_eq!(layer_of("head"), None);
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
        for role in ["head", "embedding_projection", "layers.0.ffn.shared.up", "layers.0.attention.q"] {
            assert_eq!(unsupported(role), None, "{role}");
        }
    }
}
