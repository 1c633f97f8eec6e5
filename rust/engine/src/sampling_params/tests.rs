//! Sampling parameters as JSON and as a struct: every bad value is named.

use super::*;

const VOCAB: usize = 100;

fn refused(extra: &str) -> InvalidParameterError {
    let text = format!(r#"{{"seed": 1, "max_tokens": 4{}{extra}}}"#, if extra.is_empty() { "" } else { ", " });
    SamplingParams::from_json(&text, VOCAB).expect_err(&text)
}

/// The error names the field, the value and the requirement.
#[test]
fn invalid_values_are_refused_by_name() {
    for (field, value, requirement) in [
        ("temperature", "-1", "a number from 0 to 100"),
        ("temperature", "\"nan\"", "a number from 0 to 100"),
        ("temperature", "\"inf\"", "a number from 0 to 100"),
        ("temperature", "1e308", "a number from 0 to 100"),
        ("temperature", "\"hot\"", "a number from 0 to 100"),
        ("temperature", "\"0.5\"", "a number from 0 to 100"),
        ("top_p", "-1", "a number > 0 and <= 1"),
        ("top_p", "0", "a number > 0 and <= 1"),
        ("top_p", "2", "a number > 0 and <= 1"),
        ("min_p", "2", "a number from 0 to 1"),
        ("min_p", "-0.5", "a number from 0 to 1"),
        ("repetition_penalty", "0", "a number > 0 and <= 100"),
        ("repetition_penalty", "101", "a number > 0 and <= 100"),
        ("presence_penalty", "2.5", "a number from -2 to 2"),
        ("frequency_penalty", "-3", "a number from -2 to 2"),
        ("top_k", "-5", "an integer from -1 to 2147483647"),
        ("top_k", "9223372036854775808", "an integer from -1 to 2147483647"),
        ("top_k", "170141183460469231731687303715884105728", "an integer from -1 to 2147483647"),
        ("top_k", "1.5", "an integer from -1 to 2147483647"),
        ("top_k", "true", "an integer from -1 to 2147483647"),
        ("logprobs", "1000000", "an integer from 0 to 20"),
        ("logprobs", "-1", "an integer from 0 to 20"),
        ("trace", "1001", "an integer from 0 to 1000"),
        ("prompt_logprobs", "21", "an integer from 0 to 20"),
        ("prompt_logprobs_from", "0", "an integer from 1 to 2147483647"),
        ("dynatemp_range", "-0.1", "a number from 0 to 100"),
        ("dynatemp_exponent", "\"nan\"", "a number from 0 to 100"),
        ("top_n_sigma", "-1.5", "a number from -1 to 100"),
        ("typical_p", "0", "a number > 0 and <= 1"),
        ("typical_p", "1.1", "a number > 0 and <= 1"),
        ("epsilon_cutoff", "-0.1", "a number from 0 to 1"),
        ("eta_cutoff", "2", "a number from 0 to 1"),
        ("top_h", "1.5", "a number from 0 to 1"),
        ("xtc_probability", "1.5", "a number from 0 to 1"),
        ("xtc_threshold", "\"inf\"", "a number from 0 to 1"),
        ("dry_multiplier", "-1", "a number from 0 to 100"),
        ("dry_base", "0.5", "a number from 1 to 100"),
        ("dry_base", "1e308", "a number from 1 to 100"),
        ("dry_allowed_length", "0", "an integer from 1 to 2147483647"),
        ("dry_penalty_last_n", "-2", "an integer from -1 to 2147483647"),
        ("dry_penalty_last_n", "0.5", "an integer from -1 to 2147483647"),
        ("mirostat", "3", "an integer from 0 to 2"),
        ("mirostat", "true", "an integer from 0 to 2"),
        ("mirostat_tau", "0", "a number > 0 and <= 100"),
        ("mirostat_eta", "1.5", "a number > 0 and <= 1"),
        ("no_repeat_ngram_size", "1025", "an integer from 0 to 1024"),
        ("priority", "2147483648", "an integer from -2147483648 to 2147483647"),
        ("priority", "-1e30", "an integer from -2147483648 to 2147483647"),
        ("priority", "0.5", "an integer from -2147483648 to 2147483647"),
        ("cache_salt", "\"\"", "a string of 1 to 1024 bytes"),
        ("cache_salt", "5", "a string of 1 to 1024 bytes"),
        ("streams", "1", "true or false"),
        ("entropy", "1", "true or false"),
        ("min_tokens", "-1", "an integer from 0 to 2147483647"),
        ("min_tokens", "5", "an integer from 0 to max_tokens (4)"),
        ("stop_token_ids", "\"stop\"", "a list of 0 to 1024 token ids"),
        ("allowed_token_ids", "3", "a list of 1 to 1048576 token ids"),
        ("allowed_token_ids", "[]", "a list of 1 to 1048576 token ids"),
        ("bad_words", "{}", "a list of at most 1536 lists of token ids"),
        ("logit_bias", "[1]", "a map from token ids to numbers"),
        ("logit_bias", r#"{"7": 1, "07": 2}"#, "a map that has each token id once"),
    ] {
        let error = refused(&format!("\"{field}\": {value}"));
        assert_eq!((error.field.as_str(), error.requirement.as_str()), (field, requirement), "{value}");
        let message = error.to_string();
        assert!(message.starts_with(&format!("{field} must be {requirement}, got ")), "{message}");
    }
    for value in ["-1", "0", "9223372036854775808", "1e300", "null"] {
        let error = SamplingParams::from_json(&format!(r#"{{"seed": 1, "max_tokens": {value}}}"#), VOCAB);
        assert_eq!(error.unwrap_err().field, "max_tokens");
    }
    for value in ["-1", "18446744073709551616", "null"] {
        let error = SamplingParams::from_json(&format!(r#"{{"seed": {value}, "max_tokens": 1}}"#), VOCAB);
        assert_eq!(error.unwrap_err().field, "seed");
    }
}

#[test]
fn invalid_list_items_are_refused_by_name() {
    for (text, field, requirement) in [
        (r#""logit_bias": {"100": 1}"#, "logit_bias", "of the model, 0 to 99"),
        (r#""logit_bias": {"-1": 1}"#, "logit_bias[-1]", "a token id from 0"),
        (r#""logit_bias": {"one": 1}"#, "logit_bias[one]", "a token id from 0"),
        (r#""logit_bias": {"1": null}"#, "logit_bias", "a map from token ids to numbers"),
        (r#""logit_bias": {"1": "inf"}"#, "logit_bias[1]", "a number from -100 to 100"),
        (r#""logit_bias": {"1": 101}"#, "logit_bias[1]", "a number from -100 to 100"),
        (r#""stop_token_ids": [5, 100]"#, "stop_token_ids[1]", "of the model, 0 to 99"),
        (r#""stop_token_ids": [-1]"#, "stop_token_ids[0]", "a token id from 0"),
        (r#""stop_token_ids": [1.5]"#, "stop_token_ids[0]", "a token id from 0"),
        (r#""stop_token_ids": [99999999999999999999999]"#, "stop_token_ids[0]", "a token id from 0"),
        (r#""bad_words": [1]"#, "bad_words[0]", "a list of 1 to 256 token ids"),
        (r#""bad_words": [["one"]]"#, "bad_words[0][0]", "a token id from 0"),
        (r#""bad_words": [[1], []]"#, "bad_words[1]", "a list of 1 to 256 token ids"),
        (r#""bad_words": [[1, 100]]"#, "bad_words[0][1]", "of the model, 0 to 99"),
        (r#""allowed_token_ids": [0, 100]"#, "allowed_token_ids[1]", "of the model, 0 to 99"),
        (r#""dry_sequence_breaker_ids": [-1]"#, "dry_sequence_breaker_ids[0]", "a token id from 0"),
        (r#""prediction": [100]"#, "prediction[0]", "of the model, 0 to 99"),
    ] {
        let error = refused(text);
        assert_eq!(error.field, field, "{error}");
        assert!(error.requirement.contains(requirement), "{error}");
    }
}

#[test]
fn long_lists_are_refused_and_shortened_in_messages() {
    let ones = |count: usize| format!("{:?}", vec![1; count]);
    for (field, list, named, items) in [
        ("bad_words", format!("{:?}", vec![[1]; 1537]), "bad_words", 1537),
        ("bad_words", format!("[{}]", ones(257)), "bad_words[0]", 257),
        ("allowed_token_ids", ones(MAX_TOKEN_IDS + 1), "allowed_token_ids", MAX_TOKEN_IDS + 1),
        ("dry_sequence_breaker_ids", ones(MAX_TOKEN_IDS + 1), "dry_sequence_breaker_ids", MAX_TOKEN_IDS + 1),
        ("stop_token_ids", ones(100_000), "stop_token_ids", 100_000),
    ] {
        let error = refused(&format!("\"{field}\": {list}"));
        assert_eq!((error.field.as_str(), error.value.as_array().map(Vec::len)), (named, Some(items)));
        let message = error.to_string();
        assert!(message.ends_with(&format!("... ({items} items)")) && message.len() < 250, "{message}");
    }
}

#[test]
fn unknown_parameters_and_malformed_json_are_refused() {
    let unknown = refused(r#""best_of": 2"#);
    assert!(unknown.to_string().contains("unknown field `best_of`"), "{unknown}");
    for text in ["", "{:", "[]", "null", &"[".repeat(100_000), r#"{"seed": 1, "seed": 2}"#] {
        assert_eq!(SamplingParams::from_json(text, VOCAB).unwrap_err().field, "sampling parameters");
    }
}

/// Values that a Rust program sets are held against the same bounds as those of JSON.
#[test]
fn values_set_in_rust_are_validated() {
    let nan = SamplingParams { mirostat_tau: f64::NAN, ..SamplingParams::default() }.validate(VOCAB).unwrap_err();
    assert_eq!(
        (nan.field.as_str(), nan.to_string().as_str()),
        ("mirostat_tau", "mirostat_tau must be a number > 0 and <= 100, got \"nan\"",)
    );
    let unbounded = SamplingParams { logprobs: Some(usize::MAX), ..SamplingParams::default() };
    assert_eq!(unbounded.validate(VOCAB).unwrap_err().field, "logprobs");
    let bias = SamplingParams { logit_bias: vec![(7, 1e9)], ..SamplingParams::default() };
    assert_eq!(bias.validate(VOCAB).unwrap_err().field, "logit_bias[7]");
    let empty = SamplingParams { bad_words: vec![Vec::new()], ..SamplingParams::default() };
    assert_eq!(empty.validate(VOCAB).unwrap_err().field, "bad_words[0]");
}

#[test]
fn rows_describe_every_parameter() {
    let rows = SamplingParams::rows();
    let row = |name: &str| rows.iter().find(|row| row.name == name).unwrap();
    for row in &rows {
        assert!(row.doc.ends_with('.') && !row.bounds.kind.is_empty() && !row.bounds.requirement.is_empty(), "{row:?}");
        assert!(!row.bounds.required || row.default.is_null(), "{row:?}");
    }
    let top_p = row("top_p");
    assert_eq!((&top_p.default, &top_p.bounds.minimum, &top_p.bounds.maximum), (&1.0.into(), &0.0.into(), &1.0.into()));
    assert!(top_p.bounds.exclusive_minimum);
    assert_eq!(row("top_k").bounds.minimum, -1);
    assert_eq!(row("dry_penalty_last_n").default, -1);
    assert!(row("seed").bounds.required && row("max_tokens").bounds.required);
    assert_eq!(row("seed").bounds.maximum, u64::MAX);
    assert_eq!(row("stop_token_ids").bounds.max_items, Some(1024));
}

/// The defaults of the table are those that their rows state.
#[test]
fn defaults_are_within_their_bounds() {
    assert_eq!(SamplingParams::default().validate(VOCAB), Ok(()));
}

#[test]
fn all_fields_are_read() {
    let text = r#"{"temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": -1, "frequency_penalty": 2, "dynatemp_range": 0.3, "dynatemp_exponent": 2,
        "top_n_sigma": 1.5, "typical_p": 0.8, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "top_h": 0.4,
        "xtc_probability": 0.5, "xtc_threshold": 0.2, "dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3,
        "dry_penalty_last_n": 64, "dry_sequence_breaker_ids": [8, 1, 8], "mirostat": 2, "mirostat_tau": 4,
        "mirostat_eta": 0.2, "no_repeat_ngram_size": 3, "bad_words": [[4, 2], [3]], "allowed_token_ids": [7, 0, 7],
        "entropy": true, "logit_bias": {"7": -100, "3": 1.5},
        "seed": 18446744073709551615, "max_tokens": 7, "min_tokens": 7, "stop_token_ids": [9, 2, 9],
        "logprobs": 20, "processed_logprobs": true, "trace": 3, "prompt_logprobs": 0, "prompt_logprobs_from": 5,
        "streams": false, "prompt_progress": true, "priority": -2, "cache_salt": "a", "prediction": [7, 7, 1]}"#;
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
        processed_logprobs: true,
        entropy: true,
        trace: Some(3),
        prompt_logprobs: Some(0),
        prompt_logprobs_from: 5,
        streams: false,
        prompt_progress: true,
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
