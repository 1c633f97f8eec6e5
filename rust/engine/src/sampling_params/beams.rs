//! Parameters of a beam search, and the sampling parameters that cannot be combined with one.

use serde_json::Value;

use super::SamplingParams;
use crate::parameter::{Bounds, Checked, Integer, InvalidParameterError, Kind, Nested, Real, Required, parameters};

/// Maximum number of beams. Each beam is a separate sequence for the model.
const MAX_BEAM_WIDTH: i128 = 128;

/// Kind of the `beam_search` parameter.
pub(super) const KIND: Nested<BeamSearchParams> = Nested {
    read: BeamSearchParams::read,
    check: BeamSearchParams::check,
    requirement: "an object of beam search parameters",
};

/// Condition under which a beam search stops before `max_tokens`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EarlyStopping {
    /// Stops as soon as there are as many complete sequences as beams.
    Always,
    /// Stops when the best beam, if it ended now, would not rank above the worst complete sequence.
    Heuristic,
    /// Stops when no beam can rank above the worst complete sequence at any length.
    Never,
}

parameters! {
    /// Parameters of a beam search. Names and meanings are those of vLLM and of Hugging Face's `generate`.
    #[derive(Debug, Clone, PartialEq)]
    pub struct BeamSearchParams ("beam_search") {
        /// Number of beams, and of the complete sequences that are kept.
        beam_width: usize = 1, Required(Integer::new(1, MAX_BEAM_WIDTH));
        /// Number of best sequences to return; at most `beam_width`.
        n: usize = 1, Integer::new(1, MAX_BEAM_WIDTH);
        /// Exponent of the length by which a sequence's total log-probability is divided; positive values favor longer sequences.
        length_penalty: f64 = 1.0, Real::closed(-10.0, 10.0);
        /// When the search stops: true, false or "never", as in Hugging Face's `generate`.
        early_stopping: EarlyStopping = EarlyStopping::Heuristic, EarlyStoppingKind;
    }
}

struct EarlyStoppingKind;

impl Kind for EarlyStoppingKind {
    type Value = EarlyStopping;

    fn read(&self, field: &str, value: &Value) -> Checked<Option<EarlyStopping>> {
        match value {
            Value::Null => Ok(None),
            Value::Bool(true) => Ok(Some(EarlyStopping::Always)),
            Value::Bool(false) => Ok(Some(EarlyStopping::Heuristic)),
            Value::String(word) if word == "never" => Ok(Some(EarlyStopping::Never)),
            _ => Err(InvalidParameterError::new(field, value.clone(), self.bounds().requirement)),
        }
    }

    fn write(&self, value: &EarlyStopping) -> Value {
        match value {
            EarlyStopping::Always => true.into(),
            EarlyStopping::Heuristic => false.into(),
            EarlyStopping::Never => "never".into(),
        }
    }

    fn bounds(&self) -> Bounds {
        Bounds {
            kind: "choice",
            choices: vec!["true", "false", "never"],
            requirement: "true, false or \"never\"".into(),
            ..Bounds::default()
        }
    }
}

impl BeamSearchParams {
    fn read(value: &Value) -> Checked<Self> {
        Self::read_object(value)
    }

    fn check(&self) -> Checked<()> {
        self.check_bounds()?;
        if self.n > self.beam_width {
            let requirement = format!("an integer from 1 to beam_width ({})", self.beam_width);
            return Err(InvalidParameterError::new("n", self.n, requirement));
        }
        Ok(())
    }
}

/// Refuses the sampling parameters that have no meaning in a beam search: stages that change the random draw,
/// and reports about a single sequence.
pub(super) fn check_conflicts(params: &SamplingParams) -> Checked<()> {
    let default = SamplingParams::default();
    macro_rules! changed {
        ($($field:ident)*) => { [$( (stringify!($field), params.$field != default.$field) ),*] };
    }
    let changed = changed![
        temperature top_k top_p min_p dynatemp_range top_n_sigma typical_p epsilon_cutoff eta_cutoff top_h
        xtc_probability mirostat structured_outputs prediction logprobs entropy trace prompt_logprobs
    ];
    match changed.into_iter().find(|(_, is_changed)| *is_changed) {
        Some((field, _)) => {
            let value = params.written(field);
            Err(InvalidParameterError::new(field, value, "left at its default in a beam search"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::structured::{StructuredOutputs, Token, Vocabulary};

    fn read(text: &str) -> Result<SamplingParams, InvalidParameterError> {
        SamplingParams::from_json(&format!(r#"{{"seed": 1, "max_tokens": 4, {text}}}"#), 100)
    }

    #[test]
    fn all_fields_are_read() {
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
    fn invalid_values_are_refused_by_name() {
        for (text, field, requirement) in [
            (r#"{}"#, "beam_width", "an integer from 1 to 128"),
            (r#"{"beam_width": 0}"#, "beam_width", "an integer from 1 to 128"),
            (r#"{"beam_width": 1000000000}"#, "beam_width", "an integer from 1 to 128"),
            (r#"{"beam_width": -1}"#, "beam_width", "an integer from 1 to 128"),
            (r#"{"beam_width": 2.5}"#, "beam_width", "an integer from 1 to 128"),
            (r#"{"beam_width": 4, "n": 0}"#, "n", "an integer from 1 to 128"),
            (r#"{"beam_width": 4, "n": 5}"#, "n", "an integer from 1 to beam_width (4)"),
            (r#"{"beam_width": 4, "length_penalty": "nan"}"#, "length_penalty", "a number from -10 to 10"),
            (r#"{"beam_width": 4, "length_penalty": -11}"#, "length_penalty", "a number from -10 to 10"),
            (r#"{"beam_width": 4, "length_penalty": "long"}"#, "length_penalty", "a number from -10 to 10"),
            (r#"{"beam_width": 4, "early_stopping": "maybe"}"#, "early_stopping", "true, false or \"never\""),
            (r#"{"beam_width": 4, "early_stopping": 1}"#, "early_stopping", "true, false or \"never\""),
            ("4", "beam_search", "an object of beam search parameters"),
        ] {
            let refused = read(&format!(r#""beam_search": {text}"#)).unwrap_err();
            assert_eq!((refused.field.as_str(), refused.requirement.as_str()), (field, requirement), "{text}");
        }
        let unknown = read(r#""beam_search": {"width": 3}"#).unwrap_err();
        assert_eq!(unknown.field, "beam_search");
        assert!(unknown.requirement.contains("`width`"), "{unknown}");
    }

    #[test]
    fn incompatible_parameters_are_refused_by_name() {
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
            assert!(other.starts_with(&format!("\"{}\"", refused.field)), "{other}: {refused}");
            assert_eq!(refused.requirement, "left at its default in a beam search");
        }
        let vocabulary = Vocabulary::new(&[Token::Text(b"a".into())]).unwrap();
        let grammar = vocabulary.compile(&StructuredOutputs::Regex { pattern: "a".into() }).unwrap();
        let params = SamplingParams {
            beam_search: Some(BeamSearchParams::default()),
            structured_outputs: Some(grammar.clone()),
            ..SamplingParams::default()
        };
        let refused = params.validate(grammar.vocab_size());
        assert_eq!(refused.unwrap_err().field, "structured_outputs");
    }
}
