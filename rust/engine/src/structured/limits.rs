//! What a grammar may take to be read, to be compiled and to be followed.
//!
//! All but one count work and not time, so that the same request always ends the same way; the one on a clock is only
//! for what none of the others has stopped, before a request is queued.

use std::time::Duration;

use llguidance::api::ParserLimits;

use super::GrammarError;

/// Bytes of a schema.
const MAX_JSON_BYTES: usize = 1 << 20;
/// Bytes of a grammar. Each of some thousand rules may lead to the next, and the compiler calls itself for each.
const MAX_LARK_BYTES: usize = 1 << 16;
/// Bytes of a regular expression.
const MAX_REGEX_BYTES: usize = 1 << 16;
/// Levels of a schema within another, counted in brackets.
const MAX_DEPTH: usize = 100;
/// Choices.
const MAX_CHOICES: usize = 10_000;
/// States of a lexer, one or two kilobytes each; a request that needs more ends.
const MAX_LEXER_STATES: usize = 50_000;

/// Nodes of the regular expressions behind a grammar. The largest schemas in use come near it.
const LEXER_FUEL: u64 = 500_000;

/// Items of a row of the parser: as many as 499 optional properties of an object make.
const ROW_ITEMS: usize = 2000;
/// Items of a row of a caller's grammar. Where that is ambiguous the work of a row grows with the third power of them,
/// and all who are in the batch wait for it: so many take ten milliseconds.
const GRAMMAR_ROW_ITEMS: usize = 800;
/// Items that one mask may make.
const STEP_ITEMS: usize = 50_000;
/// Nodes of regular expressions that one mask may make, some 70 nanoseconds each.
const STEP_LEXER_FUEL: u64 = 200_000;

/// Bytes of stack for those who read and match grammars: they call themselves for each level of nesting.
pub(super) const STACK_BYTES: usize = 64 << 20;

/// What compiling may take, and making one mask.
#[derive(Debug, Clone)]
pub(super) struct Limits {
    pub parser: ParserLimits,
    /// How long a compilation may take before its request is refused.
    pub compile_time: Duration,
    /// Compilations that may go on beyond that at once: each ends by itself, but has a processor until then.
    pub max_late: usize,
}

impl Default for Limits {
    fn default() -> Self {
        let parser = ParserLimits {
            max_lexer_states: MAX_LEXER_STATES,
            initial_lexer_fuel: LEXER_FUEL,
            step_max_items: STEP_ITEMS,
            step_lexer_fuel: STEP_LEXER_FUEL,
            max_items_in_row: ROW_ITEMS,
            // Schemas are the callers', and may be confidential: errors say what is wrong, not what the grammar was.
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Self { parser, compile_time: Duration::from_secs(3), max_late: 4 }
    }
}

/// Those of a caller's own grammar, of these.
pub(super) fn of_grammar(limits: &ParserLimits) -> ParserLimits {
    ParserLimits { max_items_in_row: limits.max_items_in_row.min(GRAMMAR_ROW_ITEMS), ..limits.clone() }
}

/// Checks the length of a grammar; how deep it may be nested its parser knows.
pub(super) fn check_lark(field: &'static str, text: &str) -> Result<(), GrammarError> {
    check_length(field, text.len(), MAX_LARK_BYTES)
}

/// Checks the length of JSON, and how deep it is nested.
pub(super) fn check_json(field: &'static str, text: &str) -> Result<(), GrammarError> {
    check_length(field, text.len(), MAX_JSON_BYTES)?;
    let (mut depth, mut quoted, mut escaped) = (0_usize, false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = quoted,
            b'"' => quoted = !quoted,
            b'[' | b'{' if !quoted => depth += 1,
            b']' | b'}' if !quoted => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err(GrammarError::TooDeep { field, limit: MAX_DEPTH });
        }
    }
    Ok(())
}

/// Checks the length of a regular expression; how deep it may be nested its parser knows.
pub(super) fn check_regex(field: &'static str, pattern: &str) -> Result<(), GrammarError> {
    check_length(field, pattern.len(), MAX_REGEX_BYTES)
}

/// Checks how many choices there are, and their length together.
pub(super) fn check_choices(field: &'static str, choices: &[String]) -> Result<(), GrammarError> {
    let count = choices.len();
    if !(1..=MAX_CHOICES).contains(&count) {
        return Err(GrammarError::Count { field, count, limit: MAX_CHOICES });
    }
    check_length(field, choices.iter().map(String::len).sum(), MAX_REGEX_BYTES)
}

fn check_length(field: &'static str, bytes: usize, limit: usize) -> Result<(), GrammarError> {
    if bytes <= limit { Ok(()) } else { Err(GrammarError::TooLong { field, bytes, limit }) }
}
