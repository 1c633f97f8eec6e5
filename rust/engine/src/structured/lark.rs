//! What has no compiler of its own, written in Lark's syntax.

use serde::Deserialize;
use serde_json::Value;

use super::schema;

/// A regular expression without the anchors at its ends. It matches the output as a whole anyway, so they change
/// nothing, but the compiler knows none.
pub(super) fn unanchored(pattern: &str) -> Result<&str, String> {
    let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
    let before_end = pattern.strip_suffix('$').filter(|rest| backslashes(rest).is_multiple_of(2));
    let pattern = before_end.unwrap_or(pattern);
    match pattern {
        "" => Err("it matches nothing but the empty text".into()),
        _ if !backslashes(pattern).is_multiple_of(2) => Err("it ends with a single backslash".into()),
        _ => Ok(pattern),
    }
}

/// Backslashes at the end of a text.
fn backslashes(text: &str) -> usize {
    text.len() - text.trim_end_matches('\\').len()
}

/// A grammar of some texts.
pub(super) fn one_of(choices: &[String]) -> Result<String, String> {
    if let Some(index) = choices.iter().position(String::is_empty) {
        return Err(format!("choice {index} is empty"));
    }
    let texts: Vec<String> = choices.iter().map(|choice| quoted(choice)).collect();
    // One terminal: the lexer makes a tree of it, however many there are and whichever begin alike.
    Ok(format!("start: CHOICE\nCHOICE: {}\n", texts.join(" | ")))
}

/// A text as Lark writes it: as JSON does, which leaves one control character as it is.
fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\x7f', "\\u007f")
}

/// vLLM's structural tag: wherever the text has one of the triggers, one of the structures follows that begin with it.
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

/// The grammar of a structural tag.
pub(super) fn structural_tag(text: &str) -> Result<String, String> {
    let tag: StructuralTag = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if tag.structures.is_empty() {
        return Err("it has no structures".into());
    }
    let mut grammar = String::from("%llguidance {}\n");
    let names: Vec<String> = (0..tag.structures.len()).map(|index| format!("tag_{index}")).collect();
    grammar += &format!("start: ({})* text_end\ntext_end: TEXT\nTEXT: /(.|\\n)*/\n", names.join(" | "));
    tag.structures.iter().try_for_each(|structure| schema::check(&structure.schema))?;
    for (index, Structure { begin, schema, end }) in tag.structures.iter().enumerate() {
        let triggers = tag.triggers.iter().filter(|trigger| !trigger.is_empty() && begin.starts_with(trigger.as_str()));
        let trigger = triggers.max_by_key(|trigger| trigger.len());
        let trigger = trigger.ok_or_else(|| format!("no trigger begins structures[{index}].begin"))?;
        let rest = &begin[trigger.len()..];
        let parts = [rest, end].map(|part| if part.is_empty() { String::new() } else { quoted(part) });
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
    fn anchors_at_the_ends_go() {
        for (pattern, expected) in [("^a$", "a"), ("a|b$", "a|b"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("^^", "^")] {
            assert_eq!(unanchored(pattern), Ok(expected));
        }
        for pattern in ["", "^$", "a\\", "^\\"] {
            assert!(unanchored(pattern).is_err(), "{pattern}");
        }
    }

    #[test]
    fn texts_are_quoted() {
        let grammar = one_of(&["a\"b".into(), "\n\x7f\\".into()]).unwrap();
        assert_eq!(grammar, "start: CHOICE\nCHOICE: \"a\\\"b\" | \"\\n\\u007f\\\\\"\n");
        assert!(one_of(&["a".into(), String::new()]).unwrap_err().contains("choice 1"));
    }
}
