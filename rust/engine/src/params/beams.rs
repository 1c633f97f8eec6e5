//! What a beam search is asked for, and what of the other parameters has no meaning beside it.

use serde::Deserialize;
use serde_json::Value;

use super::json::{integer, real, shown};
use super::{ParamError, SamplingParams, limits};

/// When a beam search ends that could go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EarlyStopping {
    /// As soon as there are as many complete sequences as beams.
    Always,
    /// When the best beam, if it ended now, would not come before the last of so many complete sequences.
    Heuristic,
    /// When it could not do so at any length: the least that the search can miss.
    Never,
}

/// A beam search. Names and meanings are those of vLLM and of Hugging Face's `generate`.
#[derive(Debug, Clone, PartialEq)]
pub struct BeamSearchParams {
    /// Beams, and the complete sequences that are kept.
    pub beam_width: usize,
    /// Complete sequences that are told of, the best.
    pub n: usize,
    /// The power of its length by which the sum of a sequence's log-probabilities is divided. Above 0 longer sequences
    /// gain by it, below 0 shorter ones.
    pub length_penalty: f64,
    /// When it ends.
    pub early_stopping: EarlyStopping,
}

impl Default for BeamSearchParams {
    /// Hugging Face's, with a single beam.
    fn default() -> Self {
        Self { beam_width: 1, n: 1, length_penalty: 1.0, early_stopping: EarlyStopping::Heuristic }
    }
}

/// The object as written: any value under each known name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    beam_width: Value,
    #[serde(default)]
    n: Value,
    #[serde(default)]
    length_penalty: Value,
    #[serde(default)]
    early_stopping: Value,
}

/// Reads a value, which is left to [`check`].
pub(super) fn read(value: &Value) -> Result<Option<BeamSearchParams>, ParamError> {
    if value.is_null() {
        return Ok(None);
    }
    let fields = Fields::deserialize(value)
        .map_err(|error| ParamError::Malformed { message: format!("beam_search: {error}") })?;
    let default = BeamSearchParams::default();
    Ok(Some(BeamSearchParams {
        beam_width: integer(&limits::BEAM_WIDTH, &fields.beam_width)?
            .ok_or(ParamError::Missing { field: limits::BEAM_WIDTH.field })?,
        n: integer(&limits::BEAMS_TOLD, &fields.n)?.unwrap_or(default.n),
        length_penalty: real(limits::LENGTH_PENALTY.field, &fields.length_penalty)?.unwrap_or(default.length_penalty),
        early_stopping: match &fields.early_stopping {
            Value::Null | Value::Bool(false) => EarlyStopping::Heuristic,
            Value::Bool(true) => EarlyStopping::Always,
            Value::String(word) if word == "never" => EarlyStopping::Never,
            other => {
                let expected = "true, false or \"never\"";
                return Err(ParamError::WrongType { field: "early_stopping", value: shown(other), expected });
            }
        },
    }))
}

/// Checks the parameters of a request that is a beam search.
pub(super) fn check(search: &BeamSearchParams, params: &SamplingParams) -> Result<(), ParamError> {
    limits::BEAM_WIDTH.check(search.beam_width)?;
    if !(1..=search.beam_width).contains(&search.n) {
        return Err(ParamError::OutOfRange {
            field: limits::BEAMS_TOLD.field,
            value: search.n.to_string(),
            limit: format!("1 to beam_width ({})", search.beam_width),
        });
    }
    limits::LENGTH_PENALTY.check(search.length_penalty)?;
    let plain = SamplingParams::default();
    // Stages that make a draw another one, of which there is none, and what is told of a single sequence.
    for (field, is_given) in [
        ("temperature", params.temperature != plain.temperature),
        ("top_k", params.top_k != plain.top_k),
        ("top_p", params.top_p != plain.top_p),
        ("min_p", params.min_p != plain.min_p),
        ("dynatemp_range", params.dynatemp_range != plain.dynatemp_range),
        ("top_n_sigma", params.top_n_sigma != plain.top_n_sigma),
        ("typical_p", params.typical_p != plain.typical_p),
        ("epsilon_cutoff", params.epsilon_cutoff != plain.epsilon_cutoff),
        ("eta_cutoff", params.eta_cutoff != plain.eta_cutoff),
        ("top_h", params.top_h != plain.top_h),
        ("xtc_probability", params.xtc_probability != plain.xtc_probability),
        ("mirostat", params.mirostat != plain.mirostat),
        ("structured_outputs", params.structured_outputs.is_some()),
        ("prediction", !params.prediction.is_empty()),
        ("logprobs", params.logprobs.is_some()),
        ("entropy", params.entropy),
        ("trace", params.trace.is_some()),
        ("prompt_logprobs", params.prompt_logprobs.is_some()),
    ] {
        if is_given {
            return Err(ParamError::WithBeams { field });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::structured::{StructuredOutputs, Token, Vocabulary};

    fn read(text: &str) -> Result<SamplingParams, ParamError> {
        SamplingParams::from_json(&format!(r#"{{"seed": 1, "max_tokens": 4, {text}}}"#), 100)
    }

    #[test]
    fn everything_is_read() {
        let found = |text: &str| read(&format!(r#""beam_search": {text}"#)).unwrap().beam_search;
        assert_eq!(found("null"), None);
        let four = BeamSearchParams { beam_width: 4, ..BeamSearchParams::default() };
        assert_eq!(found(r#"{"beam_width": 4}"#), Some(four.clone()));
        assert_eq!(found(r#"{"beam_width": 4, "early_stopping": false, "n": null}"#), Some(four));
        let all = r#"{"beam_width": 128, "n": 3, "length_penalty": -0.5, "early_stopping": "never"}"#;
        let expected =
            BeamSearchParams { beam_width: 128, n: 3, length_penalty: -0.5, early_stopping: EarlyStopping::Never };
        assert_eq!(found(all), Some(expected));
        let always = found(r#"{"beam_width": 1, "early_stopping": true}"#).unwrap();
        assert_eq!(always.early_stopping, EarlyStopping::Always);
    }

    #[test]
    fn every_bad_value_is_named() {
        for (text, field, limit) in [
            (r#"{"beam_width": 0}"#, "beam_width", "1 to 128"),
            (r#"{"beam_width": 1000000000}"#, "beam_width", "1 to 128"),
            (r#"{"beam_width": -1}"#, "beam_width", "1 to 128"),
            (r#"{"beam_width": 4, "n": 0}"#, "n", "1 to 128"),
            (r#"{"beam_width": 4, "n": 5}"#, "n", "1 to beam_width (4)"),
            (r#"{"beam_width": 4, "length_penalty": "nan"}"#, "length_penalty", "at most 10"),
            (r#"{"beam_width": 4, "length_penalty": -11}"#, "length_penalty", "at least -10"),
        ] {
            let refused = read(&format!(r#""beam_search": {text}"#)).unwrap_err();
            let ParamError::OutOfRange { field: named, limit: stated, .. } = &refused else { panic!("{refused}") };
            assert!(*named == field && stated.contains(limit), "{refused}");
        }
        for (text, field) in [
            (r#"{"beam_width": 2.5}"#, "beam_width"),
            (r#"{"beam_width": 4, "early_stopping": "maybe"}"#, "early_stopping"),
            (r#"{"beam_width": 4, "early_stopping": 1}"#, "early_stopping"),
            (r#"{"beam_width": 4, "length_penalty": "long"}"#, "length_penalty"),
        ] {
            let refused = read(&format!(r#""beam_search": {text}"#)).unwrap_err();
            assert!(matches!(&refused, ParamError::WrongType { field: named, .. } if *named == field), "{refused}");
        }
        assert!(read(r#""beam_search": {"width": 3}"#).unwrap_err().to_string().contains("`width`"));
        assert!(read(r#""beam_search": {}"#).unwrap_err().to_string().contains("`beam_width`"));
        assert!(read(r#""beam_search": 4"#).unwrap_err().to_string().contains("beam_search"));
    }

    #[test]
    fn what_has_no_meaning_beside_it_is_named() {
        for other in [
            r#""temperature": 0"#,
            r#""top_k": 5"#,
            r#""top_p": 0.5"#,
            r#""min_p": 0.1"#,
            r#""dynatemp_range": 0.1"#,
            r#""top_n_sigma": 1"#,
            r#""typical_p": 0.5"#,
            r#""epsilon_cutoff": 0.1"#,
            r#""eta_cutoff": 0.1"#,
            r#""top_h": 0.5"#,
            r#""xtc_probability": 0.5"#,
            r#""mirostat": 2"#,
            r#""prediction": [1]"#,
            r#""logprobs": 0"#,
            r#""entropy": true"#,
            r#""trace": 0"#,
            r#""prompt_logprobs": 0"#,
        ] {
            let refused = read(&format!(r#""beam_search": {{"beam_width": 2}}, {other}"#)).unwrap_err();
            let ParamError::WithBeams { field } = refused else { panic!("{refused}") };
            assert!(other.starts_with(&format!("\"{field}\"")), "{other}: {field}");
        }
        let vocabulary = Vocabulary::new(&[Token::Text(b"a".into())]).unwrap();
        let grammar = vocabulary.compile(&StructuredOutputs::Regex { pattern: "a".into() }).unwrap();
        let params = SamplingParams {
            beam_search: Some(BeamSearchParams::default()),
            structured_outputs: Some(grammar.clone()),
            ..SamplingParams::default()
        };
        let refused = params.validate(grammar.vocab_size());
        assert_eq!(refused, Err(ParamError::WithBeams { field: "structured_outputs" }));
    }
}
