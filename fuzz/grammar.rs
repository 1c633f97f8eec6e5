//! Fuzz target of structured outputs.

use std::sync::LazyLock;

use ferrule_engine::structured::Token;
use ferrule_engine::{StructuredOutputs, Vocabulary};

static VOCABULARY: LazyLock<Vocabulary> = LazyLock::new(|| {
    let bytes = (0..=255).map(|byte| Token::Text(vec![byte]));
    let longer = ["{\"", "\":", "true", "  ", "ab", "é"].map(|text| Token::Text(text.into()));
    let tokens: Vec<Token> = bytes.chain(longer).chain([Token::Special(b"<|end|>".into())]).collect();
    Vocabulary::new(&tokens).expect("a vocabulary of bytes")
});

/// Compiles a constraint and returns whether it was accepted.
pub fn grammar(content: &[u8]) -> bool {
    let constraint = str::from_utf8(content).ok().and_then(constraint);
    constraint.is_some_and(|constraint| VOCABULARY.compile(&constraint).is_ok())
}

/// Reads an input: a kind of constraint in the first line, and its text, so that the fuzzer need not escape it; or else
/// the JSON form that an engine receives.
fn constraint(text: &str) -> Option<StructuredOutputs> {
    let (kind, rest) = text.split_once('\n').unwrap_or_default();
    let rest = rest.to_owned();
    match kind {
        "grammar" => Some(StructuredOutputs::Grammar { grammar: rest }),
        "json" => Some(StructuredOutputs::Json { schema: rest, whitespace: Default::default() }),
        "regex" => Some(StructuredOutputs::Regex { pattern: rest }),
        "structural_tag" => Some(StructuredOutputs::StructuralTag { tag: rest }),
        _ => StructuredOutputs::from_json(text).ok(),
    }
}
