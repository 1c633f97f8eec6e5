//! Estimates the compiler's work before it starts, because a running compilation cannot be stopped.
//!
//! For consecutive optional parts the compiler visits each one's followers, which takes quadratic time: two thousand
//! take half a second. They are counted in the source text, overestimating slightly.

use std::collections::HashMap;

/// Maximum optional parts, such as `a?` or `b*`, of a regular expression, terminal or rule.
const MAX_OPTIONAL: usize = 2000;
/// Maximum large character classes, such as `\w`, of one of them, some kilobytes each.
const MAX_CLASSES: usize = 5000;

/// Checks a regular expression.
pub(super) fn check_regex(pattern: &str) -> Result<(), String> {
    Size::of(pattern).check("it")
}

/// Checks the terminals of a grammar, with the terminals that they contain, and its rules.
pub(super) fn check_lark(text: &str) -> Result<(), String> {
    let definitions = Definitions::read(text);
    let mut known = HashMap::new();
    definitions.0.keys().try_for_each(|name| definitions.size(name, &mut known).check(name))
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Size {
    optional: usize,
    classes: usize,
}

impl Size {
    fn of(text: &str) -> Self {
        let mut size = Self::default();
        let mut bytes = text.bytes().peekable();
        while let Some(byte) = bytes.next() {
            let next = bytes.peek().copied();
            match (byte, next) {
                (b'\\', Some(escaped)) => {
                    bytes.next();
                    size.classes += usize::from(b"wWdDsSpP".contains(&escaped));
                }
                // `(?:` and similar.
                (b'(', Some(b'?')) => _ = bytes.next(),
                (b'?' | b'*', _) | (b'{', Some(b'0' | b',')) | (b'(', Some(b'|')) | (b'|', Some(b'|' | b')')) => {
                    size.optional += 1;
                }
                _ => {}
            }
        }
        size
    }

    fn and(self, other: Self) -> Self {
        let optional = self.optional.saturating_add(other.optional);
        Self { optional, classes: self.classes.saturating_add(other.classes) }
    }

    fn check(self, name: &str) -> Result<(), String> {
        let Self { optional, classes } = self;
        if optional > MAX_OPTIONAL {
            return Err(format!("{name} is too large: {optional} parts are optional; the limit is {MAX_OPTIONAL}"));
        }
        if classes > MAX_CLASSES {
            return Err(format!("{name} is too large: {classes} classes such as \\w; the limit is {MAX_CLASSES}"));
        }
        Ok(())
    }
}

/// Definitions of a grammar: for each name its text and the terminals in it.
#[derive(Debug, Default)]
struct Definitions(HashMap<String, (String, Vec<String>)>);

impl Definitions {
    /// Parses the definitions: a name before a colon starts a definition, which ends at the next one.
    fn read(text: &str) -> Self {
        let mut found = Self::default();
        let mut name = String::new();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let is_name = is_named(first);
            let length = match first {
                '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
                '"' | '/' => quoted(rest, first),
                _ if is_name => rest.find(|each| !is_named(each)).unwrap_or(rest.len()),
                _ => first.len_utf8(),
            };
            let (part, after) = rest.split_at(length);
            rest = after;
            if is_name && !first.is_ascii_digit() && begins_definition(after) {
                name = part.into();
            } else if !part.starts_with("//") {
                let (written, named) = found.0.entry(name.clone()).or_default();
                *written += part;
                named.extend((is_name && is_terminal(part)).then(|| part.into()));
            }
        }
        found
    }

    /// Returns the size of a definition, for a terminal including the terminals in it. Cycles are left to the compiler
    /// to reject.
    fn size(&self, name: &str, known: &mut HashMap<String, Size>) -> Size {
        if let Some(&size) = known.get(name) {
            return size;
        }
        let Some((written, named)) = self.0.get(name) else { return Size::default() };
        known.insert(name.into(), Size::default());
        let named: &[String] = if is_terminal(name) { named } else { &[] };
        let size = named.iter().fold(Size::of(written), |sum, name| sum.and(self.size(name, known)));
        known.insert(name.into(), size);
        size
    }
}

/// Returns whether a colon follows a name, possibly after its priority or attributes.
fn begins_definition(after: &str) -> bool {
    let rest = match after.strip_prefix('[') {
        Some(within) => within.split_once(']').map_or(after, |(_, rest)| rest),
        None => after.trim_start_matches(|each: char| each == '.' || each == '-' || each.is_ascii_digit()),
    };
    rest.trim_start().starts_with(':')
}

fn is_named(each: char) -> bool {
    each.is_ascii_alphanumeric() || each == '_'
}

/// Returns whether a name is a terminal's, which is upper case.
fn is_terminal(name: &str) -> bool {
    name.chars().any(|each| each.is_ascii_uppercase()) && !name.chars().any(|each| each.is_ascii_lowercase())
}

/// Returns the length in bytes of a quoted string, including the quotes.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (place, each) in text.char_indices().skip(1) {
        match each {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            each if each == quote => return place + each.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(optional: usize, classes: usize) -> Size {
        Size { optional, classes }
    }

    #[test]
    fn optional_parts_are_counted() {
        for (pattern, expected) in [
            ("abc(?:d|e)+", size(0, 0)),
            ("a?b*c{0,3}d{,2}(e|)(|f)", size(6, 0)),
            (r"\?\*\w\\d\p{L}\S", size(0, 3)),
            (r"\", size(0, 0)),
        ] {
            assert_eq!(Size::of(pattern), expected, "{pattern}");
        }
        assert!(check_regex(&"a?".repeat(2000)).is_ok() && check_regex(&r"\w".repeat(5000)).is_ok());
        assert!(check_regex(&"a?".repeat(2001)).unwrap_err().contains("2001 parts"));
        assert!(check_regex(&r"\w".repeat(5001)).unwrap_err().contains("5001 classes"));
    }

    #[test]
    fn terminals_are_counted_with_their_parts() {
        let text = "start: (A \"?\" | b)? // ???\nb[lazy]: A A B?\nA.-1: B? /x*\\/:y?/ B\n  | C\nB : \"\\\"\" C?\nC: C";
        let definitions = Definitions::read(text);
        let counted = |name| definitions.size(name, &mut HashMap::new()).optional;
        // Operators inside strings are counted too.
        assert_eq!([counted("start"), counted("b"), counted("A"), counted("B"), counted("D")], [2, 1, 5, 1, 0]);
        let doubled = |times: usize| {
            let each = (0..times).map(|index| format!("T{index}: T{0} T{0}\n", index + 1)).collect::<String>();
            format!("{each}T{times}: \"a\"?\nstart: T0")
        };
        assert!(check_lark(&doubled(10)).is_ok());
        assert!(check_lark(&doubled(11)).unwrap_err().contains("2048 parts"));
        assert!(check_lark(&doubled(200)).is_err());
        assert!(check_lark(&format!("start: {}", "\"a\"? ".repeat(2001))).unwrap_err().contains("start"));
    }
}
