//! Limits on reading, compiling and matching a grammar.
//!
//! All limits except one count work instead of time, so that the same request always ends the same way. The time limit
//! applies only to compilation, before a request is queued.

use std::time::Duration;

use llguidance::api::ParserLimits;

use super::GrammarError;

/// Maximum bytes of a JSON schema.
const MAX_JSON_BYTES: usize = 1 << 20;
/// Maximum bytes of a Lark grammar. The compiler recurses for each of up to thousands of chained rules.
const MAX_LARK_BYTES: usize = 1 << 16;
/// Maximum bytes of a regular expression.
const MAX_REGEX_BYTES: usize = 1 << 16;
/// Maximum nesting depth of a schema in brackets.
const MAX_DEPTH: usize = 100;
/// Maximum number of choices.
const MAX_CHOICES: usize = 10_000;
/// Maximum lexer states, one or two kilobytes each; a request that needs more fails.
const MAX_LEXER_STATES: usize = 50_000;

/// Maximum nodes of a grammar's regular expressions. The largest schemas in use come close.
const LEXER_FUEL: u64 = 500_000;

/// Maximum parser items per row: as many as 499 optional object properties create.
const ROW_ITEMS: usize = 2000;
/// Maximum parser items per row of a caller's own grammar. In ambiguous grammars the work grows with their cube and
/// delays the whole batch; this many take ten milliseconds.
const GRAMMAR_ROW_ITEMS: usize = 800;
/// Maximum parser items created per mask.
const STEP_ITEMS: usize = 50_000;
/// Maximum regular expression nodes created per mask, about 70 nanoseconds each.
const STEP_LEXER_FUEL: u64 = 200_000;

/// Stack size in bytes of threads that parse and match grammars, which recurse per nesting level.
pub(super) const STACK_BYTES: usize = 64 << 20;

/// Limits on compilation and masks.
#[derive(Debug, Clone)]
pub(super) struct Limits {
    pub parser: ParserLimits,
    /// Time after which a compilation is abandoned and its request rejected.
    pub compile_time: Duration,
    /// Maximum number of overdue compilations running at once; each ends by itself but uses a processor until then.
    pub max_overdue: usize,
}

impl Default for Limits {
    fn default() -> Self {
        let parser = ParserLimits {
            max_lexer_states: MAX_LEXER_STATES,
            initial_lexer_fuel: LEXER_FUEL,
            step_max_items: STEP_ITEMS,
            step_lexer_fuel: STEP_LEXER_FUEL,
            max_items_in_row: ROW_ITEMS,
            // Schemas may be confidential: errors describe the problem without the grammar.
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Self { parser, compile_time: Duration::from_secs(3), max_overdue: 4 }
    }
}

/// Returns the limits for a caller's own grammar.
pub(super) fn of_grammar(limits: &ParserLimits) -> ParserLimits {
    ParserLimits { max_items_in_row: limits.max_items_in_row.min(GRAMMAR_ROW_ITEMS), ..limits.clone() }
}

/// Checks the length of a grammar; its parser limits the nesting.
pub(super) fn check_lark(field: &'static str, text: &str) -> Result<(), GrammarError> {
    check_length(field, text.len(), MAX_LARK_BYTES)
}

/// Checks the length and nesting depth of JSON.
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

/// Checks the length of a regular expression; its parser limits the nesting.
pub(super) fn check_regex(field: &'static str, pattern: &str) -> Result<(), GrammarError> {
    check_length(field, pattern.len(), MAX_REGEX_BYTES)
}

/// Checks the number of choices and their total length.
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
