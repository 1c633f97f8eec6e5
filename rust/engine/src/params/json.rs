//! Sampling parameters from JSON.
//!
//! Numbers come in as wide as JSON has them, so that a value that does not fit is refused under its field's name
//! rather than by a parser that knows only a line and a column.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::limits::{self, IntegerRange};
use super::{ParamError, SamplingParams, beams, check_count};

/// The object as written: any value under each known name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
#[derive(Default)]
struct Fields {
    temperature: Value,
    top_k: Value,
    top_p: Value,
    min_p: Value,
    repetition_penalty: Value,
    presence_penalty: Value,
    frequency_penalty: Value,
    dynatemp_range: Value,
    dynatemp_exponent: Value,
    top_n_sigma: Value,
    typical_p: Value,
    epsilon_cutoff: Value,
    eta_cutoff: Value,
    top_h: Value,
    xtc_probability: Value,
    xtc_threshold: Value,
    dry_multiplier: Value,
    dry_base: Value,
    dry_allowed_length: Value,
    dry_penalty_last_n: Value,
    dry_sequence_breaker_ids: Value,
    mirostat: Value,
    mirostat_tau: Value,
    mirostat_eta: Value,
    no_repeat_ngram_size: Value,
    bad_words: Value,
    allowed_token_ids: Value,
    logit_bias: Value,
    seed: Value,
    max_tokens: Value,
    min_tokens: Value,
    stop_token_ids: Value,
    logprobs: Value,
    entropy: Value,
    trace: Value,
    prompt_logprobs: Value,
    prompt_logprobs_from: Value,
    streams: Value,
    priority: Value,
    cache_salt: Value,
    prediction: Value,
    beam_search: Value,
}

/// Reads the object. Ranges of reals are left to [`SamplingParams::validate`].
pub(super) fn read(text: &str, vocab_size: usize) -> Result<SamplingParams, ParamError> {
    if !text.trim_start().starts_with('{') {
        // serde would also take a list for a struct's fields in their order.
        return Err(ParamError::Malformed { message: "expected a JSON object".into() });
    }
    let fields: Fields =
        serde_json::from_str(text).map_err(|error| ParamError::Malformed { message: error.to_string() })?;
    let default = SamplingParams::default();
    Ok(SamplingParams {
        temperature: real("temperature", &fields.temperature)?.unwrap_or(default.temperature),
        top_k: integer(&limits::TOP_K, &fields.top_k)?.unwrap_or(default.top_k),
        top_p: real("top_p", &fields.top_p)?.unwrap_or(default.top_p),
        min_p: real("min_p", &fields.min_p)?.unwrap_or(default.min_p),
        repetition_penalty: real("repetition_penalty", &fields.repetition_penalty)?
            .unwrap_or(default.repetition_penalty),
        presence_penalty: real("presence_penalty", &fields.presence_penalty)?.unwrap_or(default.presence_penalty),
        frequency_penalty: real("frequency_penalty", &fields.frequency_penalty)?.unwrap_or(default.frequency_penalty),
        dynatemp_range: real("dynatemp_range", &fields.dynatemp_range)?.unwrap_or(default.dynatemp_range),
        dynatemp_exponent: real("dynatemp_exponent", &fields.dynatemp_exponent)?.unwrap_or(default.dynatemp_exponent),
        top_n_sigma: real("top_n_sigma", &fields.top_n_sigma)?.unwrap_or(default.top_n_sigma),
        typical_p: real("typical_p", &fields.typical_p)?.unwrap_or(default.typical_p),
        epsilon_cutoff: real("epsilon_cutoff", &fields.epsilon_cutoff)?.unwrap_or(default.epsilon_cutoff),
        eta_cutoff: real("eta_cutoff", &fields.eta_cutoff)?.unwrap_or(default.eta_cutoff),
        top_h: real("top_h", &fields.top_h)?.unwrap_or(default.top_h),
        xtc_probability: real("xtc_probability", &fields.xtc_probability)?.unwrap_or(default.xtc_probability),
        xtc_threshold: real("xtc_threshold", &fields.xtc_threshold)?.unwrap_or(default.xtc_threshold),
        dry_multiplier: real("dry_multiplier", &fields.dry_multiplier)?.unwrap_or(default.dry_multiplier),
        dry_base: real("dry_base", &fields.dry_base)?.unwrap_or(default.dry_base),
        dry_allowed_length: integer(&limits::DRY_ALLOWED_LENGTH, &fields.dry_allowed_length)?
            .unwrap_or(default.dry_allowed_length),
        dry_penalty_last_n: last_n(&fields.dry_penalty_last_n)?,
        dry_sequence_breaker_ids: tokens(
            "dry_sequence_breaker_ids",
            &fields.dry_sequence_breaker_ids,
            vocab_size,
            limits::MAX_TOKEN_IDS,
        )?,
        mirostat: integer(&limits::MIROSTAT, &fields.mirostat)?.unwrap_or(default.mirostat),
        mirostat_tau: real("mirostat_tau", &fields.mirostat_tau)?.unwrap_or(default.mirostat_tau),
        mirostat_eta: real("mirostat_eta", &fields.mirostat_eta)?.unwrap_or(default.mirostat_eta),
        no_repeat_ngram_size: integer(&limits::NO_REPEAT_NGRAM_SIZE, &fields.no_repeat_ngram_size)?
            .unwrap_or(default.no_repeat_ngram_size),
        bad_words: words(&fields.bad_words, vocab_size)?,
        allowed_token_ids: match &fields.allowed_token_ids {
            Value::Null => None,
            ids => Some(tokens("allowed_token_ids", ids, vocab_size, limits::MAX_TOKEN_IDS)?),
        },
        logits_processor: None,
        logit_bias: bias(&fields.logit_bias, vocab_size)?,
        seed: seed(&fields.seed)?,
        max_tokens: integer(&limits::MAX_TOKENS, &fields.max_tokens)?
            .ok_or(ParamError::Missing { field: "max_tokens" })?,
        min_tokens: integer(&limits::MIN_TOKENS, &fields.min_tokens)?.unwrap_or(default.min_tokens),
        stop_token_ids: tokens("stop_token_ids", &fields.stop_token_ids, vocab_size, limits::MAX_STOP_TOKEN_IDS)?,
        logprobs: integer(&limits::LOGPROBS, &fields.logprobs)?,
        entropy: flag("entropy", &fields.entropy)?.unwrap_or(default.entropy),
        trace: integer(&limits::TRACE, &fields.trace)?,
        prompt_logprobs: integer(&limits::PROMPT_LOGPROBS, &fields.prompt_logprobs)?,
        prompt_logprobs_from: integer(&limits::PROMPT_LOGPROBS_FROM, &fields.prompt_logprobs_from)?
            .unwrap_or(default.prompt_logprobs_from),
        streams: flag("streams", &fields.streams)?.unwrap_or(default.streams),
        priority: priority(&fields.priority)?.unwrap_or(default.priority),
        structured_outputs: None,
        cache_salt: salt(&fields.cache_salt)?,
        prediction: tokens("prediction", &fields.prediction, vocab_size, limits::MAX_PREDICTION)?,
        beam_search: beams::read(&fields.beam_search)?,
    })
}

/// A value as an error shows it.
pub(super) fn shown(value: &Value) -> String {
    const LENGTH: usize = 64;
    let text = value.to_string();
    match text.char_indices().nth(LENGTH) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

pub(super) fn real(field: &'static str, value: &Value) -> Result<Option<f64>, ParamError> {
    let number = match value {
        Value::Null => return Ok(None),
        Value::Number(number) => number.as_f64(),
        Value::String(word) => word.parse::<f64>().ok().filter(|number| !number.is_finite()),
        _ => None,
    };
    number.map(Some).ok_or_else(|| ParamError::WrongType { field, value: shown(value), expected: "a number" })
}

/// A whole number, or `Err(true)` for one too large for the type and `Err(false)` for anything else.
fn whole(value: &Value) -> Result<i128, bool> {
    let Value::Number(number) = value else { return Err(false) };
    if let Some(number) = number.as_i64() {
        return Ok(number.into());
    }
    if let Some(number) = number.as_u64() {
        return Ok(number.into());
    }
    // Beyond 64 bits the parser has rounded it to a float; a smaller float was written with a point or an exponent.
    Err(number.as_f64().is_some_and(|number| number.abs() >= i64::MAX as f64))
}

pub(super) fn integer(range: &IntegerRange, value: &Value) -> Result<Option<usize>, ParamError> {
    let out_of_range = || ParamError::OutOfRange { field: range.field, value: shown(value), limit: range.to_string() };
    match whole(value) {
        _ if value.is_null() => Ok(None),
        Ok(-1) if range.minus_one_is_zero => Ok(Some(0)),
        Ok(number) => match usize::try_from(number) {
            Ok(number) if (range.low..=range.high).contains(&number) => Ok(Some(number)),
            _ => Err(out_of_range()),
        },
        Err(true) => Err(out_of_range()),
        Err(false) => {
            Err(ParamError::WrongType { field: range.field, value: shown(value), expected: "a whole number" })
        }
    }
}

/// A number of tokens; none for -1, which stands for all.
fn last_n(value: &Value) -> Result<Option<usize>, ParamError> {
    if value.as_i64() == Some(-1) { Ok(None) } else { integer(&limits::DRY_PENALTY_LAST_N, value) }
}

fn words(value: &Value, vocab: usize) -> Result<Vec<Vec<u32>>, ParamError> {
    const FIELD: &str = "bad_words";
    let wrong =
        |value: &Value| ParamError::WrongType { field: FIELD, value: shown(value), expected: "lists of token ids" };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(items) => {
            check_count(FIELD, items.len(), limits::MAX_BAD_WORDS)?;
            let word = |item: &Value| match item {
                Value::Array(_) => tokens(FIELD, item, vocab, limits::MAX_BAD_WORD_TOKENS),
                _ => Err(wrong(item)),
            };
            items.iter().map(word).collect()
        }
        _ => Err(wrong(value)),
    }
}

fn seed(value: &Value) -> Result<u64, ParamError> {
    const FIELD: &str = "seed";
    let out_of_range =
        || ParamError::OutOfRange { field: FIELD, value: shown(value), limit: format!("0 to {}", u64::MAX) };
    match whole(value) {
        _ if value.is_null() => Err(ParamError::Missing { field: FIELD }),
        Ok(number) => u64::try_from(number).map_err(|_| out_of_range()),
        Err(true) => Err(out_of_range()),
        Err(false) => Err(ParamError::WrongType { field: FIELD, value: shown(value), expected: "a whole number" }),
    }
}

fn flag(field: &'static str, value: &Value) -> Result<Option<bool>, ParamError> {
    match value {
        Value::Null => Ok(None),
        Value::Bool(flag) => Ok(Some(*flag)),
        _ => Err(ParamError::WrongType { field, value: shown(value), expected: "true or false" }),
    }
}

fn priority(value: &Value) -> Result<Option<i32>, ParamError> {
    const FIELD: &str = "priority";
    let out_of_range =
        || ParamError::OutOfRange { field: FIELD, value: shown(value), limit: format!("{} to {}", i32::MIN, i32::MAX) };
    match whole(value) {
        _ if value.is_null() => Ok(None),
        Ok(number) => i32::try_from(number).map(Some).map_err(|_| out_of_range()),
        Err(true) => Err(out_of_range()),
        Err(false) => Err(ParamError::WrongType { field: FIELD, value: shown(value), expected: "a whole number" }),
    }
}

fn salt(value: &Value) -> Result<Option<Arc<str>>, ParamError> {
    const FIELD: &str = limits::CACHE_SALT.field;
    match value {
        Value::Null => Ok(None),
        Value::String(salt) if (limits::CACHE_SALT.low..=limits::CACHE_SALT.high).contains(&salt.len()) => {
            Ok(Some(salt.as_str().into()))
        }
        Value::String(salt) => {
            let limit = format!("a string of {} bytes", limits::CACHE_SALT);
            Err(ParamError::OutOfRange { field: FIELD, value: format!("one of {} bytes", salt.len()), limit })
        }
        _ => Err(ParamError::WrongType { field: FIELD, value: shown(value), expected: "a string" }),
    }
}

fn token(field: &'static str, id: Result<i128, bool>, written: String, vocab: usize) -> Result<u32, ParamError> {
    match id {
        Ok(id) if (0..vocab as i128).contains(&id) => {
            u32::try_from(id).map_err(|_| ParamError::TokenId { field, id: written, vocab_size: vocab })
        }
        Ok(_) | Err(true) => Err(ParamError::TokenId { field, id: written, vocab_size: vocab }),
        Err(false) => Err(ParamError::WrongType { field, value: written, expected: "token ids (whole numbers)" }),
    }
}

fn tokens(field: &'static str, value: &Value, vocab: usize, limit: usize) -> Result<Vec<u32>, ParamError> {
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(items) => {
            check_count(field, items.len(), limit)?;
            items.iter().map(|item| token(field, whole(item), shown(item), vocab)).collect()
        }
        _ => Err(ParamError::WrongType { field, value: shown(value), expected: "a list of token ids" }),
    }
}

fn bias(value: &Value, vocab: usize) -> Result<Vec<(u32, f64)>, ParamError> {
    const FIELD: &str = "logit_bias";
    let read = |(key, value): (&String, &Value)| {
        let id = token(FIELD, key.parse::<i128>().map_err(|_| false), shown(&Value::String(key.clone())), vocab)?;
        let expected = "a map from token ids to numbers";
        let bias = real(FIELD, value)?.ok_or(ParamError::WrongType { field: FIELD, value: shown(value), expected })?;
        Ok((id, bias))
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Object(map) => {
            let mut entries = Map::iter(map).map(read).collect::<Result<Vec<_>, ParamError>>()?;
            // "7" and "07" are one id: refusing beats guessing which of them is meant.
            entries.sort_by_key(|&(id, _)| id);
            match entries.windows(2).find(|pair| pair[0].0 == pair[1].0) {
                Some(pair) => {
                    let value = pair[0].0.to_string();
                    Err(ParamError::WrongType { field: FIELD, value, expected: "a map that names each token id once" })
                }
                None => Ok(entries),
            }
        }
        _ => Err(ParamError::WrongType {
            field: FIELD,
            value: shown(value),
            expected: "a map from token ids to numbers",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: usize = 100;

    fn refused(extra: &str) -> ParamError {
        let text = format!(r#"{{"seed": 1, "max_tokens": 4{}{extra}}}"#, if extra.is_empty() { "" } else { ", " });
        SamplingParams::from_json(&text, VOCAB).expect_err(&text)
    }

    /// FAULTS rows 46 to 52: each refused, and the message names field, value and limit.
    #[test]
    fn every_bad_number_is_named() {
        for (field, value, limit) in [
            ("temperature", "-1", "at most 100"),
            ("temperature", "\"nan\"", "at most 100"),
            ("temperature", "\"inf\"", "at most 100"),
            ("temperature", "1e308", "at most 100"),
            ("top_p", "-1", "at most 1"),
            ("top_p", "0", "above 0"),
            ("top_p", "2", "at most 1"),
            ("min_p", "2", "at most 1"),
            ("min_p", "-0.5", "at least 0"),
            ("repetition_penalty", "0", "above 0"),
            ("repetition_penalty", "101", "at most 100"),
            ("presence_penalty", "2.5", "at most 2"),
            ("frequency_penalty", "-3", "at least -2"),
            ("top_k", "-5", "0 or -1: off"),
            ("top_k", "9223372036854775808", "2147483647"),
            ("top_k", "170141183460469231731687303715884105728", "2147483647"),
            ("logprobs", "1000000", "0 to 20"),
            ("logprobs", "-1", "0 to 20"),
            ("trace", "1001", "0 to 1000"),
            ("prompt_logprobs", "21", "0 to 20"),
            ("prompt_logprobs_from", "0", "1 to"),
            ("dynatemp_range", "-0.1", "at least 0"),
            ("dynatemp_exponent", "\"nan\"", "at most 100"),
            ("top_n_sigma", "-1", "at least 0"),
            ("typical_p", "0", "above 0"),
            ("typical_p", "1.1", "at most 1"),
            ("epsilon_cutoff", "-0.1", "at least 0"),
            ("eta_cutoff", "2", "at most 1"),
            ("top_h", "1.5", "at most 1"),
            ("xtc_probability", "1.5", "at most 1"),
            ("xtc_threshold", "\"inf\"", "at most 1"),
            ("dry_multiplier", "-1", "at least 0"),
            ("dry_base", "0.5", "at least 1"),
            ("dry_base", "1e308", "at most 100"),
            ("dry_allowed_length", "0", "1 to 2147483647"),
            ("dry_penalty_last_n", "-2", "0 to 2147483647"),
            ("mirostat", "3", "0 to 2"),
            ("mirostat_tau", "0", "above 0"),
            ("mirostat_eta", "1.5", "at most 1"),
            ("no_repeat_ngram_size", "1025", "0 to 1024"),
            ("priority", "2147483648", "2147483647"),
            ("priority", "-1e30", "-2147483648"),
            ("cache_salt", "\"\"", "1 to 1024"),
            ("min_tokens", "-1", "0 to"),
            ("min_tokens", "5", "max_tokens (4)"),
        ] {
            let ParamError::OutOfRange { field: named, value: given, limit: stated } =
                refused(&format!("\"{field}\": {value}"))
            else {
                panic!("{field} {value}")
            };
            assert_eq!(named, field);
            assert!(stated.contains(limit), "{field}: {stated}");
            assert!(!given.is_empty());
        }
        for value in ["-1", "0", "9223372036854775808", "1e300"] {
            let error = SamplingParams::from_json(&format!(r#"{{"seed": 1, "max_tokens": {value}}}"#), VOCAB);
            assert!(matches!(error, Err(ParamError::OutOfRange { field: "max_tokens", .. })), "{error:?}");
        }
        for value in ["-1", "18446744073709551616"] {
            let error = SamplingParams::from_json(&format!(r#"{{"seed": {value}, "max_tokens": 1}}"#), VOCAB);
            assert!(matches!(error, Err(ParamError::OutOfRange { field: "seed", .. })), "{error:?}");
        }
    }

    #[test]
    fn ids_outside_the_vocabulary_are_named() {
        for (text, field, id) in [
            (r#""logit_bias": {"100": 1}"#, "logit_bias", "\"100\""),
            (r#""logit_bias": {"-1": 1}"#, "logit_bias", "\"-1\""),
            (r#""stop_token_ids": [5, 100]"#, "stop_token_ids", "100"),
            (r#""stop_token_ids": [-1]"#, "stop_token_ids", "-1"),
            (r#""bad_words": [[1, 100]]"#, "bad_words", "100"),
            (r#""allowed_token_ids": [0, 100]"#, "allowed_token_ids", "100"),
            (r#""dry_sequence_breaker_ids": [-1]"#, "dry_sequence_breaker_ids", "-1"),
            (r#""stop_token_ids": [99999999999999999999999]"#, "stop_token_ids", "1e+23"),
        ] {
            assert_eq!(refused(text), ParamError::TokenId { field, id: id.into(), vocab_size: VOCAB });
        }
    }

    #[test]
    fn other_shapes_are_named() {
        for (text, field) in [
            (r#""temperature": "hot""#, "temperature"),
            (r#""temperature": "0.5""#, "temperature"),
            (r#""top_k": 1.5"#, "top_k"),
            (r#""top_k": true"#, "top_k"),
            (r#""priority": 0.5"#, "priority"),
            (r#""cache_salt": 5"#, "cache_salt"),
            (r#""streams": 1"#, "streams"),
            (r#""stop_token_ids": "stop""#, "stop_token_ids"),
            (r#""stop_token_ids": [1.5]"#, "stop_token_ids"),
            (r#""bad_words": [1]"#, "bad_words"),
            (r#""bad_words": {}"#, "bad_words"),
            (r#""bad_words": [["one"]]"#, "bad_words"),
            (r#""allowed_token_ids": 3"#, "allowed_token_ids"),
            (r#""dry_penalty_last_n": 0.5"#, "dry_penalty_last_n"),
            (r#""mirostat": true"#, "mirostat"),
            (r#""entropy": 1"#, "entropy"),
            (r#""logit_bias": [1]"#, "logit_bias"),
            (r#""logit_bias": {"one": 1}"#, "logit_bias"),
            (r#""logit_bias": {"1": null}"#, "logit_bias"),
            (r#""logit_bias": {"7": 1, "07": 2}"#, "logit_bias"),
        ] {
            assert!(matches!(refused(text), ParamError::WrongType { field: named, .. } if named == field), "{text}");
        }
        assert!(matches!(refused(r#""logit_bias": {"1": "inf"}"#), ParamError::OutOfRange { field: "logit_bias", .. }));
        assert!(matches!(refused(r#""logit_bias": {"1": 101}"#), ParamError::OutOfRange { field: "logit_bias", .. }));
        assert_eq!(refused(r#""allowed_token_ids": []"#), ParamError::Empty { field: "allowed_token_ids" });
        assert_eq!(refused(r#""bad_words": [[1], []]"#), ParamError::Empty { field: "an item of bad_words" });
        for (field, list, count, limit) in [
            ("bad_words", vec![vec![1]; 1537], 1537, limits::MAX_BAD_WORDS),
            ("bad_words", vec![vec![1; 257]], 257, limits::MAX_BAD_WORD_TOKENS),
        ] {
            assert_eq!(refused(&format!("\"{field}\": {list:?}")), ParamError::TooMany { field, count, limit });
        }
        for field in ["allowed_token_ids", "dry_sequence_breaker_ids"] {
            let (limit, count) = (limits::MAX_TOKEN_IDS, limits::MAX_TOKEN_IDS + 1);
            let many = format!("\"{field}\": {:?}", vec![1; count]);
            assert_eq!(refused(&many), ParamError::TooMany { field, count, limit });
        }
        let many = format!("\"stop_token_ids\": {:?}", vec![1; 100_000]);
        assert_eq!(refused(&many), ParamError::TooMany { field: "stop_token_ids", count: 100_000, limit: 1024 });
        assert!(refused(r#""best_of": 2"#).to_string().contains("best_of"));
        for text in ["", "{:", "[]", "null", &"[".repeat(100_000)] {
            assert!(matches!(SamplingParams::from_json(text, VOCAB), Err(ParamError::Malformed { .. })));
        }
        assert_eq!(SamplingParams::from_json(r#"{"seed": 1}"#, 9), Err(ParamError::Missing { field: "max_tokens" }));
        assert_eq!(SamplingParams::from_json(r#"{"max_tokens": 1}"#, 9), Err(ParamError::Missing { field: "seed" }));
    }

    #[test]
    fn everything_is_read() {
        let text = r#"{"temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
            "presence_penalty": -1, "frequency_penalty": 2, "dynatemp_range": 0.3, "dynatemp_exponent": 2,
            "top_n_sigma": 1.5, "typical_p": 0.8, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "top_h": 0.4,
            "xtc_probability": 0.5, "xtc_threshold": 0.2, "dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3,
            "dry_penalty_last_n": 64, "dry_sequence_breaker_ids": [8, 1, 8], "mirostat": 2, "mirostat_tau": 4,
            "mirostat_eta": 0.2, "no_repeat_ngram_size": 3, "bad_words": [[4, 2], [3]], "allowed_token_ids": [7, 0, 7],
            "entropy": true, "logit_bias": {"7": -100, "3": 1.5},
            "seed": 18446744073709551615, "max_tokens": 7, "min_tokens": 7, "stop_token_ids": [9, 2, 9],
            "logprobs": 20, "trace": 3, "prompt_logprobs": 0, "prompt_logprobs_from": 5, "streams": false, "priority": -2,
            "cache_salt": "a", "prediction": [7, 7, 1]}"#;
        let expected = SamplingParams {
            temperature: 0.5,
            top_k: 0,
            top_p: 0.9,
            min_p: 0.1,
            repetition_penalty: 1.1,
            presence_penalty: -1.0,
            frequency_penalty: 2.0,
            dynatemp_range: 0.3,
            dynatemp_exponent: 2.0,
            top_n_sigma: 1.5,
            typical_p: 0.8,
            epsilon_cutoff: 0.01,
            eta_cutoff: 0.02,
            top_h: 0.4,
            xtc_probability: 0.5,
            xtc_threshold: 0.2,
            dry_multiplier: 0.8,
            dry_base: 2.0,
            dry_allowed_length: 3,
            dry_penalty_last_n: Some(64),
            dry_sequence_breaker_ids: vec![1, 8],
            mirostat: 2,
            mirostat_tau: 4.0,
            mirostat_eta: 0.2,
            no_repeat_ngram_size: 3,
            bad_words: vec![vec![4, 2], vec![3]],
            allowed_token_ids: Some(vec![0, 7]),
            logits_processor: None,
            logit_bias: vec![(3, 1.5), (7, -100.0)],
            seed: u64::MAX,
            max_tokens: 7,
            min_tokens: 7,
            stop_token_ids: vec![2, 9],
            logprobs: Some(20),
            entropy: true,
            trace: Some(3),
            prompt_logprobs: Some(0),
            prompt_logprobs_from: 5,
            streams: false,
            priority: -2,
            structured_outputs: None,
            cache_salt: Some("a".into()),
            prediction: vec![7, 7, 1],
            beam_search: None,
        };
        assert_eq!(SamplingParams::from_json(text, VOCAB), Ok(expected));
        let nulls = r#"{"seed": 0, "max_tokens": 16, "temperature": null, "top_k": null, "logprobs": null,
            "stop_token_ids": null, "logit_bias": null, "dry_penalty_last_n": -1, "allowed_token_ids": null,
            "bad_words": null, "entropy": null}"#;
        assert_eq!(SamplingParams::from_json(nulls, VOCAB), Ok(SamplingParams::default()));
    }
}
