//! Limits of tokenizer.json: files in use pass, hostile ones are refused before a library reads them.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ferrule_formats::{check_charsmap, check_tokenizer_json};
use serde_json::{Value, json};

#[track_caller]
fn refused(file: &Value, fragment: &str) {
    let message = check_tokenizer_json(file.to_string().as_bytes()).expect_err(fragment).to_string();
    assert!(message.contains(fragment), "{fragment:?} is not in {message:?}");
}

fn replace(pattern: &Value, content: &str) -> Value {
    json!({"type": "Replace", "pattern": pattern, "content": content})
}

fn charsmap(trie: u32, rest: usize) -> Vec<u8> {
    [&trie.to_le_bytes()[..], &vec![0; rest]].concat()
}

#[test]
fn components_in_use_are_accepted() {
    let precompiled = BASE64_STANDARD.encode(charsmap(8, 12));
    let spaces = json!({"Regex": " {2,}"});
    let normalizers = json!([
        {"type": "Precompiled", "precompiled_charsmap": precompiled},
        replace(&spaces, "▁"),
        replace(&json!({"String": "``"}), "\""),
        replace(&json!({"String": " "}), "▁"),
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Lowercase"},
    ]);
    let decoders = json!([replace(&json!({"String": "▁"}), " "), {"type": "ByteFallback"}, {"type": "Fuse"}]);
    let file = json!({
        "version": "1.0",
        "truncation": null,
        "added_tokens": [{"id": 0, "content": "<s>", "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "dropout": null, "vocab": {"a": 0, "b": -1, "c": 1.5}, "merges": [["a", "b"], "b a"]},
    });
    check_tokenizer_json(file.to_string().as_bytes()).unwrap();
    check_tokenizer_json(b"{}").unwrap();
}

#[test]
fn replacements_that_multiply_a_text_are_refused() {
    let message = "must make a text at most 64 times as long";
    let doubling = replace(&json!({"String": "a"}), "aa");
    let chain = |step: &Value, steps: usize| Value::Array(vec![step.clone(); steps]);
    let sequence = |key: &str, steps: &Value| json!({"type": "Sequence", key: steps});
    check_tokenizer_json(json!({"normalizer": sequence("normalizers", &chain(&doubling, 6))}).to_string().as_bytes())
        .unwrap();
    refused(&json!({"normalizer": sequence("normalizers", &chain(&doubling, 7))}), message);
    refused(&json!({"decoder": sequence("decoders", &chain(&doubling, 40))}), message);
    let nested = sequence("normalizers", &chain(&sequence("normalizers", &chain(&doubling, 4)), 2));
    refused(&json!({"normalizer": nested}), message);
    for empty in [json!({"Regex": "x*"}), json!({"String": ""})] {
        refused(&json!({"normalizer": sequence("normalizers", &chain(&replace(&empty, "x"), 7))}), message);
    }
    refused(&json!({"normalizer": replace(&json!({"String": "a"}), &"b".repeat(65))}), message);
}

#[test]
fn sizes_are_limited() {
    let long = "x".repeat((16 << 10) + 1);
    refused(
        &json!({"normalizer": {"type": "Prepend", "prepend": long}}),
        "strings of normalizer must have at most 16384",
    );
    refused(&json!({"decoder": {"type": "WordPiece", "prefix": long}}), "strings of decoder must have at most 16384");
    refused(&json!({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": long}}}), "strings of pre_tokenizer");
    refused(
        &json!({"model": {"vocab": {long.clone(): 0}}}),
        "a string must have at most 16384 bytes, got 16385 at line 1",
    );
    refused(&json!({"model": {"vocab": [[long.clone(), 0.5]]}}), "got 16385");
    refused(&json!({"added_tokens": [{"content": long}]}), "got 16385");
    refused(&json!({"normalizer": {"type": "Prepend", "prepend": "x".repeat(8 << 20)}}), "at most 8388608 bytes, got");
    let steps = vec![json!({"type": "NFC"}); 64];
    refused(&json!({"normalizer": {"type": "Sequence", "normalizers": steps}}), "must have at most 64 steps");
    refused(&json!("x"), "is not a valid tokenizer");
    let deep = format!(r#"{{"model": {}{}}}"#, "[".repeat(1000), "]".repeat(1000));
    assert!(check_tokenizer_json(deep.as_bytes()).unwrap_err().to_string().contains("recursion limit"));
}

#[test]
fn the_trie_of_a_charsmap_lies_inside_it() {
    check_charsmap(&charsmap(0, 0)).unwrap();
    check_charsmap(&charsmap(8, 8)).unwrap();
    for (trie, rest) in [(u32::MAX, 16), (12, 8), (6, 8)] {
        let message = check_charsmap(&charsmap(trie, rest)).unwrap_err().to_string();
        assert_eq!(
            message,
            format!(
                "precompiled_charsmap must begin with the bytes of its trie, a multiple of 4 up to {rest}, got {trie}"
            )
        );
        let map = BASE64_STANDARD.encode(charsmap(trie, rest));
        refused(&json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": map}}), &message);
    }
    assert!(check_charsmap(b"abc").unwrap_err().to_string().ends_with("got 3 bytes in all"));
    refused(&json!({"normalizer": {"precompiled_charsmap": "?"}}), "precompiled_charsmap must be base64");
}
