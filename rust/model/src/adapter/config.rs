//! Configuration of an adapter, as Python has read and checked it.

use serde::Deserialize;

use super::error::AdapterError;

/// Configuration of an adapter.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterConfig {
    /// Rank of modules that `rank_pattern` does not name.
    pub rank: usize,
    /// Alpha, the numerator of the scale, of modules that `alpha_pattern` does not name.
    pub alpha: f64,
    /// Whether the scale is alpha divided by the square root of the rank (rsLoRA, Kalajdzievski 2023) instead of the
    /// rank.
    pub rank_stabilized: bool,
    /// Ranks of named modules; the first match counts.
    pub rank_pattern: Vec<(String, usize)>,
    /// Alphas of named modules; the first match counts.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Names of the modules that have an adapter; `None` if the tensors determine it.
    pub targets: Option<Vec<String>>,
    /// Names of modules that have no adapter even if `targets` names them.
    pub excluded: Vec<String>,
    /// Layers whose modules have an adapter; `None` for all.
    pub layers: Option<Vec<usize>>,
}

impl AdapterConfig {
    /// Reads the JSON that Python writes.
    ///
    /// # Errors
    /// [`AdapterError::Config`].
    pub fn from_json(json: &str) -> Result<Self, AdapterError> {
        serde_json::from_str(json).map_err(|error| AdapterError::Config(error.to_string()))
    }

    /// Returns the rank and the scale of a module. The scale may exceed f32.
    pub(super) fn rank_and_scale(&self, module: &str) -> (usize, f64) {
        let rank = of_first(&self.rank_pattern, module).unwrap_or(self.rank);
        let alpha = of_first(&self.alpha_pattern, module).unwrap_or(self.alpha);
        let denominator = if self.rank_stabilized { (rank as f64).sqrt() } else { rank as f64 };
        (rank, alpha / denominator)
    }

    /// Returns whether a module has an adapter, or `None` if the tensors determine it.
    pub(super) fn targets(&self, module: &str, layer: Option<usize>) -> Option<bool> {
        let targets = self.targets.as_ref()?;
        let is_in_layer = self.layers.as_ref().is_none_or(|layers| layer.is_some_and(|layer| layers.contains(&layer)));
        Some(is_in_layer && any_names(targets, module) && !any_names(&self.excluded, module))
    }
}

/// Returns the value of the first name that matches a module.
fn of_first<T: Copy>(pattern: &[(String, T)], module: &str) -> Option<T> {
    pattern.iter().find(|(name, _)| names(name, module)).map(|(_, value)| *value)
}

fn any_names(all: &[String], module: &str) -> bool {
    all.iter().any(|name| names(name, module))
}

/// Returns whether a name matches a module: its end after a dot, or, with a leading `^`, all of it.
pub(super) fn names(name: &str, module: &str) -> bool {
    match name.strip_prefix('^') {
        Some(whole) => module == whole,
        None => module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.')),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> AdapterConfig {
        let json = r#"{
            "rank": 8, "alpha": 16.0, "rank_stabilized": false,
            "rank_pattern": [["down_proj", 4], ["^model.layers.1.down_proj", 2]],
            "alpha_pattern": [["layers.1.up_proj", 24.0]],
            "targets": ["up_proj", "down_proj"], "excluded": ["layers.2.up_proj"], "layers": [1, 2]
        }"#;
        AdapterConfig::from_json(json).unwrap()
    }

    #[test]
    fn names_match_the_end_of_module_names_after_a_dot() {
        for (name, module, fits) in [
            ("q_proj", "model.layers.0.q_proj", true),
            ("proj", "model.layers.0.q_proj", false),
            ("layers.0.q_proj", "model.layers.10.q_proj", false),
            ("model.layers.0.q_proj", "model.layers.0.q_proj", true),
            ("^model.layers.0.q_proj", "model.layers.0.q_proj", true),
            ("^q_proj", "model.layers.0.q_proj", false),
            ("", "q_proj", false),
        ] {
            assert_eq!(names(name, module), fits, "{name:?} {module:?}");
        }
    }

    #[test]
    fn the_first_matching_name_sets_rank_and_scale() {
        let config = config();
        assert_eq!(config.rank_and_scale("model.layers.0.up_proj"), (8, 2.0));
        assert_eq!(config.rank_and_scale("model.layers.1.up_proj"), (8, 3.0));
        assert_eq!(config.rank_and_scale("model.layers.1.down_proj"), (4, 4.0));
        let stabilized = AdapterConfig { rank_stabilized: true, ..config };
        assert_eq!(stabilized.rank_and_scale("model.layers.0.down_proj"), (4, 8.0));
    }

    #[test]
    fn targets_respect_names_exclusions_and_layers() {
        let config = config();
        assert_eq!(config.targets("model.layers.1.up_proj", Some(1)), Some(true));
        assert_eq!(config.targets("model.layers.1.q_proj", Some(1)), Some(false));
        assert_eq!(config.targets("model.layers.2.up_proj", Some(2)), Some(false));
        assert_eq!(config.targets("model.layers.3.up_proj", Some(3)), Some(false));
        assert_eq!(config.targets("up_proj", None), Some(false));
        let by_tensors = AdapterConfig { targets: None, ..config };
        assert_eq!(by_tensors.targets("model.layers.3.up_proj", Some(3)), None);
    }

    #[test]
    fn an_unknown_field_is_refused_by_name() {
        let error = AdapterConfig::from_json(r#"{"rank": 8, "dora": true}"#).unwrap_err();
        assert!(error.to_string().contains("`dora`"), "{error}");
    }
}
