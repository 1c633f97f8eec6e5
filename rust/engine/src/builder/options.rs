//! Options of an engine: one table row each; see [`crate::parameter`].

use std::path::PathBuf;
use std::time::Duration;

use ferrule_kernels::Format;
use ferrule_kernels::kv::KvFormat;
use ferrule_model::Quantization;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::parameter::{
    Bounds, Checked, Choice, Directory, Flag, Integer, InvalidParameterError, Kind, MAX_COUNT, Optional, Real, Seconds,
    malformed, parameters,
};
use crate::{SpeculativeConfig, SpeculativeMethod};

/// Maximum number of threads; more than any supported machine has processors.
const MAX_THREADS: i128 = 1024;
/// Maximum number of sequences of a step, and of tokens of a step.
const MAX_STEP: i128 = 65_536;
/// Maximum target inter-token latency, in seconds.
const MAX_TARGET_ITL: f64 = 3600.0;
/// Maximum number of draft tokens of a sequence in a step.
const MAX_SPECULATIVE_TOKENS: i128 = 64;
/// Maximum length of an n-gram that prompt lookup compares.
const MAX_PROMPT_LOOKUP: i128 = 64;
/// Default size of a prefix cache directory: 8 GiB.
const PREFIX_CACHE_DIR_LIMIT: u64 = 8 << 30;
/// Number of bytes.
const BYTES: Integer<u64> = Integer::new(1, i64::MAX as i128);

/// Formats of the weights, and `auto`.
const QUANTIZATION: Choice<Option<Quantization>> = Choice {
    names: || ["auto"].into_iter().chain(Quantization::ALL.iter().map(|each| each.name())).collect(),
    named: |name| if name == "auto" { Some(None) } else { Quantization::named(name).map(Some) },
    name: |quantization| quantization.map_or("auto", |each| each.name()),
};

/// Formats of keys and values, and `auto`.
const KV_CACHE_DTYPE: Choice<Option<KvFormat>> = Choice {
    names: || ["auto"].into_iter().chain(KvFormat::ALL.iter().map(|each| each.name())).collect(),
    named: |name| if name == "auto" { Some(None) } else { KvFormat::named(name).map(Some) },
    name: |format| format.map_or("auto", |each| each.name()),
};

/// Placement of threads and weights.
const NUMA: Choice<bool> = Choice {
    names: || vec!["auto", "off"],
    named: |name| ["off", "auto"].iter().position(|each| *each == name).map(|is_on| is_on == 1),
    name: |is_on| if *is_on { "auto" } else { "off" },
};

parameters! {
    /// Options of an engine: how it loads a model, and how much memory and time it may use.
    #[derive(Debug, Clone, PartialEq)]
    pub struct EngineOptions ("options") {
        /// Format of the weights; "auto" is int8, bf16 for encoders, or the stored format of quantized weights.
        quantization: Option<Quantization> = None, QUANTIZATION;
        /// Format of the KV cache; "auto" is f32 beside f32 weights, else f16.
        kv_cache_dtype: Option<KvFormat> = None, KV_CACHE_DTYPE;
        /// Whether a packed file is mapped into memory, so that processes share it, or read into memory.
        mmap: bool = true, Flag;
        /// Whether mapped weights may exceed the memory; they are then read from disk repeatedly.
        allow_paging: bool = false, Flag;
        /// Number of threads; default: the processors that the process may use.
        threads: Option<usize> = None, Optional(Integer::new(1, MAX_THREADS));
        /// Whether threads and weights are placed by NUMA node, if the processors are on several.
        numa: bool = true, NUMA;
        /// Maximum number of tokens of a sequence, prompt and output together; default: the model's context.
        max_model_len: Option<usize> = None, Optional(Integer::new(1, i64::MAX as i128));
        /// Size of the KV cache in bytes; default: half of the free memory.
        kv_cache_memory: Option<u64> = None, Optional(BYTES);
        /// Maximum number of sequences in a step.
        max_num_seqs: usize = 64, Integer::new(1, MAX_STEP);
        /// Maximum number of tokens in a step, and so the size of a prefill chunk.
        max_num_batched_tokens: usize = 512, Integer::new(1, MAX_STEP);
        /// Maximum number of requests that wait to be scheduled; default: no limit.
        max_queued_requests: Option<usize> = None, Optional(Integer::new(1, MAX_COUNT as i128));
        /// Target inter-token latency in seconds: limits prefill beside sequences that decode.
        target_itl: Duration = Duration::from_millis(150), Seconds(Real::above(0.0, MAX_TARGET_ITL));
        /// Whether requests share the KV cache of a common prefix; it never changes a token.
        enable_prefix_caching: bool = true, Flag;
        /// Directory in which prefixes outlive the process; default: memory only.
        prefix_cache_dir: Option<PathBuf> = None, Optional(Directory);
        /// Maximum number of bytes in `prefix_cache_dir`.
        prefix_cache_dir_limit: u64 = PREFIX_CACHE_DIR_LIMIT, BYTES;
        /// Speculative decoding; it never changes a token.
        speculative_config: SpeculativeConfig = SpeculativeConfig::default(), Speculative;
    }
}

impl EngineOptions {
    /// Reads and checks the options of an engine, written as a JSON object.
    ///
    /// # Errors
    /// [`InvalidParameterError`] for the first violation.
    pub fn from_json(text: &str) -> Result<Self, InvalidParameterError> {
        if !text.trim_start().starts_with('{') {
            // serde would also accept a list with the fields in order.
            return Err(malformed("options", &"expected an object"));
        }
        Self::read_object(&mut serde_json::Deserializer::from_str(text))
    }

    /// Checks the options, also against the longest context of the model.
    pub(super) fn check(&self, context: usize) -> Checked<()> {
        self.check_bounds()?;
        if self.prefix_cache_dir.is_some() && !self.enable_prefix_caching {
            return Err(InvalidParameterError::new("enable_prefix_caching", false, "true with prefix_cache_dir"));
        }
        match self.max_model_len.filter(|tokens| *tokens > context) {
            Some(tokens) => {
                let requirement = format!("an integer from 1 to {context}");
                Err(InvalidParameterError::new("max_model_len", tokens, requirement))
            }
            None => Ok(()),
        }
    }

    /// Returns the format of the KV cache: f32 if the weights are f32; else f16, which halves the bytes to read.
    pub(super) fn kv_format(&self) -> KvFormat {
        let is_exact = self.quantization.is_some_and(|each| each.is_all(Format::F32));
        self.kv_cache_dtype.unwrap_or(if is_exact { KvFormat::F32 } else { KvFormat::F16 })
    }
}

/// Kind of a [`SpeculativeConfig`].
struct Speculative;

/// The object in the form of the JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    num_speculative_tokens: Value,
    /// Minimum and maximum length of an n-gram of prompt lookup, or null.
    prompt_lookup: Option<(Value, Value)>,
    adaptive: bool,
}

impl Kind for Speculative {
    type Value = SpeculativeConfig;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<SpeculativeConfig>> {
        if value.is_null() {
            return Ok(None);
        }
        let Written { num_speculative_tokens, prompt_lookup, adaptive } =
            Deserialize::deserialize(value).map_err(|error| malformed(field, &error))?;
        let count = |name: &str, value: &Value, low: i128, high: i128| {
            let kind = Integer::<usize>::new(low, high);
            let absent = || InvalidParameterError::new(name, Value::Null, kind.bounds().requirement);
            kind.read(name, value)?.ok_or_else(absent)
        };
        let lookup = |(shortest, longest): (Value, Value)| {
            let longest = count("prompt_lookup_max", &longest, 1, MAX_PROMPT_LOOKUP)?;
            let shortest = count("prompt_lookup_min", &shortest, 1, longest as i128)?;
            Ok(SpeculativeMethod::Ngram { shortest, longest })
        };
        Ok(Some(SpeculativeConfig {
            method: prompt_lookup.map(lookup).transpose()?,
            num_speculative_tokens: count(
                "num_speculative_tokens",
                &num_speculative_tokens,
                0,
                MAX_SPECULATIVE_TOKENS,
            )?,
            adaptive,
        }))
    }

    fn write(&self, value: &SpeculativeConfig) -> Value {
        let SpeculativeConfig { method, num_speculative_tokens, adaptive } = value;
        let lookup = method.as_ref().map(|SpeculativeMethod::Ngram { shortest, longest }| (shortest, longest));
        json!({"num_speculative_tokens": num_speculative_tokens, "prompt_lookup": lookup, "adaptive": adaptive})
    }

    fn bounds(&self) -> Bounds {
        Bounds { kind: "object", requirement: "an object of speculative decoding options".into(), ..Bounds::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> InvalidParameterError {
        EngineOptions::from_json(text).and_then(|options| options.check(256)).unwrap_err()
    }

    #[test]
    fn invalid_values_are_refused_by_name() {
        for (field, value, requirement) in [
            ("quantization", "\"int5\"", "one of auto, "),
            ("kv_cache_dtype", "8", "one of auto, "),
            ("mmap", "1", "true or false"),
            ("threads", "0", "an integer from 1 to 1024"),
            ("numa", "\"on\"", "one of auto, off"),
            ("max_model_len", "257", "an integer from 1 to 256"),
            ("max_model_len", "0", "an integer from 1 to "),
            ("kv_cache_memory", "-1", "an integer from 1 to 9223372036854775807"),
            ("max_num_seqs", "65537", "an integer from 1 to 65536"),
            ("max_num_batched_tokens", "2.5", "an integer from 1 to 65536"),
            ("max_queued_requests", "0", "an integer from 1 to 2147483647"),
            ("target_itl", "0", "a number > 0 and <= 3600"),
            ("prefix_cache_dir", "\"\"", "the path of a directory"),
        ] {
            let error = refused(&format!(r#"{{"{field}": {value}}}"#));
            assert_eq!(error.field, field, "{error}");
            assert!(error.requirement.starts_with(requirement), "{error}");
        }
        for (given, field) in [
            (r#"{"num_speculative_tokens": 65, "prompt_lookup": null, "adaptive": true}"#, "num_speculative_tokens"),
            (r#"{"num_speculative_tokens": 4, "prompt_lookup": [5, 4], "adaptive": true}"#, "prompt_lookup_min"),
            (r#"{"num_speculative_tokens": 4, "prompt_lookup": [1, 65], "adaptive": true}"#, "prompt_lookup_max"),
            (r#"{"tokens": 4}"#, "speculative_config"),
        ] {
            assert_eq!(refused(&format!(r#"{{"speculative_config": {given}}}"#)).field, field);
        }
        let unused = refused(r#"{"prefix_cache_dir": "/tmp/pages", "enable_prefix_caching": false}"#);
        assert_eq!(unused.field, "enable_prefix_caching");
        for text in ["", "[]", "null", r#"{"thread": 1}"#] {
            assert_eq!(refused(text).field, "options", "{text}");
        }
    }

    #[test]
    fn options_are_read_and_have_valid_defaults() {
        let text = r#"{"quantization": "int8", "kv_cache_dtype": "auto", "threads": null, "target_itl": 0.5,
            "speculative_config": {"num_speculative_tokens": 4, "prompt_lookup": [2, 3], "adaptive": false}}"#;
        let options = EngineOptions::from_json(text).unwrap();
        let method = Some(SpeculativeMethod::Ngram { shortest: 2, longest: 3 });
        assert_eq!(
            options,
            EngineOptions {
                quantization: Quantization::named("int8"),
                target_itl: Duration::from_millis(500),
                speculative_config: SpeculativeConfig { method, num_speculative_tokens: 4, adaptive: false },
                ..EngineOptions::default()
            }
        );
        assert_eq!(EngineOptions::default().check(1), Ok(()));
        assert_eq!(EngineOptions::default().kv_format(), KvFormat::F16);
        let exact = EngineOptions { quantization: Quantization::named("f32"), ..EngineOptions::default() };
        assert_eq!(exact.kv_format(), KvFormat::F32);
    }

    #[test]
    fn rows_describe_every_option() {
        for row in EngineOptions::rows() {
            assert!(row.doc.ends_with('.') && !row.bounds.requirement.is_empty(), "{row:?}");
        }
    }
}
