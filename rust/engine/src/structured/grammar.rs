//! Structured output constraints of a request, and their compilation.

use std::fmt;

use llguidance::api::{GrammarInit, GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Logger, Matcher, ParserFactory};
use serde::Deserialize;

use super::constraint::{MatcherError, Next};
use super::vocabulary::first_line;
use super::{GrammarError, lark, limits, schema};

/// A structured output constraint. Strings are as given by the caller.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum StructuredOutputs {
    /// JSON that matches a schema (<https://json-schema.org>).
    Json {
        /// The schema as JSON text.
        schema: String,
        /// Allowed whitespace between the parts.
        #[serde(default)]
        whitespace: Whitespace,
    },
    /// Text that matches a regular expression as a whole.
    Regex {
        /// The pattern in Rust's syntax (<https://docs.rs/regex/latest/regex/#syntax>), without look-around.
        pattern: String,
    },
    /// One of the given texts.
    Choice {
        /// The texts; none may be empty.
        choices: Vec<String>,
    },
    /// Text that a context-free grammar derives.
    Grammar {
        /// The grammar in the Lark dialect of `llguidance`.
        grammar: String,
    },
    /// Free text with tagged parts, each of which matches a schema.
    StructuralTag {
        /// JSON in the format of vLLM's `structural_tag`.
        tag: String,
    },
}

/// Whitespace between the parts of JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Whitespace {
    /// Up to 32 whitespace characters in each place.
    #[default]
    Some,
    /// No whitespace.
    None,
    /// Text that matches a regular expression, or nothing, in each place.
    Pattern(String),
}

impl StructuredOutputs {
    /// Parses a constraint from JSON.
    ///
    /// # Errors
    /// Returns [`GrammarError::Malformed`] for invalid JSON or unknown fields.
    pub fn from_json(text: &str) -> Result<Self, GrammarError> {
        serde_json::from_str(text).map_err(|error| GrammarError::Malformed(error.to_string()))
    }

    /// Returns the parameter's name, for errors.
    pub(super) fn field(&self) -> &'static str {
        match self {
            Self::Json { .. } => "structured_outputs.json",
            Self::Regex { .. } => "structured_outputs.regex",
            Self::Choice { .. } => "structured_outputs.choice",
            Self::Grammar { .. } => "structured_outputs.grammar",
            Self::StructuralTag { .. } => "structured_outputs.structural_tag",
        }
    }

    /// Returns the truncated source, for errors.
    pub(super) fn shown(&self) -> String {
        const LENGTH: usize = 64;
        let text = match self {
            Self::Json { schema: text, .. }
            | Self::Regex { pattern: text }
            | Self::Grammar { grammar: text }
            | Self::StructuralTag { tag: text } => text.clone(),
            Self::Choice { choices } => choices.join(", "),
        };
        let line: String = text.chars().take(LENGTH).map(|each| if each.is_control() { ' ' } else { each }).collect();
        if text.chars().nth(LENGTH).is_some() { format!("{line}…") } else { line }
    }

    /// Checks the limits that need no compilation.
    pub(super) fn check(&self) -> Result<(), GrammarError> {
        let field = self.field();
        match self {
            Self::Json { schema, whitespace } => {
                if let Whitespace::Pattern(pattern) = whitespace {
                    limits::check_regex("structured_outputs.whitespace_pattern", pattern)?;
                }
                limits::check_json(field, schema)
            }
            Self::Regex { pattern } => limits::check_regex(field, pattern),
            Self::Choice { choices } => limits::check_choices(field, choices),
            Self::Grammar { grammar } => limits::check_lark(field, grammar),
            Self::StructuralTag { tag } => limits::check_json(field, tag),
        }
    }

    /// Compiles a matcher at the start of the output, or returns the error message.
    pub(super) fn compile(&self, factory: &ParserFactory, vocab_size: usize) -> Result<Matcher, String> {
        let grammar = match self {
            Self::Json { schema, whitespace } => GrammarWithLexer::from_json_schema(schema::read(schema, whitespace)?),
            Self::Regex { pattern } => GrammarWithLexer::from_regex(lark::unanchored(pattern)?),
            Self::Choice { choices } => GrammarWithLexer::from_lark(lark::one_of(choices)?),
            Self::Grammar { grammar } => GrammarWithLexer::from_lark(lark::prepared(grammar)?),
            Self::StructuralTag { tag } => GrammarWithLexer::from_lark(lark::structural_tag(tag)?),
        };
        let limits = match self {
            Self::Grammar { .. } => limits::of_grammar(factory.limits()),
            _ => factory.limits().clone(),
        };
        let grammar = GrammarInit::Serialized(TopLevelGrammar::from_grammar(grammar));
        let quiet = Logger::new(0, 0);
        let parser = factory.create_parser_from_init_ext(grammar, quiet, InferenceCapabilities::default(), limits);
        let mut matcher = Matcher::new(parser);
        if let Some(error) = matcher.get_error() {
            return Err(error);
        }
        // The compiler ignores what it warns about, so a warning is an error.
        if let Some(warning) = matcher.grammar_warnings().first() {
            return Err(first_line(warning));
        }
        // The first mask shows whether any output exists, and every sequence starts with it.
        match Next::of(&mut matcher, vocab_size, &[]) {
            Ok(Next::Tokens(_)) => take_first_steps(matcher.deep_clone(), vocab_size).map(|()| matcher),
            Ok(Next::End) => Err("only the empty text satisfies it".into()),
            Err(MatcherError::NothingAllowed) => Err("no output of the model's tokens satisfies it".into()),
            Err(MatcherError::Matcher(reason)) => Err(reason),
        }
    }
}

/// Rejects grammars that fail within the first tokens.
fn take_first_steps(mut matcher: Matcher, vocab_size: usize) -> Result<(), String> {
    const STEPS: usize = 4;
    let environment = matcher.tok_env().map_err(|error| error.to_string())?;
    for _ in 0..STEPS {
        let mask = match Next::of(&mut matcher, vocab_size, &[]) {
            Ok(Next::Tokens(mask)) => mask,
            Err(MatcherError::Matcher(reason)) => return Err(reason),
            Ok(Next::End) | Err(MatcherError::NothingAllowed) => break,
        };
        // Skip whitespace tokens, which make no progress.
        let is_text = |&token: &u32| !environment.tok_trie().token(token).trim_ascii().is_empty();
        let Some(token) = mask.tokens().find(is_text).or_else(|| mask.tokens().next()) else { break };
        matcher.consume_token(token).map_err(|error| first_line(&error.to_string()))?;
        if matcher.is_stopped() {
            break;
        }
    }
    Ok(())
}

/// A compiled constraint, shared by any number of sequences.
pub struct Grammar {
    source: StructuredOutputs,
    /// State at the start of the output; sequences copy it.
    matcher: Matcher,
    vocab_size: usize,
}

impl Grammar {
    pub(super) fn new(source: StructuredOutputs, matcher: Matcher, vocab_size: usize) -> Self {
        Self { source, matcher, vocab_size }
    }

    /// Returns the constraint that was compiled.
    #[must_use]
    pub fn source(&self) -> &StructuredOutputs {
        &self.source
    }

    /// Returns the size of the vocabulary that it was compiled for.
    pub(crate) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns a matcher with separate tables, so that other sequences do not count against its limits.
    pub(super) fn matcher(&self) -> Matcher {
        self.matcher.deep_clone()
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("source", &self.source).finish_non_exhaustive()
    }
}

impl PartialEq for Grammar {
    /// Compares the constraints and the vocabulary sizes.
    fn eq(&self, other: &Self) -> bool {
        self.source == other.source && self.vocab_size == other.vocab_size
    }
}
