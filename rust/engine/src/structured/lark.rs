//! Translation of choices, patterns and structural tags into Lark grammars.

use serde::Deserialize;
use serde_json::Value;

use super::{schema, size};

/// Removes the anchors at the ends of a regular expression. It matches the whole output anyway, and the compiler does
/// not support anchors.
pub(super) fn unanchored(pattern: &str) -> Result<&str, String> {
    let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
    let before_end = pattern.strip_suffix('$').filter(|rest| backslashes(rest).is_multiple_of(2));
    let pattern = before_end.unwrap_or(pattern);
    match pattern {
        "" => Err("it matches only the empty text".into()),
        _ if !backslashes(pattern).is_multiple_of(2) => Err("it ends with a single backslash".into()),
        _ => size::check_regex(pattern).map(|()| pattern),
    }
}

/// Returns the number of trailing backslashes.
fn backslashes(text: &str) -> usize {
    text.len() - text.trim_end_matches('\\').len()
}

/// Returns a grammar that matches one of the texts.
pub(super) fn one_of(choices: &[String]) -> Result<String, String> {
    if let Some(index) = choices.iter().position(String::is_empty) {
        return Err(format!("choice {index} is empty"));
    }
    let texts: Vec<String> = choices.iter().map(|choice| quoted(choice)).collect();
    // A single terminal, for which the lexer builds a trie, however many choices share prefixes.
    Ok(format!("start: CHOICE\nCHOICE: {}\n", texts.join(" | ")))
}

/// Returns a Lark string literal: JSON's, except for one control character.
fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\x7f', "\\u007f")
}

/// Prepares the schemas inside a grammar; rejects other grammar syntaxes.
pub(super) fn prepared(text: &str) -> Result<String, String> {
    const SCHEMA: &str = "%json";
    if text.lines().any(is_ebnf) {
        return Err("it is GBNF or EBNF, but Lark's syntax is expected: a rule is `name: …` instead of \
                    `name ::= …`, the first rule is `start` instead of `root`, characters are /[a-z]/ instead of \
                    [a-z], and a comment begins with // instead of #"
            .into());
    }
    size::check_lark(text)?;
    let (mut prepared, mut rest) = (String::new(), text);
    while let Some(place) = rest.find(SCHEMA) {
        let (before, after) = rest.split_at(place + SCHEMA.len());
        (prepared, rest) = (prepared + before, after);
        let mut values = serde_json::Deserializer::from_str(after).into_iter::<Value>();
        // Without JSON after it, `%json` is part of a string or comment, or the compiler reports the error.
        let Some(Ok(given)) = values.next() else { continue };
        let mut schema = given.clone();
        schema::prepare(&mut schema)?;
        if schema != given {
            rest = &after[values.byte_offset()..];
            prepared += &format!(" {schema}");
        }
    }
    Ok(prepared + rest)
}

/// Returns whether a line starts a rule in GBNF or EBNF syntax.
fn is_ebnf(line: &str) -> bool {
    let name = line.split_once("::=").map_or("", |(name, _)| name.trim());
    !name.is_empty() && name.chars().all(|each| each.is_alphanumeric() || "_-<>".contains(each))
}

/// vLLM's structural tag: after each trigger, one of the structures that begin with it must follow.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StructuralTag {
    #[serde(rename = "type")]
    _kind: Option<String>,
    structures: Vec<Structure>,
    triggers: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Structure {
    begin: String,
    schema: Value,
    end: String,
}

/// Returns the grammar of a structural tag.
pub(super) fn structural_tag(text: &str) -> Result<String, String> {
    let tag: StructuralTag = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if tag.structures.is_empty() {
        return Err("its list of structures is empty".into());
    }
    let mut grammar = String::from("%llguidance {}\n");
    let names: Vec<String> = (0..tag.structures.len()).map(|index| format!("tag_{index}")).collect();
    grammar += &format!("start: ({})* text_end\ntext_end: TEXT\nTEXT: /(.|\\n)*/\n", names.join(" | "));
    for (index, Structure { begin, mut schema, end }) in tag.structures.into_iter().enumerate() {
        schema::prepare(&mut schema)?;
        let triggers = tag.triggers.iter().filter(|trigger| !trigger.is_empty() && begin.starts_with(trigger.as_str()));
        let trigger = triggers.max_by_key(|trigger| trigger.len());
        let trigger = trigger.ok_or_else(|| format!("structures[{index}].begin starts with none of the triggers"))?;
        let rest = &begin[trigger.len()..];
        let parts = [rest, end.as_str()].map(|part| if part.is_empty() { String::new() } else { quoted(part) });
        grammar += &format!("tag_{index}: begin_{index} {} body_{index} {}\n", parts[0], parts[1]);
        grammar += &format!("begin_{index}[lazy]: TEXT {}\n", quoted(trigger));
        grammar += &format!("body_{index}: %json {schema}\n");
    }
    Ok(grammar)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_at_the_ends_are_removed() {
        for (pattern, expected) in [("^a$", "a"), ("a|b$", "a|b"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("^^", "^")] {
            assert_eq!(unanchored(pattern), Ok(expected));
        }
        for pattern in ["", "^$", "a\\", "^\\"] {
            assert!(unanchored(pattern).is_err(), "{pattern}");
        }
    }

    #[test]
    fn schemas_within_a_grammar_are_prepared() {
        let plain = "start: %json {\"type\": \"integer\"} \"%json\" // %json\n";
        assert_eq!(prepared(plain), Ok(plain.into()));
        let wide = "start: a %json {\"type\":\"integer\",\"minimum\":-9223372036854775808}b";
        let narrow = "start: a %json {\"type\":\"integer\",\"minimum\":-9223372036854774784}b";
        assert_eq!(prepared(wide), Ok(narrow.into()));
        assert!(prepared("start: %json {\"multipleOf\": 10000019}").unwrap_err().contains("10000019"));
        assert!(prepared("start: %json\n{\"x-guidance\": {\"lenient\": true}}").unwrap_err().contains("lenient"));
    }

    #[test]
    fn other_grammar_syntaxes_are_recognized() {
        for text in ["root ::= \"a\"", "x: y\n <expr>::= y", "start ::= \"a\" | start"] {
            assert!(prepared(text).unwrap_err().contains("Lark"), "{text}");
        }
        assert!(prepared("start: \"a ::= b\"\nb: \"::=\"").is_ok());
    }

    #[test]
    fn texts_are_quoted() {
        let grammar = one_of(&["a\"b".into(), "\n\x7f\\".into()]).unwrap();
        assert_eq!(grammar, "start: CHOICE\nCHOICE: \"a\\\"b\" | \"\\n\\u007f\\\\\"\n");
        assert!(one_of(&["a".into(), String::new()]).unwrap_err().contains("choice 1"));
    }
}
